"""D05 (namespaces do not meet), D09 (lengths at the boundary of a block)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeRemote, plugged
from rig import Rig, open_rig, pattern, prompt, slots_of

TOKENS = prompt(1, 2)
NAMESPACES: list[tuple[str, ...] | None] = [
    ("a:b", "c"),
    ("a", "b:c"),
    ("a:b:c",),
    ("a", "b", "c"),
    ("",),
    (),
    None,
]


def same(first: Sequence[str] | None, second: Sequence[str] | None) -> bool:
    """The documented rule: no labels and None are the same; everything else must be equal."""
    return tuple(first or ()) == tuple(second or ())


async def look_everywhere(rig: Rig, stored: Sequence[str] | None, tier: str) -> None:
    """Only the namespace that was stored hits, in `tier`, with its own bytes."""
    for asked in NAMESPACES:
        plan = rig.kv.get_match(TOKENS, namespace=asked)
        assert plan.matched == (8 if same(asked, stored) else 0), (stored, asked)
        plan.cancel()
    result = await rig.get(TOKENS, stored)
    assert (result.loaded, result.by_tier[tier]) == (8, 2)


@pytest.mark.parametrize("where", ["disk", "remote"])
@pytest.mark.parametrize("stored", NAMESPACES, ids=repr)
async def test_d05_only_the_same_namespace_hits(
    tmp_path: Path, stored: tuple[str, ...] | None, where: str
) -> None:
    with plugged(FakeRemote) as remote:
        settings: dict[str, Any] = {"disk_backend": remote} if where == "remote" else {}
        async with open_rig(tmp_path, **settings) as rig:
            await rig.put(TOKENS, stored)
            await look_everywhere(rig, stored, "host")
            await rig.push_out()
            await look_everywhere(rig, stored, "disk")
        async with open_rig(tmp_path, **settings) as rig:
            await look_everywhere(rig, stored, "disk")


async def test_d05_all_namespaces_side_by_side(tmp_path: Path) -> None:
    distinct = [namespace for namespace in NAMESPACES if namespace is not None]
    async with open_rig(tmp_path) as rig:
        for namespace in distinct:
            await rig.put(TOKENS, namespace)
        assert rig.kv.usage()["disk"]["resident"] == 2 * len(distinct)
        for namespace in NAMESPACES:
            assert (await rig.get(TOKENS, namespace)).loaded == 8
    async with open_rig(tmp_path) as rig:
        for namespace in NAMESPACES:
            assert (await rig.get(TOKENS, namespace)).loaded == 8


LENGTHS = [0, 1, 3, 4, 5, 8, 9]
NONE_COMPUTED = dict(zip(LENGTHS, [0, 0, 0, 0, 4, 4, 8], strict=True))


def expected(length: int, computed: int) -> int:
    """Whole blocks of all but the last token, less what the engine has."""
    return max(0, (length - 1) // 4 * 4 - computed) if length else 0


@pytest.mark.parametrize("computed", [0, 4])
@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_d09_lengths_at_the_boundary(tmp_path: Path, tier: str, computed: int) -> None:
    async with open_rig(tmp_path) as rig:
        for length in LENGTHS:
            await rig.put(list(range(100 * length, 101 * length)))
        if tier == "disk":
            await rig.push_out()
        for length in LENGTHS:
            tokens = list(range(100 * length, 101 * length))
            plan = rig.kv.get_match(tokens, computed_tokens=computed, leave_tokens=1)
            assert plan.matched == expected(length, computed), length
            if computed == 0:
                assert plan.matched == NONE_COMPUTED[length]
            assert plan.offset == computed
            assert plan.offset + plan.matched <= max(computed, length - 1)
            blocks = plan.matched // 4
            assert rig.kv.usage()["manager"]["pinned"] == blocks
            rig.device.wipe()
            result = await rig.kv.launch(plan, slots_of(range(5, 5 + blocks)))
            assert result.loaded == plan.matched
            for i in range(blocks):
                wanted = pattern(tokens, plan.offset // 4 + i)
                assert np.array_equal(rig.device.read(5 + i), wanted)
            assert rig.kv.usage()["manager"]["pinned"] == 0


async def test_d09_the_engine_has_more_than_the_cache(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 2))
        plan = rig.kv.get_match(prompt(1, 6), computed_tokens=16, leave_tokens=1)
        assert (plan.matched, plan.offset) == (0, 16)
        assert rig.kv.usage()["manager"] == {**rig.kv.usage()["manager"], "pinned": 0, "plans": 0}
        result = await rig.kv.launch(plan, [])
        assert (result.loaded, result.matched) == (0, 0)
