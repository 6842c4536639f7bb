"""Completions: hardware work <-> awaitables, through one eventfd and the only `add_reader` we have.

`Completions.ticket` takes a ticket that C code, the kernel or a device completes; `await ticket`
says what became of it - `fail` (work that could not be queued) - `attach`, `detach`,
`request_flush`, `request_drain` (io_uring rings) - `now`, `call_later` - `aclose`, `close_now`.
`Latch` (something that happens once): what tasks wait for each other with.

Awaiting a ticket is only listening: cancelling an awaiter releases neither the ticket nor what it
keeps alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from flexkv._core import ffi, lib
from flexkv.errors import CapacityError, ClosedError, FlexKVError, InputError

if TYPE_CHECKING:
    from flexkv._core import CData

_DRAIN = 256  # finished tickets per C call
_FLUSH_EVERY, _FLUSH_RETRY_S = 8, 0.005  # batches; a refused one (no kernel memory) wakes nobody
# What hardware may still write to although its hub is gone: nobody can say when freeing it is safe.
_abandoned: list[object] = []


class Done(NamedTuple):
    """What became of a ticket: parts that failed, and the errno of the first failure (or 0)."""

    failed: int
    error: int


class Ticket:
    """One batch of hardware work: `number` is for C functions, `address` for hardware callbacks.
    Any number of tasks may await it, before or after it completes; each gets the same `Done`.
    """

    __slots__ = ("_done", "_loop", "_waiters", "address", "number", "parts")

    def __init__(self, number: int, parts: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.parts = parts
        self.address: CData = ffi.cast("void *", number)
        self._loop = loop
        self._done: Done | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> Done | None:
        """The outcome, or None while parts are out."""
        return self._done

    def __await__(self) -> Generator[asyncio.Future[None], None, Done]:
        if self._done is None:
            # One future per awaiter: cancelling a task cancels the future that it waits for.
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                yield from waiter
            finally:
                if self._done is None:
                    self._waiters.remove(waiter)
        assert self._done is not None
        return self._done

    def _settle(self, done: Done) -> None:
        self._done = done
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Latch:
    """Something that happens once.

    anyio.Event does the same, but costs 4 us to make, wait for and set, where a request has several
    of them; this costs 1 us, and next to nothing while nobody waits.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
        """Say that it has happened."""
        self._set = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    async def wait(self) -> None:
        """Wait until it has happened; return at once when it has."""
        if self._set:
            return
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if self._waiters is not None:
                self._waiters.remove(waiter)


