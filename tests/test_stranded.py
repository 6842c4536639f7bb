"""Host blocks that only their descendants in a store keep: they make room when nothing else can."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rig import Rig, open_rig, prompt

from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK

HOST, DISK = 0, 1


def chain(index: PrefixIndex, length: int, name: int, parent: int = NO_BLOCK) -> np.ndarray:
    keys = np.arange(2 * length, dtype=np.uint64).reshape(-1, 2) + np.uint64(1000 * name + 1)
    blocks = index.insert(keys, parent)
    index.pin(blocks)
    return blocks


def land(index: PrefixIndex, tier: int, blocks: np.ndarray) -> None:
    index.land(tier, blocks, blocks)
    index.ready(tier, blocks, 0.0)


def stranded(index: PrefixIndex, tier: int, gone: list[int]) -> list[int]:
    found: list[int] = index.stranded(tier, np.array(gone, np.uint32), 9).tolist()
    index.check_integrity()
    return found


def test_the_index_names_stranded_blocks_leaves_first() -> None:
    index = PrefixIndex(64, ["host", "disk"])
    blocks = chain(index, 5, 1)
    land(index, HOST, blocks[:3])
    land(index, DISK, blocks[3:])
    assert stranded(index, HOST, []) == [], "pinned"
    index.unpin(blocks)
    assert index.victims(HOST, 9).tolist() == []
    assert stranded(index, HOST, []) == blocks[:3][::-1].tolist()
    assert index.stranded(HOST, blocks[:0], 2).tolist() == blocks[1:3][::-1].tolist()
    twigs = np.concatenate([chain(index, 1, name, parent=int(blocks[2])) for name in (2, 3)])
    land(index, HOST, twigs)
    index.unpin(twigs)
    assert stranded(index, HOST, twigs.tolist()) == blocks[:3][::-1].tolist()
    index.pin(twigs[:1])
    assert stranded(index, HOST, twigs[1:].tolist()) == [], "a child stays"
    index.unpin(twigs[:1])
    index.pin(blocks[1:2])
    assert stranded(index, HOST, twigs.tolist()) == [int(blocks[2])]
    index.unpin(blocks[1:2])


async def lose_an_ancestor(rig: Rig, tokens: list[int]) -> None:
    """Leave block 1 in the host alone, with its children on a disk that takes no more writes."""
    await rig.put(tokens)
    await rig.push_out()
    faults = rig.faults()
    faults.add("read", "flip", skip=1, times=1)
    assert (await rig.get(tokens)).loaded == 4
    faults.clear()
    faults.add("write", "EIO")
    await rig.put(tokens, durable=False)
    await rig.kv.flush()
    assert (await rig.get(tokens)).loaded == 16


@pytest.mark.parametrize("spill", ["through", "on_evict"])
async def test_a_block_that_cannot_be_written_leaves_the_host_in_the_end(
    tmp_path: Path, spill: str
) -> None:
    async with open_rig(tmp_path, spill=spill) as rig:
        tokens = prompt(1, 4)
        await lose_an_ancestor(rig, tokens)
        for name in range(2, 6):
            await rig.put(prompt(name, 8), durable=False)
            await rig.kv.flush()
            assert (await rig.get(prompt(name, 8))).loaded == 32
        assert (await rig.get(tokens)).loaded == 4, "block 1 is lost, block 0 is not"
