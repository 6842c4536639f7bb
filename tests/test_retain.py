"""Retention hints and prefetch with lead through the manager: what users see of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rig import SPEC, STRIDE, Device, open_rig, pattern, prompt, slots_of
from rig import TOKENS_PER_BLOCK as SIZE
from stepping import Steps, registered

from flexkv import BlockingKVManager, FlexKVConfig, InputError
from flexkv.model import CacheGroup

GROUPS = (CacheGroup("full"), CacheGroup("near", window_tokens=5))


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "sieve", "steps"])
async def test_a_retained_prompt_outlives_what_came_after_it(policy: str) -> None:
    async with open_rig(host=8, eviction_policy=policy) as rig:
        await rig.put(prompt(1, 4), durable=False)
        assert rig.kv.retain(prompt(1, 4))
        for name in range(2, 8):
            await rig.put(prompt(name, 3), durable=False)
        assert (await rig.get(prompt(1, 4))).loaded == 4 * SIZE
        assert rig.kv.telemetry.value("held_blocks", tier="host") == 4


async def test_no_hint_locks_the_host_and_a_prompt_as_large_as_it_is_stored() -> None:
    async with open_rig(host=8, retain_share=1.0) as rig:
        for name in (1, 2):
            await rig.put(prompt(name, 4), durable=False)
            rig.kv.retain(prompt(name, 4), priority=name * 10)
        await rig.put(prompt(3, 3), durable=False)  # the lighter prompt gives way, from its end on
        assert (await rig.get(prompt(2, 4))).loaded == 4 * SIZE
        assert (await rig.get(prompt(1, 4))).loaded == 1 * SIZE
        await rig.put(prompt(4, 8), durable=False)
        assert (await rig.get(prompt(4, 8))).loaded == 8 * SIZE


async def test_hints_on_everything_leave_a_share_of_the_host_to_others() -> None:
    async with open_rig(host=8, retain_share=0.5) as rig:
        for name in range(1, 9):
            await rig.put(prompt(name, 1), durable=False)
            rig.kv.retain(prompt(name, 1), priority=100)
        for name in range(11, 15):
            await rig.put(prompt(name, 1), durable=False)
        there = [(await rig.get(prompt(name, 1))).loaded == SIZE for name in range(1, 9)]
        assert sum(there) == 4
        assert rig.kv.telemetry.value("hinted_blocks", tier="host") == 4


async def test_a_hint_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_rig(host=8, retain_max_ttl_s=60.0) as rig:
        found, completions = [], rig.kv._stack.completions
        await rig.put(prompt(1, 4), durable=False)
        rig.kv.retain(prompt(1, 4), ttl_s=1e9)
        begun = completions.now()
        for name, later_s in ((2, 30.0), (3, 61.0)):
            monkeypatch.setattr(completions, "now", lambda later_s=later_s: begun + later_s)
            await rig.put(prompt(name, 4), durable=False)
            await rig.put(prompt(name + 10, 4), durable=False)
            found.append((await rig.get(prompt(1, 4))).loaded)
        assert found == [4 * SIZE, 0]
        assert rig.kv.telemetry.value("hints") == 0
        monkeypatch.undo()


async def test_hints_hold_on_disk_too_and_survive_leaving_the_host(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=4, disk=12) as rig:
        await rig.put(prompt(1, 3))
        rig.kv.retain(prompt(1, 3), priority=1)
        for name in range(2, 9):
            await rig.put(prompt(name, 4))
        result = await rig.get(prompt(1, 3))
        assert result.loaded == 3 * SIZE
        assert rig.kv.telemetry.value("held_blocks", tier="disk") == 3


async def test_a_hint_may_come_first_and_be_taken_back() -> None:
    async with open_rig(host=8) as rig:
        assert rig.kv.retain(prompt(1, 3), namespace=("a",))
        await rig.put(prompt(1, 3), ("a",), durable=False)
        await rig.push_out()
        await rig.put(prompt(1, 3), ("a",), durable=False)
        assert not rig.kv.retain(prompt(1, 3), namespace=("a",), priority=0)
        for name in (2, 3):
            await rig.put(prompt(name, 4), durable=False)
        assert (await rig.get(prompt(1, 3), ("a",))).loaded == 0


async def test_hints_that_cannot_be_used_are_refused() -> None:
    async with open_rig(host=8) as rig:
        for wrong in ({"priority": 101}, {"priority": "high"}, {"steps": -1}, {"ttl_s": -1.0}):
            with pytest.raises(InputError, match=str(next(iter(wrong.values())))):
                rig.kv.retain(prompt(1, 3), **wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="one-dimensional"):
            rig.kv.retain([[1, 2]])
        assert not rig.kv.retain(prompt(1, 1)[:-1])  # no whole block


async def test_a_run_that_is_near_brings_its_prompt_into_the_host(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=8, prefetch_lead_steps=2) as rig:
        await rig.put(prompt(1, 4))
        await rig.push_out()
        rig.kv.retain(prompt(1, 4), steps=3)
        await rig.kv.flush()
        assert rig.count("lead_blocks") == 0
        rig.kv.retain(prompt(1, 4), steps=2)
        await rig.kv.flush()
        assert rig.count("lead_blocks") == 4
        before = rig.count("transfer_blocks", source="disk", target="host")
        result = await rig.get(prompt(1, 4))
        assert (result.loaded, result.by_tier["host"]) == (4 * SIZE, 4)
        assert rig.count("transfer_blocks", source="disk", target="host") == before == 4
        rig.kv.retain(prompt(1, 4), steps=0)  # it is there already
        assert rig.count("lead_blocks") == 4


async def test_promotion_by_hints_is_dropped_first_under_load(tmp_path: Path) -> None:
    steps = Steps()
    with registered(steps):
        async with open_rig(
            tmp_path, host=8, device_backend="stepping", max_in_flight_gets=1
        ) as rig:
            await rig.put(prompt(1, 2))
            await rig.put(prompt(2, 2))
            await rig.push_out()
            steps.arm("before scatter")
            gets = [rig.kv.get_async(prompt(2, 2), slots_of([10 + i, 20 + i])) for i in range(2)]
            await steps.reached.wait()
            assert rig.kv.retain(prompt(1, 2), steps=0)  # a get is waiting for its turn
            assert rig.count("dropped_blocks", work="lead") == 2
            steps.release()
            await rig.kv.wait(gets)
            assert rig.kv.retain(prompt(1, 2), steps=0)
            await rig.kv.flush()
            assert rig.count("lead_blocks") == 2


async def test_a_prefetch_brings_what_every_group_needs(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=10) as rig:
        for i in range(4):
            rig.device.write(i, pattern(prompt(1, 4), i, ("full",)))
            rig.device.write(4 + i, pattern(prompt(1, 4), i, ("near",)))
        mapping = slots_of(range(8))
        transfer = rig.kv.put_async(prompt(1, 4), mapping, groups=GROUPS, held=(None, None))
        await transfer
        await transfer.durable()
        await rig.push_out()
        brought = await rig.kv.prefetch_async(prompt(1, 4), groups=GROUPS)
        assert brought.loaded == brought.matched == (4 + 2) * SIZE  # a window is two blocks
        assert rig.count("transfer_blocks", source="disk", target="host") == 6


def test_hints_and_groups_from_other_threads() -> None:
    config = FlexKVConfig(
        spec=SPEC,
        host_cache_bytes=8 * STRIDE,
        huge_pages=False,
    )
    with BlockingKVManager(config) as kv:
        kv.register(Device(16, "cpu").caches, axes="PBNHD")
        assert kv.retain(np.array(prompt(1, 2)), priority=3, ttl_s=10.0)
        assert not kv.retain(prompt(1, 2), ttl_s=0)
        assert kv.prefetch(prompt(1, 2), groups=GROUPS).result().loaded == 0
