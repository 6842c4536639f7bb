"""How bytes get from the data files into the arena and back: one small interface, two engines.

`Engine.transfer` moves the blocks of `Moves` and tells, per block, bytes moved or -errno.
`RingEngine` does it with io_uring, `ThreadEngine` with a few threads; `choose` tries what this
machine and these directories can do. `register` tells the kernel about the arena once, so that it
need not pin the pages of every I/O.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import aiofiles.os
import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.backends.disk.format import pointer
from flexkv.backends.disk.settings import DiskSettings
from flexkv.errors import StorageError
from flexkv.model import PAGE_BYTES, SlotIds

if TYPE_CHECKING:
    from flexkv.completion import Completions
    from flexkv.memory import Arena

_RUN_BYTES = 4 << 20  # neighbours in a file go out in one call, up to this much
_RUN_BLOCKS = 512  # below IOV_MAX

Vectored = Callable[[int, Sequence[memoryview], int], int]  # os.preadv, os.pwritev


@dataclass(frozen=True, slots=True)
class Moves:
    """Blocks to move: `size_bytes` each, between file fds[i] at offsets[i] and arena slot
    host_slots[i].
    """

    write: bool
    fds: NDArray[np.int32]
    offsets: NDArray[np.uint64]
    host_slots: SlotIds
    size_bytes: int

    def __len__(self) -> int:
        return len(self.fds)


class Engine(Protocol):
    """Moves blocks; never raises for an I/O error."""

    name: ClassVar[str]

    async def transfer(self, moves: Moves) -> NDArray[np.int32]:
        """Move the blocks; per block the bytes moved (too few: the file ends) or -errno."""
        ...

    async def aclose(self) -> None:
        """Wait for what is in flight and stop."""
        ...


class RingEngine:
    """io_uring: a batch is queued by one C call and finished by one ticket."""

    name: ClassVar[str] = "io_uring"

    def __init__(
        self, completions: Completions, arena: Arena, settings: DiskSettings, buffered: bool
    ) -> None:
        ring = lib.fx_ring_open(completions.hub, settings.queue_depth, settings.in_flight_bytes)
        if ring == ffi.NULL:
            raise StorageError(f"io_uring cannot be opened: {os.strerror(ffi.errno)}")
        self._ring = ring
        self._completions = completions
        self._arena = arena
        # Without O_DIRECT the kernel would copy while we submit: leave that to its own threads.
        self._mode = 2 if buffered else 0

    async def start(self, registers: bool) -> str:
        """Register the arena, if that is wanted and can be had, and begin to take work; say what
        became of it.
        """
        told = "buffers are not registered: "
        if not registers:
            told += "asked for"
        elif os.fstat(self._arena.fd).st_blocks * 512 < self._arena.size_bytes:
            told += "the host tier is not prefaulted, and registering would take all of it now"
        else:
            try:  # 0.05 s/GiB: not on the loop
                error = await anyio.to_thread.run_sync(
                    self._register, limiter=anyio.CapacityLimiter(1)
                )
            except BaseException:  # cancelled: nobody else knows the ring yet
                lib.fx_ring_close(self._ring)
                raise
            told = "buffers are registered" if not error else told + _explain_register(error)
        self._completions.attach(self._ring)
        return told

    def _register(self) -> int:
        return lib.fx_ring_register(self._ring, self._arena.base, self._arena.size_bytes)

    async def transfer(self, moves: Moves) -> NDArray[np.int32]:
        """Move the blocks; see `Engine`."""
        count = len(moves)
        results = np.zeros(count, np.int32)
        addresses = moves.host_slots.astype(np.uint64)
        addresses *= np.uint64(self._arena.stride_bytes)
        addresses += np.uint64(self._arena.base)
        lengths = np.full(count, moves.size_bytes, np.uint32)
        ticket = self._completions.ticket(keep=(results, self._arena))
        queued = lib.fx_ring_queue(
            self._ring,
            self._mode | moves.write,
            count,
            pointer("int32_t", moves.fds),
            pointer("uint64_t", moves.offsets),
            pointer("uint64_t", addresses),
            pointer("uint32_t", lengths),
            pointer("int32_t", results),
            ticket.number,
        )
        if queued < 0:
            results[:] = queued
            self._completions.fail(ticket, -queued)
        else:
            self._completions.request_flush()
        await ticket
        return results

    async def aclose(self) -> None:
        """Wait for what is in flight and give the ring back."""
        if self._ring == ffi.NULL:
            return
        ring, self._ring = self._ring, ffi.NULL
        self._completions.detach(ring)
        await anyio.to_thread.run_sync(
            lib.fx_ring_close, ring, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )


class ThreadEngine:
    """preadv and pwritev in a few threads, for machines and file systems without io_uring or
    O_DIRECT.

    `read` and `write` are the system calls; tests put shorter ones there.
    """

    name: ClassVar[str] = "threads"

    def __init__(
        self,
        arena: Arena,
        threads: int,
        *,
        read: Vectored = os.preadv,
        write: Vectored = os.pwritev,
    ) -> None:
        self._arena = arena
        self._threads = threads
        self._calls: tuple[Vectored, Vectored] = (read, write)
        self._pool = ThreadPoolExecutor(threads, "flexkv-disk")
        self._in_thread = aiofiles.os.wrap(self._move_runs)

    async def transfer(self, moves: Moves) -> NDArray[np.int32]:
        """Move the blocks; see `Engine`."""
        results = np.zeros(len(moves), np.int32)
        runs = _runs(moves)
        shares = min(self._threads, len(runs))
        if shares == 1:
            await self._in_thread(moves, runs, results, executor=self._pool)
            return results

        async def share(number: int) -> None:
            await self._in_thread(moves, runs[number::shares], results, executor=self._pool)

        async with anyio.create_task_group() as group:
            for number in range(shares):
                group.start_soon(share, number)
        return results

    async def aclose(self) -> None:
        """Wait for what is in flight and end the threads."""
        await anyio.to_thread.run_sync(
            self._pool.shutdown, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )

    def _move_runs(
        self, moves: Moves, runs: list[NDArray[np.intp]], results: NDArray[np.int32]
    ) -> None:
        for run in runs:
            self._move_run(moves, run, results)

    def _move_run(self, moves: Moves, run: NDArray[np.intp], results: NDArray[np.int32]) -> None:
        size = moves.size_bytes
        views = [memoryview(self._arena.view(int(moves.host_slots[i])).data)[:size] for i in run]
        call = self._calls[moves.write]
        moved, error = _move_all(call, int(moves.fds[run[0]]), views, int(moves.offsets[run[0]]))
        whole = moved // size
        results[run[:whole]] = size
        if whole == len(run):
            return
        if len(run) > 1:  # one bad block must not take its neighbours along
            for i in run[whole:]:
                self._move_run(moves, run[run == i], results)
            return
        results[run[0]] = error or moved


def _runs(moves: Moves) -> list[NDArray[np.intp]]:
    """Positions of the blocks, cut into runs that follow each other in one file."""
    order = np.lexsort((moves.offsets, moves.fds))
    fds, offsets = moves.fds[order], moves.offsets[order]
    joined = (np.diff(fds) == 0) & (np.diff(offsets) == moves.size_bytes)
    most = max(1, min(_RUN_BLOCKS, _RUN_BYTES // moves.size_bytes))
    runs: list[NDArray[np.intp]] = []
    for run in np.split(order, np.flatnonzero(~joined) + 1):
        runs += [run[start : start + most] for start in range(0, len(run), most)]
    return runs


def _move_all(call: Vectored, fd: int, views: list[memoryview], offset: int) -> tuple[int, int]:
    """Move all of `views`, continuing short calls; bytes moved, and -errno if an error ended it.

    O_DIRECT takes whole pages only, so a call that stopped within a page is continued at the
    page's start.
    """
    total = sum(map(len, views))
    moved = 0
    while moved < total:
        try:
            count = call(fd, _after(views, moved), offset + moved)
        except OSError as error:
            return moved, -(error.errno or errno.EIO)
        reached = moved + count
        if reached >= total:
            return reached, 0
        if reached // PAGE_BYTES * PAGE_BYTES <= moved:
            return reached, 0
        moved = reached // PAGE_BYTES * PAGE_BYTES
    return moved, 0


def _after(views: list[memoryview], skip: int) -> list[memoryview]:
    left = []
    for view in views:
        if skip < len(view):
            left.append(view[skip:])
        skip = max(0, skip - len(view))
    return left


async def choose(
    settings: DiskSettings, buffered: str, completions: Completions, arena: Arena
) -> tuple[Engine, str]:
    """Open the engine that `settings.engine` asks for, or the best one; and say why it is that
    one.

    `buffered` says why O_DIRECT is out of reach ("" when it works): then submitting to io_uring
    would copy bytes on the event loop.

    Raises:
        StorageError: io_uring was asked for by name and cannot be had.
    """
    if settings.engine == "threads":
        return ThreadEngine(arena, settings.threads), "asked for"
    failure = lib.fx_ring_probe()
    if failure == 0 and (not buffered or settings.engine == "io_uring"):
        try:
            ring = RingEngine(completions, arena, settings, bool(buffered))
        except StorageError:
            if settings.engine == "io_uring":
                raise
            failure = -ffi.errno
        else:
            told = await ring.start(settings.register_buffers == "auto")
            return ring, f"{buffered or 'available'}; {told}"
    reason = explain_ring(failure) if failure else f"{buffered}, and io_uring would block without"
    if settings.engine == "io_uring":
        raise StorageError(f'{reason}. Set engine="auto" to use threads instead')
    return ThreadEngine(arena, settings.threads), reason


def explain_ring(failure: int) -> str:
    """Say why io_uring cannot be used, from what `fx_ring_probe` returned, and what may help."""
    if not lib.fx_ring_built():
        return "io_uring was left out of this build (install liburing-dev and rebuild)"
    hint = {
        errno.EPERM: "a container's seccomp profile or kernel.io_uring_disabled forbids it",
        errno.ENOSYS: "the kernel has none",
        errno.ENOMEM: "raise the locked-memory limit (ulimit -l)",
    }.get(-failure, "see io_uring_setup(2)")
    return f"io_uring cannot be used: {os.strerror(-failure)} ({hint})"


def _explain_register(failure: int) -> str:
    if failure == -errno.ENOMEM:
        return "raise the locked-memory limit (ulimit -l) above the size of the host tier"
    return os.strerror(-failure)
