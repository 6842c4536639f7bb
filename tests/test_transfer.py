"""Handles: listening, results, times, plans."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from rig import open_rig, prompt, slots_of
from stepping import open_stepping

from flexkv import CapacityError, InputError


async def test_a_transfer_may_be_awaited_by_many_and_again_and_again(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        steps.arm("before gather")
        put = rig.start_put(prompt(1, 4))

        async def listen() -> object:
            return await put

        listeners = [asyncio.ensure_future(listen()) for _ in range(5)]
        await steps.reached.wait()
        assert not put.done
        assert put.outcome == "running"
        with pytest.raises(RuntimeError, match="not done"):
            put.result()
        steps.release()
        results = await asyncio.gather(*listeners)
        assert all(result is put.result() for result in results)
        assert await put is put.result()
        assert put.outcome == "ok"
        assert "put" in repr(put)


async def test_every_listener_of_a_refused_put_is_told(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        put = rig.kv.put_async(prompt(1, 9), slots_of(range(9)))
        assert put.done
        for _ in range(2):
            with pytest.raises(CapacityError):
                await put
        with pytest.raises(CapacityError):
            await put.durable()
        await put.quiesced()
        put.cancel()
        assert put.outcome == "failed"
        assert await rig.kv.wait([put], timeout_ms=10) == [put]


async def test_work_that_nobody_waits_for_is_hidden(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        steps.arm("before gather")
        put = rig.start_put(prompt(1, 4))
        await steps.reached.wait()
        steps.release()
        await put.quiesced()
        result = await put
        assert result.exposed_ms == 0
        assert result.hidden_ms == result.elapsed_ms >= 0


async def test_waiting_is_exposed_from_the_first_listener_on(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        steps.arm("before gather")
        put = rig.start_put(prompt(1, 4))
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, steps.release)
        result = await put
        assert 15 <= result.exposed_ms <= result.elapsed_ms


async def test_a_cancelled_get_names_what_must_not_be_read(tmp_path: Path) -> None:
    async with open_stepping(tmp_path) as (rig, steps):
        await rig.put(prompt(1, 6))
        rig.device.wipe()
        steps.arm("before scatter")
        get = rig.kv.get_async(prompt(1, 6), slots_of(range(10, 16)))
        await steps.reached.wait()
        get.cancel()
        steps.release()
        result = await get
        assert (result.cancelled, result.timed_out) == (True, False)
        started = result.loaded // 4  # the blocks of the slice that had started
        assert 0 < started < 6
        assert result.failed_device_blocks.tolist() == list(range(10 + started, 16))
        assert get.outcome == "cancelled"


async def test_cancelling_what_is_done_changes_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        put = rig.start_put(prompt(1, 4))
        result = await put
        put.cancel()
        assert await put is result
        assert not result.cancelled


async def test_wait_returns_what_is_done_in_the_order_given(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, max_in_flight_puts=1) as (rig, steps):
        first = rig.start_put(prompt(1, 2))
        await first
        steps.arm("before gather")
        second = rig.start_put(prompt(2, 2), first=10)
        assert await rig.kv.wait([second, first], timeout_ms=1) == [first]
        assert await rig.kv.wait([second], timeout_ms=0) == []
        steps.release()
        assert await rig.kv.wait([second, first], timeout_ms=5000) == [second, first]
        assert await rig.kv.wait([second, first]) == [second, first]


async def test_a_plan_is_used_once(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        put = rig.kv.put_match(prompt(1, 3))
        with pytest.raises(InputError, match="slots"):
            rig.kv.launch(put, slots_of([1]))
        assert put.open  # a mapping that does not fit costs nothing
        for i in range(3):
            rig.device.write(5 + i, np.full(4096, i, np.uint8))
        transfer = rig.kv.launch(put, slots_of([5, 6, 7]))
        put.cancel()  # nothing any more
        assert (await transfer).stored == 12
        with pytest.raises(InputError, match="launched"):
            rig.kv.launch(put, slots_of([5, 6, 7]))
        assert "closed" in repr(put)


async def test_a_plan_without_blocks_holds_nothing_and_may_be_launched(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        plan = rig.kv.get_match(prompt(1, 3))
        assert (plan.matched, plan.offset) == (0, 0)
        result = await rig.kv.launch(plan, [])
        assert (result.loaded, result.matched) == (0, 0)
        plan.cancel()
