"""Honest plug-ins that the kit's own tests need: `Patient` (a device that loses completions),
`Queue` (a policy without the index's order),
`Shelf` and `ShelfDevice` (a store in memory, and a device that reads from it), `Plain` and `Int8`
(codecs).
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.backends.cpu import CpuBackend
from flexkv.backends.packing import checked_ids
from flexkv.completion import Completions, Ticket
from flexkv.errors import ClosedError, InputError, TransferError
from flexkv.model import BlockIds, BoolArray, IOStatus, KVSpec, SlotIds, Statuses
from flexkv.protocols import (
    BlockCopy,
    BlockIO,
    DeviceBackend,
    DeviceInfo,
    PolicyContext,
    Recovered,
    Region,
    Services,
)
from flexkv.testing import DirectHarness, StorageHarness
from flexkv.testing.built_in import CpuHarness

Bytes = NDArray[np.uint8]


class Patient(CpuBackend):
    """A `cpu` device that may lose completions, and waits for them for 50 ms."""

    losing = False

    async def copy(self, batch: BlockCopy) -> None:
        if not self.losing:
            return await super().copy(batch)
        assert self._services is not None
        completions = self._services.completions
        ticket = completions.ticket()
        self.watch(completions, ticket)
        if (await ticket).failed:
            raise TransferError("no completion came within 50 ms")

    def watch(self, completions: Completions, ticket: Ticket) -> None:
        completions.call_later(0.05, completions.fail, ticket, errno.ETIMEDOUT)


class PatientHarness(CpuHarness):
    """Makes it lose them."""

    @contextmanager
    def lose(self, backend: DeviceBackend, services: Services) -> Iterator[None]:
        assert isinstance(backend, Patient)
        backend.losing = True
        yield
        backend.losing = False


class Queue:
    """Least recently used, by itself: a dict in order of use."""

    flexkv_api: ClassVar[int] = 1

    def open(self, context: PolicyContext) -> None:
        self.used: dict[int, None] = {}

    def inserted(self, blocks: BlockIds, now: float) -> None:
        self.touched(blocks, now)

    def touched(self, blocks: BlockIds, now: float) -> None:
        for block in blocks.tolist():
            self.used.pop(block, None)
            self.used[block] = None

    def removed(self, blocks: BlockIds) -> None:
        for block in blocks.tolist():
            self.used.pop(block, None)

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        known = np.array(list(self.used), np.uint32)
        return known[evictable(known)][:count]


_shelves: dict[str, dict[int, tuple[bytes, bytes, int]]] = {}  # slot -> key, bytes, check


def check_of(key: bytes, data: bytes) -> int:
    """What is kept beside a block, to know it again."""
    return zlib.crc32(key + data)


class Shelf:
    """A store in this process's memory, one per `place`."""

    flexkv_api: ClassVar[int] = 1
    addressing: ClassVar[Literal["slot", "key"]] = "slot"
    alignment_bytes = 1

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        return []

    async def open(self, services: Services) -> Recovered | None:
        self.arena, self.size = services.arena, services.identity.spec.block_bytes
        self.blocks = _shelves.setdefault(services.settings["place"], {})
        return None

    async def read(self, batch: BlockIO) -> Statuses:
        raise NotImplementedError("only the device reads from here")

    async def write(self, batch: BlockIO) -> Statuses:
        for host, slot, key in zip(batch.host_slots, batch.store_slots, batch.keys, strict=True):
            name, data = key.tobytes(), self.arena.view(int(host))[: self.size].tobytes()
            self.blocks[int(slot)] = name, data, check_of(name, data)
        return np.zeros(len(batch), np.uint8)

    def locate(self, batch: BlockIO) -> AbstractContextManager[BlockIO]:
        return nullcontext(batch)  # the device knows the way

    async def discard(self, batch: BlockIO) -> Statuses:
        for slot in batch.store_slots.tolist():
            self.blocks.pop(slot, None)
        return np.zeros(len(batch), np.uint8)

    async def aclose(self) -> None: ...


class ShelfDevice(CpuBackend):
    """A `cpu` device that also reads from a shelf, by way of a staging arena slot of its own."""

    async def open(self, services: Services) -> None:
        settings = dict(services.settings)
        self.blocks = _shelves.setdefault(settings.pop("place"), {})
        staging = services.arena.slots - 1
        self.staging = np.array([staging], np.uint32)
        self.turn = anyio.Lock()
        await super().open(
            Services(services.completions, services.arena, services.identity, settings)
        )

    async def read_into(self, batch: BlockIO, region: Region, device_blocks: SlotIds) -> Statuses:
        if self._services is None:
            raise ClosedError("the shelf device is not open")
        targets = checked_ids(device_blocks, region.blocks, "device block")
        if len(targets) != len(batch):
            raise InputError(f"{len(targets)} device blocks for {len(batch)} stored ones")
        statuses = np.zeros(len(batch), np.uint8)
        for i, (slot, key) in enumerate(zip(batch.store_slots, batch.keys, strict=True)):
            statuses[i] = await self.fetch(int(slot), key.tobytes(), region, targets[i : i + 1])
        return statuses

    async def fetch(self, slot: int, key: bytes, region: Region, target: SlotIds) -> int:
        found = self.blocks.get(slot)
        if found is None or found[0] != key:
            return IOStatus.MISSING
        if check_of(key, found[1]) != found[2]:
            return IOStatus.DAMAGED
        await self.bring(found[1], region, target)
        return IOStatus.LANDED

    async def bring(self, data: bytes, region: Region, target: SlotIds) -> None:
        assert self._services is not None
        async with self.turn:
            view = self._services.arena.view(int(self.staging[0]))
            before = view.copy()
            view[: len(data)] = np.frombuffer(data, np.uint8)
            await self.copy(BlockCopy(region, target, self.staging, True))
            view[:] = before


class ShelfHarness(StorageHarness):
    """The back door to a shelf."""

    persistent = False

    def settings(self, place: Path) -> dict[str, Any]:
        return {"place": str(place)}

    def write_raw(
        self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec, data: Bytes
    ) -> None:
        name, _, check = _shelves[str(place)][slot]
        _shelves[str(place)][slot] = name, data.tobytes(), check


class ShelfDeviceHarness(DirectHarness, CpuHarness):
    """A shelf device and its shelf."""

    store = ShelfHarness(Shelf)

    def settings(self, place: Path) -> dict[str, Any]:
        return {"place": str(place), "inline_bytes": 0}


class Plain:
    """A codec that does nothing."""

    flexkv_api: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    def encoded_bytes(self, spec: KVSpec) -> int:
        return spec.block_bytes

    def encode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:] = source

    def decode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:] = source


class Int8:
    """float32 -> int8 with one scale per block."""

    flexkv_api: ClassVar[int] = 1
    lossy: ClassVar[bool] = True

    def encoded_bytes(self, spec: KVSpec) -> int:
        return 4 + spec.block_bytes // 4

    def encode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        values = np.ascontiguousarray(source).view(np.float32)
        scales = self.scales(values)
        target[:, :4] = scales.view(np.uint8)
        target[:, 4:] = np.rint(values / np.where(scales, scales, 1)).astype(np.int8).view(np.uint8)

    def scales(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.abs(values).max(axis=1, keepdims=True, initial=0) / np.float32(127)

    def decode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        scales = np.ascontiguousarray(source[:, :4]).view(np.float32)
        numbers = np.ascontiguousarray(source[:, 4:]).view(np.int8)
        target[:] = (numbers * scales).astype(np.float32).view(np.uint8)
