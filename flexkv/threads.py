"""How another thread gets at what the loop thread works with, without waking it.

`SharedSelector` (the loop's selector: other threads are let in between two things that it does,
and leave calls with it) - `Answer` (what a call on another thread comes to).
"""

from __future__ import annotations

import ctypes
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

# Keeps the interpreter's lock: os.write and call_soon_threadsafe let it go, and a thread that
# computes then has it for milliseconds.
_ring = ctypes.PyDLL(None).eventfd_write
_ring.argtypes = [ctypes.c_int, ctypes.c_uint64]


class SharedSelector(selectors.DefaultSelector):
    """The loop's selector. The loop thread holds `lock` except here: who holds it instead has the
    manager to himself. `turn` is taken first, so that nobody is overtaken by the loop thread again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.turn = threading.Lock(), threading.Lock()
        self.asleep = False  # the loop waits, and has made up its mind for how long
        self._left: deque[Callable[[], object]] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.register(self._bell, selectors.EVENT_READ)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events with the lock released; let in who waits for it."""
        if timeout is not None and timeout <= 0 and not self.turn.locked():
            return self._unrung(super().select(timeout))
        self.asleep = timeout is None or timeout > 0
        self.lock.release()
        try:
            events = super().select(timeout)
        finally:
            with self.turn:
                self.lock.acquire()
            self.asleep = False
        return self._unrung(events)

    def _unrung(
        self, events: list[tuple[selectors.SelectorKey, int]]
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Make the calls that were left, if the bell rang; the loop does not know of it."""
        for position, (key, _) in enumerate(events):
            if key.fd == self._bell:
                os.eventfd_read(self._bell)
                while self._left:
                    self._left.popleft()()
                return events[:position] + events[position + 1 :]
        return events

    def wake(self) -> None:
        """Have the loop look at its timers again. For other threads, while the loop is open."""
        _ring(self._bell, 1)

    def leave(self, call: Callable[[], object]) -> None:
        """Have a call, which must not raise, made on the loop thread soon. See `wake`."""
        self._left.append(call)
        self.wake()

    def close(self) -> None:
        """Close the selector, and the bell with it."""
        super().close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def enter(self, timeout_s: float = -1) -> None:
        """Take the lock of a loop that others run; `lock.release` gives it back.

        Raises:
            TimeoutError: the loop thread did not come by in time (below 0: it is waited for).
        """
        if self.turn.acquire(timeout=timeout_s):
            try:
                if self.lock.acquire(timeout=timeout_s):
                    return
            finally:
                self.turn.release()
        raise TimeoutError(f"the manager's loop was busy for {timeout_s} s")


class Answer(Generic[_T]):
    """What a call on another thread comes to; a bare lock, as every call has to pass it."""

    __slots__ = ("_error", "_ready", "_value")

    def __init__(self) -> None:
        self._ready = threading.Lock()
        self._ready.acquire()
        self._value: Any = None
        self._error: BaseException | None = None

    async def work_out(
        self, verb: Callable[..., _T], arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        try:
            self._value = verb(*arguments, **keywords)
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        finally:
            self._ready.release()

    def wait(self) -> _T:
        self._ready.acquire()
        if self._error is not None:
            raise self._error
        value: _T = self._value
        return value
