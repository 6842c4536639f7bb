"""Every limit: what happens when it is reached, and that it costs nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rig import open_rig, prompt, slots_of
from stepping import open_stepping

from flexkv import CapacityError, InputError


async def test_gets_above_the_limit_wait_and_above_the_queue_are_refused(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, max_in_flight_gets=2, max_queued_requests=3) as (rig, steps):
        await rig.put(prompt(1, 2))
        steps.arm("before scatter")
        gets = [rig.kv.get_async(prompt(1, 2), slots_of([2 * i, 2 * i + 1])) for i in range(5)]
        with pytest.raises(CapacityError, match="max_queued_requests"):
            rig.kv.get_async(prompt(1, 2), slots_of([20, 21]))
        await steps.reached.wait()
        assert rig.kv.usage()["manager"]["pinned"] == 10
        assert steps.names.count("before scatter") <= 2
        steps.release()
        assert [result.loaded for result in await asyncio.gather(*gets)] == [8] * 5
        assert (await rig.get(prompt(1, 2))).loaded == 8


async def test_puts_above_the_queue_are_refused(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, max_in_flight_puts=1, max_queued_requests=1) as (rig, steps):
        steps.arm("before gather")
        puts = [rig.start_put(prompt(name, 2), first=2 * name) for name in range(2)]
        with pytest.raises(CapacityError, match="max_in_flight_puts"):
            rig.start_put(prompt(3, 2), first=6)
        steps.release()
        for put in puts:
            await put
        assert (await rig.get(prompt(3, 2))).loaded == 0


async def test_prefetches_above_the_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, max_in_flight_prefetches=1) as (rig, steps):
        for name in (1, 2):
            await rig.put(prompt(name, 4))
        await rig.put(prompt(3, 8))
        steps.arm("before read")
        first = rig.kv.prefetch_async(prompt(1, 4))
        second = rig.kv.prefetch_async(prompt(2, 4))
        assert second.done
        with pytest.raises(CapacityError, match="max_in_flight_prefetches"):
            await second
        assert rig.kv.telemetry.value("dropped_blocks", work="prefetch") == 4
        steps.release()
        assert (await first).loaded == 16


async def test_a_full_spill_queue_drops_and_counts_and_the_host_is_not_stuck(
    tmp_path: Path,
) -> None:
    async with open_stepping(tmp_path, spill_queue_blocks=4, host=32, disk=64) as (rig, steps):
        steps.arm("before write")
        for name in range(3):
            await rig.start_put(prompt(name, 8))
        assert rig.kv.usage()["manager"]["spilling"] <= 4
        dropped = rig.kv.telemetry.value("dropped_blocks", work="spill")
        assert dropped >= 24 - 4 - 4  # what is queued or being written is not dropped
        steps.arm()
        await rig.kv.flush()
        for name in range(10, 20):  # what was dropped leaves the host like everything else
            await rig.start_put(prompt(name, 16))
            await rig.kv.flush()


async def test_dropped_spills_are_made_up_for(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, spill_queue_blocks=2, host=32, disk=64) as (rig, steps):
        steps.arm("before write")
        for name in (1, 2, 3):
            await rig.start_put(prompt(name, 8))
        assert rig.kv.telemetry.value("dropped_blocks", work="spill") >= 16
        steps.arm()
        await rig.kv.flush()
        assert rig.kv.usage()["disk"]["resident"] < 24
        with_ancestors = rig.kv.usage()["disk"]["resident"]
        assert with_ancestors >= 4 + 8  # the last offer brought its whole prompt along
        for name in (1, 2, 3):
            for _ in range(4):  # a put offers again what is in the host only
                put = rig.start_put(prompt(name, 8))
                await put
                await rig.kv.flush()
            await put.durable()
        assert rig.kv.usage()["disk"]["resident"] == 24


async def test_an_expired_plan_gives_everything_back(tmp_path: Path) -> None:
    async with open_rig(tmp_path, plan_ttl_ms=10) as rig:
        await rig.put(prompt(1, 4))
        get, put = rig.kv.get_match(prompt(1, 4)), rig.kv.put_match(prompt(2, 4))
        assert rig.kv.usage()["host"]["free"] == 0
        expired = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.1, expired.set_result, None)
        await expired
        assert not get.open
        assert not put.open
        assert rig.kv.usage()["host"]["free"] == 4
        for plan in (get, put):
            with pytest.raises(InputError, match="expired"):
                rig.kv.launch(plan, slots_of(range(4)))
        assert rig.kv.telemetry.value("expired_plans", kind="put") == 1


async def test_a_host_without_room_refuses_a_put_and_loses_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 8))
        plan = rig.kv.get_match(prompt(1, 8))
        refused = rig.kv.put_async(prompt(2, 1), slots_of([0]))
        with pytest.raises(CapacityError, match="pinned"):
            await refused
        await refused.quiesced()
        plan.cancel()
        await rig.put(prompt(2, 1))
        assert (await rig.get(prompt(1, 8))).loaded == 32


async def test_nothing_is_on_disk_that_is_not_in_the_index(tmp_path: Path) -> None:
    """After evictions ahead of need and after a reset, a restart finds what was there, no more."""
    settings = {"evict_ratio": 0.25, "host": 16, "disk": 16}
    async with open_rig(tmp_path, **settings) as rig:
        for name in range(4):
            await rig.put(prompt(name, 6), durable=False)
            await rig.kv.flush()
        there = rig.kv.usage()["disk"]["resident"]
        assert there <= 16
        assert rig.count("evicted_blocks", tier="disk") >= 8
    async with open_rig(tmp_path, **settings) as rig:
        assert rig.kv.usage()["disk"]["resident"] == there
        await rig.kv.reset()
    async with open_rig(tmp_path, **settings) as rig:
        assert rig.kv.usage()["disk"]["resident"] == 0


async def test_what_is_durable_can_leave_the_host_at_once(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, disk=400) as (rig, _):
        for name in range(40):
            await rig.put(prompt(name, 8))  # the whole host, every time
