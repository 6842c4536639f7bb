"""How a scheduler's thread gets at what the loop thread works with, and soon.

`SharedSelector` (the loop's selector: other threads are let in between two things that it does) -
`haste` (a context in which the interpreter comes back sooner).
"""

from __future__ import annotations

import selectors
import sys
import threading

_HASTE_S = 1e-4


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


class Haste:
    """While a scheduler is in here, other threads have to give the interpreter back after 100 us
    instead of 5 ms: it loses it at every C function, and what it asks for takes less than that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(_HASTE_S)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._usual)


haste = Haste()  # of the process, as the interval is
