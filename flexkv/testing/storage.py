"""What every store must do with blocks; `StorageBackendTests` is the whole set.

Subclass it in a test module and return a `StorageHarness` from the fixture `harness`. The tests of
life and of restarts come from `storage_life` and `storage_restart`.
"""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from flexkv.errors import InputError
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING, NO_SLOT, PAGE_BYTES, Identity, KVSpec
from flexkv.protocols import API_VERSION, DeviceInfo, StorageBackend
from flexkv.testing.guard import on_loop, refused, require
from flexkv.testing.harness import StorageHarness
from flexkv.testing.storage_bench import (
    IDENTITY,
    SENTINEL,
    OpenStore,
    StorageBench,
    keys_of,
    opened,
    pattern,
)
from flexkv.testing.storage_life import StorageLifeTests
from flexkv.testing.storage_restart import StorageRestartTests

READ = "StorageBackend.read"
WRITE = "StorageBackend.write"
DISCARD = "StorageBackend.discard"
PROBE = "StorageBackend.probe"


class StorageBackendTests(StorageLifeTests, StorageRestartTests):
    """All that a store must do. Override `harness`."""

    def test_it_has_the_verbs_of_the_door(self, harness: StorageHarness) -> None:
        backend = harness.make()
        require(
            isinstance(backend, StorageBackend)
            and backend.flexkv_api == API_VERSION
            and backend.addressing in ("slot", "key"),
            "StorageBackend",
            f"{backend!r} must have flexkv_api = {API_VERSION}, addressing 'slot' or 'key', and "
            "every verb of StorageBackend",
        )

    def test_its_alignment_is_one_that_the_arena_has(self, harness: StorageHarness) -> None:
        alignment = harness.make().alignment_bytes
        good = isinstance(alignment, int) and alignment >= 1 and PAGE_BYTES % alignment == 0
        require(
            good,
            "StorageBackend",
            f"alignment_bytes = {alignment!r}: arena slots are aligned to {PAGE_BYTES} bytes, so "
            f"it must divide {PAGE_BYTES}",
        )

    def test_probe_never_raises(self, harness: StorageHarness) -> None:
        for _ in range(2):
            try:
                found = list(harness.make().probe())
            except Exception as error:
                require(False, PROBE, f"probe must never raise, but raised {error!r}")
            good = all(isinstance(info, DeviceInfo) and info.name for info in found)
            require(good, PROBE, f"probe lists DeviceInfo with a name, not {found!r}")

    @on_loop
    async def test_blocks_come_back_in_any_order(self, bench: StorageBench) -> None:
        capacity = bench.harness.capacity_blocks
        async with opened(bench) as store:
            numbers = list(range(capacity))
            slots = bench.rng.sample(numbers, capacity)
            await _all_land(store, numbers, slots)
            order = [bench.rng.randrange(capacity) for _ in range(capacity)]  # some of them twice
            statuses = await store.get([numbers[i] for i in order], [slots[i] for i in order])
            _expect(statuses, [LANDED] * capacity, READ, "blocks that were written, in any order")

    @pytest.mark.parametrize(
        "spec",
        [
            KVSpec.uniform(1, 1, 1, "uint8", parts=1, tokens_per_block=1),
            KVSpec.uniform(1, 2, 128, tokens_per_block=8),
            KVSpec.uniform(2, 1, 40, tokens_per_block=16),
            KVSpec.uniform(3, 7, 24, "float32", tokens_per_block=16),
        ],
        ids=lambda spec: f"{spec.block_bytes} bytes",
    )
    @on_loop
    async def test_blocks_of_any_size_come_back(self, bench: StorageBench, spec: KVSpec) -> None:
        async with opened(bench, identity=Identity("flexkv-kit", "", spec)) as store:
            await _all_land(store, list(range(12)))
            statuses = await store.get(list(range(12)))
            _expect(statuses, [LANDED] * 12, READ, f"blocks of {spec.block_bytes} bytes")

    @on_loop
    async def test_random_batches_of_everything_agree_with_a_dictionary(
        self, bench: StorageBench
    ) -> None:
        rng, capacity = bench.rng, bench.harness.capacity_blocks
        held: dict[int, int] = {}  # slot -> number
        fresh = 1000
        async with opened(bench) as store:
            for turn in range(40):
                slots = rng.sample(range(capacity), rng.randint(1, capacity))
                verb = rng.choice(["write", "read", "discard"])
                what = f"{verb} number {turn} of slots {slots}"
                if verb == "write":
                    numbers = [fresh + i for i in range(len(slots))]
                    fresh += len(slots)
                    _expect(await store.put(numbers, slots), [LANDED] * len(slots), WRITE, what)
                    held |= dict(zip(slots, numbers, strict=True))
                    continue
                numbers = [held.get(slot, 900 + slot) for slot in slots]
                expected = [LANDED if slot in held else MISSING for slot in slots]
                if verb == "read":
                    _expect(await store.get(numbers, slots), expected, READ, what)
                else:
                    _expect(await store.drop(numbers, slots), expected, DISCARD, what)
                    held = {slot: n for slot, n in held.items() if slot not in slots}

    @on_loop
    async def test_many_batches_at_once_all_come_back(self, bench: StorageBench) -> None:
        step = bench.harness.capacity_blocks // 4
        async with opened(bench, host_slots=8 * step) as store:
            wrong: list[str] = []

            async def write_and_read(share: int) -> None:
                numbers = list(range(share * step, (share + 1) * step))
                for verb in (store.put, store.get):
                    statuses = await verb(numbers, None, share * step)
                    if statuses != [LANDED] * step:
                        wrong.append(f"{numbers}: {statuses}")

            async with anyio.create_task_group() as group:
                for share in range(4):
                    group.start_soon(write_and_read, share)
            require(not wrong, READ, f"of four batches at once, some did not land: {wrong}")

    @on_loop
    async def test_an_empty_batch_is_answered(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            for verb in (store.put, store.get, store.drop):
                await verb([])

    @on_loop
    async def test_only_slots_of_the_batch_are_filled(self, bench: StorageBench) -> None:
        async with opened(bench, host_slots=16) as store:
            await _all_land(store, [1, 2, 3])
            arena = store.services.arena
            for slot in range(16):
                arena.view(slot)[:] = SENTINEL
            await store.get([1, 2, 3], first=7)
            others = [slot for slot in range(16) if not 7 <= slot < 10]
            touched = [slot for slot in others if (arena.view(slot) != SENTINEL).any()]
            require(not touched, READ, f"read wrote to slots {touched}, which are not in the batch")

    @on_loop
    async def test_what_was_never_written_is_missing(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            await _all_land(store, [1, 3])
            statuses = await store.get([1, 2, 3, 4])
            _expect(statuses, [LANDED, MISSING, LANDED, MISSING], READ, "blocks 2 and 4 of 1 and 3")

    @on_loop
    async def test_another_key_in_the_slot_is_missing(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            await _all_land(store, [1, 2, 3])
            statuses = await store.get([1, 9, 3], [1, 2, 3])
            _expect(statuses, [LANDED, MISSING, LANDED], READ, "a slot that holds another key")

    @on_loop
    async def test_a_slot_that_is_written_again_holds_the_new_block_only(
        self, bench: StorageBench
    ) -> None:
        if not bench.slotted:
            pytest.skip("the store is addressed by key")
        async with opened(bench) as store:
            await _all_land(store, [1], [7])
            await _all_land(store, [2], [7])
            statuses = await store.get([2, 1], [7, 7])
            _expect(statuses, [LANDED, MISSING], READ, "the new and the old block of a slot")

    @on_loop
    async def test_discarded_blocks_are_missing(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            await _all_land(store, list(range(8)))
            gone = await store.drop([4, 5, 20])
            _expect(gone, [LANDED, LANDED, MISSING], DISCARD, "two blocks and one unknown")
            expected = [LANDED] * 4 + [MISSING] * 2 + [LANDED] * 2
            _expect(
                await store.get(list(range(8))), expected, READ, "blocks 4 and 5 were discarded"
            )
            await _all_land(store, [4])
            _expect(await store.get([4]), [LANDED], READ, "a block stored again after a discard")

    @on_loop
    async def test_a_key_of_zeros_discards_whatever_the_slot_holds(
        self, bench: StorageBench
    ) -> None:
        if not bench.slotted:
            pytest.skip("the store is addressed by key")
        async with opened(bench) as store:
            await _all_land(store, [4])
            batch = store.batch([4, 5])
            batch.keys[:] = 0
            statuses = (await store.backend.discard(batch)).tolist()
            _expect(
                statuses, [LANDED, MISSING], DISCARD, "keys of zeros, of a full and an empty slot"
            )
            _expect(await store.get([4]), [MISSING], READ, "a slot discarded by a key of zeros")

    @on_loop
    async def test_slots_out_of_range_are_refused(self, bench: StorageBench) -> None:
        if not bench.slotted:
            pytest.skip("the store is addressed by key")
        async with opened(bench) as store:
            for verb in (store.get, store.put, store.drop):
                for slot in (bench.harness.capacity_blocks, NO_SLOT):
                    with refused(InputError, READ, f"{verb.__name__} of slot {slot}"):
                        await verb([1], [slot])

    @on_loop
    async def test_what_is_stored_are_the_bytes_that_were_written(
        self, bench: StorageBench
    ) -> None:
        """Read through the back door, open and closed: a store must not vouch for itself."""
        async with opened(bench) as store:
            await _all_land(store, [1, 2, 3])
            self._check_stored(bench, [1, 2, 3])
        self._check_stored(bench, [1, 2, 3])

    def _check_stored(self, bench: StorageBench, numbers: list[int]) -> None:
        spec = IDENTITY.spec
        for number, key in zip(numbers, keys_of(numbers), strict=True):
            stored = bench.harness.read_back(bench.place, number, key, spec)
            require(
                np.array_equal(stored, pattern(number, spec.block_bytes)),
                WRITE,
                f"write said LANDED for block {number}, but the store holds other bytes",
            )

    @on_loop
    async def test_damage_is_told_and_costs_only_its_block(self, bench: StorageBench) -> None:
        spec, numbers = IDENTITY.spec, [1, 2, 3, 4, 5]
        keys = dict(zip(numbers, keys_of(numbers), strict=True))
        for position in (0, spec.block_bytes // 2 + 3, spec.block_bytes - 1):
            async with opened(bench) as store:
                await _all_land(store, numbers)
                data = pattern(3, spec.block_bytes).copy()
                data[position] ^= 1
                bench.harness.write_raw(bench.place, 3, keys[3], spec, data)
                statuses = await store.get(numbers)
                expected = [LANDED, LANDED, DAMAGED, LANDED, LANDED]
                what = f"one flipped bit in byte {position} of block 3"
                _expect(statuses, expected, READ, what)
                statuses = await store.get([3])
                require(statuses[0] != LANDED, READ, "a block that was DAMAGED has LANDED since")

    @on_loop
    async def test_blocks_that_changed_places_are_damaged(self, bench: StorageBench) -> None:
        """Each is whole, but not the block that was asked for: checksums are bound to keys."""
        spec, keys = IDENTITY.spec, keys_of([1, 2])
        async with opened(bench) as store:
            await _all_land(store, [1, 2, 3])
            for number, key in zip((1, 2), keys, strict=True):
                data = pattern(3 - number, spec.block_bytes)
                bench.harness.write_raw(bench.place, number, key, spec, data)
            statuses = await store.get([1, 2, 3])
            _expect(statuses, [DAMAGED, DAMAGED, LANDED], READ, "blocks 1 and 2 changed places")

    @on_loop
    async def test_reads_that_fail_in_part_say_which(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            await _all_land(store, list(range(12)))
            with bench.harness.fail(store.backend, store.services, "read", 3, 2):
                statuses = await store.get(list(range(12)))
            expected = [LANDED] * 3 + [FAILED] * 2 + [LANDED] * 7
            _expect(statuses, expected, READ, "blocks 3 and 4 of 12 could not be read")
            statuses = await store.get(list(range(12)))
            _expect(statuses, [LANDED] * 12, READ, "a read that failed says nothing of the block")

    @on_loop
    async def test_writes_that_fail_in_part_say_which_and_leave_nothing(
        self, bench: StorageBench
    ) -> None:
        async with opened(bench) as store:
            if bench.slotted:
                await _all_land(store, [20, 21], [3, 4])
            with bench.harness.fail(store.backend, store.services, "write", 3, 2):
                statuses = await store.put(list(range(12)))
            expected = [LANDED] * 3 + [FAILED] * 2 + [LANDED] * 7
            _expect(statuses, expected, WRITE, "blocks 3 and 4 of 12 could not be written")
            expected = [LANDED] * 3 + [MISSING] * 2 + [LANDED] * 7
            _expect(await store.get(list(range(12))), expected, READ, "blocks whose write failed")
            if bench.slotted:
                statuses = await store.get([20, 21], [3, 4])
                _expect(statuses, [MISSING] * 2, READ, "what a failed write was to replace")


async def _all_land(store: OpenStore, numbers: list[int], slots: list[int] | None = None) -> None:
    _expect(await store.put(numbers, slots), [LANDED] * len(numbers), WRITE, "a plain write")


def _expect(statuses: list[int], expected: list[int], door: str, what: str) -> None:
    __tracebackhide__ = True
    require(
        statuses == expected,
        door,
        f"{what}: expected {expected}, got {statuses} "
        f"(LANDED {LANDED}, FAILED {FAILED}, DAMAGED {DAMAGED}, MISSING {MISSING})",
    )
