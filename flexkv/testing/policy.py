"""What every eviction policy must do; `EvictionPolicyTests` is the whole set.

Subclass it in a test module and return a `PolicyHarness` from the fixture `harness`. Policies are
asked directly, not through the index, which would forgive them.
"""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from flexkv.protocols import API_VERSION, EvictionPolicy
from flexkv.testing.children import in_child
from flexkv.testing.guard import KitTests, require
from flexkv.testing.harness import Origin, PolicyHarness
from flexkv.testing.policy_story import CAPACITY, VICTIMS, Story

INSERTED = "EvictionPolicy.inserted"
REMOVED = "EvictionPolicy.removed"
OPEN = "EvictionPolicy.open"

_SPARE_BYTES = 64 << 10


class EvictionPolicyTests(KitTests):
    """All that an eviction policy must do. Override `harness`."""

    @pytest.fixture
    def harness(self) -> PolicyHarness:
        """What is tested: override this."""
        raise NotImplementedError("override the fixture `harness`: return a PolicyHarness")

    @pytest.fixture
    def seed(self, request: pytest.FixtureRequest) -> int:
        """Of `--flexkv-seed`; printed when a test fails."""
        seed: int = request.config.getoption("--flexkv-seed")
        request.node.add_report_section("setup", "flexkv", f"--flexkv-seed {seed}")
        return seed

    def test_it_has_the_verbs_of_the_door(self, harness: PolicyHarness) -> None:
        policy = harness.make()
        require(
            isinstance(policy, EvictionPolicy) and policy.flexkv_api == API_VERSION,
            "EvictionPolicy",
            f"{policy!r} must have flexkv_api = {API_VERSION} and every verb of EvictionPolicy",
        )

    def test_settings_of_other_policies_are_no_error(self, harness: PolicyHarness) -> None:
        try:
            Story(harness, 0, settings={"no_such_setting": 1})
        except Exception as error:
            what = f"a policy is opened with the settings of all policies, but raised {error!r}"
            require(False, OPEN, what)

    @pytest.mark.parametrize("part", range(4))
    def test_victims_are_resident_leaves_that_nobody_pins(
        self, harness: PolicyHarness, seed: int, part: int
    ) -> None:
        """Random stories of put, hit, pin, drop and evict; every answer is checked, unvetoed."""
        for number in range(5):
            Story(harness, 1000 * seed + 10 * part + number).tell(200)

    def test_something_leaves_as_long_as_something_can(
        self, harness: PolicyHarness, seed: int
    ) -> None:
        for count in (1, 3, CAPACITY):
            story = Story(harness, seed)
            story.tell(100)
            story.unpin_all()
            while story.resident:
                gone = story.evict(count)
                require(len(gone), VICTIMS, f"{len(story.resident)} blocks could leave, none does")

    def test_asking_without_evicting_uses_nothing_up(
        self, harness: PolicyHarness, seed: int
    ) -> None:
        """A put that finds no room asks, and then evicts nothing."""
        story = Story(harness, seed)
        story.tell(100)
        for count in (1, 4, CAPACITY, 1, 2, CAPACITY):
            story.ask(count)
        require(not len(story.ask(0)), VICTIMS, "0 victims were asked for")

    def test_nothing_leaves_while_everything_is_pinned(
        self, harness: PolicyHarness, seed: int
    ) -> None:
        story = Story(harness, seed)
        story.tell(100)
        story.pin_all()
        for count in (1, CAPACITY):
            story.ask(count)
        story.unpin_all()
        require(len(story.ask(1)), VICTIMS, "blocks were unpinned, but none can leave")

    @pytest.mark.parametrize("order", ["prompt order", "leaves first"])
    def test_blocks_are_removed_in_any_order_and_come_back(
        self, harness: PolicyHarness, seed: int, order: str
    ) -> None:
        story = Story(harness, seed)
        for _ in range(20):
            chain = story.put(None, 6)
            story.hit(chain)
            story.drop(chain[3:] if order == "prompt order" else chain[:2:-1])
            story.hit(chain[:3])
            story.ask(CAPACITY)
            story.drop(chain[:3] if order == "prompt order" else chain[2::-1])
            require(not len(story.ask(CAPACITY)), REMOVED, "blocks that were removed could leave")

    def test_empty_batches_are_nothing(self, harness: PolicyHarness) -> None:
        story, none = Story(harness, 0), np.empty(0, np.uint32)
        story.put(None, 3)
        story.policy.inserted(none, story.now)
        story.policy.touched(none, story.now)
        story.policy.removed(none)
        require(len(story.ask(1)) == 1, VICTIMS, "one of three blocks could leave, none does")

    def test_an_empty_tier_has_no_victims(self, harness: PolicyHarness) -> None:
        story = Story(harness, 0)
        require(not len(story.ask(5)), VICTIMS, "the tier is empty, but something is to leave")

    def test_time_may_stand_still_or_jump(self, harness: PolicyHarness, seed: int) -> None:
        for step in (0.0, 1e-9, 1e9):
            Story(harness, seed, step=step).tell(60)

    def test_two_tiers_do_not_know_of_each_other(self, harness: PolicyHarness, seed: int) -> None:
        one, other = Story(harness, seed), Story(harness, seed + 1)
        other.put(None, 6)
        before = other.ask(6).tolist()
        one.tell(60)
        after = other.ask(6).tolist()
        what = "what happened in one tier changed the victims of another: keep state in `self`"
        require(before == after, OPEN, what)

    def test_the_same_calls_have_the_same_answers(
        self, harness: PolicyHarness, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In this process and in others: no clock, no chance, no order of hashes."""
        told = _tell(harness.origin, seed)
        require(
            told == _tell(harness.origin, seed),
            VICTIMS,
            "the same story told twice had other victims: a policy has no clock and no randomness "
            "but from a fixed seed",
        )
        monkeypatch.setenv("PYTHONHASHSEED", "1")
        require(
            told == in_child(_tell, harness.origin, seed),
            VICTIMS,
            "the same story had other victims in another process: the order of a set of strings, "
            "or of ids, decides",
        )

    def test_what_it_remembers_is_bounded(self, harness: PolicyHarness, seed: int) -> None:
        story = Story(harness, seed)
        story.tell(600)  # ghosts and tables fill up
        before = _allocated_by(story, 0)
        grown = _allocated_by(story, 2000) - before
        require(
            grown < _SPARE_BYTES,
            INSERTED,
            f"2,000 further steps on {CAPACITY} blocks left {grown} more bytes in use: what a "
            "policy remembers is bounded by context.max_blocks",
        )

    def test_a_ranked_policy_leaves_the_order_to_the_index(
        self, harness: PolicyHarness, seed: int
    ) -> None:
        if not getattr(harness.make(), "ranked", False):
            pytest.skip("the policy does not say `ranked = True`")
        story = Story(harness, seed)
        for _ in range(20):
            story.tell(10)
            for count in (1, 5, CAPACITY):
                same = story.ask(count).tolist() == story.index.order(0).take(count).tolist()
                what = "`ranked` promises that victims is what context.order.take says; it is not"
                require(same, VICTIMS, what)


def _tell(origin: Origin, seed: int) -> list[list[int]]:
    return Story(origin.make(), seed).tell(150)


def _allocated_by(story: Story, steps: int) -> int:
    """Bytes in use after some more steps, counted from when counting began."""
    if not steps:
        gc.collect()
        tracemalloc.start()
        return 0
    try:
        story.tell(steps, keep=False)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
