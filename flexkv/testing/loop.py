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
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, TypeVar, cast

from anyio._backends._asyncio import CancelScope

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
        self._number = loop.next_number()  # first: making a task puts it into a set
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
        self._numbers = 0
        super().__init__(self._clock)
        self.set_task_factory(lambda loop, coroutine, **more: _Task(coroutine, loop=loop, **more))

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._clock.now

    @property
    def turns(self) -> int:
        """How often the loop has turned."""
        return self._clock.turns

    def next_number(self) -> int:
        """A number for something that was made on this loop: 1, 2, 3, ..."""
        self._numbers += 1
        return self._numbers

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
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
        while left := sorted(asyncio.all_tasks(self), key=hash):
            # anyio wraps coroutines: the wrapper of a task that is cancelled before its first step
            # drops a coroutine that was never awaited, and Python warns of it. They begin first.
            begun = [task for task in left if _has_begun(task)]
            for task in begun:
                task.cancel()
            self.run_until_complete(asyncio.wait(begun) if begun else asyncio.sleep(0))
        self.run_until_complete(self.shutdown_asyncgens())


def _has_begun(task: asyncio.Task[Any]) -> bool:
    return getcoroutinestate(cast("Coroutine[Any, Any, Any]", task.get_coro())) != CORO_CREATED


_scope_numbers: dict[int, int] = {}  # of cancel scopes made on virtual loops, by id


def _number_scopes() -> None:
    """Make cancel scopes of virtual loops hash to their number, as tasks do: anyio keeps them in
    sets, whose order is that of their addresses otherwise. Other scopes stay as they are.
    """
    begin, usual = CancelScope.__init__, CancelScope.__hash__

    def init(self: CancelScope, *arguments: Any, **keywords: Any) -> None:
        begin(self, *arguments, **keywords)
        loop = asyncio._get_running_loop()
        if isinstance(loop, VirtualLoop):
            _scope_numbers[id(self)] = loop.next_number()
        else:
            _scope_numbers.pop(id(self), None)

    def number(self: object) -> int:
        return _scope_numbers.get(id(self)) or usual(self)

    CancelScope.__init__ = init  # type: ignore[method-assign]
    CancelScope.__hash__ = number  # type: ignore[method-assign]


_number_scopes()
