"""The public face of KVManager on the small rig: put, match, get, prefetch, wait, remove, reset,
lifetime.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from rig import SPEC, Device, open_rig, prompt, slots_of

from flexkv import (
    CapacityError,
    ClosedError,
    ConfigError,
    FlexKVConfig,
    InputError,
    KVManager,
)


async def test_a_prompt_comes_back_from_host_memory() -> None:
    async with open_rig() as rig:
        tokens = prompt(1, 5)
        await rig.put(tokens)
        result = await rig.get(tokens, blocks=[9, 3, 11, 0, 30])
        assert (result.loaded, result.by_tier) == (20, {"host": 5})
        assert result.size_bytes == 5 * SPEC.block_bytes


async def test_the_longest_prefix_comes_back(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 5))
        shared = prompt(1, 5)[:12]
        result = await rig.get(prompt(2, 6, shared=shared))
        assert result.loaded == 12
        result = await rig.get([7, *prompt(1, 5)])
        assert result.loaded == 0


async def test_a_partial_block_at_the_end_is_ignored() -> None:
    async with open_rig() as rig:
        tokens = [*prompt(1, 3), 5, 6]
        await rig.put(tokens)
        assert (await rig.get(tokens)).loaded == 12


async def test_blocks_pushed_out_of_host_come_back_from_disk(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        for name in range(4):
            await rig.put(prompt(name, 6))
        for name in range(4):
            result = await rig.get(prompt(name, 6))
            assert result.loaded == 24, name
        assert rig.kv.usage()["disk"]["resident"] == 24


async def test_a_get_longer_than_the_host_tier_passes_through_staging(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=32) as rig:
        await rig.put(prompt(3, 24))
    async with open_rig(tmp_path, host=8) as rig:
        for _ in range(2):
            result = await rig.get(prompt(3, 24), blocks=list(range(40, 64)))
            assert result.loaded == 96


@pytest.mark.parametrize("spill", ["through", "on_evict"])
async def test_spill_modes_keep_what_the_host_cannot(tmp_path: Path, spill: str) -> None:
    async with open_rig(tmp_path, spill=spill) as rig:
        for name in range(3):
            await rig.put(prompt(name, 8), durable=spill == "through")
        await rig.kv.flush()
        for name in range(3):
            assert (await rig.get(prompt(name, 8))).loaded == 32, name


async def test_spill_never_keeps_the_disk_empty(tmp_path: Path) -> None:
    async with open_rig(tmp_path, spill="never") as rig:
        for name in range(3):
            await rig.put(prompt(name, 8))
        assert rig.kv.usage()["disk"]["resident"] == 0
        assert (await rig.get(prompt(0, 8))).loaded == 0


async def test_prefetch_promotes_to_host(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 6))
        await rig.put(prompt(2, 8))
        result = await rig.kv.prefetch_async(prompt(1, 6))
        assert result.loaded == 24
        assert result.by_tier["disk"] == 6
        result = await rig.get(prompt(1, 6))
        assert result.by_tier == {"host": 6}


async def test_concurrent_gets_of_the_same_blocks_share_one_read(tmp_path: Path) -> None:
    async with open_rig(tmp_path, device=64) as rig:
        tokens = prompt(1, 4)
        await rig.put(tokens)
        await rig.put(prompt(2, 8))
        rig.device.wipe()
        before = rig.kv.telemetry.value("transfer_bytes", source="disk", target="host")
        first = rig.kv.get_async(tokens, slots_of([0, 1, 2, 3]))
        second = rig.kv.get_async(tokens, slots_of([10, 11, 12, 13]))
        results = await asyncio.gather(first, second)
        assert [result.loaded for result in results] == [16, 16]
        for i, block in enumerate([10, 11, 12, 13]):
            assert np.array_equal(rig.device.read(block), rig.device.read(i))
        after = rig.kv.telemetry.value("transfer_bytes", source="disk", target="host")
        assert after - before == 4 * SPEC.block_bytes


async def test_match_launch_and_cancel_keep_the_books(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = prompt(1, 4)
        await rig.put(tokens)
        plan = rig.kv.get_match(tokens, computed_tokens=4, leave_tokens=1)
        assert (plan.offset, plan.matched) == (4, 8)
        plan.cancel()
        plan.cancel()
        plan = rig.kv.get_match(tokens)
        rig.device.wipe()
        result = await rig.kv.launch(plan, slots_of([5, 6, 7, 8]))
        assert result.loaded == 16
        with pytest.raises(InputError, match="launched"):
            rig.kv.launch(plan, slots_of([5, 6, 7, 8]))
        put = rig.kv.put_match(prompt(2, 3))
        assert put.matched == 12
        put.cancel()
        assert (await rig.get(prompt(2, 3))).loaded == 0


async def test_a_forgotten_plan_expires(tmp_path: Path) -> None:
    async with open_rig(tmp_path, plan_ttl_ms=20) as rig:
        await rig.put(prompt(1, 4))
        plan = rig.kv.get_match(prompt(1, 4))
        assert rig.kv.usage()["manager"]["pinned"] == 4
        expired = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.06, expired.set_result, None)
        await expired
        assert not plan.open
        assert rig.kv.usage()["manager"]["pinned"] == 0


async def test_wait_returns_those_that_are_done() -> None:
    async with open_rig() as rig:
        transfers = [rig.start_put(prompt(name, 2), first=name * 2) for name in range(3)]
        assert await rig.kv.wait(transfers, timeout_ms=2000) == transfers
        assert await rig.kv.wait([]) == []


async def test_remove_forgets_a_tail_and_spares_what_others_use(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        long, other = prompt(1, 4), prompt(2, 4, shared=prompt(1, 4)[:8])
        await rig.put(long)
        await rig.put(other)
        assert rig.kv.remove(long) == 8
        await rig.kv.flush()
        assert (await rig.get(long)).loaded == 8
        assert (await rig.get(other)).loaded == 16


async def test_reset_forgets_everything(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 4))
        plan = rig.kv.get_match(prompt(1, 4))
        await rig.kv.reset()
        assert not plan.open
        assert (await rig.get(prompt(1, 4))).loaded == 0
        await rig.put(prompt(1, 4))
        assert (await rig.get(prompt(1, 4))).loaded == 16
    async with open_rig(tmp_path) as rig:
        assert (await rig.get(prompt(1, 4))).loaded == 16


async def test_a_put_that_does_not_fit_fails_whole() -> None:
    async with open_rig(host=8) as rig:
        await rig.put(prompt(1, 4))
        store = rig.kv.put_async(prompt(2, 9), slots_of(range(9)))
        with pytest.raises(CapacityError, match="host_cache_bytes"):
            await store
        assert (await rig.get(prompt(1, 4))).loaded == 16


@pytest.mark.parametrize(
    ("tokens", "slots", "message"),
    [
        ([1, 2, 3, 4], [0, 1, 2], "slot_mapping has 3"),
        ([1, 2, 3, 4], [1, 2, 3, 4], "consecutive"),
        ([1, 2, 3, 4], [0, 1, 3, 2], "consecutive"),
        ([1, 2, 3, 4], [4000, 4001, 4002, 4003], "below 64"),
        ([1, 2, 3, 4], [-4, -3, -2, -1], "slot_mapping must be >= 0"),
        ([1.5, 2, 3, 4], [0, 1, 2, 3], "tokens"),
        ([[1, 2, 3, 4]], [0, 1, 2, 3], "tokens"),
    ],
)
async def test_unusable_input_is_refused_and_costs_nothing(
    tokens: list[int], slots: list[int], message: str
) -> None:
    async with open_rig() as rig:
        with pytest.raises(InputError, match=message):
            rig.kv.put_async(tokens, slots)


async def test_calls_outside_the_context_are_refused() -> None:
    kv = KVManager(FlexKVConfig(spec=SPEC, host_cache_bytes=2**20))
    with pytest.raises(ClosedError, match="async with"):
        kv.get_match([1, 2, 3, 4])
    async with kv:
        kv.register(Device().caches, axes="PBNHD")
    with pytest.raises(ClosedError):
        kv.get_match([1, 2, 3, 4])
    await kv.aclose()
    with pytest.raises(ClosedError, match="once"):
        async with kv:
            pass


async def test_a_missing_spec_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"KVSpec\.uniform"):
        async with KVManager(FlexKVConfig()):
            pass


async def test_a_clean_restart_finds_everything(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=24, dirs=3) as rig:
        for name in range(4):
            await rig.put(prompt(name, 5), durable=False)
    async with open_rig(tmp_path, dirs=3) as rig:
        for name in range(4):
            result = await rig.get(prompt(name, 5))
            assert (result.loaded, result.by_tier) == (20, {"host": 0, "disk": 5})


async def test_flush_waits_for_what_was_accepted_not_for_what_comes_after(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=64, disk=512) as rig:
        going = True

        async def keep_putting(name: int) -> None:
            round_ = 0
            while going:
                round_ += 1
                put = rig.start_put(prompt(name * 1000 + round_, 2), first=name * 2)
                await rig.kv.wait([put])  # a host that is full of spills may refuse it
                await asyncio.sleep(0)

        noise = [asyncio.create_task(keep_putting(name)) for name in range(1, 4)]
        await rig.put(prompt(9, 4), durable=False)
        async with asyncio.timeout(5):
            await rig.kv.flush()
        disk = rig.kv.telemetry.value("transfer_blocks", source="host", target="disk")
        assert disk >= 4
        going = False
        await asyncio.gather(*noise)
