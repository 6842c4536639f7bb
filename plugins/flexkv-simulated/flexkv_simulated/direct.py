"""The `simulated_direct` device backend: the simulated device, reading storage past the host.

`SimulatedDirectBackend.read_into` (files -> device memory, verified by the device).
"""

from __future__ import annotations

import errno
import os
from typing import ClassVar

import numpy as np

from flexkv.backends.packing import checked_ids
from flexkv.errors import InputError, TransferError
from flexkv.model import FAILED, LANDED, MISSING, SKIPPED, SlotIds, Statuses
from flexkv.protocols import BlockIO, Region
from flexkv.telemetry import log
from flexkv_simulated.backend import Batch, SimulatedBackend


class SimulatedDirectBackend(SimulatedBackend):
    """As SimulatedBackend, with engines that read files. `direct_blocks` counts what they read."""

    name: ClassVar[str] = "simulated_direct"

    def __init__(self) -> None:
        super().__init__()
        self.direct_blocks = 0

    async def read_into(self, batch: BlockIO, region: Region, device_blocks: SlotIds) -> Statuses:
        """Fill device blocks from `batch.extents`; see `DirectStorage`.

        Raises:
            InputError: the batch does not say where its blocks lie, or a device block does not
                exist.
            ClosedError: the backend is not open.
        """
        completions, extents = self.services.completions, batch.extents
        planes, n_planes, block_bytes = self.packed(region).select(None)
        blocks = checked_ids(device_blocks, region.blocks, "device block")
        if extents is None or len(blocks) != len(batch):
            raise InputError(f"{len(blocks)} device blocks need the extents of as many blocks")
        statuses = np.full(len(blocks), MISSING, np.uint8)
        held = np.flatnonzero(extents.held)
        if not len(held):
            return statuses
        found, files = np.full(len(held), FAILED, np.uint8), _Files(extents.files[held])
        work = Batch(
            *(planes, n_planes, block_bytes),
            device_blocks=blocks[held],
            files=files.numbers,
            offsets=extents.offsets[held],
            keys=batch.keys[held],
            checksums=extents.checksums[held],
            statuses=found,
        )
        work.native.read_bytes, work.native.sum_bytes = extents.size_bytes, extents.block_bytes
        ticket = completions.ticket(keep=(region, work, files))
        try:
            self.submit("storage", work, ticket)
        except TransferError as error:
            log.warning("direct.refused", blocks=len(held), error=str(error))
            completions.fail(ticket, errno.EIO)
        done = await self.settled(ticket)
        statuses[held] = SKIPPED if done.failed else found
        self.direct_blocks += int(np.count_nonzero(statuses == LANDED))
        return statuses


class _Files:
    """Descriptors of our own for those of the store, which it may close when nobody waits for us
    any more; closed when the last reference, that of the ticket, is gone.
    """

    def __init__(self, files: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        distinct, where = np.unique(files, return_inverse=True)
        self._own = [os.dup(int(fd)) for fd in distinct]
        self.numbers = np.array(self._own, np.int32)[where]

    def __del__(self) -> None:
        for fd in self._own:
            os.close(fd)
