"""A trace through a real manager: `replay`.

Every request is a get and then a put of its whole prompt, as an engine makes them: the `cpu` device
holds its blocks, host memory (and files, with a disk tier) keep them. Block bytes are scaled by the
caller; what is decided does not depend on them. Every block carries its number, and a block that
comes back with another one ends the replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv import FlexKVConfig, KVManager
from flexkv.errors import CapacityError, InputError, TransferError
from flexkv.model import HOST, KVSpec
from flexkv.traces import Trace
from flexkv.traces.model import TraceRequest, numbered

MIN_BLOCK_BYTES = 32
Report = Callable[[int, int], None]
_PARTS, _WORD_BYTES = 2, 2  # K and V, 16-bit elements


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """How to replay. `disk_blocks` 0: no disk tier; `policy` None: the default one. `speed` 0: as
    fast as possible, else so many times as fast as the trace was; `concurrency` requests are under
    way at most.
    """

    host_blocks: int
    disk_blocks: int = 0
    block_bytes: int = 4096
    directory: Path | None = None
    policy: str | None = None
    speed: float = 0.0
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.host_blocks < 1 or self.disk_blocks < 0 or self.concurrency < 1:
            raise InputError(
                f"a replay needs room in the host and at least one request at a time, got {self}"
            )
        if self.block_bytes < MIN_BLOCK_BYTES or self.block_bytes % MIN_BLOCK_BYTES:
            raise InputError(
                f"block_bytes is a multiple of {MIN_BLOCK_BYTES}, got {self.block_bytes}"
            )
        if not 0 <= self.speed < float("inf"):
            raise InputError(f"speed is 0 or above, got {self.speed}")

    @property
    def spec(self) -> KVSpec:
        """What a block holds: one layer, one token."""
        elements = self.block_bytes // (_PARTS * _WORD_BYTES)
        return KVSpec.uniform(1, 1, elements, "bfloat16", tokens_per_block=1)


@dataclass(slots=True)
class _Counts:
    get_ms: list[float] = field(default_factory=list)
    put_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    by_tier: dict[str, int] = field(default_factory=dict)
    hits: int = 0
    refused_puts: int = 0


def replay(trace: Trace, setup: ReplaySetup, progress: Report | None = None) -> dict[str, Any]:
    """Replay a trace; return what was hit, moved and evicted, and how long it took.

    Latencies are {"p50", "p90", "p99"} in ms, of gets and puts of one block or more.

    Raises:
        InputError: the trace has no blocks.
        TransferError: a block came back with other bytes.
    """
    if not trace.accesses:
        raise InputError(f"{trace.name} has no block ids: there is nothing to replay")
    with ExitStack() as stack:
        folder = setup.directory
        if setup.disk_blocks:
            made = TemporaryDirectory(dir=folder, prefix="flexkv-replay-")
            folder = Path(stack.enter_context(made))
        return anyio.run(_Replay(trace, setup, folder, progress).run)


class _Replay:
    """One replay: the manager, its device memory, and what is counted."""

    def __init__(
        self, trace: Trace, setup: ReplaySetup, folder: Path | None, progress: Report | None
    ) -> None:
        self._trace, self._setup, self._folder, self._progress = trace, setup, folder, progress
        self._most = max(len(request.block_ids) for request in trace.requests)
        blocks, half = self._most * setup.concurrency, setup.block_bytes // _PARTS
        self._memory = np.zeros((_PARTS, blocks, 1, 1, half // _WORD_BYTES), np.uint16)
        # the first eight bytes of each part of a block: its number
        self._marks = self._memory.reshape(_PARTS, blocks, -1).view(np.int64)[:, :, 0]
        everything = np.concatenate([request.block_ids for request in trace.requests])
        self._bound, numbers = numbered(everything)
        ends = np.cumsum([len(request.block_ids) for request in trace.requests])[:-1]
        self._prompts = np.split(numbers, ends)
        self._counts, self._done = _Counts(), 0

    async def run(self) -> dict[str, Any]:
        """Open a manager, replay, close."""
        setup = self._setup
        stride = setup.spec.stride_bytes
        settings: dict[str, Any] = {"huge_pages": False}
        if setup.policy:
            settings["eviction_policy"] = setup.policy
        if setup.disk_blocks:
            settings |= {
                "disk_cache_bytes": setup.disk_blocks * stride,
                "disk_dirs": [self._folder],
            }
        config = FlexKVConfig.load(
            model="replay", spec=setup.spec, host_cache_bytes=setup.host_blocks * stride, **settings
        )
        async with KVManager(config) as kv:
            kv.register({"layer.0": self._memory}, axes="PBNHD")
            start = time.perf_counter()
            await self._requests(kv)
            elapsed_s = time.perf_counter() - start
            await kv.flush()
            return self._result(kv, elapsed_s)

    async def _requests(self, kv: KVManager) -> None:
        lanes: list[int] = list(range(self._setup.concurrency))
        room = anyio.Semaphore(self._setup.concurrency)
        items = zip(self._trace.requests, self._prompts, strict=True)
        if self._setup.concurrency == 1:
            for request, prompt in self._in_time(items):
                await self._wait_for(request)
                await self._one(kv, prompt, 0)
            return

        async def one(prompt: NDArray[np.int64]) -> None:
            lane = lanes.pop()
            try:
                await self._one(kv, prompt, lane)
            finally:
                lanes.append(lane)
                room.release()

        async with anyio.create_task_group() as group:
            for request, prompt in self._in_time(items):
                await self._wait_for(request)
                await room.acquire()
                group.start_soon(one, prompt)

    def _in_time(
        self, items: Iterator[tuple[TraceRequest, NDArray[np.int64]]]
    ) -> Iterator[tuple[TraceRequest, NDArray[np.int64]]]:
        """Yield requests with blocks; start the clock."""
        self._start_s = time.perf_counter()
        for item in items:
            if len(item[1]):
                yield item
            else:
                self._tell()

    async def _wait_for(self, request: TraceRequest) -> None:
        """Wait until it is time for a request; note how late it is."""
        speed = self._setup.speed
        if not speed:
            return
        since_s = (request.timestamp_ms - self._trace.requests[0].timestamp_ms) / 1e3 / speed
        ahead_s = self._start_s + since_s - time.perf_counter()
        if ahead_s > 0:
            await anyio.sleep(ahead_s)
        self._counts.late_ms.append(max(0.0, -ahead_s) * 1e3)

    async def _one(self, kv: KVManager, prompt: NDArray[np.int64], lane: int) -> None:
        """Get a prompt into the blocks of a lane, compute the rest, put all of it."""
        counts, first = self._counts, lane * self._most
        slots = np.arange(first, first + len(prompt))
        marks = self._marks[:, first : first + len(prompt)]
        marks[:] = -1
        begin = time.perf_counter()
        got = await kv.get_async(prompt, slots)
        counts.get_ms.append((time.perf_counter() - begin) * 1e3)
        if (marks[:, : got.loaded] != prompt[: got.loaded]).any():
            raise TransferError(f"other bytes came back for a prompt of {len(prompt)} blocks")
        counts.hits += got.loaded
        for tier, blocks in got.by_tier.items():
            counts.by_tier[tier] = counts.by_tier.get(tier, 0) + blocks
        marks[:] = prompt
        kept = min(len(prompt), self._setup.host_blocks)
        begin = time.perf_counter()
        try:
            await kv.put_async(prompt[:kept], slots[:kept])
        except CapacityError:
            counts.refused_puts += 1
        counts.put_ms.append((time.perf_counter() - begin) * 1e3)
        self._tell()

    def _tell(self) -> None:
        self._done += 1
        if self._progress is not None and self._done % 16 == 0:
            self._progress(self._done, len(self._trace.requests))

    def _result(self, kv: KVManager, elapsed_s: float) -> dict[str, Any]:
        counts, setup, accesses = self._counts, self._setup, self._trace.accesses
        moved = {
            "->".join(labels): int(value)
            for (name, *labels), value in kv.telemetry.counters.items()
            if name == "transfer_bytes"
        }
        usage = kv.usage()
        return {
            "trace": self._trace.name,
            "policy": setup.policy or FlexKVConfig().eviction_policy,
            "requests": len(self._trace.requests),
            "accesses": accesses,
            "hits": counts.hits,
            "hit_percent": round(100 * counts.hits / accesses, 3),
            "hits_by_tier": counts.by_tier,
            "bytes_by_route": moved,
            "evicted_by_tier": {
                tier: usage[tier]["evicted"] for tier in (HOST, "disk") if tier in usage
            },
            "capacity_blocks": {"host": setup.host_blocks, "disk": setup.disk_blocks},
            "block_bytes": setup.block_bytes,
            "refused_puts": counts.refused_puts,
            "elapsed_s": round(elapsed_s, 3),
            "requests_per_s": round(len(counts.get_ms) / elapsed_s, 1),
            "blocks_per_s": round(accesses / elapsed_s),
            "get_ms": _percentiles(counts.get_ms),
            "put_ms": _percentiles(counts.put_ms),
            "late_ms": _percentiles(counts.late_ms),
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    found = np.percentile(values, (50, 90, 99))
    return {f"p{p}": round(float(v), 4) for p, v in zip((50, 90, 99), found, strict=True)}
