"""The `ranks` device backend: the device is memory of other processes, which copy for us.

`open` (start the server) - `make_region` (blocks of the workers) - `copy` (one small message per
rank, one ticket for all) - `aclose`. One block of the manager holds the shares of all ranks side by
side, so that a block is there when every rank's share is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from flexkv.backends.packing import checked_ids
from flexkv.errors import ClosedError, ConfigError, InputError, LayoutError, TransferError
from flexkv.model import KVSpec
from flexkv.protocols import (
    API_VERSION,
    BlockCopy,
    DeviceInfo,
    Region,
    RegionHandle,
    Services,
)
from flexkv.ranks import wire
from flexkv.ranks.server import RankServer


class RanksBackend:
    """Commands the copies of an engine's workers.

    Settings: `server`, a ready RankServer; or `path`, `ranks`, `blocks` and `timeout_ms` to make
    one. `inline_bytes` is passed on to the workers.
    """

    flexkv_api: ClassVar[int] = API_VERSION

    def __init__(self) -> None:
        self._services: Services | None = None
        self._server: RankServer | None = None

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List nothing: what the workers have is known when they join."""
        return []

    async def open(self, services: Services) -> None:
        """Start to listen for workers.

        Raises:
            ConfigError: a setting is unknown or missing, or the path cannot be used.
        """
        settings = dict(services.settings)
        inline_bytes = int(settings.pop("inline_bytes", 0))
        server = settings.pop("server", None)
        if server is None:
            try:
                path = Path(settings.pop("path"))
                ranks, blocks = int(settings.pop("ranks")), int(settings.pop("blocks"))
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"the ranks backend needs path, ranks and blocks, or a server: {error!r}"
                ) from error
            share = services.identity.spec.block_bytes // max(1, ranks)
            timeout_ms = int(settings.pop("timeout_ms", 1000))
            server = RankServer(
                path, ranks=ranks, share_bytes=share, blocks=blocks, timeout_ms=timeout_ms
            )
        if settings:
            raise ConfigError(f"the ranks backend has no setting {sorted(settings)[0]!r}")
        if server.ranks * server.share_bytes != services.identity.spec.block_bytes:
            raise ConfigError(
                f"{server.ranks} shares of {server.share_bytes} bytes are no block of "
                f"{services.identity.spec.block_bytes}"
            )
        server.open(services.arena, inline_bytes)
        self._server, self._services = server, services

    def make_region(self, kv_caches: Any, spec: KVSpec, axes: str | None = None) -> Region:
        """Describe the workers' memory by its number of blocks (an int, or None: the server's)."""
        blocks = self._opened().blocks if kv_caches is None else kv_caches
        if not isinstance(blocks, int) or blocks != self._opened().blocks:
            raise LayoutError(
                f"workers hold {self._opened().blocks} blocks of their own memory and register it "
                f"themselves; register that number here, not {blocks!r}"
            )
        assert self._services is not None
        layers = self._services.identity.spec.layers // self._opened().ranks
        return Region((), blocks, layers)

    def export_region(self, region: Region) -> RegionHandle:
        """Refuse: the memory is not ours.

        Raises:
            LayoutError: always.
        """
        raise LayoutError("the memory of workers is theirs; it cannot be exported from here")

    def import_region(self, handle: RegionHandle) -> Region:
        """Refuse: workers register their memory themselves.

        Raises:
            LayoutError: always.
        """
        raise LayoutError("workers register their memory themselves, see RankAgent")

    async def copy(self, batch: BlockCopy) -> None:
        """Have every rank copy its share; return when all bytes have landed.

        The batch's tag is None, or the step of the engine that has to have begun and the number of
        the load that workers wait for (0: they do not), see `Gate` and `Loads`.

        Raises:
            InputError: a block or slot does not exist, or the lists differ in length.
            TransferError: a rank is missing, died, stalled or failed.
            ClosedError: the backend is not open.
        """
        server = self._opened()
        assert self._services is not None
        arena, completions = self._services.arena, self._services.completions
        blocks = checked_ids(batch.device_blocks, server.blocks, "device block")
        slots = checked_ids(batch.host_slots, arena.slots, "host slot")
        if len(blocks) != len(slots):
            raise InputError(
                f"{len(blocks)} device blocks cannot pair with {len(slots)} host slots"
            )
        if not len(blocks):
            return
        step, load = batch.tag or (0, 0)
        packed = wire.ids_to_bytes(blocks), wire.ids_to_bytes(slots)
        move = wire.Move(0, step, batch.to_device, *packed, batch.layers, load)
        ticket = completions.ticket(server.ranks, keep=arena)
        try:
            server.submit(ticket.number, move)
        except TransferError:
            completions.fail(ticket, errno.ENOTCONN)
            raise
        done = await ticket
        if done.failed:
            raise TransferError(
                f"{done.failed} of {server.ranks} ranks failed to copy {len(blocks)} blocks: "
                f"{os.strerror(done.error)}"
            )

    async def aclose(self) -> None:
        """Part from the workers. Twice is fine."""
        self._services = None
        if self._server is not None:
            self._server.close()

    def _opened(self) -> RankServer:
        if self._server is None or self._services is None:
            raise ClosedError("the ranks backend is not open")
        return self._server
