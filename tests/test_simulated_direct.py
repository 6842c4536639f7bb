"""Storage to device without the host: what finds no room there does not pass through it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import MemoryStore, plugged
from rig import TOKENS_PER_BLOCK, Rig, open_rig, prompt

from flexkv.backends.disk.format import DATA_NAME
from flexkv.errors import InputError
from flexkv.protocols import BlockIO
from flexkv.testing.faults import flip_bit

TOKENS = prompt(1, 6)


@asynccontextmanager
async def full_host(path: Path, **settings: Any) -> AsyncIterator[Rig]:
    """A rig whose prompt is on disk only, and whose host is full of pinned blocks."""
    async with open_rig(path, device_backend="simulated_direct", **settings) as rig:
        await rig.put(TOKENS)
        await rig.push_out()
        plan = rig.kv.get_match(prompt(900, 8))
        yield rig
        plan.cancel()


def direct_blocks(rig: Rig) -> int:
    count: int = rig.kv._stack.device.direct_blocks  # type: ignore[attr-defined]
    return count


async def test_blocks_without_room_in_the_host_come_directly(tmp_path: Path) -> None:
    async with full_host(tmp_path, dirs=2) as rig:
        arena = rig.kv._stack.arena
        staging = [arena.view(slot) for slot in range(8, arena.slots)]
        for view in staging:
            view[:] = 0xA5
        result = await rig.get(TOKENS, blocks=[9, 3, 40, 11, 0, 7])
        assert (result.loaded, result.by_tier) == (24, {"host": 0, "disk": 6})
        assert direct_blocks(rig) == 6
        assert all((view == 0xA5).all() for view in staging)


async def test_what_finds_room_in_the_host_passes_through_it(tmp_path: Path) -> None:
    async with open_rig(tmp_path, device_backend="simulated_direct") as rig:
        await rig.put(TOKENS)
        await rig.push_out()
        assert (await rig.get(TOKENS)).loaded == 24
        assert direct_blocks(rig) == 0


@pytest.mark.parametrize(("promote", "direct"), [("always", 0), ("when_room", 3), ("never", 6)])
async def test_who_is_not_to_be_promoted_comes_directly(
    tmp_path: Path, promote: str, direct: int
) -> None:
    async with open_rig(tmp_path, device_backend="simulated_direct", promote=promote) as rig:
        await rig.put(TOKENS)
        await rig.push_out()
        rig.kv.remove(prompt(900, 8))
        await rig.put(prompt(2, 5))
        assert rig.kv.usage()["host"]["free"] == 3
        assert (await rig.get(TOKENS)).loaded == 24
        assert direct_blocks(rig) == direct
        assert rig.kv.usage()["host"]["free"] == (3 if promote == "never" else 0)
        kept = await rig.get(prompt(2, 5))
        assert kept.by_tier["host"] == (2 if promote == "always" else 5), "who was evicted for it?"
        await rig.kv.prefetch_async(TOKENS)  # that is for the host, whatever a get does
        assert (await rig.get(TOKENS)).by_tier["host"] == 6


async def test_a_damaged_block_is_a_miss_and_is_forgotten(tmp_path: Path) -> None:
    async with full_host(tmp_path, dirs=1) as rig:
        slot = 2  # blocks are written in order into an empty store
        flip_bit(tmp_path / "d0" / DATA_NAME, slot * rig.store._stride_bytes + 100)
        result = await rig.get(TOKENS)
        assert result.loaded == 2 * TOKENS_PER_BLOCK
        assert rig.count("damaged_blocks", tier="disk") == 1
        match = rig.kv.get_match(TOKENS)
        assert match.matched == 2 * TOKENS_PER_BLOCK
        match.cancel()


@pytest.mark.parametrize("fault", ["refused", "failed", "sticky"])
async def test_a_fault_of_the_device_costs_this_get_and_no_block(
    tmp_path: Path, fault: str
) -> None:
    options = {"timeout_ms": 30}
    async with full_host(tmp_path, device_options=options) as rig:
        device = rig.kv._stack.device.device  # type: ignore[attr-defined]
        for _ in range(4):  # more often than a store is forgiven for
            device.inject(fault, "storage", blocks=1)
            result = await rig.get(TOKENS)
            assert result.loaded < 24
            device.reset()
        assert (await rig.get(TOKENS)).loaded == 24


async def test_a_store_that_does_not_say_where_is_read_through_staging(tmp_path: Path) -> None:
    with plugged(MemoryStore) as store:
        async with full_host(tmp_path, disk_backend=store) as rig:
            assert (await rig.get(TOKENS)).loaded == 24
            assert direct_blocks(rig) == 0


async def test_a_batch_without_extents_is_refused(tmp_path: Path) -> None:
    async with full_host(tmp_path) as rig:
        one = np.zeros(1, np.uint32)
        batch = BlockIO(np.empty(0, np.uint32), one, np.zeros((1, 2), np.uint64))
        device: Any = rig.kv._stack.device
        with pytest.raises(InputError, match="extents"):
            await device.read_into(batch, rig.kv._region, one)
