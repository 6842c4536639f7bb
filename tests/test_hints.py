"""Retention hints in the brain: what they weigh and take, where they bind, how they end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model import World, groups_of
from test_policies import Prompts

from flexkv.errors import InputError
from flexkv.groups import GroupKeys
from flexkv.hints import Hints, HintTree, RetainLimits, weight_of
from flexkv.policies.lru import LRU
from flexkv.policies.steps import Steps
from flexkv.tier import Tier


class Hinted(Prompts):
    """Prompts in one tier of some slots, with hints."""

    def __init__(self, policy: Any, *, capacity: int = 8, **limits: Any) -> None:
        super().__init__(policy, capacity=capacity)
        self.hints = Hints(
            self.index, [Tier("host", 0, self.index, self.pool)], RetainLimits(**limits)
        )

    def retain(self, prompt: str, **hint: Any) -> bool:
        return self.hints.retain([GroupKeys(self.keys(prompt))], self.now, **hint)

    def names(self, prompts: list[str], count: int) -> str:
        """Last letters of those who would leave, in order."""
        victims = self.index.victims(0, count).tolist()
        letters = {int(self.index.find(self.keys(prompt))[-1]): prompt[-1] for prompt in prompts}
        return "".join(letters[victim] for victim in victims)


def test_the_heaviest_hint_and_the_soonest_run_count() -> None:
    order = [(None, None), (100, None), (51, 0), (51, 3), (51, None), (50, 0), (0, 0), (0, 9)]
    weights = [weight_of(*hint) for hint in order[1:]]
    assert weights == sorted(weights, reverse=True)
    assert len(set(weights)) == len(weights)
    assert weight_of(None, None) == weight_of(50, None)
    assert weight_of(None, 4) == weight_of(0, 4)
    assert weight_of(0, None) == 0 < weight_of(0, 10**9)
    for wrong in ((101, None), (-1, None), (1, -1), (1.5, None), (True, None), (1, "2")):
        with pytest.raises(InputError, match=str(wrong[0] if wrong[1] is None else wrong[1])):
            weight_of(*wrong)  # type: ignore[arg-type]


def test_what_is_hinted_leaves_last_and_lightest_first() -> None:
    for policy in (LRU(), Steps()):
        hinted = Hinted(policy)
        for prompt in ("a", "b", "c", "d", "e"):
            hinted.put(prompt)
        hinted.retain("a", priority=90)
        hinted.retain("b", priority=10)
        hinted.retain("c", priority=10, steps=2)
        assert hinted.names(list("abcde"), 5) == "debca"


def test_hints_on_blocks_that_are_not_there_wait_for_them() -> None:
    hinted = Hinted(LRU())
    assert hinted.retain("ab")
    hinted.put("ab")
    hinted.put("abx")
    hinted.put("y")
    assert hinted.names(["a", "ab", "abx", "y"], 4) == "xyba"


def test_hints_take_no_more_than_their_share_of_a_tier() -> None:
    hinted = Hinted(LRU(), capacity=8, share=0.5)
    for prompt in ("a", "b", "c", "d", "e", "f", "g", "h"):
        hinted.put(prompt)
        hinted.retain(prompt, priority=20 if prompt in "fgh" else 10)
    # of the five lightest one is held: the first that was
    assert hinted.names(list("abcdefgh"), 8) == "bcdeafgh"


def test_a_hint_ends_and_a_new_one_replaces_it() -> None:
    hinted = Hinted(LRU(), max_ttl_s=100.0)
    for prompt in ("a", "b", "c"):
        hinted.put(prompt)
    hinted.retain("a", ttl_s=10.0)
    hinted.retain("a", ttl_s=20.0)
    hinted.retain("b", ttl_s=1e9)
    assert hinted.names(["a", "b", "c"], 3) == "cab"
    hinted.hints.advance(hinted.now + 15.0)
    assert hinted.names(["a", "b", "c"], 1) == "c"
    hinted.hints.advance(hinted.now + 20.0)
    assert hinted.names(["a", "b", "c"], 3) == "acb"
    hinted.hints.advance(hinted.now + 100.0)
    assert hinted.names(["a", "b", "c"], 3) == "abc"
    assert len(hinted.hints) == 0
    assert hinted.index.audience(0).holder is None


@pytest.mark.parametrize("over", [{"priority": 0}, {"ttl_s": 0}])
def test_a_hint_can_be_taken_back(over: dict[str, Any]) -> None:
    hinted = Hinted(LRU())
    hinted.put("a")
    hinted.put("b")
    assert hinted.retain("a")
    assert not hinted.retain("a", **over)
    assert hinted.names(["a", "b"], 2) == "ab"


def test_the_table_of_hints_is_bounded_and_keeps_the_heaviest() -> None:
    hinted = Hinted(LRU(), blocks=4)
    assert hinted.retain("ab", priority=50)
    assert hinted.retain("cd", priority=10)
    assert hinted.retain("ef", priority=20)
    assert not hinted.retain("gh", priority=5)
    assert not hinted.retain("abcdefg", priority=100)
    live = [groups[0].keys.tolist() for groups, _, _ in hinted.hints.live()]
    assert live == []  # the last one was heavier than all others, and too long
    assert hinted.hints.blocks == len(hinted.hints._tree) == 0


def test_hinting_again_and_again_leaves_nothing_behind() -> None:
    hinted = Hinted(LRU())
    for number in range(500):
        hinted.retain("abc", priority=1 + number % 100, ttl_s=50.0)
        hinted.retain(f"x{number % 7}", steps=number)
        hinted.now += 0.01
    assert len(hinted.hints) == 8
    assert len(hinted.hints._ends) + len(hinted.hints._least) <= 4 * 8 + 200
    for prompt in ("abc", *(f"x{number}" for number in range(7))):
        hinted.retain(prompt, priority=0)
    assert not hinted.hints._ends
    assert not len(hinted.hints._tree)


def test_windows_hold_the_blocks_that_a_match_needs() -> None:
    world = World(12, 0, "never", "lru")
    path = (0, 1, 2, 0)
    world.plan_put(path, [0, 1, 2, 3], [0, 1, 2, 3])
    world.launch_put(0)
    world.drain()
    world.ledger.hints.retain(groups_of(path), world.now)
    assert len(world.index.victims(0, 1)) == 1  # asking is when it is settled who is held
    held = np.flatnonzero(world.ledger.hints.holds["host"]._held)
    kept = {tuple(key) for key in world.index.keys(held.astype(np.uint32)).tolist()}
    full, near, nearer = groups_of(path)
    wanted = [*full.keys.tolist(), *near.keys[-2:].tolist(), *nearer.keys[-3:].tolist()]
    # 9 blocks, of which a share of 6 is held: those nearest to the start of a prompt first
    assert len(kept) == 6
    assert kept <= {tuple(key) for key in wanted}


def test_a_tree_of_hints_shares_what_prompts_share() -> None:
    tree = HintTree()
    tree.add([1, 2, 3, 4], 5)
    tree.add([1, 2, 9], 7)
    tree.add([1], 3)
    assert tree.weights([1, 2, 3, 4]).tolist() == [7, 7, 5, 5]
    assert [tree.weight(key) for key in (9, 8)] == [7, 0]
    tree.take([1, 2, 9], 7)
    assert tree.weights([1, 2, 3, 4]).tolist() == [5, 5, 5, 5]
    tree.take([1, 2, 3, 4], 5)
    assert tree.weights([1, 2, 3, 4]).tolist() == [3, 0, 0, 0]
    tree.take([1], 3)
    assert len(tree) == 0


def test_taking_back_what_was_never_hinted_weighs_nothing() -> None:
    tree = HintTree()
    tree.add([1, 2, 3], 5)
    assert tree.weights([1, 2, 9]).tolist() == [5, 5, 0]
    assert tree.weights([1, 2]).tolist() == [5, 5]
    hinted = Hinted(LRU())
    hinted.put("abx")
    hinted.retain("abc")
    assert not hinted.retain("abx", ttl_s=0)
    assert hinted.hints.holds["host"].hinted == 2


def test_steps_evicts_variable_suffixes_first_then_the_farthest() -> None:
    hinted = Hinted(Steps(), capacity=16)
    hinted.put("old")
    for prompt, steps in (("a", 5), ("b", 1), ("c", 3)):
        hinted.retain(prompt, steps=steps)
        hinted.put(prompt)
    hinted.put("bx")  # continues a hinted prefix
    hinted.put("n")
    prompts = ["o", "ol", "old", "a", "b", "c", "bx", "n"]
    assert hinted.names(prompts, 8) == "xdlonacb"
    hinted.index.touch(hinted.index.find(hinted.keys("bx")), hinted.now + 1)  # used again
    assert hinted.names(prompts, 8) == "dlonxacb"
