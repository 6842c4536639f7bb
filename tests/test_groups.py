"""Prompts of hybrid models through the manager: what a match needs of each group of layers, and
that blocks which stand alone come back whatever became of those before, also after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rig import TOKENS_PER_BLOCK as SIZE
from rig import Rig, open_rig, pattern, prompt, slots_of

from flexkv import ConfigError, GetResult, InputError
from flexkv.model import CacheGroup

FULL, NEAR = CacheGroup("full"), CacheGroup("near", window_tokens=5)  # two blocks of 4
GROUPS = (FULL, NEAR)


async def put(rig: Rig, tokens: Sequence[int], held: Sequence[int]) -> None:
    """Put a prompt of which the window's group has the blocks `held`."""
    count = len(tokens) // SIZE
    for i in range(count):
        rig.device.write(i, pattern(tokens, i, ("full",)))
    for at, i in enumerate(held):
        rig.device.write(count + at, pattern(tokens, i, ("near",)))
    mapping = slots_of(range(count + len(held)))
    transfer = rig.kv.put_async(tokens, mapping, groups=GROUPS, held=(None, list(held)))
    await transfer
    await transfer.durable()


async def get(rig: Rig, tokens: Sequence[int], computed: int = 0) -> int:
    """Load what can be, check every byte, return how many tokens it was."""
    plan = rig.kv.get_match(tokens, computed_tokens=computed, groups=GROUPS)
    assert plan.offset == computed
    rig.device.wipe()
    count, end = sum(plan.parts) // SIZE, (computed + plan.matched) // SIZE
    result = await rig.kv.launch(plan, slots_of(range(10, 10 + count)))
    assert isinstance(result, GetResult)
    assert result.loaded == result.matched == sum(plan.parts)
    at = 10
    for name, tokens_of in zip(("full", "near"), plan.parts, strict=True):
        for i in range(end - tokens_of // SIZE, end):
            assert np.array_equal(rig.device.read(at), pattern(tokens, i, (name,))), (name, i)
            at += 1
    return plan.matched


async def test_a_match_ends_where_every_group_has_what_it_needs(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = prompt(1, 5)
        await put(rig, tokens, [1, 2, 4])
        plan = rig.kv.get_match(tokens, groups=GROUPS)
        # five blocks of FULL; of NEAR a window of two ends behind block 2
        assert (plan.matched, plan.parts, plan.reach) == (3 * SIZE, (3 * SIZE, 2 * SIZE), 5 * SIZE)
        plan.cancel()
        assert await get(rig, tokens) == 3 * SIZE
        assert await get(rig, tokens, computed=2 * SIZE) == SIZE
        # with four blocks computed, the window's first block is on the device
        assert await get(rig, tokens, computed=4 * SIZE) == SIZE
        assert await get(rig, tokens[: 2 * SIZE]) == 0


async def test_what_one_window_lacks_the_others_need_not_have(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=16) as rig:
        tokens, far = prompt(1, 5), CacheGroup("far", window_tokens=8)
        groups, held = (FULL, NEAR, far), (None, [0, 3, 4], [0, 1, 2])
        await rig.kv.put_async(tokens, slots_of(range(11)), groups=groups, held=held)
        # NEAR has windows behind 5 blocks and 1, `far` behind 3, 2 and 1
        plan = rig.kv.get_match(tokens, groups=groups)
        assert (plan.matched, plan.parts) == (SIZE, (SIZE, SIZE, SIZE))
        plan.cancel()


async def test_groups_and_prompts_without_them_share_no_blocks(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = prompt(1, 2)
        await put(rig, tokens, [0, 1])
        assert rig.kv.get_match(tokens).matched == 0
        for others in ((CacheGroup("other"),), (CacheGroup("full", 8),), (CacheGroup("near"),)):
            assert rig.kv.get_match(tokens, groups=others).matched == 0
        plan = rig.kv.get_match(tokens, groups=(FULL,))
        assert plan.matched == 2 * SIZE
        plan.cancel()


async def test_a_window_is_found_after_a_restart_without_the_blocks_before_it(
    tmp_path: Path,
) -> None:
    tokens = prompt(1, 4)
    async with open_rig(tmp_path) as rig:
        await put(rig, tokens, [2, 3])
    async with open_rig(tmp_path) as rig:
        assert rig.kv.usage()["disk"]["resident"] == 6
        assert await get(rig, tokens) == 4 * SIZE
        assert await get(rig, tokens[: 3 * SIZE]) == 0


async def test_a_window_leaves_block_by_block_and_can_be_removed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = prompt(1, 3)
        await put(rig, tokens, [1, 2])
        assert rig.kv.remove(tokens, groups=(NEAR,)) == 2 * SIZE
        assert rig.kv.get_match(tokens, groups=GROUPS).matched == 0
        await put(rig, tokens, [1, 2])  # what is there already is not copied again
        assert await get(rig, tokens) == 3 * SIZE
        assert rig.kv.remove(tokens, groups=GROUPS) == 5 * SIZE
        await rig.kv.flush()
        assert rig.kv.usage()["manager"]["entries"] == 0


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        tokens = prompt(1, 3)
        with pytest.raises(ConfigError, match="window_tokens"):
            CacheGroup("x", -1)
        for held, reason in [
            ((None, [0, 3]), "below 3 blocks"),
            ((None, [1, 1]), "ascend"),
            (([0, 1], None), "as a whole"),
        ]:
            with pytest.raises(InputError, match=reason):
                rig.kv.put_match(tokens, groups=GROUPS, held=held)
