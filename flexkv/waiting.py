"""Waiting that costs next to nothing while nobody waits.

`Signal` (happens again and again; `flexkv.completion.Latch` is what happens once) - `Deadlines`
(many items, one timer) - `in_time` (a wait that ends with an error).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import anyio

from flexkv.completion import Completions, Latch
from flexkv.errors import StalledError

Item = TypeVar("Item")


class Signal:
    """Something that happens many times; those who wait see the next time."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next: Latch | None = None

    def raise_(self) -> None:
        """Wake everybody who waits now."""
        latch, self._next = self._next, None
        if latch is not None:
            latch.set()

    async def wait(self) -> None:
        """Wait for the next raise."""
        if self._next is None:
            self._next = Latch()
        await self._next.wait()


class Deadlines(Generic[Item]):
    """Calls `expire(item)` for every item that is still there after `delay_s` seconds.

    All items have the same delay, so one timer for the oldest is enough.
    """

    def __init__(
        self, completions: Completions, delay_s: float, expire: Callable[[Item], None]
    ) -> None:
        self._completions, self._delay_s, self._expire = completions, delay_s, expire
        self._items: dict[Item, float] = {}  # in the order of their deadlines
        self._timer: Any = None

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        """Start the time of an item."""
        self._items[item] = self._completions.now() + self._delay_s
        if self._timer is None:
            self._timer = self._completions.call_later(self._delay_s, self._sweep)

    def remove(self, item: Item) -> None:
        """Forget an item, if it is there."""
        self._items.pop(item, None)

    def items(self) -> list[Item]:
        """Return the items, the oldest first."""
        return list(self._items)

    def clear(self) -> None:
        """Forget all items and stop the timer."""
        self._items.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        while self._items:
            item, deadline = next(iter(self._items.items()))
            left_s = deadline - self._completions.now()
            if left_s > 0:
                self._timer = self._completions.call_later(left_s, self._sweep)
                return
            del self._items[item]
            self._expire(item)


@contextmanager
def in_time(limit_ms: float, what: str) -> Iterator[None]:
    """Bound what is awaited inside; math.inf: it may take for ever.

    Raises:
        StalledError: the time is over; `what` says what is still under way.
    """
    with anyio.move_on_after(limit_ms / 1e3) as scope:
        yield
    if scope.cancelled_caught:
        raise StalledError(
            f"{what} after {limit_ms:g} ms: hardware is slow or does not answer. The work goes on; "
            "wait again, or raise settle_timeout_ms"
        )
