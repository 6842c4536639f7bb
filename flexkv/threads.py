"""How another thread gets at what the loop thread works with, without waking it.

`SharedSelector` (the loop's selector: other threads are let in between two things that it does).
"""

from __future__ import annotations

import selectors
import threading


class SharedSelector(selectors.DefaultSelector):
    """The loop's selector. The loop thread holds `lock` except here: who holds it instead has the
    manager to himself. `turn` is taken first, so that nobody is overtaken by the loop thread again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.turn = threading.Lock(), threading.Lock()
        self.asleep = False  # the loop waits, and has made up its mind for how long

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events with the lock released; let in who waits for it."""
        if timeout is not None and timeout <= 0 and not self.turn.locked():
            return super().select(timeout)
        self.asleep = timeout is None or timeout > 0
        self.lock.release()
        try:
            return super().select(timeout)
        finally:
            with self.turn:
                self.lock.acquire()
            self.asleep = False
