"""Fake backends for tests of the whole manager, registered as plug-ins.

`plugged` (a name for a class while a test runs) - `MemoryStore` (a store in memory that survives
closing) - `FakeRemote` (the same, with faults and gates) - `FaultyDevice` (a device whose
copies can fail or wait).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
from rig import device_backend

from flexkv import plugins
from flexkv.errors import TransferError
from flexkv.model import IOStatus, Statuses
from flexkv.protocols import API_VERSION, BlockCopy, BlockIO, DeviceInfo, Recovered, Services
from flexkv.testing.faults import FaultyStorage, Gate

_numbers = itertools.count()


@contextmanager
def plugged(target: Any, group: str = plugins.BACKENDS) -> Iterator[str]:
    """Register `target`; yields the name under which the configuration finds it."""
    name = f"fake-{next(_numbers)}"
    with plugins.register(group, name, target):
        yield name


class MemoryStore:
    """A slot-addressed store in memory. What is below one directory name survives closing."""

    flexkv_api: ClassVar[int] = API_VERSION
    addressing: ClassVar[Literal["slot", "key"]] = "slot"
    alignment_bytes = 1
    kept: ClassVar[dict[str, dict[int, tuple[bytes, bytes, int, bytes]]]] = {}

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        return [DeviceInfo("memory")]

    async def open(self, services: Services) -> Recovered | None:
        self._arena, self._size = services.arena, services.identity.spec.block_bytes
        self.slots = self.kept.setdefault(str(services.settings["directories"]), {})
        if not self.slots:
            return None
        keys, parents, depths, _ = zip(*self.slots.values(), strict=True)
        return Recovered(
            np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2),
            np.frombuffer(b"".join(parents), np.uint64).reshape(-1, 2),
            np.array(depths, np.uint32),
            np.array(list(self.slots), np.uint32),
        )

    async def read(self, batch: BlockIO) -> Statuses:
        statuses = np.full(len(batch), IOStatus.MISSING, np.uint8)
        for i, slot in enumerate(batch.store_slots.tolist()):
            held = self.slots.get(slot)
            if held is not None and held[0] == batch.keys[i].tobytes():
                view = self._arena.view(int(batch.host_slots[i]))
                view[: self._size] = np.frombuffer(held[3], np.uint8)
                statuses[i] = IOStatus.LANDED
        return statuses

    async def write(self, batch: BlockIO) -> Statuses:
        assert batch.parents is not None
        assert batch.depths is not None
        for i, slot in enumerate(batch.store_slots.tolist()):
            content = self._arena.view(int(batch.host_slots[i]))[: self._size].tobytes()
            chain = (batch.keys[i].tobytes(), batch.parents[i].tobytes(), int(batch.depths[i]))
            self.slots[slot] = (*chain, content)
        return np.zeros(len(batch), np.uint8)

    async def discard(self, batch: BlockIO) -> Statuses:
        statuses = np.full(len(batch), IOStatus.MISSING, np.uint8)
        for i, slot in enumerate(batch.store_slots.tolist()):
            held = self.slots.get(slot)
            if held is not None and batch.keys[i].tobytes() in (held[0], bytes(16)):
                del self.slots[slot]
                statuses[i] = IOStatus.LANDED
        return statuses

    async def aclose(self) -> None:
        pass


class FakeRemote(FaultyStorage):
    """A `MemoryStore` with faults and gates in front of it."""

    flexkv_api: ClassVar[int] = API_VERSION
    addressing: ClassVar[Literal["slot", "key"]] = "slot"
    alignment_bytes = 1

    def __init__(self) -> None:
        super().__init__(MemoryStore())


class FaultyDevice(device_backend()):  # type: ignore[misc]
    """The chosen device, of which copies fail: the next `failures` of those to (or from) it."""

    failures = 0
    to_device = True
    skip = 0
    gate: Gate | None = None

    async def copy(self, batch: BlockCopy) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if batch.to_device == self.to_device:
            if self.skip:
                self.skip -= 1
            elif self.failures:
                self.failures -= 1
                raise TransferError("the device is gone for a moment")
        await super().copy(batch)
