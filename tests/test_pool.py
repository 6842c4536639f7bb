"""Slot pools: nothing is handed out twice, neighbours stay together, the books balance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flexkv.errors import CapacityError
from flexkv.pool import SlotPool


class PoolMachine(RuleBasedStateMachine):
    """The pool against a set."""

    @initialize(capacity=st.sampled_from([0, 1, 5, 63, 64, 65, 130, 200]))
    def open(self, capacity: int) -> None:
        self.pool, self.out = SlotPool(capacity), set[int]()

    @rule(count=st.integers(0, 80))
    def take(self, count: int) -> None:
        runs = self.free_runs()
        if count > sum(runs):
            with pytest.raises(CapacityError):
                self.pool.take(count)
            return
        slots = self.pool.take(count).tolist()
        assert len(set(slots)) == count
        assert not self.out & set(slots)
        if count and max(runs) >= 2 * count:  # a run that is surely long enough is not torn up
            assert slots == list(range(slots[0], slots[0] + count))
        self.out |= set(slots)

    @rule(data=st.data(), shuffled=st.booleans())
    def give(self, data: st.DataObject, shuffled: bool) -> None:
        slots = [slot for slot in sorted(self.out) if data.draw(st.booleans())]
        slots = (
            data.draw(st.permutations(slots))
            if shuffled
            else slots[:: data.draw(st.sampled_from([1, -1]))]
        )
        self.pool.give(np.array(slots, np.uint32))
        self.out -= set(slots)

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.integers(0, self.pool.capacity + 1), max_size=10))
        good = len(set(wanted)) == len(wanted) and not set(wanted) & self.out
        if good and all(slot < self.pool.capacity for slot in wanted):
            self.pool.reserve(np.array(wanted, np.uint32))
            self.out |= set(wanted)
        else:
            with pytest.raises(AssertionError):
                self.pool.reserve(np.array(wanted, np.uint32))

    def free_runs(self) -> list[int]:
        lengths, run = [0], 0
        for slot in range(self.pool.capacity):
            run = 0 if slot in self.out else run + 1
            lengths.append(run)
        return [n for n, after in zip(lengths, [*lengths[1:], 0], strict=True) if n and not after]

    @invariant()
    def balances(self) -> None:
        self.pool.check_integrity()
        assert self.pool.used == len(self.out)
        assert self.pool.used + self.pool.free == self.pool.capacity


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("slots", [[3, 3], [5], [8], [2, 9]])
def test_what_is_not_out_cannot_be_given_back(slots: list[int]) -> None:
    pool = SlotPool(8)
    pool.take(5)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(np.array(slots, np.uint32))
    pool.check_integrity()


def test_a_refused_take_changes_nothing() -> None:
    pool = SlotPool(8)
    pool.take(5)
    with pytest.raises(CapacityError, match="4 slots are wanted, 3 of 8 are free"):
        pool.take(4)
    assert pool.free == 3
    assert len(pool.take(3)) == 3


def test_neighbours_join_whatever_the_order_of_return() -> None:
    pool = SlotPool(300)
    slots = pool.take(300)
    pool.give(slots[::2])
    pool.give(slots[1::2])
    assert pool.take(300).tolist() == list(range(300))


def test_scattered_slots_come_in_few_runs() -> None:
    pool = SlotPool(100)
    pool.take(100)
    pool.give(np.r_[0:10, 20:50, 60:65].astype(np.uint32))
    slots = pool.take(38).tolist()
    assert slots[:30] == list(range(20, 50))  # the longest run first
    assert np.count_nonzero(np.diff(slots) != 1) == 1
