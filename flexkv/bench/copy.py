"""How fast blocks move between an engine's KV tensors and host memory: `run`.

Gather and scatter of blocks by the copy engine, against the same bytes in plain non-temporal copies
(the limit), memcpy and torch's `index_select` and `index_copy_`, interleaved in one run.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.backends.layout import make_region
from flexkv.backends.packing import PackedRegion
from flexkv.bench.report import Progress, Result, interleave, median, ratio_of_pairs
from flexkv.errors import ConfigError
from flexkv.memory import Arena
from flexkv.model import KVSpec

if TYPE_CHECKING:
    from flexkv._core import CData

BLOCK_BYTES = 2 << 20  # Llama-3-8B's block of 16 tokens; 32 KiB is its K or V of one layer
SEGMENTS_BYTES = (32 << 10, 256 << 10, 2 << 20)
MEMORY_BYTES = 3 << 29
_TOKENS = 16
_YARDSTICKS = {"memcpy": 0, "plain": 1, "pagewise": 2}  # kinds of fx_copy_plain


def run(
    progress: Progress,
    *,
    segments_bytes: Sequence[int] = SEGMENTS_BYTES,
    threads: Sequence[int] = (1, 2),
    memory_bytes: int = MEMORY_BYTES,
    repeats: int = 7,
) -> list[Result]:
    """Measure GB/s of `gather` (KV tensors to arena) and `scatter` (back).

    `limit` is the faster of two plain non-temporal loops over the same addresses, given as arrays;
    `peer` is torch, or memcpy without torch; `ratio` is to the limit, pair by pair. All others are
    in `params`. Each sample moves half of the tensors: a random half, to random slots.

    Raises:
        ConfigError: a segment does not divide a block, or memory is too small for 8 blocks.
    """
    if wrong := [size for size in segments_bytes if size < 4096 or BLOCK_BYTES % size]:
        raise ConfigError(f"segments must be 4 KiB to 2 MiB and divide 2 MiB, got {wrong[0]}")
    if memory_bytes < 16 * BLOCK_BYTES:
        raise ConfigError(f"memory_bytes must be at least {16 * BLOCK_BYTES}, got {memory_bytes}")
    steps = [(size, count) for size in segments_bytes for count in threads]
    results: list[Result] = []
    blocks = memory_bytes // 2 // BLOCK_BYTES
    arena = Arena(blocks, BLOCK_BYTES)
    pool = _aligned(blocks * BLOCK_BYTES)
    try:
        for done, (segment, count) in enumerate(steps):
            progress(f"copy {segment >> 10} KiB, {count} thread(s)", 2 * done, 2 * len(steps))
            with _Field(pool, arena, segment, count) as field:
                for to_device in (False, True):
                    results.append(_measure(field, to_device, repeats))
                    progress(results[-1].name, 2 * done + 1 + to_device, 2 * len(steps))
    finally:
        arena.close()
    return results


def _measure(field: _Field, to_device: bool, repeats: int) -> Result:
    actions = field.actions(to_device)
    for action in actions.values():  # pages, threads and code are warm before anything counts
        action()
    field.check(to_device)
    samples = interleave({name: field.timed(action) for name, action in actions.items()}, repeats)
    speeds = {name: median(values) for name, values in samples.items()}
    ours = samples.pop("flexkv")
    limit = max(("plain", "pagewise"), key=lambda name: speeds[name])
    peer = "torch" if "torch" in samples else "memcpy"
    params: dict[str, Any] = {
        "segment_bytes": field.segment,
        "threads": field.threads,
        "block_bytes": BLOCK_BYTES,
        "batch_blocks": len(field.blocks),
        "limit": f"{limit} non-temporal copy",
        "peer": {"torch": "index_copy_" if to_device else "index_select"}.get(peer, peer),
    }
    for name, values in samples.items():
        params[f"{name}_gb_per_s"] = speeds[name]
        params[f"ratio_to_{name}"] = ratio_of_pairs(ours, values)
    return Result(
        "scatter" if to_device else "gather",
        speeds["flexkv"],
        "GB/s",
        limit=speeds[limit],
        peer=speeds[peer],
        ratio=ratio_of_pairs(ours, samples[limit]),
        samples=repeats,
        params=params,
    )


class _Field:
    """The two memories, cut into planes of one segment size, and every way to copy between them."""

    def __init__(self, pool: NDArray[np.uint8], arena: Arena, segment: int, threads: int) -> None:
        self.segment, self.threads = segment, threads
        self._planes, total = BLOCK_BYTES // segment, arena.slots
        self._arena, self._pool = arena, pool
        self._tensors = pool.reshape(self._planes, total, _TOKENS, segment // _TOKENS)
        spec = KVSpec.uniform(self._planes, 1, segment // _TOKENS, "uint8", parts=1)
        self._packed = PackedRegion(make_region(list(self._tensors), spec, "BND"))
        shuffled = np.random.default_rng(segment + threads).permuted(
            np.tile(np.arange(total, dtype=np.uint32), (2, 1)), axis=1
        )
        self.blocks, self._slots = np.ascontiguousarray(shuffled[:, : total // 2])
        starts = np.arange(self._planes, dtype=np.uint64)
        base = np.uint64(pool.__array_interface__["data"][0])
        device = base + self.blocks[:, None] * np.uint64(segment)
        self._device = (device + starts * np.uint64(segment * total)).ravel()
        host = np.uint64(arena.base) + self._slots[:, None] * np.uint64(BLOCK_BYTES)
        self._host = (host + starts * np.uint64(segment)).ravel()

    def __enter__(self) -> _Field:
        self._hub = lib.fx_hub_open(8)
        self._crew = lib.fx_crew_open(self.threads, 64)
        self._poll = select.poll()
        self._poll.register(lib.fx_hub_fd(self._hub), select.POLLIN)
        self._workers = ThreadPoolExecutor(self.threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.shutdown()
        lib.fx_crew_close(self._crew)
        lib.fx_hub_close(self._hub, 0)

    def actions(self, to_device: bool) -> dict[str, Callable[[], None]]:
        """Return the competitors: each moves the same bytes once."""

        def plain(kind: int) -> Callable[[], None]:
            return lambda: self._plain(to_device, kind)

        actions: dict[str, Callable[[], None]] = {"flexkv": lambda: self._copy(to_device)}
        actions |= {name: plain(kind) for name, kind in _YARDSTICKS.items()}
        return actions | self._torch(to_device)

    def timed(self, action: Callable[[], None]) -> Callable[[], float]:
        """Return a function that runs `action` and says its speed in GB/s."""

        def measure() -> float:
            start = time.perf_counter()
            action()
            return len(self.blocks) * BLOCK_BYTES / (time.perf_counter() - start) / 1e9

        return measure

    def check(self, to_device: bool) -> None:
        """Make sure that what is measured also copies."""
        mark = np.arange(BLOCK_BYTES, dtype=np.uint64).astype(np.uint8).reshape(self._planes, -1)
        here = self._tensors.reshape(self._planes, -1, self.segment)[:, int(self.blocks[-1])]
        there = self._arena.view(int(self._slots[-1])).reshape(self._planes, -1)
        source, target = (there, here) if to_device else (here, there)
        source[:] = mark
        target[:] = 0
        self._copy(to_device)
        assert np.array_equal(target, mark), "the copy engine did not copy"

    def _copy(self, to_device: bool) -> None:
        planes, count, _ = self._packed.select(None)
        arguments: Any = (
            *(planes, count, self._arena.base, self._arena.stride_bytes),
            *(_pointer("uint32_t[]", ids) for ids in (self._slots, self.blocks)),
            *(len(self.blocks), int(to_device)),
        )
        if self.threads == 1:
            lib.fx_copy_blocks(*arguments)
            return
        ticket = lib.fx_ticket_take(self._hub, 1)
        queued: Any = (self._crew, *arguments, ticket)
        assert lib.fx_crew_copy(*queued) == 0
        done = ffi.new("fx_done[]", 1)
        while not lib.fx_hub_drain(self._hub, done, 1):
            self._poll.poll()
            with suppress(BlockingIOError):  # a signal may be spurious; unread, it would never end
                os.eventfd_read(lib.fx_hub_fd(self._hub))
        assert not done[0].failed

    def _plain(self, to_device: bool, kind: int) -> None:
        source, target = self._device, self._host
        if to_device:
            source, target = target, source
        cuts = [len(source) * i // self.threads for i in range(self.threads + 1)]

        def part(begin: int, end: int) -> None:
            here, there = (_pointer("uint64_t[]", side[begin:end]) for side in (source, target))
            lib.fx_copy_plain(here, there, self.segment, end - begin, kind)

        if self.threads == 1:
            part(0, len(source))
        else:
            list(self._workers.map(part, cuts[:-1], cuts[1:]))

    def _torch(self, to_device: bool) -> dict[str, Callable[[], None]]:
        """Return torch's way, from and to memory that is laid out as it likes; {} without torch."""
        try:
            torch = import_module("torch")
        except ImportError:
            return {}
        ids = torch.from_numpy(self.blocks.astype(np.int64))
        # As bfloat16, what models use; as bytes `index_copy_` is two to three times slower.
        kv = torch.from_numpy(self._tensors.reshape(self._planes, -1, self.segment))
        kv = kv.view(torch.bfloat16)
        whole: Any = self._arena.view(0).base
        host = torch.from_numpy(np.frombuffer(whole, np.uint8))
        host = host[: len(ids) * BLOCK_BYTES].view(self._planes, len(ids), self.segment)
        host = host.view(torch.bfloat16)

        def move() -> None:
            with _torch_threads(torch, self.threads):
                for plane in range(self._planes):
                    if to_device:
                        kv[plane].index_copy_(0, ids, host[plane])
                    else:
                        torch.index_select(kv[plane], 0, ids, out=host[plane])

        return {"torch": move}


@contextmanager
def _torch_threads(torch: Any, threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pointer(kind: str, array: NDArray[Any]) -> CData:
    return ffi.from_buffer(kind, array.data)


def _aligned(size: int) -> NDArray[np.uint8]:
    """Memory as an engine has it, from numpy, on a page boundary and touched."""
    raw = np.zeros(size + 4096, np.uint8)
    start = -int(raw.__array_interface__["data"][0]) % 4096
    view = raw[start : start + size]
    view[::4096] = 1
    return view
