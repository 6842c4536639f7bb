"""Which reset of the cluster a disk tier is of: `EpochFile`, beside its files.

The file is written when a reset has been carried out, never before. So a node that dies meanwhile
finds an older epoch than the cluster's and drops its disk once more.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio.to_thread
import msgspec

from flexkv.telemetry import log

NAME = "flexkv.epoch"


class _Content(msgspec.Struct):
    cluster: str
    epoch: int


class EpochFile:
    """The epoch of what one folder's disk tier holds, in one cluster; without a folder, nothing.

    Args:
        cluster: its prefix and name; what another cluster wrote counts as nothing.
    """

    def __init__(self, folder: Path | None, cluster: str) -> None:
        self._path, self._cluster = None if folder is None else folder / NAME, cluster

    async def read(self) -> int:
        """Return the epoch, 0 where none of this cluster is known."""
        return await anyio.to_thread.run_sync(self._read)

    async def write(self, epoch: int) -> None:
        """Keep an epoch, once all that was forgotten for it is forgotten on the device, too.

        What cannot be written is logged: the next start drops the disk, and is right.
        """
        await anyio.to_thread.run_sync(self._write, epoch)

    def _read(self) -> int:
        if self._path is None:
            return 0
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_Content)
        except FileNotFoundError:
            return 0
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("cluster.epoch_unreadable", path=str(self._path), error=str(error))
            return 0
        return max(0, found.epoch) if found.cluster == self._cluster else 0

    def _write(self, epoch: int) -> None:
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        try:
            os.sync()  # the disk tier itself never waits for its device
            with new.open("wb") as file:
                file.write(msgspec.json.encode(_Content(self._cluster, epoch)))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            log.warning("cluster.epoch_not_kept", path=str(self._path), error=str(error))
