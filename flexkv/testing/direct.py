"""What a device backend must do that reads from a store by itself; `DirectStorageTests` is the set.

Subclass it in a test module and return a `DirectHarness` from the fixture `harness`. The tests of
the device itself are `DeviceBackendTests`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from flexkv.errors import ClosedError, InputError
from flexkv.model import DAMAGED, LANDED, MISSING, NO_SLOT, KVSpec
from flexkv.protocols import BlockIO, DirectStorage, LocatableStorage, Services
from flexkv.testing.device_bench import DeviceBench, OpenDevice, same
from flexkv.testing.device_bench import opened as device_opened
from flexkv.testing.guard import (
    KitTests,
    give_up,
    longest_stall,
    on_loop,
    refused,
    require,
    within,
)
from flexkv.testing.harness import DirectHarness
from flexkv.testing.kv_memory import KvMemory
from flexkv.testing.storage_bench import (
    IDENTITY,
    OpenStore,
    checked,
    keys_of,
    pattern,
)

READ = "DirectStorage.read_into"
CLOSE = "DeviceBackend.aclose"

_BLOCKS = 24
_GRACE_S = 0.05  # in which bytes would land that come late
_PROMPTLY_S = 1.0
_NUMBERS = list(range(12))


@dataclass(slots=True)
class Pair:
    """A device and a store, both open, and tensors of `_BLOCKS` blocks."""

    device: OpenDevice
    store: OpenStore
    memory: KvMemory

    async def read(
        self,
        numbers: Sequence[int],
        blocks: Sequence[int],
        slots: Sequence[int] | None = None,
    ) -> list[int]:
        """Read blocks from the store into device `blocks`; their statuses."""
        backend = self.device.backend
        assert isinstance(backend, DirectStorage)
        store = np.array(numbers if slots is None else slots, np.uint32)
        wanted = BlockIO(np.empty(0, np.uint32), store, keys_of(numbers))
        targets, keeper = np.array(blocks, np.uint32), self.store.backend
        assert isinstance(keeper, LocatableStorage), "the store of the harness must say where"
        with keeper.locate(wanted) as batch:
            answer = await backend.read_into(batch, self.device.region, targets)
        return checked(answer, len(numbers), "read_into")

    async def check(
        self,
        numbers: Sequence[int],
        blocks: Sequence[int],
        expected: list[int],
        what: str,
        slots: Sequence[int] | None = None,
    ) -> None:
        """Read, and require the statuses, the bytes, and that nothing else changed."""
        wanted = self.memory.snapshot()
        statuses = await self.read(numbers, blocks, slots)
        require(statuses == expected, READ, f"{what}: expected {expected}, got {statuses}")
        after = self.memory.snapshot()
        for number, block, status in zip(numbers, blocks, statuses, strict=True):
            if status == LANDED:
                data = pattern(number, self.device.spec.block_bytes)
                self.memory.place(wanted, block, data)
            else:  # whatever a block holds that did not land
                self.memory.place(wanted, block, self.memory.block(after, block))
        require(
            same(after, wanted),
            READ,
            f"{what}: a block that has LANDED has other bytes, or bytes changed beside the batch",
        )
        untouched = self.device.untouched(range(self.device.services.arena.slots))
        require(untouched, READ, f"{what}: host slots changed; the batch names none")


class DirectStorageTests(KitTests):
    """All that direct reads must do. Override `harness`."""

    spec: KVSpec = IDENTITY.spec

    @pytest.fixture
    def harness(self) -> DirectHarness:
        """What is tested: override this."""
        raise NotImplementedError("override the fixture `harness`: return a DirectHarness")

    @pytest.fixture
    def bench(
        self, harness: DirectHarness, tmp_path: Path, flexkv_rng: random.Random
    ) -> DeviceBench:
        """What device and store are made of."""
        return DeviceBench(harness, tmp_path, flexkv_rng, self.limit_s / 3)

    def test_it_has_the_verb_of_the_door(self, harness: DirectHarness) -> None:
        backend = harness.make()
        what = f"{backend!r} must have the verb read_into"
        require(isinstance(backend, DirectStorage), "DirectStorage", what)

    @on_loop
    async def test_stored_blocks_come_to_the_device(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            for _ in range(10):
                n = bench.rng.randint(1, 12)
                numbers, blocks = bench.rng.sample(_NUMBERS, n), bench.rng.sample(range(_BLOCKS), n)
                what = f"stored blocks {numbers} into device blocks {blocks}"
                await pair.check(numbers, blocks, [LANDED] * n, what)

    @on_loop
    async def test_an_empty_batch_is_answered(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            await pair.check([], [], [], "an empty batch")

    @on_loop
    async def test_what_is_not_there_is_missing(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            what = "a slot never written and one that holds another key"
            await pair.check([1, 30, 9, 3], [4, 5, 6, 7], [0, 3, 3, 0], what, [1, 30, 2, 3])

    @on_loop
    async def test_damage_is_told_and_costs_only_its_block(self, bench: DeviceBench) -> None:
        harness = bench.harness
        assert isinstance(harness, DirectHarness)
        async with opened(bench) as pair:
            data = pattern(3, self.spec.block_bytes).copy()
            data[-1] ^= 1
            harness.store.write_raw(bench.place, 3, keys_of([3])[0], self.spec, data)
            expected = [LANDED, LANDED, DAMAGED, LANDED]
            await pair.check([1, 2, 3, 4], [8, 3, 0, 5], expected, "a flipped bit in block 3")
            statuses = await pair.read([3], [0])
            require(statuses != [LANDED], READ, "a block that was DAMAGED has LANDED since")

    @on_loop
    async def test_a_discarded_block_is_missing(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            await pair.store.drop([2])
            await pair.check([1, 2], [0, 1], [LANDED, MISSING], "block 2 was discarded")

    @on_loop
    async def test_ids_out_of_range_are_refused_before_anything_moves(
        self, bench: DeviceBench
    ) -> None:
        async with opened(bench) as pair:
            before = pair.memory.snapshot()
            for numbers, blocks in (([1, 2], [0, _BLOCKS]), ([1], [NO_SLOT]), ([1, 2], [0])):
                with refused(InputError, READ, f"device blocks {blocks} for {len(numbers)} blocks"):
                    await pair.read(numbers, blocks)
            what = "a batch that was refused moved bytes first"
            require(same(pair.memory.snapshot(), before), READ, what)

    @on_loop
    async def test_a_backend_that_is_closed_says_so(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            await pair.device.backend.aclose()
            with refused(ClosedError, READ, "a read by a backend that is closed"):
                await pair.read([1], [1])

    @on_loop
    async def test_many_reads_at_once_all_land(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            wanted, wrong = pair.memory.snapshot(), list[int]()

            async def read(number: int) -> None:
                if await pair.read([number], [number + 5]) != [LANDED]:
                    wrong.append(number)
                got = pair.memory.block(pair.memory.snapshot(), number + 5)
                if not np.array_equal(got, pattern(number, self.spec.block_bytes)):
                    wrong.append(number)

            async with anyio.create_task_group() as group:
                for number in _NUMBERS:
                    group.start_soon(read, number)
            what = f"of 12 reads at once, those of {wrong} returned before their bytes were there"
            require(not wrong, READ, what)
            for number in _NUMBERS:
                pair.memory.place(wanted, number + 5, pattern(number, self.spec.block_bytes))
            require(same(pair.memory.snapshot(), wanted), READ, "other bytes changed as well")

    @on_loop
    async def test_giving_up_takes_effect_at_once_and_close_waits(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            device, closed = pair.device, anyio.Event()

            async def close() -> None:
                await device.backend.aclose()
                closed.set()

            async with anyio.create_task_group() as group:
                with bench.harness.hold(device.backend, device.services):
                    work = pair.read(_NUMBERS, _NUMBERS)
                    await give_up(work, _GRACE_S, _PROMPTLY_S, READ)
                    group.start_soon(close)
                    await anyio.sleep(_GRACE_S)
                    what = "aclose returned while a read that its caller gave up on was in flight"
                    require(not closed.is_set(), CLOSE, what)
                await within(bench.limit_s, closed.wait(), CLOSE, "aclose does not end")

    @on_loop
    async def test_no_byte_lands_after_close_whoever_gave_up(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(pair.read, _NUMBERS, _NUMBERS)
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            closing = pair.device.backend.aclose()
            await within(bench.limit_s, closing, CLOSE, "aclose does not end")
            pair.memory.fill(bench.rng)
            before = pair.memory.snapshot()
            await anyio.sleep(_GRACE_S)
            what = "bytes landed on the device after aclose returned"
            require(same(pair.memory.snapshot(), before), CLOSE, what)

    @on_loop
    async def test_reads_do_not_keep_the_loop_from_running(self, bench: DeviceBench) -> None:
        async with opened(bench) as pair:

            async def work() -> None:
                for _ in range(8):
                    await pair.read(_NUMBERS, _NUMBERS)

            stall_ms = await longest_stall(work)
            what = f"reads keep the event loop from running for {stall_ms:.1f} ms"
            require(not stall_ms, READ, what)


@contextlib.asynccontextmanager
async def opened(bench: DeviceBench) -> AsyncIterator[Pair]:
    """Open device and store, in the order of the manager, and store blocks 0 to 11."""
    harness = bench.harness
    assert isinstance(harness, DirectHarness)
    async with device_opened(bench, IDENTITY.spec, slots=32, identity=IDENTITY) as device:
        services = device.services
        chosen = Services(
            services.completions,
            services.arena,
            IDENTITY,
            harness.store.settings(bench.place),
            harness.store.capacity_blocks,
        )
        store = OpenStore(harness.store.make(), chosen, bench.place)
        await store.backend.open(chosen)
        try:
            statuses = await store.put(_NUMBERS)
            assert statuses == [LANDED] * 12, f"the store of the harness answers {statuses}"
            memory = device.memory(bench.axes("PBNHD"), _BLOCKS)
            device.wipe()
            yield Pair(device, store, memory)
        finally:
            await store.backend.aclose()
