"""Streams of our own, what is queued in them, and who asks when nobody tells.

`Lane` (a stream of one device and direction) - `Launch` (one batch there: `queue` copies and the
host function that completes its ticket) - `Watch` (completions that do not come: after an error of
its context a device calls no host functions).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexkv._core import ffi as core_ffi
from flexkv._core import lib
from flexkv.backends.cuda.choice import Choice, CudaRegion, Shape, calls, entries
from flexkv.backends.cuda.library import NOT_READY, Cuda, CudaError, ffi
from flexkv.backends.cuda.pins import PIECE_BYTES, Scratch
from flexkv.backends.device import Job
from flexkv.completion import Completions, Ticket
from flexkv.telemetry import log

_SOON_S = 0.01
THREADS = 512  # of a thread block; as in move.cu
_NON_BLOCKING, _NO_TIMING = 1, 2
_TO_DEVICE, _TO_HOST = 1, 2

ffi.cdef(
    """
    typedef struct {
        uint64_t planes, slots, blocks, host_base, host_stride;
        uint32_t n_planes, n_blocks, to_device, segments;
    } flexkv_move;
    """
)


def _address(name: str) -> int:
    """Where a function of the C core is: what a device's own threads call, without the GIL."""
    return int(core_ffi.cast("uintptr_t", core_ffi.addressof(lib, name)))


LANDED, REFUSED = _address("fx_complete"), _address("fx_refuse")


