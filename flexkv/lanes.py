"""Bounded queues: bytes in flight in one direction of one backend, and the staging slots of the
engine.

`Lane.acquire` (wait for a share of the limit), `Lane.release`, `Staging.borrow`. Fair within a
priority, all or nothing: nobody holds a part while waiting for the rest.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import numpy as np

from flexkv.completion import Latch
from flexkv.model import SlotIds
from flexkv.pool import SlotPool


class Lane:
    """A limit shared by everyone who acquires; a request above the limit waits until it has the
    lane alone.
    """

    __slots__ = ("_arrivals", "_free", "_waiting", "limit", "name")

    def __init__(self, name: str, limit: int) -> None:
        self.name, self.limit = name, max(1, limit)
        self._free = self.limit
        self._waiting: list[tuple[int, int, int, Latch]] = []
        self._arrivals = count()

    @property
    def in_flight(self) -> int:
        """Units taken and not yet released."""
        return self.limit - self._free

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def acquire(self, size: int, priority: int = 0) -> int:
        """Take `size` units, waiting behind requests of the same or a lower priority number;
        returns units taken.
        """
        size = min(size, self.limit)
        if not self._waiting and size <= self._free:
            self._free -= size
            return size
        turn = Latch()
        entry = (priority, next(self._arrivals), size, turn)
        heapq.heappush(self._waiting, entry)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # it had come: pass it on
                self.release(size)
            else:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
                self._grant()
            raise
        return size

    def release(self, size: int) -> None:
        """Return what `acquire` took."""
        self._free += size
        assert self._free <= self.limit, f"lane {self.name} released more than it held"
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][2] <= self._free:
            _, _, size, turn = heapq.heappop(self._waiting)
            self._free -= size
            turn.set()


class Staging:
    """Arena slots behind the host tier, for blocks that pass through the host without staying."""

    def __init__(self, slots: int, first_slot: int) -> None:
        self.capacity = slots
        self._pool, self._first = SlotPool(slots), np.uint32(first_slot)
        self._lane = Lane("staging", slots)

    @asynccontextmanager
    async def borrow(self, count: int, priority: int) -> AsyncIterator[SlotIds]:
        """Wait for `count` slots (at most the capacity), all at once; give them back at the end."""
        held = await self._lane.acquire(count, priority)
        slots = self._pool.take(held)
        try:
            yield slots + self._first
        finally:
            self._pool.give(slots)
            self._lane.release(held)
