"""A tier or a link as a server: submit, raise_priority, cancel; coalesce, batch_seconds, Activity.

A job is `fragments` requests of equal size. It is cut into chunks of whole fragments; a chunk
takes one channel, and between chunks the most urgent job goes first: preemption at chunk borders.
A path of several servers (a tier, then the link to it) is passed chunk by chunk, so two tiers
behind one link share its bytes per second. Per channel, with L = latency, q = queue depth per
channel and x = fragment bytes / (bytes_per_s / channels): a chunk of f fragments holds the channel
for f * max(x, (L + x) / q) (Little's law), and its last byte arrives after `batch_seconds`.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import SimulationError
from flexkv.sim.clock import VirtualClock
from flexkv.sim.profiles import TierProfile


class Priority(enum.IntEnum):
    """Who goes first at a chunk border; first come, first served within one."""

    DEMAND_READ = 0
    DEMAND_WRITE = 1
    PREFETCH = 2
    WRITE_BACK = 3


def coalesce(slots: NDArray[np.int64], block_bytes: int, limit_bytes: int) -> NDArray[np.int64]:
    """Merge neighbouring slots into requests of at most `limit_bytes`; return their bytes.

    `slots` int64 [n] in the order they are asked for; a limit below two blocks merges none.
    """
    count = len(slots)
    if count == 0:
        return np.zeros(0, np.int64)
    together = max(1, limit_bytes // block_bytes)
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    lengths = np.diff(np.concatenate(([0], breaks, [count])))
    full, rest = np.divmod(lengths, together)
    sizes = np.full(int(full.sum()), together, np.int64)
    return np.concatenate((sizes, rest[rest > 0])) * block_bytes


def batch_seconds(
    fragments: int, fragment_bytes: float, latency_s: float, bytes_per_s: float, depth: int
) -> float:
    """Return the time of `fragments` requests on one idle channel with `depth` in flight.

    Whole rounds of `depth` take max(depth * x, L + x); the last one L + rest * x.
    """
    if fragments <= 0:
        return 0.0
    x_s = fragment_bytes / bytes_per_s
    rounds = -(-fragments // depth)
    rest = fragments - (rounds - 1) * depth
    bound_by_latency = (rounds - 1) * (latency_s + x_s) + latency_s + rest * x_s
    return max(latency_s + fragments * x_s, bound_by_latency)


class Activity:
    """When at least one transfer was in service: merged intervals, in seconds."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []

    def add(self, start_s: float, end_s: float) -> None:
        """Note that something was in service from `start_s` to `end_s`; starts never go back."""
        if end_s <= start_s:
            return
        if self.intervals and start_s <= self.intervals[-1][1]:
            first, last = self.intervals[-1]
            self.intervals[-1] = (first, max(last, end_s))
        else:
            self.intervals.append((start_s, end_s))

    def total_s(self) -> float:
        """Return the length of all intervals."""
        return sum(end - start for start, end in self.intervals)