class Lane:
    """A stream that does not wait for the default stream, and spare events."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self.cuda, self.device = cuda, device
        self._spare: list[int] = []
        self._made: list[int] = []
        stream = ffi.new("uintptr_t *")
        with cuda.on(device):
            cuda.call("cudaStreamCreateWithPriority", stream, _NON_BLOCKING, 0)
        self.stream = int(stream[0])

    def event(self) -> int:
        """An event that is not in use, on the current device."""
        if self._spare:
            return self._spare.pop()
        event = ffi.new("uintptr_t *")
        self.cuda.call("cudaEventCreateWithFlags", event, _NO_TIMING)
        self._made.append(int(event[0]))
        return self._made[-1]

    def spare(self, *events: int) -> None:
        """Have events back."""
        self._spare.extend(events)

    def close(self) -> None:
        """Destroy the stream and the events; nothing is queued any more."""
        with self.cuda.on(self.device, to_release=True):
            self.cuda.runtime.cudaStreamDestroy(self.stream)
            for event in self._made:
                self.cuda.runtime.cudaEventDestroy(event)


@dataclass(slots=True, eq=False)
class Launch:
    """One batch in a lane. `ready` is the engine's event; `done` happens after the bytes have
    landed and before the host function.

    `tried`: `queue` has returned; `queued`: all of it is in the stream; `silent`: without a host
    function.
    """

    lane: Lane
    ticket: Ticket
    ready: int
    done: int
    pieces: list[int]
    tried: bool = False
    queued: bool = False
    silent: bool = False

    def queue(self, copy: Callable[[], None]) -> None:
        """Queue what `copy` queues behind the engine's event, then one host function: the ticket
        lands or, when a call failed, fails, but not before what was queued has landed.
        """
        cuda, stream = self.lane.cuda, self.lane.stream
        function = LANDED
        try:
            cuda.call("cudaStreamWaitEvent", stream, self.ready, 0)
            copy()
            cuda.call("cudaEventRecord", self.done, stream)
            self.queued = True
        except CudaError as error:
            log.warning("cuda.copy_failed", error=str(error), device=self.lane.device)
            function = REFUSED
        try:
            cuda.call("cudaLaunchHostFunc", stream, function, self.ticket.number)
        except CudaError as error:
            log.warning("cuda.no_host_function", error=str(error), device=self.lane.device)
            self.silent = True
        self.tried = True

    def state(self) -> int:
        """0 when no byte can land any more, NOT_READY while it may, else the error of the context
        (a context that is lost does nothing any more).
        """
        runtime, lane = self.lane.cuda.runtime, self.lane
        if not self.tried:
            return NOT_READY
        try:
            with lane.cuda.on(lane.device):
                if self.queued:
                    return int(runtime.cudaEventQuery(self.done))
                return int(runtime.cudaStreamQuery(lane.stream))
        except CudaError as error:
            return error.code


class Watch:
    """Asks about launches whose completion has not come for `timeout_ms`.

    A ticket is settled when its work was found over twice in a row: in between, the host function
    had its time. Where none was queued, once is enough, and is soon.
    """

    def __init__(self, completions: Completions, timeout_ms: int) -> None:
        self._completions, self._timeout_s = completions, timeout_ms / 1000
        self._out: dict[Launch, bool] = {}  # whether its work was over when last asked
        self._next: Any = None  # the handle of `call_later`

    def add(self, launch: Launch) -> None:
        """Look after a launch."""
        self._out[launch] = False
        if launch.silent and self._next is not None:
            self._next.cancel()
            self._next = None
        if self._next is None:
            wait_s = min(_SOON_S, self._timeout_s) if launch.silent else self._timeout_s
            self._next = self._completions.call_later(wait_s, self._look)

    def finished(self) -> Iterator[Launch]:
        """Take those whose tickets are done."""
        for launch in [launch for launch in self._out if launch.ticket.done is not None]:
            del self._out[launch]
            yield launch

    def _look(self) -> None:
        self._next = None
        out = [launch for launch in self._out if launch.ticket.done is None]
        for launch in out:
            state = launch.state()
            over = state != NOT_READY
            if over and (self._out[launch] or launch.silent):
                good = not state and launch.queued
                log.warning("cuda.completion_lost", device=launch.lane.device, error=state)
                lib.fx_settle(launch.ticket.number, 0 if good else errno.EIO, 1)
            self._out[launch] = over
        if out:
            self._next = self._completions.call_later(self._timeout_s, self._look)


# --- what is queued


def queue_calls(lane: Lane, job: Job, shape: Shape, chunk_slots: int, choice: Choice) -> None:
    """Queue the batch as 1-D and 2-D copies."""
    cuda, runtime, stream = lane.cuda, lane.cuda.runtime, lane.stream
    kind = _TO_DEVICE if job.to_device else _TO_HOST
    for call in calls(job, shape, chunk_slots, choice.edges):
        near, far = (call.device, call.device_pitch), (call.host, call.host_pitch)
        (target, target_pitch), (source, source_pitch) = (
            (near, far) if job.to_device else (far, near)
        )
        if call.rows == 1:
            code = runtime.cudaMemcpyAsync(target, source, call.width, kind, stream)
            cuda.check("cudaMemcpyAsync", code)
        else:
            sides = (target, target_pitch, source, source_pitch)
            code = runtime.cudaMemcpy2DAsync(*sides, call.width, call.rows, kind, stream)
            cuda.check("cudaMemcpy2DAsync", code)


def queue_batches(lane: Lane, job: Job, shape: Shape) -> None:
    """Queue the batch as batched copies of its segments."""
    for device, host, sizes in entries(job, shape):
        target, source = (device, host) if job.to_device else (host, device)
        code = lane.cuda.batch(target, source, np.ascontiguousarray(sizes), lane.stream)
        lane.cuda.check("cudaMemcpyBatchAsync", code)


def blocks_of_piece(shape: Shape) -> int:
    """How many blocks one launch of the kernel can be told of; 0: too many planes."""
    return max(0, PIECE_BYTES - shape.planes.nbytes) // 8


@dataclass(frozen=True, slots=True)
class Kernel:
    """flexkv_move, loaded: `function` for cuLaunchKernel, at most `grid` thread blocks."""

    function: int
    grid: int

    def queue(
        self, lane: Lane, job: Job, shape: Shape, scratch: Scratch, pieces: list[int]
    ) -> None:
        """Queue the batch as launches, one for each of the pieces, which tell them what to do."""
        step = blocks_of_piece(shape)
        for number, piece in enumerate(pieces):
            part = slice(number * step, (number + 1) * step)
            slots, blocks = job.host_slots[part], job.device_blocks[part]
            address, memory = scratch.place(piece)
            sizes = shape.planes.nbytes, slots.nbytes
            memory[: sizes[0]] = shape.planes.view(np.uint8)
            memory[sizes[0] : sum(sizes)] = slots.view(np.uint8)
            memory[sum(sizes) : sum(sizes) + blocks.nbytes] = blocks.view(np.uint8)
            at = (address, address + sizes[0], address + sum(sizes))
            host = (job.host_base, job.host_stride_bytes)
            counts = (len(shape.planes), len(blocks), int(job.to_device), shape.segments)
            move = ffi.new("flexkv_move *", (*at, *host, *counts))
            arguments = ffi.new("void *[1]", [move])
            warps = len(blocks) * shape.segments
            grid = max(1, min(self.grid, -(-warps * 32 // THREADS)))
            shared_and_stream = (0, lane.stream)
            code = lane.cuda.driver.cuLaunchKernel(
                *(self.function, grid, 1, 1, THREADS, 1, 1, *shared_and_stream, arguments, ffi.NULL)
            )
            lane.cuda.check("cuLaunchKernel", code)


def device_region(packed: object) -> CudaRegion:
    """The region as this backend packs it."""
    assert isinstance(packed, CudaRegion)
    return packed
