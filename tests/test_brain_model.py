"""Index, pool, ledger and planner against labels: whatever the order of puts, gets, completions,
failures, evictions and restarts, nothing wrong is ever matched or moved, and the books balance.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model import DISK, World, groups_of, keys_of

from flexkv.errors import CapacityError
from flexkv.groups import GroupKeys
from flexkv.ledger import SpillMode
from flexkv.model import HOST, IOStatus

POLICIES = ["lru", "lfu", "slru", "fifo", "mru", "filo", "steps", "hazard"]
held = st.sets(st.integers(0, 5), max_size=6).map(lambda gone: set(range(6)) - gone)
paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
statuses = st.sampled_from([IOStatus.LANDED] * 6 + list(IOStatus))
outcomes = st.one_of(st.just([IOStatus.LANDED] * 8), st.lists(statuses, min_size=1, max_size=8))


class Brain(RuleBasedStateMachine):
    """Everything that a manager and its engine may do to the brain, in any order."""

    failing = True

    @initialize(
        host=st.integers(2, 8),
        disk=st.integers(0, 12),
        spill=st.sampled_from(["through", "on_evict", "never"]),
        policy=st.sampled_from(POLICIES),
    )
    def open(self, host: int, disk: int, spill: SpillMode, policy: str) -> None:
        self.world = World(host, disk, spill, policy)

    @rule(path=paths)
    def plan_put(self, path: tuple[int, ...]) -> None:
        try:
            self.world.plan_put(path)
        except CapacityError:
            self.world.check()

    @rule(path=paths, near=held, nearer=held)
    def plan_put_of_groups(self, path: tuple[int, ...], near: set[int], nearer: set[int]) -> None:
        try:
            parts = [sorted(n for n in some if n < len(path)) for some in (near, nearer)]
            self.world.plan_put(path, *parts)
        except CapacityError:
            self.world.check()

    @rule(path=paths, priority=st.sampled_from([0, 1, 100]), steps=st.sampled_from([None, 0, 3]))
    def retain(self, path: tuple[int, ...], priority: int, steps: int | None) -> None:
        hints, hint = self.world.ledger.hints, {"priority": priority, "ttl_s": 20.0}
        hints.retain(groups_of(path), self.world.now, steps=steps, **hint)

    @rule(path=paths, first=st.integers(0, 3))
    def get_groups(self, path: tuple[int, ...], first: int) -> None:
        self.world.get_groups(groups_of(path), first)

    @rule(path=paths)
    def remove_window(self, path: tuple[int, ...]) -> None:
        self.world.ledger.remove(groups_of(path)[1])

    @precondition(lambda self: self.world.puts)
    @rule(data=st.data())
    def launch_put(self, data: st.DataObject) -> None:
        self.world.launch_put(data.draw(st.integers(0, len(self.world.puts) - 1)))

    @precondition(lambda self: self.world.puts and self.failing)
    @rule(data=st.data())
    def cancel_put(self, data: st.DataObject) -> None:
        self.world.cancel_put(data.draw(st.integers(0, len(self.world.puts) - 1)))

    @rule(path=paths, prefetch=st.booleans())
    def get(self, path: tuple[int, ...], prefetch: bool) -> None:
        self.world.get(path, prefetch=prefetch)

    @precondition(lambda self: self.world.startable())
    @rule(data=st.data(), outcome=outcomes)
    def complete(self, data: st.DataObject, outcome: list[int]) -> None:
        op = data.draw(st.sampled_from(self.world.startable()))
        if not self.failing:
            outcome = [IOStatus.LANDED] * len(outcome)
        self.world.step(op, outcome)

    @precondition(lambda self: self.world.startable())
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        op = data.draw(st.sampled_from(self.world.startable()))
        if op.began is None:
            self.world.begin(op)

    @precondition(lambda self: self.world.runs and self.failing)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.world.runs)).cancelled = True

    @rule()
    def spill(self) -> None:
        self.world.spill()

    @rule()
    def drop_spills(self) -> None:
        if self.failing:
            del self.world.ledger.spills[:1]

    @rule()
    def discard(self) -> None:
        self.world.discard()

    @rule(tier=st.sampled_from([HOST, DISK]), count=st.integers(1, 3))
    def evict(self, tier: str, count: int) -> None:
        if tier in self.world.tiers and self.world.spill_mode != "on_evict":
            place = self.world.tiers[tier]
            victims = self.world.index.victims(place.number, count)
            keys = self.world.index.keys(victims)
            self.world.ledger.vacate(place, place.evict(victims), keys)

    @rule(path=paths)
    def remove(self, path: tuple[int, ...]) -> None:
        self.world.ledger.remove(GroupKeys(keys_of(path)))

    @precondition(lambda self: DISK in self.world.tiers and self.failing)
    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(path=paths)
    def drain_and_put(self, path: tuple[int, ...]) -> None:
        while self.world.puts:
            self.world.launch_put(0)
        self.world.drain()
        assert self.world.index.pinned == 0
        if len(path) <= self.world.capacities[HOST]:
            self.world.put_always_fits(path)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


class BrainWithoutFailures(Brain):
    """The same with a body that never fails: then ancestors outlive descendants."""

    failing = False


_settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestBrain = Brain.TestCase
TestBrain.settings = _settings
TestBrainWithoutFailures = BrainWithoutFailures.TestCase
TestBrainWithoutFailures.settings = _settings
