"""An open device backend with an arena, for the tests of the kit.

`DeviceKit` (fixtures `harness` and `bench`) - `DeviceBench` (what a test is given: harness, folder,
random numbers) - `opened` (the backend, open, checked when it closes) - `OpenDevice`: `memory`,
`register`, `copy`, `bytes_of`, `wipe`, `untouched`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec
from flexkv.protocols import BlockCopy, DeviceBackend, Services
from flexkv.testing.guard import KitTests, require, tickets_are_back, within
from flexkv.testing.harness import CREW_QUEUE, Bytes, DeviceHarness
from flexkv.testing.kv_memory import KvMemory

SENTINEL = 0xA5
SLOTS = 24


@dataclass(slots=True)
class OpenDevice:
    """A backend that is open, and what it may use. `copy` moves blocks of the last `memory`."""

    harness: DeviceHarness
    spec: KVSpec
    backend: DeviceBackend
    services: Services
    rng: random.Random
    region: Any = None
    kept: list[KvMemory] = field(default_factory=list)

    def memory(
        self,
        axes: str,
        blocks: int,
        *,
        spec: KVSpec | None = None,
        plain: bool = False,
        shared: bool = False,
    ) -> KvMemory:
        """Make an engine's tensors with random content and register them."""
        made = KvMemory(
            self.harness, spec or self.spec, axes, blocks, self.rng, plain=plain, shared=shared
        )
        self.kept.append(made)
        self.register(made)
        return made

    def register(self, memory: KvMemory) -> None:
        """Copy from and to this memory from now on."""
        tensors, spec, axes = memory.tensors, memory.spec, memory.axes
        self.region = self.harness.make_region(self.backend, tensors, spec, axes)

    async def copy(
        self,
        blocks: Iterable[int],
        slots: Iterable[int],
        *,
        to_device: bool,
        layers: tuple[int, int] | None = None,
    ) -> None:
        """Copy between device `blocks` and arena `slots`."""
        numbers = np.fromiter(blocks, np.uint32), np.fromiter(slots, np.uint32)
        await self.backend.copy(BlockCopy(self.region, *numbers, to_device, layers))

    def bytes_of(self, slot: int) -> Bytes:
        """A view of the block in an arena slot."""
        return self.services.arena.view(slot)[: self.spec.block_bytes]

    def wipe(self) -> None:
        """Fill every arena slot with the sentinel."""
        for slot in range(self.services.arena.slots):
            self.services.arena.view(slot)[:] = SENTINEL

    def untouched(self, slots: Iterable[int]) -> bool:
        """Whether arena slots hold what they held at first."""
        return all(bool((self.services.arena.view(slot) == SENTINEL).all()) for slot in slots)


