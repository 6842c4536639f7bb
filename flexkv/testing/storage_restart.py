"""A store after its process: what is found again, by whom, and what must not be."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from flexkv.errors import FlexKVError
from flexkv.model import DAMAGED, LANDED, MISSING
from flexkv.testing.children import ChildError, in_child, in_fork, until_killed
from flexkv.testing.guard import on_loop, require
from flexkv.testing.harness import Origin, StorageHarness
from flexkv.testing.storage_bench import (
    IDENTITY,
    OpenStore,
    StorageBench,
    StorageKit,
    keys_of,
    opened,
    pattern,
)

OPEN = "StorageBackend.open"
READ = "StorageBackend.read"
WRITE = "StorageBackend.write"
DISCARD = "StorageBackend.discard"


class StorageRestartTests(StorageKit):
    """Opening again. Stores that say they are not `persistent` must come up empty."""

    @on_loop
    async def test_a_new_store_is_empty(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            found = store.recovered_rows()
            require(not found, OPEN, f"a new store says that it holds blocks {sorted(found)}")

    @on_loop
    async def test_committed_blocks_are_found_again(self, bench: StorageBench) -> None:
        numbers = list(range(10, 20))
        slots = bench.rng.sample(range(bench.harness.capacity_blocks), 10)
        async with opened(bench) as store:
            await store.put(numbers, slots)
        async with opened(bench) as store:
            if not bench.harness.persistent:
                require(not store.recovered_rows(), OPEN, "a store that keeps nothing found blocks")
                return
            self._check_rows(bench, store, numbers, slots)
            statuses = await store.get(numbers, slots)
            require(statuses == [LANDED] * 10, READ, f"blocks found again are {statuses}")
            await store.put([50], slots[:1])
        async with opened(bench) as store:
            found = set(store.recovered_rows())
            expected = {50, *numbers[1:]} | (set() if bench.slotted else {numbers[0]})
            require(found == expected, OPEN, f"after a slot was reused, {sorted(found)} are found")

    def _check_rows(
        self, bench: StorageBench, store: OpenStore, numbers: list[int], slots: list[int]
    ) -> None:
        rows = store.recovered_rows()
        require(
            sorted(rows) == numbers,
            OPEN,
            f"blocks {numbers} were committed, but opening again found {sorted(rows)}",
        )
        for number, slot in zip(numbers, slots, strict=True):
            parent = keys_of([number - 1])[0].tolist()
            at, found_parent, depth = rows[number]
            require(
                (found_parent, depth) == (parent, number) and (at == slot or not bench.slotted),
                OPEN,
                f"block {number} was written to slot {slot} with parent {parent} and depth "
                f"{number}, but came back in slot {at} with {found_parent} and {depth}",
            )

    @on_loop
    async def test_discarded_blocks_do_not_come_back(self, bench: StorageBench) -> None:
        _needs_persistence(bench)
        async with opened(bench) as store:
            await store.put(list(range(8)))
            await store.drop([2, 5])
        async with opened(bench) as store:
            found = sorted(store.recovered_rows())
            require(
                found == [0, 1, 3, 4, 6, 7],
                DISCARD,
                f"of blocks 0 to 7, 2 and 5 were discarded; opening again found {found}",
            )
            statuses = await store.get([2, 5])
            require(LANDED not in statuses, DISCARD, "a discarded block was read after a restart")

    @on_loop
    async def test_blocks_whose_write_failed_are_not_found(self, bench: StorageBench) -> None:
        _needs_persistence(bench)
        async with opened(bench) as store:
            with bench.harness.fail(store.backend, store.services, "write", 3, 2):
                await store.put(list(range(12)))
        async with opened(bench) as store:
            found = sorted(store.recovered_rows())
            kept = [number for number in range(12) if number not in (3, 4)]
            require(found == kept, WRITE, f"blocks 3 and 4 of 12 had FAILED; found again: {found}")

    @on_loop
    async def test_damage_between_two_lives_is_not_served(self, bench: StorageBench) -> None:
        _needs_persistence(bench)
        async with opened(bench) as store:
            await store.put([1, 2, 3])
        data = pattern(2, IDENTITY.spec.block_bytes).copy()
        data[77] ^= 8
        bench.harness.write_raw(bench.place, 2, keys_of([2])[0], IDENTITY.spec, data)
        async with opened(bench) as store:
            statuses = await store.get([1, 2, 3])
            require(
                statuses[0] == statuses[2] == LANDED and statuses[1] in (DAMAGED, MISSING),
                READ,
                f"block 2 was damaged while the store was closed; statuses are {statuses}",
            )

    @on_loop
    async def test_another_identity_is_refused_or_finds_nothing(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            await store.put([1, 2, 3])
        other = replace(IDENTITY, model="another-model")
        try:
            async with opened(bench, identity=other) as store:
                statuses = await store.get([1, 2, 3])
                require(
                    not store.recovered_rows() and LANDED not in statuses,
                    OPEN,
                    f"another model was served blocks of this one: {statuses}",
                )
        except FlexKVError:  # refused: then the store is whole
            async with opened(bench) as store:
                kept = await store.get([1, 2, 3]) == [LANDED] * 3
                require(
                    kept or not bench.harness.persistent,
                    OPEN,
                    "another identity was refused, but the store has lost its blocks",
                )

    @on_loop
    async def test_another_process_finds_the_blocks_and_leaves_its_own(
        self, harness: StorageHarness, bench: StorageBench
    ) -> None:
        _needs_persistence(bench)
        async with opened(bench) as store:
            await store.put(list(range(8)))
        work = partial(in_child, _read_and_write, harness.origin, str(bench.place))
        try:
            await anyio.to_thread.run_sync(work)
        except ChildError as error:
            require(False, OPEN, f"another process could not use the store: {error}")
        async with opened(bench) as store:
            statuses = await store.get(list(range(12)))
            require(
                statuses == [LANDED] * 12,
                OPEN,
                f"blocks 8 to 11 were written by another process; statuses are {statuses}",
            )

    @on_loop
    async def test_a_fork_that_ends_disturbs_nobody(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            await store.put([1, 2])
            in_fork(_nothing)
            statuses = [await store.get([1, 2]), await store.put([3]), await store.get([3])]
            require(
                statuses == [[LANDED] * 2, [LANDED], [LANDED]],
                READ,
                f"after a fork of the process has ended, statuses are {statuses}",
            )

    @on_loop
    async def test_what_was_acknowledged_survives_a_kill(
        self, harness: StorageHarness, bench: StorageBench
    ) -> None:
        _needs_persistence(bench)
        work = partial(until_killed, _write_for_ever, harness.origin, str(bench.place), messages=12)
        lines = await anyio.to_thread.run_sync(work)
        held: dict[int, int] = {}
        unsure: set[int] = set()
        for word, number, slot in lines:
            if word == "begun":
                unsure.add(slot)
                held.pop(slot, None)
            else:
                unsure.discard(slot)
                held[slot] = number
        async with opened(bench) as store:
            kept = {slot: number for slot, number in held.items() if slot not in unsure}
            found = {at: number for number, (at, *_) in store.recovered_rows().items()}
            lost = sorted(set(kept.items()) - set(found.items())) if bench.slotted else []
            require(
                not lost, WRITE, f"killed after write said LANDED: (slot, block) {lost} are gone"
            )
            statuses = await store.get(list(kept.values()), list(kept))
            require(
                statuses == [LANDED] * len(kept),
                WRITE,
                f"killed after write said LANDED: read again, blocks are {statuses}",
            )


def _nothing() -> None:
    pass


def _needs_persistence(bench: StorageBench) -> None:
    if not bench.harness.persistent:
        pytest.skip("the harness says that the store keeps nothing")


def _bench(origin: Origin, place: str) -> StorageBench:
    return StorageBench(origin.make(), Path(place), random.Random(1), 30.0)


def _read_and_write(origin: Origin, place: str) -> None:
    """In another process: find blocks 0 to 7, write 8 to 11."""

    async def main() -> None:
        bench = _bench(origin, place)
        async with opened(bench) as store:
            assert sorted(store.recovered_rows()) == list(range(8)), store.recovered_rows()
            assert await store.get(list(range(8))) == [LANDED] * 8
            assert await store.put(list(range(8, 12))) == [LANDED] * 4

    anyio.run(main)


def _write_for_ever(origin: Origin, place: str, say: object) -> None:
    """In another process: write one block after the other, until killed."""

    async def main() -> None:
        bench = _bench(origin, place)
        async with opened(bench) as store:
            number = 0
            while True:
                slot = number % 8
                say(("begun", 100 + number, slot))  # type: ignore[operator]
                assert await store.put([100 + number], [slot]) == [LANDED]
                say(("done", 100 + number, slot))  # type: ignore[operator]
                number += 1

    anyio.run(main)
