"""D01 (cancelled plans leak nothing), D03 (a prefix splits while its write is held back), D04 (what
is in use is not evicted).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig import Rig, open_rig, prompt, slots_of

from flexkv import CapacityError

POLICIES = ["lru", "lfu", "slru", "fifo", "mru", "filo", "hazard"]


def books(rig: Rig) -> dict[str, Any]:
    """Free slots, readable blocks, pins, plans, index size."""
    usage = rig.kv.usage()
    for tier in usage.values():
        tier.pop("evicted", None)
    return usage


async def test_d01_a_cancelled_plan_leaves_no_trace(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = prompt(1, 4)
        await rig.put(tokens)
        await rig.push_out(2)
        before = books(rig)
        for _ in range(3):
            plan = rig.kv.get_match(tokens)
            assert plan.matched == 16
            assert rig.kv.usage()["manager"]["pinned"] == 4
            plan.cancel()
            assert books(rig) == before
        await rig.put(prompt(3, 8))
        result = await rig.get(tokens)
        assert (result.loaded, result.by_tier["disk"]) == (16, 4)


async def test_d01_a_cancelled_put_plan_leaves_no_trace(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 4))
        before = books(rig)
        for _ in range(3):
            plan = rig.kv.put_match(prompt(2, 4))
            plan.cancel()
            assert books(rig) == before
        await rig.put(prompt(3, 8))
        assert (await rig.get(prompt(1, 4))).loaded == 16


async def test_d01_cancel_races_completion_and_everything_is_released_once(tmp_path: Path) -> None:
    """200 times: a get is cancelled at once, when it is done, or after a random number of loop
    ticks; pins never go below 0.
    """
    random = np.random.default_rng(1)
    outcomes = set()
    async with open_rig(tmp_path, host=8, inline_copy_bytes=0) as rig:
        prompts = [prompt(name, 4) for name in range(4)]
        for tokens in prompts:
            await rig.put(tokens)
        for round_ in range(200):
            tokens = prompts[round_ % 4]
            rig.device.wipe()
            transfer = rig.kv.get_async(tokens, slots_of(range(4)))
            if round_ % 10 == 0:
                await transfer
            elif round_ % 10 > 1:
                for _ in range(int(random.integers(0, 24))):
                    await asyncio.sleep(0)
            transfer.cancel()
            transfer.cancel()
            result = await transfer
            await transfer.quiesced()
            rig.check(tokens, result, range(4))
            outcomes.add(transfer.outcome)
            if round_ % 20 == 0:
                await rig.check_idle()
    assert {"ok", "cancelled"} <= outcomes, "the race was never won by both"


async def test_d01_a_cancelled_listener_touches_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 4))
        await rig.push_out()
        gate = rig.faults().hold("read")
        rig.device.wipe()
        transfer = rig.kv.get_async(prompt(1, 4), slots_of(range(4)))

        async def listen() -> None:
            await transfer

        listeners = [asyncio.create_task(listen()) for _ in range(3)]
        await gate.reached.wait()
        for listener in listeners[:2]:
            listener.cancel()
        gate.open()
        await listeners[2]
        rig.check(prompt(1, 4), await transfer, range(4))
        assert transfer.result().loaded == 16
        assert [listener.cancelled() for listener in listeners] == [True, True, False]


async def test_d03_a_prefix_splits_while_its_write_is_held_back(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=16) as rig:
        first = prompt(1, 10)
        second = prompt(2, 10, shared=first[:36])
        gate = rig.faults().hold("write")
        put_first = rig.start_put(first)
        await put_first
        await gate.reached.wait()
        put_second = rig.start_put(second, first=20)
        assert (await put_second).new == 4
        assert rig.count("transfer_blocks", source="host", target="disk") == 0
        gate.open()
        await put_first.durable()
        await put_second.durable()
        assert rig.kv.usage()["disk"]["resident"] == 11
        await rig.push_out(3)
        for tokens in (first, second):
            assert (await rig.get(tokens)).loaded == 40
        assert rig.count("damaged_blocks", tier="disk") == 0


@pytest.mark.parametrize("failures", [1, 100])
async def test_d03_blocks_whose_write_failed_are_not_said_to_be_on_disk(
    tmp_path: Path, failures: int
) -> None:
    """With the write of the last shared blocks failing for a moment, or for good."""
    async with open_rig(tmp_path, host=16) as rig:
        first = prompt(1, 10)
        second = prompt(2, 10, shared=first[:36])
        faults = rig.faults()
        gate = faults.hold("write")
        faults.add("write", "EIO", skip=8, times=failures)
        await rig.start_put(first)
        await gate.reached.wait()
        await rig.start_put(second, first=20)
        gate.open()
        await rig.kv.flush()
        assert rig.kv.usage()["disk"]["resident"] == (11 if failures == 1 else 8)
        faults.clear()
        for name in (3, 4, 5, 6):
            await rig.put(prompt(name, 4))
        loaded = [(await rig.get(tokens)).loaded for tokens in (first, second)]
        assert loaded == ([40, 40] if failures == 1 else [32, 32])
        await rig.put(first)
        await rig.push_out()
        assert (await rig.get(first)).loaded == 40


@pytest.mark.parametrize("spill", ["through", "on_evict"])
async def test_d03_a_dropped_spill_does_not_tie_up_host_memory(tmp_path: Path, spill: str) -> None:
    """Ancestors that only the host holds, with children on disk, can leave the host some time."""
    async with open_rig(tmp_path, disk=64, spill=spill, spill_queue_blocks=2) as rig:
        for round_ in range(12):
            await rig.put(prompt(round_, 8), durable=False)
            await rig.kv.flush()
            await rig.put(prompt(100 + round_, 4), durable=False)
            await rig.kv.flush()


@pytest.mark.parametrize("policy", POLICIES)
async def test_d04_blocks_of_the_put_itself_are_not_its_victims(policy: str) -> None:
    async with open_rig(host=4, eviction_policy=policy) as rig:
        wanted, other = prompt(1, 4), prompt(8, 2)
        await rig.put(wanted[:8])
        await rig.put(other)
        await rig.put(wanted)
        assert rig.kv.usage()["host"]["evicted"] == 2
        assert (await rig.get(wanted)).loaded == 16
        assert (await rig.get(other)).loaded == 0


@pytest.mark.parametrize("policy", POLICIES)
async def test_d04_a_put_that_would_need_locked_blocks_fails_whole(policy: str) -> None:
    async with open_rig(host=4, eviction_policy=policy) as rig:
        wanted, other = prompt(1, 4), prompt(8, 2)
        await rig.put(wanted[:8])
        await rig.put(other)
        lock = rig.kv.get_match(other)
        before = books(rig)
        with pytest.raises(CapacityError):
            await rig.kv.put_async(wanted, slots_of(range(4)))
        with pytest.raises(CapacityError):
            rig.kv.put_match(wanted)
        assert books(rig) == before
        assert rig.kv.usage()["host"]["evicted"] == 0
        assert (await rig.get(wanted)).loaded == 8
        lock.cancel()
        await rig.put(wanted)
        assert (await rig.get(wanted)).loaded == 16


@pytest.mark.parametrize("spill", ["through", "on_evict"])
@pytest.mark.parametrize("policy", POLICIES)
async def test_d04_pinned_blocks_survive_pressure_in_both_tiers(
    tmp_path: Path, policy: str, spill: str
) -> None:
    """A plan holds its blocks while 40 blocks go through 8 + 16 slots."""
    settings = {"eviction_policy": policy, "spill": spill, "disk": 16}
    async with open_rig(tmp_path, **settings) as rig:
        await rig.put(prompt(1, 4), durable=spill == "through")
        plan = rig.kv.get_match(prompt(1, 4))
        for name in range(2, 12):
            await rig.put(prompt(name, 4), durable=False)
            await rig.kv.flush()
        rig.device.wipe()
        result = await rig.kv.launch(plan, slots_of([3, 0, 9, 4]))
        rig.check(prompt(1, 4), result, [3, 0, 9, 4])
        assert result.loaded == 16
