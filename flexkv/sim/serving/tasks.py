"""Tasks in virtual time: generators that wait for each other, without an event loop.

`Tasks.spawn` (run a generator up to its first wait) - `Happening` (what a task yields to wait for
it: something that happens once) - `Tasks.happen`, `Tasks.after`. Tasks that are woken at one moment
run in the order in which they were woken, as those of an event loop do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from functools import partial
from typing import TypeAlias

from flexkv.sim.clock import VirtualClock


class Happening:
    """Something that happens once."""

    __slots__ = ("over", "waiting")

    def __init__(self) -> None:
        self.over = False
        self.waiting: list[Task] = []


Task: TypeAlias = Generator[Happening, None, None]


class Tasks:
    """Generators on a virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self._ready: deque[Task] = deque()
        self._pumping = False

    def spawn(self, task: Task) -> None:
        """Run a task; those that were woken before go first."""
        self._ready.append(task)
        self._pump()

    def happen(self, happening: Happening) -> None:
        """Say that it has happened: wake those who wait for it."""
        happening.over = True
        if happening.waiting:
            self._ready.extend(happening.waiting)
            happening.waiting.clear()
            self._pump()

    def after(self, delay_s: float) -> Happening:
        """Return what happens `delay_s` seconds from now."""
        happening = Happening()
        self.clock.after(delay_s, partial(self.happen, happening))
        return happening

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._ready:
                task = self._ready.popleft()
                for awaited in task:
                    if not awaited.over:
                        awaited.waiting.append(task)
                        break
        finally:
            self._pumping = False
