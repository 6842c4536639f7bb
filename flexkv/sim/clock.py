"""The virtual clock: at, after, step, run, cancel.

Events fire in order of (time, order of scheduling), so the same calls give the same run. Nothing
here knows the wall clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from flexkv.errors import SimulationError

Action = Callable[[], None]


class Event:
    """A call that is due at `when_s`; cancel it with `VirtualClock.cancel`."""

    __slots__ = ("action", "when_s")

    def __init__(self, when_s: float, action: Action) -> None:
        self.when_s = when_s
        self.action: Action | None = action


class VirtualClock:
    """Seconds that pass only when the next event is taken."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._order = 0

    def at(self, when_s: float, action: Action) -> Event:
        """Call `action` at `when_s` (seconds, not before now)."""
        if not when_s >= self.now_s or math.isinf(when_s):
            raise SimulationError(
                f"an event at {when_s} s cannot be scheduled at {self.now_s} s; give a finite time"
                " that is not in the past"
            )
        event = Event(when_s, action)
        heapq.heappush(self._heap, (when_s, self._order, event))
        self._order += 1
        return event

    def after(self, delay_s: float, action: Action) -> Event:
        """Call `action` in `delay_s` seconds."""
        return self.at(self.now_s + delay_s, action)

    def cancel(self, event: Event) -> None:
        """Forget an event; harmless when it has fired."""
        event.action = None

    def step(self) -> bool:
        """Take the next event; False when there is none."""
        while self._heap:
            when_s, _, event = heapq.heappop(self._heap)
            if event.action is not None:
                action, event.action = event.action, None
                self.now_s = when_s
                action()
                return True
        return False

    def run(self, until_s: float = math.inf) -> float:
        """Take all events up to `until_s`; return the time then (the last event's if infinite)."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            when_s, _, event = heapq.heappop(heap)
            if event.action is not None:
                action, event.action = event.action, None
                self.now_s = when_s
                action()
        if not math.isinf(until_s):
            self.now_s = max(self.now_s, until_s)
        return self.now_s

    def run_while(self, busy: Callable[[], bool]) -> float:
        """Take events while `busy()`; an empty queue that is still busy is an error."""
        while busy():
            if not self.step():
                raise SimulationError("nothing is scheduled, yet something is waited for")
        return self.now_s