def overlap_s(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Return the time that lies in both lists of sorted, disjoint intervals."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        low, high = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        total += max(0.0, high - low)
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return total


class Job:
    """A batch of equal requests on its way through `path`."""

    __slots__ = (
        "cancelled", "finish_s", "fragment_bytes", "left", "on_done", "path", "priority",
        "size_bytes", "start_s", "submitted_s", "write",
    )  # fmt: skip

    def __init__(
        self,
        path: tuple[Server, ...],
        fragments: int,
        fragment_bytes: float,
        priority: Priority,
        write: bool,
        now_s: float,
        on_done: Callable[[Job], None] | None,
    ) -> None:
        self.path, self.priority, self.write, self.on_done = path, priority, write, on_done
        self.fragment_bytes = fragment_bytes
        self.size_bytes = fragments * fragment_bytes
        self.submitted_s = now_s
        self.start_s: float | None = None
        self.finish_s: float | None = None
        self.left = 0  # chunks that have not passed the last server
        self.cancelled = False

    @property
    def done(self) -> bool:
        """True when the last byte has arrived, or the job was cancelled and is quiet."""
        return self.left == 0


Chunk = tuple[Job, int, int]  # job, position in its path, fragments


class Server:
    """One tier or link on a virtual clock."""

    def __init__(
        self, clock: VirtualClock, profile: TierProfile, activity: Activity | None = None
    ) -> None:
        self.clock, self.profile = clock, profile
        self.name = profile.name
        self.channels = min(profile.channels, profile.queue_depth)
        self.depth = max(1, profile.queue_depth // self.channels)
        self._queues: list[deque[Chunk]] = [deque() for _ in Priority]
        self._free = list(range(self.channels))
        self.queued = 0
        self.most_queued = 0
        self.activity = Activity()  # of this server alone
        self._shared = activity  # of a group of servers, if wanted
        self.occupied_s = 0.0  # channel seconds
        self.served_bytes = [0.0] * len(Priority)
        self.requests = 0

    def rate_bytes_per_s(self, write: bool) -> float:
        """Return what one channel moves."""
        profile = self.profile
        whole = profile.write_bytes_per_s if write else profile.read_bytes_per_s
        return whole / profile.channels

    def busy_s(self) -> float:
        """Return the time during which at least one request was in service."""
        return self.activity.total_s()

    def utilisation(self) -> float:
        """Return occupied channel time over all channel time so far, 0 to 1."""
        return self.occupied_s / (self.channels * self.clock.now_s) if self.clock.now_s else 0.0

    # -- used by `submit` and by the neighbours in a path

    def push(self, chunk: Chunk) -> None:
        """Queue a chunk and serve what can be served."""
        self._queues[chunk[0].priority].append(chunk)
        self.queued += 1
        self.most_queued = max(self.most_queued, self.queued)
        self._serve()

    def requeue(self, job: Job, old: Priority) -> None:
        """Move the waiting chunks of a job to the queue of its new priority."""
        moved = [chunk for chunk in self._queues[old] if chunk[0] is job]
        if moved:
            self._queues[old] = deque(c for c in self._queues[old] if c[0] is not job)
            self._queues[job.priority].extend(moved)

    def drop(self, job: Job) -> int:
        """Forget the waiting chunks of a job; return how many."""
        queue = self._queues[job.priority]
        kept = deque(chunk for chunk in queue if chunk[0] is not job)
        dropped = len(queue) - len(kept)
        self._queues[job.priority] = kept
        self.queued -= dropped
        return dropped

    def _serve(self) -> None:
        while self._free and self.queued:
            queue = next(queue for queue in self._queues if queue)
            chunk = queue.popleft()
            self.queued -= 1
            channel = heapq.heappop(self._free)
            self._start(chunk, channel)

    def _start(self, chunk: Chunk, channel: int) -> None:
        job, _, fragments = chunk
        now_s, latency_s = self.clock.now_s, self.profile.latency_s
        if job.start_s is None:
            job.start_s = now_s
        rate = self.rate_bytes_per_s(job.write)
        x_s = job.fragment_bytes / rate
        held_s = fragments * max(x_s, (latency_s + x_s) / self.depth)
        spent_s = max(
            held_s, batch_seconds(fragments, job.fragment_bytes, latency_s, rate, self.depth)
        )
        self.occupied_s += held_s
        self.activity.add(now_s, now_s + spent_s)
        if self._shared is not None:
            self._shared.add(now_s, now_s + spent_s)
        self.served_bytes[job.priority] += fragments * job.fragment_bytes
        self.requests += fragments
        self.clock.after(held_s, lambda: self._freed(channel))
        self.clock.after(spent_s, lambda: _passed(chunk))

    def _freed(self, channel: int) -> None:
        heapq.heappush(self._free, channel)
        self._serve()


def _passed(chunk: Chunk) -> None:
    job, position, fragments = chunk
    if position + 1 < len(job.path) and not job.cancelled:
        job.path[position + 1].push((job, position + 1, fragments))
        return
    job.left -= 1
    if job.left == 0:
        job.finish_s = job.path[0].clock.now_s
        if job.on_done is not None and not job.cancelled:
            job.on_done(job)


def submit(
    path: Sequence[Server],
    size_bytes: float,
    *,
    fragments: int = 1,
    priority: Priority = Priority.DEMAND_READ,
    write: bool = False,
    on_done: Callable[[Job], None] | None = None,
) -> Job:
    """Send `fragments` equal requests of together `size_bytes` through `path`, now.

    A fragment above a server's `chunk_bytes` is asked for in pieces of that size. The job's
    `finish_s` is set, and `on_done` called, when the last byte has passed the last server.
    """
    if not path or fragments < 1 or not size_bytes > 0:
        raise SimulationError(
            f"a job needs a path and bytes, got {len(path)} servers, {fragments} fragments,"
            f" {size_bytes} bytes"
        )
    chunk_bytes = min(server.profile.chunk_bytes for server in path)
    pieces = fragments * max(1, -(-int(size_bytes / fragments) // chunk_bytes))
    job = Job(
        tuple(path), pieces, size_bytes / pieces, priority, write, path[0].clock.now_s, on_done
    )
    whole = max(1, int(chunk_bytes // job.fragment_bytes))
    most = max(1, min(whole, -(-pieces // path[0].channels)))
    counts = [most] * (pieces // most) + ([pieces % most] if pieces % most else [])
    job.left = len(counts)
    for count in counts:
        path[0].push((job, 0, count))
    return job


def raise_priority(job: Job, priority: Priority) -> None:
    """Make a job more urgent: what has not started yet goes before others from now on."""
    old = job.priority
    if priority >= old:
        return
    job.priority = priority
    for server in job.path:
        server.requeue(job, old)


def cancel(job: Job) -> int:
    """Drop the chunks of a job that no server has started; return how many; `on_done` is off."""
    job.cancelled = True
    dropped = sum(server.drop(job) for server in job.path)
    job.left -= dropped
    if job.left == 0 and job.finish_s is None:
        job.finish_s = job.path[0].clock.now_s
    return dropped
