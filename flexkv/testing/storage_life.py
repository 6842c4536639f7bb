"""How a store lives: opening, batches in flight, giving up, closing, staying off the loop."""

from __future__ import annotations

import contextlib

import anyio
import anyio.lowlevel
import pytest

from flexkv.errors import ClosedError, ConfigError, FlexKVError
from flexkv.model import LANDED, Identity, KVSpec
from flexkv.testing.guard import (
    give_up,
    leaves_nothing,
    longest_stall,
    no_blocking_calls,
    on_loop,
    refused,
    require,
    within,
)
from flexkv.testing.harness import StorageHarness
from flexkv.testing.storage_bench import SENTINEL, OpenStore, StorageBench, StorageKit, opened

OPEN = "StorageBackend.open"
READ = "StorageBackend.read"
WRITE = "StorageBackend.write"
CLOSE = "StorageBackend.aclose"

LARGE = Identity("flexkv-kit", "", KVSpec.uniform(8, 8, 128))  # 512 KiB per block
_PROMPTLY_S = 1.0
_GRACE_S = 0.05  # in which bytes would land that come late
_NUMBERS = list(range(12))


class StorageLifeTests(StorageKit):
    """Opening, giving up and closing."""

    @on_loop
    async def test_a_store_that_is_not_open_says_so(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            other = OpenStore(bench.harness.make(), store.services, bench.place)
            await store.backend.aclose()
            for one, what in ((other, "never opened"), (store, "closed")):
                for verb in (one.get, one.put, one.drop):
                    with refused(ClosedError, READ, f"{verb.__name__} by a store that is {what}"):
                        await verb([1])

    @on_loop
    async def test_closing_twice_or_unopened_is_fine(self, bench: StorageBench) -> None:
        what = "aclose does not end"
        await within(bench.limit_s, bench.harness.make().aclose(), CLOSE, f"{what} when not open")
        async with opened(bench) as store:
            await within(bench.limit_s, store.backend.aclose(), CLOSE, what)
            await within(bench.limit_s, store.backend.aclose(), CLOSE, f"a second {what}")

    @on_loop
    async def test_unknown_settings_are_refused(self, bench: StorageBench) -> None:
        with refused(ConfigError, OPEN, "a setting that the store does not know"):
            async with opened(bench, no_such_setting=1):
                pass

    @on_loop
    async def test_a_second_owner_is_refused(self, bench: StorageBench) -> None:
        if not bench.harness.exclusive:
            pytest.skip("the harness says that the store may be opened twice")
        async with opened(bench) as store:
            await store.put([1])
            with refused(FlexKVError, OPEN, "a store that somebody has open"):
                async with opened(bench):
                    pass
            statuses = await store.get([1])
            require(
                statuses == [LANDED], OPEN, "refusing a second owner cost the first one a block"
            )

    @on_loop
    async def test_opening_and_closing_leaves_nothing_behind(self, bench: StorageBench) -> None:
        async def once() -> None:
            async with opened(bench) as store:
                await store.put(_NUMBERS)
                await store.get(_NUMBERS)

        await leaves_nothing(once, CLOSE, bench.harness.pool_threads)

    @pytest.mark.parametrize("verb", ["read", "write"])
    @on_loop
    async def test_a_batch_waits_for_hardware_that_stands_still(
        self, bench: StorageBench, verb: str
    ) -> None:
        async with opened(bench) as store:
            await store.put(_NUMBERS)
            over, statuses = anyio.Event(), list[int]()

            async def work() -> None:
                statuses.extend(await (store.get if verb == "read" else store.put)(_NUMBERS))
                over.set()

            async with anyio.create_task_group() as group:
                with bench.harness.hold(store.backend, store.services):
                    group.start_soon(work)
                    await anyio.sleep(_GRACE_S)
                    early = over.is_set() and LANDED in statuses
                    door = f"StorageBackend.{verb}"
                    require(not early, door, f"the store stands still, but {verb} said LANDED")
                await within(bench.limit_s, over.wait(), door, f"the {verb} does not end")

    @pytest.mark.parametrize("verb", ["read", "write"])
    @on_loop
    async def test_giving_up_takes_effect_at_once_and_close_waits(
        self, bench: StorageBench, verb: str
    ) -> None:
        """A deadline passes while the store stands still: the caller goes, the work stays."""
        async with opened(bench) as store:
            await store.put(_NUMBERS)
            closed = anyio.Event()

            async def close() -> None:
                await store.backend.aclose()
                closed.set()

            async with anyio.create_task_group() as group:
                with bench.harness.hold(store.backend, store.services):
                    work = (store.get if verb == "read" else store.put)(_NUMBERS)
                    await give_up(work, _GRACE_S, _PROMPTLY_S, f"StorageBackend.{verb}")
                    group.start_soon(close)
                    await anyio.sleep(_GRACE_S)
                    require(
                        not closed.is_set(),
                        CLOSE,
                        f"aclose returned while a {verb} that its caller gave up on was in flight: "
                        "files and memory would be given away under it",
                    )
                await within(bench.limit_s, closed.wait(), CLOSE, "aclose does not end")
            await _nothing_lands_any_more(store)

    @pytest.mark.parametrize("batches", [1, 5])
    @on_loop
    async def test_no_byte_lands_after_close_whoever_gave_up(
        self, bench: StorageBench, batches: int
    ) -> None:
        async with opened(bench, identity=LARGE) as store:
            await store.put(_NUMBERS)
            async with anyio.create_task_group() as group:
                for _ in range(batches):  # all into the same slots, which nobody looks at
                    group.start_soon(store.backend.read, store.batch(_NUMBERS))
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            await within(bench.limit_s, store.backend.aclose(), CLOSE, "aclose does not end")
            await _nothing_lands_any_more(store)

    @on_loop
    async def test_giving_up_again_and_again_loses_no_block(self, bench: StorageBench) -> None:
        async with opened(bench) as store:
            await store.put(_NUMBERS)
            for turn in range(20):
                async with anyio.create_task_group() as group:
                    group.start_soon(store.get, _NUMBERS)
                    group.start_soon(store.put, [20, 21], None, 20)
                    for _ in range(turn % 6):
                        await anyio.lowlevel.checkpoint()
                    group.cancel_scope.cancel()
            statuses = await store.get(_NUMBERS)
            require(
                statuses == [LANDED] * 12,
                READ,
                f"after reads and writes that were given up, stored blocks are {statuses}",
            )
            require(
                await store.put([20, 21]) == [LANDED] * 2
                and await store.get([20, 21]) == [LANDED] * 2,
                WRITE,
                "a block whose write was given up cannot be written again",
            )

    @on_loop
    async def test_close_while_writes_are_in_flight_waits_for_them(
        self, bench: StorageBench
    ) -> None:
        landed: list[int] = []
        async with opened(bench) as store:

            async def write(number: int) -> None:
                with contextlib.suppress(FlexKVError):  # refused because it closes: fine
                    if await store.put([number], None, number) == [LANDED]:
                        landed.append(number)

            async with anyio.create_task_group() as group:
                for number in range(16):
                    group.start_soon(write, number)
                await anyio.lowlevel.checkpoint()
                await within(bench.limit_s, store.backend.aclose(), CLOSE, "aclose does not end")
        if bench.harness.persistent:
            async with opened(bench) as store:
                statuses = await store.get(landed) if landed else []
                lost = [n for n, status in zip(landed, statuses, strict=True) if status != LANDED]
                require(not lost, CLOSE, f"blocks {lost} had LANDED while it closed, and are gone")

    @pytest.mark.parametrize("verb", ["read", "write"])
    @on_loop
    async def test_large_batches_do_not_keep_the_loop_from_running(
        self, bench: StorageBench, verb: str
    ) -> None:
        async with opened(bench, identity=LARGE) as store:
            batch = store.batch(list(range(32)))
            await store.backend.write(batch)

            async def work() -> None:
                await (store.backend.read if verb == "read" else store.backend.write)(batch)

            stall_ms = await longest_stall(work)
            require(
                not stall_ms,
                f"StorageBackend.{verb}",
                f"a {verb} of 16 MiB keeps the event loop from running for {stall_ms:.1f} ms, "
                "most of its duration: wait for a ticket instead of the store",
            )

    @on_loop
    async def test_nothing_blocking_is_called_on_the_loop(
        self, harness: StorageHarness, bench: StorageBench
    ) -> None:
        async with opened(bench) as store:
            with no_blocking_calls(harness.plugin, READ):
                batch = store.batch(_NUMBERS)
                await store.backend.write(batch)
                await store.backend.write(batch)
                await store.backend.read(batch)
                await store.backend.discard(batch)
                await store.backend.aclose()


async def _nothing_lands_any_more(store: OpenStore) -> None:
    arena = store.services.arena
    for slot in range(arena.slots):
        arena.view(slot)[:] = SENTINEL
    await anyio.sleep(_GRACE_S)
    late = [slot for slot in range(arena.slots) if (arena.view(slot) != SENTINEL).any()]
    require(
        not late,
        CLOSE,
        f"bytes landed in host slots {late} after aclose returned: they belong to somebody else by "
        "then",
    )
