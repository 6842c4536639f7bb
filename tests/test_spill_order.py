"""A store gets a block only together with its ancestors, whatever the order in which they land."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np
from fakes import plugged
from model import DISK, World, keys_of
from rig import open_rig, prompt

from flexkv.backends.cpu import CpuBackend
from flexkv.model import IOStatus
from flexkv.protocols import BlockCopy

LANDED = IOStatus.LANDED


def test_a_block_waits_for_its_parent_that_is_still_landing() -> None:
    world = World(4, 4, "through", "lru")
    for path in ((0,), (0, 1)):
        world.plan_put(path)
        world.launch_put(0)
    parent, child, *_ = world.startable()
    world.step(child, [LANDED])
    blocks, keys = world.ledger.spills.pop(0)
    spill = world.planner.plan_spill(blocks, keys)
    assert spill.graph is None
    assert spill.dropped == 0
    assert spill.early.tolist() == blocks.tolist()
    world.step(parent, [LANDED])
    world.ledger.spills.append((blocks, keys))
    world.drain()
    assert {key for key, _, _ in world.records.values()} == {
        tuple(key) for key in keys_of((0, 1)).tolist()
    }


def test_a_block_whose_parent_never_landed_is_not_written() -> None:
    world = World(4, 4, "through", "lru")
    for path in ((0,), (0, 1)):
        world.plan_put(path)
        world.launch_put(0)
    parent, child, *_ = world.startable()
    world.step(child, [LANDED])
    world.step(parent, [IOStatus.FAILED])
    blocks, keys = world.ledger.spills.pop(0)
    spill = world.planner.plan_spill(blocks, keys)
    assert (spill.graph, spill.dropped, len(spill.early)) == (None, 1, 0)
    assert world.tiers[DISK].free == 4


async def test_a_put_whose_end_lands_first_is_durable(tmp_path: Path) -> None:
    """Two slices of a put are in flight at once; the first one is held until the other landed."""
    late, sizes = anyio.Event(), []

    class SlowStart(CpuBackend):
        async def copy(self, batch: BlockCopy) -> None:
            sizes.append(len(batch))
            if len(sizes) == 1:
                await late.wait()
            elif len(sizes) == 2:
                late.set()
            await super().copy(batch)

    with plugged(SlowStart) as device:
        async with open_rig(tmp_path, device_backend=device) as rig:
            put = rig.start_put(prompt(1, 4))
            await put.durable()
            assert sizes[:2] == [2, 2]
            assert rig.kv.usage()["disk"]["resident"] == 4


async def test_a_get_of_nothing_asks_no_device() -> None:
    copies: list[int] = []

    class Counting(CpuBackend):
        async def copy(self, batch: BlockCopy) -> None:
            copies.append(len(batch))
            await super().copy(batch)

    with plugged(Counting) as device:
        async with open_rig(device_backend=device) as rig:
            fetch = rig.kv.get_async(prompt(1, 2), np.arange(8))
            assert fetch.done
            assert (await fetch).loaded == 0
            assert copies == []
