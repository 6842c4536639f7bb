"""An asyncio event loop in virtual time: nothing waits, and everything happens again the same way.

`VirtualLoop` (a selector loop whose clock jumps to the next timer) - `VirtualLoop.run` (a coroutine
to its end, then whatever it left behind) - `StandstillError` (nothing can happen any more, or too
much happens). Callbacks run in the order that asyncio promises; what comes late, early or in
another order is for those who set the timers to choose.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StandstillError(Exception):
    """Somebody waits for what can never happen, or the loop turns without end."""


class _Selector(selectors.DefaultSelector):
    """Asks the system what is ready, and moves the clock where a real one would wait."""

    def __init__(self, limit_s: float, limit_turns: int, each_turn: Callable[[], None]) -> None:
        super().__init__()
        self.now = 0.0
        self.turns = 0
        self.limit_s, self.limit_turns = limit_s, limit_turns
        self.each_turn = each_turn

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        self.each_turn()
        if self.turns > self.limit_turns:
            raise StandstillError(f"the loop turned {self.turns} times, at {self.now:.4f} s")
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise StandstillError(f"at {self.now:.4f} s everybody waits and nothing will happen")
        self.now += timeout
        if self.now > self.limit_s:
            raise StandstillError(f"it is not over after {self.limit_s} s of virtual time")
        return []


class _Task(asyncio.Task[Any]):
    """A task that hashes to its number, so that a set of tasks has the same order in every run."""

    def __init__(self, coroutine: Any, *, loop: asyncio.AbstractEventLoop, **more: Any) -> None:
        assert isinstance(loop, VirtualLoop)
        loop.made_tasks += 1
        self._number = loop.made_tasks  # first: making a task puts it into a set
        super().__init__(coroutine, loop=loop, **more)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and passes only while everybody waits.

    File descriptors are real and looked at in every turn, but never waited for: whatever makes them
    ready must do so on this thread. Work for other threads is refused.

    Args:
        each_turn: called before every turn; what it raises ends `run`.
        limit_s: virtual seconds after which `run` raises StandstillError.
        limit_turns: turns after which it does.
    """

    def __init__(
        self,
        each_turn: Callable[[], None] = lambda: None,
        *,
        limit_s: float = 1e6,
        limit_turns: int = 1_000_000,
    ) -> None:
        self._clock = _Selector(limit_s, limit_turns, each_turn)
        self.made_tasks = 0
        super().__init__(self._clock)
        self.set_task_factory(
            lambda loop, coroutine, **more: _Task(coroutine, loop=loop, **more)
        )

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._clock.now

    @property
    def turns(self) -> int:
        """How often the loop has turned."""
        return self._clock.turns

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Refuse: what other threads do cannot happen again the same way.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"no threads in virtual time: {func!r} cannot be run in an executor")

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end, cancel what it left behind, close the loop.

        Raises:
            StandstillError: a limit was passed, or nobody can go on; `main` is cancelled.
            Exception: whatever `main` or `each_turn` raises.
        """
        asyncio.set_event_loop(self)
        try:
            return self.run_until_complete(main)
        finally:
            try:
                self._wind_up()
            finally:
                asyncio.set_event_loop(None)
                self.close()

    def _wind_up(self) -> None:
        """Cancel all tasks and let them end, as `asyncio.run` does; nobody looks on any more."""
        clock = self._clock
        clock.each_turn = lambda: None
        clock.limit_s, clock.limit_turns = clock.now + 1e6, clock.turns + 100_000
        left = sorted(asyncio.all_tasks(self), key=hash)
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.run_until_complete(self.shutdown_asyncgens())
