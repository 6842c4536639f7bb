"""Fetch or recompute through a manager: a slow store is left alone, and used again when it is fast.

Time is virtual: reads of the store and copies to the device take what the test says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from fakes import MemoryStore, plugged
from rig import TOKENS_PER_BLOCK as SIZE
from rig import Rig, open_rig, prompt, slots_of

from flexkv import GetResult, InputError
from flexkv.backends.cpu import CpuBackend
from flexkv.model import CacheGroup, Statuses
from flexkv.protocols import BlockCopy, BlockIO, Recovered, Services
from flexkv.testing.loop import VirtualLoop

PREFILL_BLOCK_S = 0.004
FAST_S, SLOW_S = 0.001, 0.040  # of a block
GROUPS = (CacheGroup("full"), CacheGroup("near", window_tokens=2 * SIZE))


class SlowStore(MemoryStore):
    """A store whose reads take their time, one after the other."""

    block_s = FAST_S
    read_blocks = 0

    async def open(self, services: Services) -> Recovered | None:
        self.kept = {}  # nothing survives
        self._turn = anyio.Lock()
        return await super().open(services)

    async def read(self, batch: BlockIO) -> Statuses:
        type(self).read_blocks += len(batch)
        async with self._turn:
            await anyio.sleep(self.block_s * len(batch))
        return await super().read(batch)


class TimedDevice(CpuBackend):
    """A device whose copies take a moment."""

    async def copy(self, batch: BlockCopy) -> None:
        await anyio.sleep(1e-5 * len(batch.device_blocks))
        await super().copy(batch)


@asynccontextmanager
async def slow_rig(path: Path, **more: Any) -> AsyncIterator[Rig]:
    class Store(SlowStore):
        """Of this rig alone: tests set its speed."""

    with plugged(Store) as store, plugged(TimedDevice) as device:
        settings = {
            "fetch_or_recompute": True,
            "prefill_tokens_per_s": SIZE / PREFILL_BLOCK_S,
            "prefill_crossover_tokens": 1e9,
            "prefault": False,
            "disk_backend": store,
            "device_backend": device,
        }
        async with open_rig(path, **(settings | more)) as rig:
            yield rig


def in_virtual_time(story: Coroutine[Any, Any, None]) -> None:
    VirtualLoop().run(story)


async def get_from_disk(rig: Rig, blocks: int = 6) -> GetResult:
    await rig.push_out(900)
    await rig.push_out(901)
    return await rig.get(prompt(1, blocks))


def test_a_slow_store_is_left_alone_and_used_again_when_it_is_fast(tmp_path: Path) -> None:
    async def story() -> None:
        async with slow_rig(tmp_path, fetch_probe_s=10) as rig:
            store = type(rig.store)
            await rig.put(prompt(1, 6))
            for _ in range(2):  # the first time nothing is known, the second time it is
                assert (await get_from_disk(rig)).by_tier["disk"] == 6
            assert rig.kv.telemetry.value("fetch_bytes_per_s", tier="disk") > 0

            store.block_s = SLOW_S
            assert (await get_from_disk(rig)).loaded == 6 * SIZE, "nobody knows it yet"
            reads = store.read_blocks
            got = await get_from_disk(rig)
            assert (got.loaded, got.matched, got.declined_blocks) == (0, 0, 6)
            assert store.read_blocks == reads
            assert rig.count("declined_blocks", tier="disk") == 6
            assert rig.count("hit_blocks") == 4 * 6, "it was there"

            store.block_s = FAST_S
            assert (await get_from_disk(rig)).loaded == 0, "nobody looks at it"
            for _ in range(3):
                await anyio.sleep(10)
                got = await get_from_disk(rig)
                if got.loaded == 6 * SIZE:
                    break
                assert got.loaded == 2 * SIZE, "a chunk is enough to look at"
                assert got.declined_blocks == 4
            assert got.loaded == 6 * SIZE
            assert 1 <= rig.count("fetch_probes") <= 3
            assert (await get_from_disk(rig)).loaded == 6 * SIZE

    in_virtual_time(story())


def test_what_lies_in_the_host_is_fetched_and_the_rest_computed(tmp_path: Path) -> None:
    async def story() -> None:
        async with slow_rig(tmp_path, fetch_probe_s=1e6) as rig:
            type(rig.store).block_s = SLOW_S
            await rig.put(prompt(1, 6))
            await get_from_disk(rig)
            await get_from_disk(rig)
            await rig.put(prompt(1, 3))  # as after it was computed
            got = await rig.get(prompt(1, 6))
            assert (got.loaded, got.declined_blocks) == (3 * SIZE, 3)
            assert got.by_tier == {"host": 3}

            whole = rig.kv.get_match(prompt(1, 6), weigh=False)
            assert (whole.matched, whole.declined_blocks) == (6 * SIZE, 0)
            whole.cancel()
            await rig.kv.prefetch_async(prompt(1, 6))
            assert (await rig.get(prompt(1, 6))).loaded == 6 * SIZE, "a prefetch is not weighed"

    in_virtual_time(story())


def test_what_the_engine_tells_of_computing_decides(tmp_path: Path) -> None:
    async def story() -> None:
        async with slow_rig(tmp_path, prefill_tokens_per_s=0) as rig:
            type(rig.store).block_s = SLOW_S
            await rig.put(prompt(1, 6))
            for _ in range(2):
                assert (await get_from_disk(rig)).loaded == 6 * SIZE, "its cost is not known"
            for _ in range(3):
                rig.kv.computed(SIZE * 10, 10 * PREFILL_BLOCK_S * 1e3)
            rate = rig.kv.telemetry.value("prefill_tokens_per_s")
            assert rate == pytest.approx(SIZE / PREFILL_BLOCK_S)
            assert (await get_from_disk(rig)).declined_blocks == 6
            for _ in range(40):
                rig.kv.computed(SIZE * 10, 100 * 10 * PREFILL_BLOCK_S * 1e3, past_tokens=SIZE)
            assert (await get_from_disk(rig)).declined_blocks == 0
            with pytest.raises(InputError, match="elapsed_ms"):
                rig.kv.computed(1, -1.0)

    in_virtual_time(story())


def test_groups_of_layers_end_together_and_their_windows_with_them(tmp_path: Path) -> None:
    async def story() -> None:
        async with slow_rig(tmp_path, host=16, disk=64, fetch_probe_s=1e6) as rig:
            type(rig.store).block_s = SLOW_S
            tokens, others = prompt(1, 6), prompt(900, 8)
            mapping = slots_of(range(12))
            await rig.kv.put_async(tokens, mapping, groups=GROUPS)
            await rig.kv.flush()
            for _ in range(3):
                await rig.kv.put_async(others, slots_of(range(16)), groups=GROUPS)
                await rig.kv.flush()
                plan = rig.kv.get_match(tokens, groups=GROUPS)
                if plan.declined_blocks:
                    break
                await rig.kv.launch(plan, mapping)
            assert plan.declined_blocks == 6, "of the group that looks at everything"
            assert (plan.matched, plan.parts) == (0, (0, 0))

            await rig.kv.put_async(tokens[: 3 * SIZE], mapping, groups=GROUPS)
            plan = rig.kv.get_match(tokens, groups=GROUPS)
            assert (plan.matched, plan.parts) == (3 * SIZE, (3 * SIZE, 2 * SIZE))
            assert plan.reach == 6 * SIZE
            assert plan.declined_blocks == 3
            await rig.kv.launch(plan, mapping)

    in_virtual_time(story())


def test_it_is_off_unless_asked_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with slow_rig(tmp_path, fetch_or_recompute=False) as rig:
            type(rig.store).block_s = SLOW_S
            await rig.put(prompt(1, 6))
            for _ in range(4):
                rig.kv.computed(10, 1.0)
                assert (await get_from_disk(rig)).loaded == 6 * SIZE
            assert "prefill_tokens_per_s" not in rig.kv.telemetry.snapshot()

    in_virtual_time(story())


def test_gets_that_are_cancelled_leave_no_backlog(tmp_path: Path) -> None:
    async def story() -> None:
        async with slow_rig(tmp_path) as rig:
            await rig.put(prompt(1, 6))
            await rig.push_out()
            get = rig.kv.get_async(prompt(1, 6), slots_of(range(6)))
            get.cancel()
            await get
            await get.quiesced()
            worth = rig.kv._stack.worth
            assert worth is not None
            sources = [np.ones(2, np.int64)]
            for _ in range(2):
                await get_from_disk(rig)
            seconds = worth.seconds(sources, 0, 1.0)
            assert seconds is not None
            assert seconds[-1] == pytest.approx(2 * FAST_S, rel=0.1)

    in_virtual_time(story())
