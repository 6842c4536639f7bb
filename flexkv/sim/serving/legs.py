"""How long batches take between two places: `Cost`, `Wire`, `Leg`, `Lane`.

A batch of a `Leg` occupies its `Wire` for the bytes and arrives after the whole cost: batches share
the bytes per second, and their latencies overlap. Two legs on one wire (reads and writes of a disk)
share it. A `Lane` bounds the bytes in flight, as the engine's lanes do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from flexkv.sim.serving.tasks import Happening, Tasks


class Cost(NamedTuple):
    """Seconds of one batch: `occupied_s` nobody else can use the wire, `total_s` until it is there
    (not less).
    """

    occupied_s: float
    total_s: float


CostOf = Callable[[int], Cost]  # of so many blocks
FREE = Cost(0.0, 0.0)


def free(blocks: int) -> Cost:
    """Cost nothing: for runs that only count."""
    return FREE


class Wire:
    """What batches share: the bytes per second."""

    __slots__ = ("free_at_s",)

    def __init__(self) -> None:
        self.free_at_s = 0.0


class Leg:
    """One direction of one backend; `blocks` it has moved, `busy_s` it has occupied its wire."""

    __slots__ = ("_cost", "_known", "_tasks", "blocks", "busy_s", "wire")

    def __init__(self, tasks: Tasks, wire: Wire, cost: CostOf) -> None:
        self._tasks, self.wire, self._cost = tasks, wire, cost
        self._known: dict[int, Cost] = {}  # by blocks: most batches are a chunk
        self.blocks = 0
        self.busy_s = 0.0

    def move(self, blocks: int) -> Happening:
        """Send a batch now; return its arrival."""
        cost, wire = self._known.get(blocks), self.wire
        if cost is None:
            cost = self._known[blocks] = self._cost(blocks)
        self.blocks += blocks
        now_s = self._tasks.clock.now_s
        start_s = max(now_s, wire.free_at_s)
        wire.free_at_s = start_s + cost.occupied_s
        self.busy_s += cost.occupied_s
        return self._tasks.after(start_s - now_s + cost.total_s)


class Lane:
    """A limit of units in flight; those who wait are served by priority, then in their order."""

    def __init__(self, tasks: Tasks, limit: int) -> None:
        self._tasks, self.limit = tasks, max(1, limit)
        self._free = self.limit
        self._waiting: list[tuple[int, int, int, Happening]] = []
        self._arrivals = 0

    def acquire(self, size: int, priority: int) -> Happening | None:
        """Take min(size, limit) units at once (None), or return the moment when they are taken."""
        size = min(size, self.limit)
        if not self._waiting and size <= self._free:
            self._free -= size
            return None
        turn = Happening()
        self._arrivals += 1
        heapq.heappush(self._waiting, (priority, self._arrivals, size, turn))
        return turn

    def release(self, size: int) -> None:
        """Give back what `acquire` took of `size`."""
        self._free += min(size, self.limit)
        while self._waiting and self._waiting[0][2] <= self._free:
            _, _, size, turn = heapq.heappop(self._waiting)
            self._free -= size
            self._tasks.happen(turn)