@dataclass(slots=True)
class DeviceBench:
    """What a test is given. `rng` starts anew for each test, from the seed in `--flexkv-seed`.

    `limit_s` is how long one call may take.
    """

    harness: DeviceHarness
    place: Path
    rng: random.Random
    limit_s: float

    def axes(self, wanted: str) -> str:
        """`wanted` if the backend takes this layout, else the first one that it takes."""
        return wanted if wanted in self.harness.axes else self.harness.axes[0]

    async def round_trip(self, spec: KVSpec, axes: str, blocks: int) -> None:
        """Save blocks to slots, restore them elsewhere; nothing else may change on either side."""
        rng = self.rng
        async with opened(self, spec) as device:
            memory = device.memory(axes, blocks)
            before = memory.snapshot()
            n = rng.randint(1, min(blocks, SLOTS))
            chosen, slots = rng.sample(range(blocks), n), rng.sample(range(SLOTS), n)
            await device.copy(chosen, slots, to_device=False)
            self._check_saved(device, memory, before, chosen, slots)
            targets = rng.sample(range(blocks), n)
            await device.copy(targets, slots, to_device=True)
            expected = [data.copy() for data in before]
            for block, target in zip(chosen, targets, strict=True):
                memory.place(expected, target, memory.block(before, block))
            after = memory.snapshot()
            self._check_restored(memory, after, expected, before, targets)

    def _check_saved(
        self,
        device: OpenDevice,
        memory: KvMemory,
        before: list[Bytes],
        blocks: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        copy, what = "DeviceBackend.copy", f"{memory.axes}, {memory.spec}"
        wrong = [
            slot
            for block, slot in zip(blocks, slots, strict=True)
            if not np.array_equal(device.bytes_of(slot), memory.block(before, block))
        ]
        require(
            not wrong,
            copy,
            f"device -> host returned, but {len(wrong)} of {len(slots)} slots do not hold their "
            f"blocks ({what})",
        )
        require(
            device.untouched(set(range(SLOTS)) - set(slots)),
            copy,
            f"device -> host changed slots that are not in the batch ({what})",
        )
        rest = (device.services.arena.view(slot)[device.spec.block_bytes :] for slot in slots)
        require(
            all(bool((tail == SENTINEL).all()) for tail in rest),
            copy,
            f"device -> host wrote behind the block's bytes in its slot ({what})",
        )
        require(
            same(memory.snapshot(), before), copy, f"device -> host changed the device ({what})"
        )

    def _check_restored(
        self,
        memory: KvMemory,
        after: list[Bytes],
        expected: list[Bytes],
        before: list[Bytes],
        targets: Sequence[int],
    ) -> None:
        copy, what = "DeviceBackend.copy", f"{memory.axes}, {memory.spec}"
        wrong = [
            target
            for target in targets
            if not np.array_equal(memory.block(after, target), memory.block(expected, target))
        ]
        require(
            not wrong,
            copy,
            f"host -> device returned, but {len(wrong)} of {len(targets)} blocks of the device do "
            f"not hold what their slots held ({what})",
        )
        require(
            same(after, expected),
            copy,
            f"host -> device changed bytes of the device that belong to no block of the batch: "
            f"other blocks, or the gaps that strides leave ({what})",
        )


@contextlib.asynccontextmanager
async def opened(
    bench: DeviceBench,
    spec: KVSpec,
    *,
    slots: int = SLOTS,
    identity: Identity | None = None,
    **settings: Any,
) -> AsyncIterator[OpenDevice]:
    """Open a backend of the bench; require that it closes, and that every ticket came back."""
    harness, close = bench.harness, "DeviceBackend.aclose"
    completions = Completions(crew_threads=2, crew_queue=CREW_QUEUE)
    arena = Arena(slots, spec.stride_bytes, huge_pages=False)
    identity = identity or Identity("flexkv-kit", spec=spec)
    chosen = harness.settings(bench.place) | settings
    services = Services(completions, arena, identity, chosen, slots)
    device = OpenDevice(harness, spec, harness.make(), services, bench.rng)
    device.wipe()
    try:
        await device.backend.open(services)
        yield device
        await within(bench.limit_s, device.backend.aclose(), close, "aclose does not end")
        tickets_are_back(completions, close)
    finally:
        with anyio.move_on_after(bench.limit_s):
            await device.backend.aclose()
        device.region = None
        for memory in device.kept:
            memory.free()
        if not await completions.aclose(1000):
            arena.close()


def same(one: list[Bytes], other: list[Bytes]) -> bool:
    """Whether two snapshots are equal."""
    return all(map(np.array_equal, one, other))


class DeviceKit(KitTests):
    """Fixtures of the device tests."""

    @pytest.fixture
    def harness(self) -> DeviceHarness:
        """What is tested: override this."""
        raise NotImplementedError("override the fixture `harness`: return a DeviceHarness")

    @pytest.fixture
    def bench(self, harness: DeviceHarness, tmp_path: Path, flexkv_rng: Any) -> DeviceBench:
        """What an open backend is made of."""
        return DeviceBench(harness, tmp_path, flexkv_rng, self.limit_s / 3)
