"""The virtual clock fires in order, and the books find what does not add up."""

from __future__ import annotations

import pytest

from flexkv.errors import ConservationError, SimulationError
from flexkv.sim import conservation
from flexkv.sim.clock import VirtualClock


def test_events_fire_by_time_and_then_in_the_order_of_their_calls() -> None:
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, lambda: seen.append("second"))
    assert clock.run() == 2.0
    assert seen == ["first", "second", "late"]


def test_an_event_may_schedule_others_and_a_cancelled_one_stays_away() -> None:
    clock, seen = VirtualClock(), []
    clock.at(1.0, lambda: clock.after(0.5, lambda: seen.append(clock.now_s)) and None)
    clock.cancel(clock.at(1.2, lambda: seen.append(-1.0)))
    assert clock.run(until_s=3.0) == 3.0
    assert seen == [1.5]


def test_the_past_and_waiting_for_nothing_are_refused() -> None:
    clock = VirtualClock()
    clock.run(until_s=5.0)
    with pytest.raises(SimulationError, match=r"4\.0 s cannot be scheduled at 5\.0 s"):
        clock.at(4.0, lambda: None)
    with pytest.raises(SimulationError, match="nothing is scheduled"):
        clock.run_while(lambda: True)


GOOD = {
    "exposed_s": 1.0,
    "hidden_s": 2.0,
    "busy_s": 3.0,
    "by_tier": {"hbm": 10.0, "ssd": 5.0},
    "moved_bytes": 15.0,
    "resident": {"hbm": 4.0},
    "capacity": {"hbm": 4.0},
    "counts": {"hits": 0.0},
}


def test_books_that_balance_pass() -> None:
    conservation.check_run(**GOOD)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"exposed_s": 1.1}, "busy for"),
        ({"moved_bytes": 16.0}, "16.0 were moved"),
        ({"resident": {"hbm": 4.1}}, "its capacity is 4.0"),
        ({"resident": {"moon": 1.0}}, "'moon'"),
        ({"counts": {"hits": -1.0}}, "hits is -1.0"),
        ({"hidden_s": float("nan")}, "hidden_s is nan"),
    ],
)
def test_books_that_do_not_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(ConservationError, match=match):
        conservation.check_run(**{**GOOD, **change})  # type: ignore[arg-type]
