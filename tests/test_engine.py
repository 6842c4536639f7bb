"""The engine: what waits for what, what overlaps, and what a failure takes along."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rig import STRIDE, TOKENS_PER_BLOCK, Rig, check_books, pattern, prompt, slots_of
from stepping import SteppingDisk, Steps, open_stepping

from flexkv import TransferError, plugins
from flexkv.model import IOStatus, Statuses
from flexkv.protocols import BlockIO


async def in_disk_only(rig: Rig, name: int, blocks: int = 6) -> None:
    """Put a prompt, and push it out of the host by another."""
    await rig.put(prompt(name, blocks))
    await rig.put(prompt(name + 500, 8))
    rig.device.wipe()


def right(rig: Rig, name: int, targets: list[int]) -> bool:
    """Whether the device blocks hold the first blocks of a prompt."""
    return all(
        bool((rig.device.read(block) == pattern(prompt(name, len(targets)), i)).all())
        for i, block in enumerate(targets)
    )


# order


async def test_a_chunk_is_read_while_the_one_before_it_is_copied(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        await in_disk_only(rig, 1)
        steps.arm("before scatter")  # the first copy to the device is held
        get = rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
        await steps.reached.wait()
        while steps.names.count("after read") < 3:  # and yet all three chunks are read
            await tick()
        assert "after scatter" not in steps.names
        steps.release()
        assert (await get).loaded == 24
        assert right(rig, 1, list(range(6)))


async def test_a_get_reads_few_chunks_at_a_time_so_that_the_first_one_lands_early(
    tmp_path: Path,
) -> None:
    async with open_stepping(tmp_path, disk_bytes_in_flight=2 * STRIDE) as (rig, steps):
        await in_disk_only(rig, 1, blocks=8)
        steps.arm("after read")  # all reads are held as soon as their bytes are there
        get = rig.kv.get_async(prompt(1, 8), slots_of(range(8)))
        await steps.reached.wait()
        while steps.names.count("after read") < 2:
            await tick()
        for _ in range(50):
            await tick()
        assert steps.names.count("before read") == 2  # of four: one for the disk, one to verify
        steps.release()
        assert (await get).loaded == 32
        assert right(rig, 1, list(range(8)))


async def test_a_copy_to_the_device_waits_for_its_read(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        await in_disk_only(rig, 1)
        steps.arm("after read")
        get = rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
        await steps.reached.wait()
        for _ in range(50):
            await tick()
        assert "before scatter" not in steps.names
        steps.release()
        assert (await get).loaded == 24


async def test_who_writes_into_a_victims_slot_waits_until_it_is_saved(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, spill="on_evict") as (rig, steps):
        await rig.put(prompt(1, 8), durable=False)
        steps.arm("before write")
        put = rig.start_put(prompt(2, 8))
        await steps.reached.wait()
        for _ in range(50):
            await tick()
        assert "before gather" not in steps.names
        steps.release()
        await put
        await rig.kv.flush()
        for name in (1, 2):
            assert (await rig.get(prompt(name, 8))).loaded == 32


async def test_a_put_plan_cancelled_during_a_save_gives_its_slots_back_afterwards(
    tmp_path: Path,
) -> None:
    async with open_stepping(tmp_path, spill="on_evict") as (rig, steps):
        await rig.put(prompt(1, 8), durable=False)
        steps.arm("before write")
        rig.kv.put_match(prompt(2, 8)).cancel()
        await steps.reached.wait()
        assert rig.kv.usage()["host"]["free"] == 0
        refused = rig.kv.put_async(prompt(3, 8), slots_of(range(8)))
        assert refused.done
        refused._error = None  # seen
        steps.release()
        await rig.kv.flush()
        assert rig.kv.usage()["host"]["free"] == 8
        await rig.put(prompt(3, 8), durable=False)
        await rig.kv.flush()
        for name in (1, 3):
            assert (await rig.get(prompt(name, 8))).loaded == 32


# joins


async def test_a_get_that_joined_another_survives_its_cancellation(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        await in_disk_only(rig, 1)
        steps.arm("before read")
        first = rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
        await steps.reached.wait()
        second = rig.kv.get_async(prompt(1, 6), slots_of(range(10, 16)))
        first.cancel()
        steps.release()
        assert (await first).cancelled
        assert (await second).loaded == 24
        assert right(rig, 1, list(range(10, 16)))


async def test_a_failed_read_is_a_miss_for_everybody_who_joined_it(tmp_path: Path) -> None:
    class Failing(SteppingDisk):
        async def read(self, batch: BlockIO) -> Statuses:
            statuses = await super().read(batch)
            if failing:
                statuses[-1] = IOStatus.FAILED
            return statuses

    failing: list[int] = []
    steps = Steps()
    Failing.steps = steps
    with plugins.register(plugins.BACKENDS, "failing", Failing):
        async with open_stepping(tmp_path, disk_backend="failing") as (rig, _):
            await in_disk_only(rig, 1)
            failing.append(1)
            steps.arm("before read")
            gets = [
                rig.kv.get_async(prompt(1, 6), slots_of(range(first, first + 6)))
                for first in (0, 10, 20)
            ]
            await steps.reached.wait()
            steps.release()
            for get, first in zip(gets, (0, 10, 20), strict=True):
                result = await get
                assert result.loaded == TOKENS_PER_BLOCK
                assert right(rig, 1, [first])
                assert first + 1 in result.failed_device_blocks
            failing.clear()
            assert (await rig.get(prompt(1, 6))).loaded == 24


async def test_a_put_waits_for_the_blocks_that_another_put_is_bringing(tmp_path: Path) -> None:
    shared = prompt(1, 4)
    async with open_stepping(tmp_path, host=16) as (rig, steps):
        steps.arm("before gather")
        first = rig.start_put(shared)
        await steps.reached.wait()
        longer = prompt(2, 6, shared=shared)
        second = rig.start_put(longer, first=20)
        third = rig.start_put(shared, first=40)  # brings nothing itself
        for _ in range(20):
            await tick()
        assert not second.done
        assert not third.done
        steps.release()
        result = await second.durable()
        assert (result.stored, result.new) == (24, 8)
        assert first.done
        result = await third.durable()
        assert (result.stored, result.new) == (16, 0)
        assert (await rig.get(longer)).loaded == 24


async def test_a_put_tells_what_another_puts_failure_cost_it(tmp_path: Path) -> None:
    shared = prompt(1, 4)
    async with open_stepping(tmp_path, host=16) as (rig, _):
        plan = rig.kv.put_match(shared)  # takes the slots, and is never launched
        longer = prompt(2, 6, shared=shared)
        result = await rig.start_put(longer)
        assert (result.stored, result.new) == (0, 8)
        plan.cancel()
        assert (await rig.start_put(longer)).stored == 24
        await rig.kv.flush()
        assert (await rig.get(longer)).loaded == 24


async def test_a_get_does_not_wait_for_a_put_that_is_only_planned(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, _):
        await in_disk_only(rig, 1)
        plan = rig.kv.put_match(prompt(1, 6))  # host slots are taken, and hold nothing yet
        result = await rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
        assert (result.loaded, result.by_tier) == (24, {"host": 0, "disk": 6})
        assert right(rig, 1, list(range(6)))
        plan.cancel()


async def test_a_prefetch_waits_for_the_get_that_brings_its_blocks(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        await in_disk_only(rig, 1)
        steps.arm("before read")
        get = rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
        await steps.reached.wait()
        prefetch = rig.kv.prefetch_async(prompt(1, 6))
        for _ in range(20):
            await tick()
        assert not prefetch.done
        steps.release()
        assert (await prefetch).loaded == 24
        assert (await get).loaded == 24


# bounds


async def test_many_gets_through_staging_do_not_block_each_other(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, staging_bytes=2 * STRIDE, device=400) as (rig, _):
        await in_disk_only(rig, 1)
        held = rig.kv.get_match(prompt(501, 8))  # no host slot can be had
        gets = [
            rig.kv.get_async(prompt(1, 6), slots_of(range(first * 6, first * 6 + 6)))
            for first in range(50)
        ]
        results = await asyncio.gather(*gets)
        assert {result.loaded for result in results} == {24}
        for first in range(50):
            assert right(rig, 1, list(range(first * 6, first * 6 + 6)))
        held.cancel()


async def test_bytes_in_flight_stay_below_the_limit(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, device_bytes_in_flight=4 * STRIDE) as (rig, steps):
        await rig.put(prompt(1, 6))
        rig.device.wipe()
        steps.arm("before scatter")
        gets = [
            rig.kv.get_async(prompt(1, 6), slots_of(range(first * 6, first * 6 + 6)))
            for first in range(8)
        ]
        for _ in range(50):
            await tick()
        lanes = rig.kv._stack.engine.lanes
        assert steps.names == ["before scatter"] * 2
        lane = lanes["host", "device"]
        assert (lane.in_flight, lane.waiting) == (4 * STRIDE, 14)  # two slices a get
        steps.release()
        for result in await asyncio.gather(*gets):
            assert result.loaded == 24
        assert (lane.in_flight, lane.waiting) == (0, 0)


async def test_no_ticket_left_is_a_miss_and_blames_no_block(tmp_path: Path) -> None:
    """A crowd on 16 tickets: gets miss, puts say so, and the disk keeps its blocks."""
    async with open_stepping(tmp_path, tickets=16, device=400, max_read_failures=1) as (rig, _):
        await in_disk_only(rig, 1)
        tickets = []
        completions = rig.kv._stack.completions
        while completions.in_flight < 16:
            tickets.append(completions.ticket())
        result = await rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
        assert result.loaded == 0
        put = rig.start_put(prompt(3, 2), first=20)
        with pytest.raises(TransferError):
            await put
        for ticket in tickets:
            completions.fail(ticket, 5)
            await ticket
        await rig.kv.flush()
        check_books(rig.kv)
        assert (await rig.get(prompt(1, 6))).loaded == 24


async def test_a_timed_out_get_settles_and_lands_nothing_after_it_has_quiesced(
    tmp_path: Path,
) -> None:
    async with open_stepping(tmp_path, transfer_timeout_ms=400) as (rig, steps):
        await in_disk_only(rig, 1)
        steps.arm("before scatter")
        get = rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
        result: Any = await get
        assert result.timed_out
        assert not result.cancelled
        assert set(result.failed_device_blocks.tolist()) == set(range(6))
        quiet = asyncio.ensure_future(get.quiesced())
        await tick()
        assert not quiet.done()
        assert rig.kv.usage()["manager"]["pinned"] == 6
        steps.release()
        await quiet
        assert await get is result
        rig.device.wipe(0xBEEF)
        await rig.kv.flush()
        assert rig.device.is_wiped(0xBEEF)


async def tick() -> None:
    """Let the loop turn, with a look at what hardware has finished."""
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.001, turned.set_result, None)
    await turned
