"""hazard: what it keeps, its books, its safeguard, and the door by which it sees prompts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hazard_rig import Replay, chats
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import open_rig, prompt, slots_of

from flexkv.errors import ConfigError, InputError
from flexkv.groups import GroupKeys
from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK
from flexkv.policies.hazard import Hazard
from flexkv.testing.harness import PolicyHarness
from flexkv.testing.policy import EvictionPolicyTests
from flexkv.traces.model import block_keys


class TestConformance(EvictionPolicyTests):
    """All that any policy must do."""

    @pytest.fixture
    def harness(self) -> PolicyHarness:
        return PolicyHarness(Hazard)


@pytest.mark.parametrize("capacity", [40, 80])
def test_what_is_learned_beats_lru(capacity: int) -> None:
    """Conversations return, documents between them do not: LRU keeps both alike."""
    lru, hazard = Replay(capacity, "lru"), Replay(capacity)
    for now, ids in chats(1, 1500):
        lru.serve(now, ids)
        hazard.serve(now, ids)
    assert hazard.policy.state["following"] == "learned"
    assert hazard.hits > 1.1 * lru.hits


def test_the_lru_beside_is_lru() -> None:
    lru, hazard = Replay(60, "lru"), Replay(60)
    for now, ids in chats(2, 1000):
        lru.serve(now, ids)
        hazard.serve(now, ids)
        assert hazard.policy.state["lru_hits"] == lru.hits


def test_while_it_has_learned_nothing_it_is_lru() -> None:
    lru, hazard = Replay(60, "lru"), Replay(60)
    for now, ids in itertools.islice(chats(3, 300), 290):
        lru.serve(now, ids)
        assert hazard.serve(now, ids).bypassed == 0
        assert hazard.hits == lru.hits


def test_the_tier_holds_what_the_model_holds() -> None:
    """Once the learned order is followed, hits of the tier are those of the model."""
    hazard = Replay(60)
    counted = []
    for now, ids in chats(4, 2000):
        before = hazard.policy.state
        hits = hazard.hits
        hazard.serve(now, ids)
        after = hazard.policy.state
        if before["following"] == after["following"] == "learned":
            counted.append((hazard.hits - hits, after["hits"] - before["hits"]))
    assert len(counted) > 1000
    assert all(tier == model for tier, model in counted)


@pytest.mark.parametrize("seed", range(2))
def test_a_learner_that_is_wrong_costs_little(seed: int) -> None:
    lru, hazard = Replay(60, "lru"), Replay(60, hazard_sabotage=True)
    for now, ids in chats(seed, 2000):
        lru.serve(now, ids)
        hazard.serve(now, ids)
    learned = hazard.policy.state["hits"]
    assert learned < 0.9 * lru.hits, "the sabotage does nothing"
    assert lru.hits - hazard.hits <= 0.005 * lru.asked


def test_the_same_calls_have_the_same_answers() -> None:
    one, other = Replay(60), Replay(60)
    for now, ids in chats(5, 800):
        assert one.serve(now, ids).blocks.tolist() == other.serve(now, ids).blocks.tolist()
    assert one.policy.state == other.policy.state


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    capacity=st.integers(1, 70),
    sabotage=st.booleans(),
    scans=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_books_balance(seed: int, capacity: int, sabotage: bool, scans: float) -> None:
    """Prefix-closed, no more than its capacity, at most four times as many ghosts, runs that agree
    with their blocks, an LRU that agrees with itself: all in the check.
    """
    chance = np.random.default_rng(seed)
    replay = Replay(capacity, hazard_sabotage=sabotage)
    planner, ledger = replay.brain.planner, replay.brain.ledger
    for step, (now, ids) in enumerate(chats(seed, 380, scans=scans)):
        deed = chance.integers(12)
        groups = [GroupKeys(block_keys(np.array(ids[:capacity], np.int64)))]
        if deed == 0:
            planner.cancel_put(planner.plan_put(groups, now))  # its bytes never come
        elif deed == 1:
            ledger.remove(groups[0])
        else:
            replay.serve(now, ids, read=deed < 5)
        state = replay.policy.state
        assert state["used"] <= capacity
        assert state["ghosts"] <= 4 * capacity
        if step % 20 == 0:
            replay.check()
    ledger.forget_everything()
    replay.check()
    assert replay.policy.state["entries"] == 0


def test_a_get_and_the_put_that_follows_are_one_use() -> None:
    """Its blocks are used as often as with the put alone."""
    alone, both = Replay(40), Replay(40)
    for now, ids in chats(6, 200):
        alone.serve(now, ids)
        both.serve(now, ids, read=True)
    for replay in (alone, both):
        replay.check()
    index = alone.brain.index
    for block in index.readable(0).tolist():
        keys = index.keys(np.array([block], np.uint32))
        other = int(both.brain.index.find(block_keys(np.array([0], np.int64)))[0])
        if keys.tolist() != both.brain.index.keys(np.array([other], np.uint32)).tolist():
            continue
        one, two = alone.policy.explain(block, 1e4), both.policy.explain(other, 1e4)
        assert one is not None
        assert two is not None
        assert one.uses == two.uses > 10


def test_it_says_why() -> None:
    replay = Replay(60)
    for now, ids in chats(7, 1500):
        replay.serve(now, ids)
    blocks = replay.brain.index.readable(0)
    reasons = [replay.policy.explain(int(block), now + 5.0) for block in blocks]
    assert all(reason is not None and reason.age_s >= 5.0 for reason in reasons)
    assert any("a continuation" in str(reason) for reason in reasons)
    assert replay.policy.explain(NO_BLOCK, now) is None


def test_prompts_of_models_with_windows_are_not_shown() -> None:
    replay = Replay(40)
    keys = block_keys(np.arange(4))
    plan = replay.brain.planner.plan_put([GroupKeys(keys, window=2)], 1.0)
    assert len(plan.blocks) == 4
    assert replay.policy.state["prompts"] == 0


def test_an_impossible_capacity_is_refused() -> None:
    index = PrefixIndex(8, ["host"])
    with pytest.raises(ConfigError, match="use lru"):
        index.set_policy(0, Hazard(), capacity_blocks=1 << 28)


async def test_a_put_tells_the_length_of_its_answer() -> None:
    async with open_rig(eviction_policy="hazard") as rig:
        tokens = prompt(1, 5)
        await rig.kv.put_async(tokens, slots_of(range(5)), output_tokens=63)
        policy = rig.kv._stack.index.audience(0).policy
        assert isinstance(policy, Hazard)
        assert "answer level 3" in str(policy.explain(0, 1e9))
        with pytest.raises(InputError, match="output_tokens"):
            rig.kv.put_match(tokens, output_tokens=-1)


class Picky(Hazard):
    """Wants two blocks of every prompt."""

    def prompt(self, *prompt: Any) -> int:
        super().prompt(*prompt)
        return 2


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexkv.policies.hazard.Hazard", Picky)


@pytest.mark.usefixtures("picky")
async def test_refused_blocks_are_told_and_nothing_waits_for_them() -> None:
    async with open_rig(eviction_policy="hazard") as rig:
        transfer = rig.start_put(prompt(1, 5))
        result = await transfer
        assert (result.stored, result.new, result.bypassed_blocks) == (8, 8, 3)
        assert (await transfer.durable()).stored == 8
        assert (await rig.get(prompt(1, 5))).loaded == 8
        assert rig.kv.telemetry.value("bypassed_blocks") == 3
        again = await rig.start_put(prompt(1, 5))
        assert (again.stored, again.new, again.bypassed_blocks) == (8, 0, 3)


@pytest.mark.usefixtures("picky")
async def test_what_any_tier_wants_is_stored(tmp_path: Path) -> None:
    """The disk keeps its own counsel: what only it wants passes through the host."""
    async with open_rig(tmp_path, host_policy="hazard", disk_policy="lru") as rig:
        result = await rig.start_put(prompt(1, 5))
        assert result.bypassed_blocks == 0


async def test_it_survives_a_restart_a_reset_and_pressure(tmp_path: Path) -> None:
    for _ in range(2):
        async with open_rig(tmp_path, eviction_policy="hazard") as rig:
            for name in range(1, 30):
                await rig.put(prompt(name % 7, 1 + name % 5))
                await rig.get(prompt(name % 7, 5))
    async with open_rig(tmp_path, eviction_policy="hazard") as rig:
        await rig.put(prompt(3, 4))
        await rig.kv.reset()
        assert (await rig.get(prompt(3, 4))).loaded == 0
        await rig.put(prompt(3, 4))
        assert (await rig.get(prompt(3, 4))).loaded == 16