class Completions:
    """Tickets of one event loop. Make it inside the running loop, use it from that thread.

    `hub` (fx_hub*) and `crew` are C objects that backends pass on to C. `wakeups` counts how often
    the loop was told that something finished.

    Args:
        tickets: how many may be out at once (up to 2**20).
        crew_threads: worker threads for copies and checksums; default: the usable cores, at most 4.
        crew_queue: batches that may wait for a worker thread.
    """

    def __init__(
        self, *, tickets: int = 4096, crew_threads: int | None = None, crew_queue: int = 4096
    ) -> None:
        if crew_threads is None:
            crew_threads = max(1, min(4, len(os.sched_getaffinity(0))))
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self.hub: CData = lib.fx_hub_open(tickets)
        if self.hub == ffi.NULL:
            raise _os_error(f"cannot make a hub of {tickets} tickets")
        self._crew, self._crew_size = ffi.NULL, (crew_threads, crew_queue)
        self.wakeups = 0
        self._tickets = tickets
        self._open: dict[int, tuple[Ticket, object]] = {}
        self._rings: list[CData] = []
        self._done = ffi.new("fx_done[]", _DRAIN)
        self._flush_wanted = False
        self._unflushed = 0
        self._closing = self._closed = False
        self._idle = asyncio.Event()
        self._fd = lib.fx_hub_fd(self.hub)
        self._loop.add_reader(self._fd, self._ready)

    @property
    def crew(self) -> CData:
        """The crew (fx_crew*). Its threads start with the first work, or FlexKVError."""
        if self._crew == ffi.NULL and not self._closed:
            self._crew = lib.fx_crew_open(*self._crew_size)
            if self._crew == ffi.NULL:
                raise _os_error("cannot start {} threads for {} jobs".format(*self._crew_size))
        return self._crew

    # --- tickets

    def ticket(self, parts: int = 1, *, keep: object = None) -> Ticket:
        """Take a ticket that `parts` completions will finish; hold `keep` until the last of them.

        `keep` is everything the work reads or writes (arrays, buffers): it lives until the ticket
        completes, whatever happens to those who await it.

        Raises:
            CapacityError: all tickets are out; nothing was taken.
            InputError: `parts` is not between 1 and 16,383.
            ClosedError: `aclose` or `close_now` was called.
        """
        self._check_thread()
        if self._closing:
            raise ClosedError("completions are closed: no ticket can be taken")
        number = lib.fx_ticket_take(self.hub, parts) if parts > 0 else 0
        if number == 0:
            if not 0 < parts <= lib.fx_hub_max_parts():
                raise InputError(
                    f"a ticket has 1 to {lib.fx_hub_max_parts()} parts, not {parts}: a batch each"
                )
            raise CapacityError(f"all {self._tickets} tickets are in flight; raise `tickets`")
        ticket = Ticket(number, parts, self._loop)
        self._open[number] = (ticket, keep)
        self._idle.clear()
        return ticket

    def fail(self, ticket: Ticket, error: int, parts: int | None = None) -> None:
        """Complete `parts` parts (default: all) as failed: for work that could not be queued.

        `error` is an errno, of either sign.
        """
        for _ in range(ticket.parts if parts is None else parts):
            lib.fx_fail(ticket.address, abs(error))

    @property
    def in_flight(self) -> int:
        """Tickets that are out."""
        return len(self._open)

    @property
    def stale(self) -> int:
        """Late or duplicate completions that were ignored: 0 unless a backend has a bug."""
        return 0 if self._closed else lib.fx_hub_stale(self.hub)

    def now(self) -> float:
        """The loop's time in seconds."""
        return self._loop.time()

    def call_later(
        self, delay_s: float, callback: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        """Call back on the loop after `delay_s` seconds; the handle has `cancel()`."""
        return self._loop.call_later(delay_s, callback, *arguments)

    # --- rings

    def attach(self, ring: CData) -> None:
        """Reap this fx_ring whenever the loop is woken, from now on."""
        self._check_thread()
        if ring not in self._rings:
            self._rings.append(ring)

    def detach(self, ring: CData) -> None:
        """Forget this fx_ring. Its owner closes it: `fx_ring_close` waits for what is in flight."""
        self._check_thread()
        if ring in self._rings:
            self._rings.remove(ring)
            self.request_drain()

    def request_flush(self) -> None:
        """Submit what the attached rings have queued: once, at the end of this loop tick, or when
        many have asked, so that a device does not wait for a long tick.
        """
        self._unflushed += 1
        if self._unflushed >= _FLUSH_EVERY:
            self._flush()
        elif not self._flush_wanted:
            self._flush_wanted = True
            self._loop.call_soon(self._flush)

    def request_drain(self) -> None:
        """Look for finished tickets at the end of this loop tick, as if the loop had been woken."""
        if not self._closed:
            self._loop.call_soon(self._drain)

    def _flush(self) -> None:
        self._flush_wanted = False
        self._unflushed = 0
        for ring in self._rings:
            if lib.fx_ring_submit(ring) < 0 and not self._flush_wanted:
                self._flush_wanted = True
                self._loop.call_later(_FLUSH_RETRY_S, self._flush)

    # --- the one reader

    def _ready(self) -> None:
        self.wakeups += 1
        self._drain()

    def _drain(self) -> None:
        if self._closed:
            return
        # The signal (it may be spurious) before the work: what finishes from here on signals again.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        for ring in self._rings:
            lib.fx_ring_reap(ring)
        finished = self._done
        while count := lib.fx_hub_drain(self.hub, finished, _DRAIN):
            for i in range(count):
                entry = finished[i]
                ticket, _ = self._open.pop(entry.ticket)
                ticket._settle(Done(entry.failed, entry.error))
        if not self._open:
            self._idle.set()

    # --- the end

    async def aclose(self, timeout_ms: int = 10_000) -> int:
        """Wait for the tickets that are out, then close crew and hub. Calling it twice is fine.

        Owners of rings close them first. Returns how many tickets did not come back in time: their
        awaiters get ETIMEDOUT, and what they keep is never freed, because hardware may still write
        to it.
        """
        self._check_thread()
        self._closing = True
        if self._open:
            with contextlib.suppress(TimeoutError):  # then the number of lost tickets is returned
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._idle.wait()
        return self._close()

    def close_now(self, timeout_ms: int = 10_000) -> int:
        """Do what `aclose` does, but block: for a loop that ends, or ended, without `aclose`."""
        self._closing = True
        if self._closed:
            return 0
        deadline = time.monotonic() + timeout_ms / 1000
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        for ring in self._rings:
            lib.fx_ring_submit(ring)
        self._drain()
        while self._open and (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            self._drain()
        return self._close()

    def _close(self) -> int:
        if self._closed:
            return 0
        self._closed = True
        if not self._loop.is_closed():
            # before the fd is closed: its number is given to someone else at once
            self._loop.remove_reader(self._fd)
        self._rings.clear()
        stayed_out = list(self._open.values())
        self._open.clear()
        _abandoned.extend(keep for _, keep in stayed_out if keep is not None)
        if self._crew != ffi.NULL:  # a thread may be stuck in the work of a lost ticket
            (lib.fx_crew_leave if stayed_out else lib.fx_crew_close)(self._crew)
        lib.fx_hub_close(self.hub, 0)
        if not self._loop.is_closed():
            for ticket, _ in stayed_out:
                ticket._settle(Done(ticket.parts, errno.ETIMEDOUT))
        return len(stayed_out)

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise FlexKVError(
                "completions belong to the thread of their event loop; "
                "from other threads use flexkv.sync.BlockingKVManager"
            )


def _os_error(what: str) -> FlexKVError:
    code = int(ffi.errno)
    return FlexKVError(f"{what}: {os.strerror(code)} (errno {code})")
