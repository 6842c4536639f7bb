"""What all remote stores have in common: `RemoteStore`, a StorageBackend addressed by key.

`read`, `write`, `discard` cut a batch into parcels for the couriers; a subclass says how to
`connect`. Blocks are named by prefix, identity and key, so that many caches may share a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import anyio
import anyio.to_thread
import numpy as np

from flexkv.backends.remote.breaker import Breaker
from flexkv.backends.remote.couriers import Client, Couriers, Parcel, Verb
from flexkv.backends.remote.heads import HEAD, judge, make_heads
from flexkv.backends.remote.settings import RemoteSettings
from flexkv.errors import ClosedError
from flexkv.model import DAMAGED, FAILED, KeyArray, Statuses
from flexkv.protocols import API_VERSION, BlockIO, DeviceInfo, Recovered, Services
from flexkv.telemetry import log


class RemoteStore:
    """A tier on another machine. Settings: see `RemoteSettings`, and the subclass's own.

    It keeps nothing that must be closed to be safe, may be shared by many processes, and finds
    again what others stored; it does not know what that is (`open` returns None).
    """

    flexkv_api: ClassVar[int] = API_VERSION
    addressing: ClassVar[Literal["slot", "key"]] = "key"
    alignment_bytes = 1
    name: ClassVar[str]
    settings_type: ClassVar[type[RemoteSettings]] = RemoteSettings

    def __init__(self) -> None:
        self._services: Services | None = None
        self._closing = False
        self._closed = anyio.Event()
        self._deletions: list[tuple[set[bytes], anyio.Event]] = []  # under way

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """Say that the client is there; servers are asked when blocks are moved."""
        return [DeviceInfo(cls.name)]

    def connect(self) -> Client:
        """Make a client, not connected yet. Called by each courier."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Give up what clients share. Called once, in a thread, when all of them are closed."""

    async def open(self, services: Services) -> Recovered | None:
        """Take the settings; a server that does not answer costs misses, not the start.

        Raises:
            ConfigError: a setting is unknown or wrong.
        """
        assert self._services is None, f"the {self.name} store is open already"
        self.settings = self.settings_type.read(services.settings)
        settings = self.settings
        self._block_bytes = services.identity.spec.block_bytes
        self._place = f"{settings.prefix}:{services.identity.digest().hex()[:32]}:".encode()
        self._breaker = Breaker(settings.failures, settings.retry_ms / 1e3)
        self._couriers = self.hire(settings.connections)
        self._services = services
        return None

    @property
    def is_down(self) -> bool:
        """Whether the store counts as not reachable."""
        return self._services is not None and self._breaker.is_open

    def names(self, keys: KeyArray) -> list[bytes]:
        """Return what the blocks of `keys` are called in the store."""
        return [self._place + key.tobytes().hex().encode() for key in keys]

    async def read(self, batch: BlockIO) -> Statuses:
        """Fill the arena slots. MISSING: the store does not have it. DAMAGED: other bytes came
        back; they are dropped there. FAILED: the store did not answer.
        """
        statuses = await self._move("read", batch)
        damaged = np.flatnonzero(statuses == DAMAGED)
        if len(damaged):
            log.warning("remote.damaged", store=self.name, blocks=len(damaged))
            await self._move("discard", _part(batch, damaged))
        return statuses

    async def write(self, batch: BlockIO) -> Statuses:
        """Store the arena slots under their keys, after deletions of these that are under way."""
        if self._deletions:
            names = set(self.names(batch.keys))
            for deletion in [over for deleted, over in self._deletions if deleted & names]:
                await deletion.wait()
        return await self._move("write", batch)

    async def discard(self, batch: BlockIO) -> Statuses:
        """Forget the blocks; MISSING where there was none."""
        self._opened()
        deletion = (set(self.names(batch.keys)), anyio.Event())
        self._deletions.append(deletion)
        try:
            return await self._move("discard", batch)
        finally:
            self._deletions.remove(deletion)
            deletion[1].set()

    async def aclose(self) -> None:
        """Wait for what is in flight, also for those who gave up on it, and end the threads."""
        if self._services is None:
            return
        if self._closing:
            await self._closed.wait()
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            await self.dismiss()
        self._closed.set()

    def hire(self, count: int) -> Couriers:
        """Start the threads that carry blocks."""
        return Couriers(count, self.connect, self._carry, self.name)

    async def dismiss(self) -> None:
        """Wait until the threads have ended, then let the connection go that they shared."""
        await anyio.to_thread.run_sync(self._couriers.close)
        await anyio.to_thread.run_sync(self.disconnect)

    # --- inside

    def _opened(self) -> Services:
        if self._services is None or self._closing:
            raise ClosedError(f"the {self.name} store is not open")
        return self._services

    async def _move(self, verb: Verb, batch: BlockIO) -> Statuses:
        services = self._opened()
        statuses = np.full(len(batch), FAILED, np.uint8)
        now = services.completions.now
        if not len(batch) or not self._breaker.admits(now()):
            return statuses
        parcels = self._parcels(verb, batch, statuses)
        ticket = services.completions.ticket(len(parcels), keep=(parcels, services.arena))
        for parcel in parcels:
            parcel.address = ticket.address
            self._couriers.put(parcel)
        await ticket
        errors = [parcel.error for parcel in parcels if parcel.error]
        if not errors:
            if self._breaker.succeeded():
                log.info("remote.up", store=self.name)
        elif self._breaker.failed(now()):
            log.warning("remote.down", store=self.name, error=errors[0])
        return statuses

    def _parcels(self, verb: Verb, batch: BlockIO, statuses: Statuses) -> list[Parcel]:
        """Cut a batch into a parcel for each courier; statuses are views of `statuses`."""
        count, keys = len(batch), np.ascontiguousarray(batch.keys, np.uint64)
        slots = np.ascontiguousarray(batch.host_slots, np.uint32)
        names = self.names(keys)
        heads = np.zeros(count, HEAD)
        if verb == "write" and batch.parents is not None:
            heads["parent"], heads["depth"] = batch.parents, batch.depths
        step = -(-count // min(count, len(self._couriers)))
        return [
            Parcel(verb, names[at:end], keys[at:end], slots[at:end], heads[at:end], part, None)
            for at in range(0, count, step)
            if len(part := statuses[at : (end := at + step)])
        ]

    def _carry(self, client: Client, parcel: Parcel) -> None:
        """Do a parcel, in a courier's thread."""
        if parcel.verb == "discard":
            return client.discard(parcel.names, parcel.statuses)
        services = self._services
        assert services is not None
        arena, size = services.arena, self._block_bytes
        bodies = [arena.view(int(slot))[:size].data for slot in parcel.slots]
        if parcel.verb == "write":
            parents, depths = parcel.heads["parent"], parcel.heads["depth"]
            parcel.heads = make_heads(arena, parcel.slots, parcel.keys, parents, depths, size)
            return client.write(parcel.names, _rows(parcel), bodies, parcel.statuses)
        try:
            client.read(parcel.names, _rows(parcel), bodies, parcel.statuses)
        finally:
            judge(arena, parcel.heads, parcel.slots, parcel.keys, parcel.statuses, size)


def _rows(parcel: Parcel) -> list[memoryview]:
    raw = parcel.heads.view(np.uint8).reshape(len(parcel), HEAD.itemsize)
    return [row.data for row in raw]


def _part(batch: BlockIO, positions: Any) -> BlockIO:
    return BlockIO(batch.host_slots[positions], batch.store_slots[positions], batch.keys[positions])
