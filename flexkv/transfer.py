"""Handles: what the manager's calls return, to listen to and to steer.

`Plan` (a match that holds its blocks until launched or cancelled) - `Transfer` (work under way;
awaiting it is only listening), `refused` (one that has failed) - `GetResult`, `PutResult`. A
transfer belongs to the manager, never to its caller: cancelling or timing out a listener touches no
byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from flexkv.completion import Latch
from flexkv.model import BlockIds, KeyArray, SlotIds
from flexkv.planned import PutPlan
from flexkv.waiting import in_time

Kind = Literal["get", "put", "prefetch"]


@dataclass(frozen=True, slots=True)
class GetResult:
    """What a get (or prefetch) brought.

    `loaded` tokens are the longest run, from the first token asked for, whose bytes truly landed
    and verified. `by_tier` counts matched blocks by the tier they were to come from.
    `failed_device_blocks` are the device blocks that were asked for and must not be read.
    `exposed_ms` is the part of `elapsed_ms` during which somebody was waiting for the transfer; the
    rest was hidden behind other work. `declined_blocks` were there and were left to be computed,
    because that is sooner; `matched` and `by_tier` are without them.
    """

    loaded: int
    matched: int
    by_tier: dict[str, int] = field(default_factory=dict)
    size_bytes: int = 0
    elapsed_ms: float = 0.0
    exposed_ms: float = 0.0
    failed_device_blocks: SlotIds = field(default_factory=lambda: np.empty(0, np.uint32))
    cancelled: bool = False
    timed_out: bool = False
    declined_blocks: int = 0

    @property
    def hidden_ms(self) -> float:
        """The part of `elapsed_ms` during which nobody was waiting."""
        return self.elapsed_ms - self.exposed_ms


@dataclass(frozen=True, slots=True)
class PutResult:
    """What a put stored: the first `stored` tokens are readable in host memory, `new` tokens came
    from this put; `stored` is short of the prompt when another put of the same blocks failed, and
    by the `bypassed_blocks` that the eviction policy refused.

    When it is there, the engine may reuse its device slots. Times as in GetResult.
    """

    stored: int
    new: int
    size_bytes: int = 0
    elapsed_ms: float = 0.0
    exposed_ms: float = 0.0
    cancelled: bool = False
    bypassed_blocks: int = 0

    @property
    def hidden_ms(self) -> float:
        """The part of `elapsed_ms` during which nobody was waiting."""
        return self.elapsed_ms - self.exposed_ms


class Plan:
    """A match: its blocks cannot be evicted until it is launched, cancelled, or its time is over.

    `matched` counts the tokens, from `offset` on, that a launch will bring (get) or take (put).
    `parts` says how many tokens of each group of layers that takes; those of a get end where it
    ends. Most models have one group. `reach` counts the tokens from the first one on that are there
    but for windows. `declined_blocks` are there, too, but computed sooner than fetched. `tag` is
    for the device backend, which finds it with every copy; the ranks backend knows some.
    """

    __slots__ = (
        "_cancel",
        "blocks",
        "declined_blocks",
        "keys",
        "kind",
        "matched",
        "offset",
        "open",
        "parts",
        "put",
        "reach",
        "tag",
    )

    def __init__(
        self,
        kind: Kind,
        *,
        offset: int,
        matched: int,
        blocks: BlockIds,
        keys: KeyArray,
        parts: tuple[int, ...],
        reach: int,
        put: PutPlan | None = None,
        declined_blocks: int = 0,
        cancel: Callable[[Plan], None],
    ) -> None:
        self.kind, self.offset, self.matched = kind, offset, matched
        self.blocks, self.keys, self.parts, self.put = blocks, keys, parts, put
        self.reach, self.declined_blocks = reach, declined_blocks
        self.open = True
        self.tag: Any = None
        self._cancel = cancel

    def cancel(self) -> None:
        """Give everything back. Safe at any time and any number of times; after a launch it does
        nothing.
        """
        self._cancel(self)

    def __repr__(self) -> str:
        state = "open" if self.open else "closed"
        return f"<Plan {self.kind} offset={self.offset} matched={self.matched} {state}>"


class Transfer:
    """A get, put or prefetch under way. Await it for its result, as often and from as many tasks as
    you like.
    """

    __slots__ = (
        "_cancel",
        "_clock",
        "_durable",
        "_error",
        "_first_listened",
        "_limit_ms",
        "_quiet",
        "_result",
        "_settled",
        "blocks",
        "finished",
        "keys",
        "kind",
        "matched",
        "started",
    )

    def __init__(
        self,
        kind: Kind,
        matched: int,
        *,
        blocks: BlockIds,
        keys: KeyArray,
        clock: Callable[[], float],
        cancel: Callable[[Transfer], None],
        durable: Callable[[Transfer], Awaitable[None]],
        limit_ms: float,
    ) -> None:
        self.kind, self.matched, self.blocks, self.keys = kind, matched, blocks, keys
        self._limit_ms = limit_ms
        self.started = clock()
        self.finished = 0.0
        self._clock, self._cancel, self._durable = clock, cancel, durable
        self._settled = Latch()
        self._quiet = Latch()
        self._result: Any = None
        self._error: BaseException | None = None
        self._first_listened: float | None = None

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._settled.is_set()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._listen().__await__()

    async def _listen(self) -> Any:
        if not self._settled.is_set():
            if self._first_listened is None:
                self._first_listened = self._clock()
            await self._settled.wait()
        return self.result()

    def result(self) -> Any:
        """Return the GetResult or PutResult, or raise what the transfer failed with.

        Raises:
            RuntimeError: the transfer is not done yet.
        """
        if not self._settled.is_set():
            raise RuntimeError(f"{self!r} is not done; await it, or ask `done` first")
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def outcome(self) -> str:
        """How it ended, for counters: ok, partial, failed, cancelled, timeout, or running."""
        if not self._settled.is_set():
            return "running"
        if self._error is not None:
            return "failed"
        if self._result.cancelled:
            return "cancelled"
        if isinstance(self._result, GetResult):
            if self._result.timed_out:
                return "timeout"
            return "ok" if self._result.loaded == self._result.matched else "partial"
        return "ok"

    async def settled(self) -> None:
        """Wait until the result is there, without raising what it holds."""
        if self._first_listened is None:
            self._first_listened = self._clock()
        await self._settled.wait()

    async def quiesced(self, timeout_ms: float | None = None) -> None:
        """Wait until no byte can land in, or be read from, the device any more: its slots may be
        reused.

        Args:
            timeout_ms: None stands for the configured `settle_timeout_ms`, math.inf for no limit.

        Raises:
            StalledError: the time is over, and its slots may not be reused yet.
        """
        if self._quiet.is_set():
            return
        limit_ms = self._limit_ms if timeout_ms is None else timeout_ms
        with in_time(limit_ms, f"the slots of {self!r} are still in use"):
            await self._quiet.wait()

    async def durable(self) -> PutResult:
        """Wait until every block of a put has reached the lowest tier that is configured.

        Raises:
            TransferError: some blocks did not reach it (dropped under load, I/O error, no room).
            StalledError: they are still on their way after `settle_timeout_ms`.
        """
        result = await self
        with in_time(self._limit_ms, f"{self!r} has not reached the lowest tier"):
            await self._durable(self)
        assert isinstance(result, PutResult)
        return result

    def cancel(self) -> None:
        """Drop the work that has not started. What has started runs to its end (milliseconds), then
        the handle is done, with `cancelled` true in its result.
        """
        self._cancel(self)

    def elapsed(self) -> tuple[float, float]:
        """(elapsed, exposed) in milliseconds up to the result."""
        elapsed = self.finished - self.started
        exposed = 0.0 if self._first_listened is None else self.finished - self._first_listened
        return elapsed * 1e3, max(0.0, exposed) * 1e3

    def settle(self, make_result: Callable[[float, float], Any]) -> None:
        """Set the result once (manager only): `make_result(elapsed_ms, exposed_ms)`."""
        if self._settled.is_set():
            return
        self.finished = self._clock()
        self._result = make_result(*self.elapsed())
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """Settle with an error (manager only)."""
        if not self._settled.is_set():
            self.finished = self._clock()
            self._error = error
            self._settled.set()

    def quiesce(self) -> None:
        """Say that nothing of this transfer is in flight any more (manager only)."""
        self._quiet.set()

    def __repr__(self) -> str:
        state = "done" if self.done else "running"
        return f"<Transfer {self.kind} matched={self.matched} {state}>"


def refused(kind: Kind, error: Exception, clock: Callable[[], float]) -> Transfer:
    """Return a transfer that has failed with `error` before it moved anything."""
    transfer = Transfer(
        kind,
        0,
        blocks=np.empty(0, np.uint32),
        keys=np.empty((0, 2), np.uint64),
        clock=clock,
        cancel=lambda _: None,
        durable=_fail_first,
        limit_ms=0,
    )
    transfer.fail(error)
    transfer.quiesce()
    return transfer


async def _fail_first(transfer: Transfer) -> None:
    raise AssertionError(f"{transfer!r} has failed: nobody asks how durable it is")
