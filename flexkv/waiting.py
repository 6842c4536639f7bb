"""Waiting that costs next to nothing while nobody waits.

`Latch` (happens once) - `Signal` (happens again and again) - `Deadlines` (many items, one
timer). anyio.Event does the same as a Latch, but costs a microsecond to make: too much for what
every request has several of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

if TYPE_CHECKING:
    from flexkv.completion import Completions

Item = TypeVar("Item")


class Latch:
    """Something that happens once."""

    __slots__ = ("_event", "_set")

    def __init__(self) -> None:
        self._set = False
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Say that it has happened."""
        self._set = True
        if self._event is not None:
            self._event.set()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    async def wait(self) -> None:
        """Wait until it has happened; return at once when it has."""
        if not self._set:
            if self._event is None:
                self._event = anyio.Event()
            await self._event.wait()


class Signal:
    """Something that happens many times; those who wait see the next time."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def raise_(self) -> None:
        """Wake everybody who waits now."""
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        """Wait for the next raise."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


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
