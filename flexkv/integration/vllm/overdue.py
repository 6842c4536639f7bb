"""Loads and saves whose end does not come: given up, so that the engine goes on without a manager.

`Overdue.add` - `take`. The manager has deadlines of its own; this is for one whose loop hangs, or
whose thread has gone. What is given up is withdrawn from it: no worker copies it any more, should
it be sent after all.
"""

from __future__ import annotations

import time
from collections import deque

from flexkv.integration.vllm.requests import Work


class Overdue:
    """Remembers when each load and save began; `wait_s` is how long it may take."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._open: deque[tuple[float, Work]] = deque()

    def add(self, work: Work) -> None:
        """Something has begun."""
        self._open.append((time.monotonic() + self._wait_s, work))

    def take(self) -> list[Work]:
        """Return what has to be given up now, as failed."""
        taken = []
        now = time.monotonic()
        while self._open and (self._open[0][0] < now or self._open[0][1].reported):
            _, work = self._open.popleft()
            if not work.reported:
                work.failed = tuple(work.blocks) if work.is_load else ()
                taken.append(work)
        return taken
