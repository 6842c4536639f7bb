"""What the `cuda` backend costs the event loop, and how fast it copies: `run`.

`loop_time` is what a restore takes of the loop: checking, choosing, launching. It means the same on
a fake; speeds mean something on a GPU only. `slowdown` (of an engine's matrix products, beside
restores) needs a torch with CUDA.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

import anyio
import numpy as np

from flexkv.backends.cuda import CudaBackend
from flexkv.backends.cuda.lanes import LANDED, Lane
from flexkv.backends.cuda.library import Cuda, Paths, ffi
from flexkv.bench.report import Progress, Result, median, percentile, ratio_of_pairs
from flexkv.completion import Completions
from flexkv.errors import ConfigError, TransferError
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec, SlotIds
from flexkv.protocols import BlockCopy, Plane, Region, Services

LAYERS, PARTS = 32, 2
SEGMENTS_BYTES = (4 << 10, 32 << 10, 256 << 10)
_LOOP_SEGMENT_BYTES = 256  # the loop's time does not depend on it, the memory that is needed does
_SLOWDOWN_SEGMENT_BYTES, _MATRIX, _PRODUCTS = 32 << 10, 4096, 40

_BUSY_US, _IN_A_ROW = 20_000, 8

ffi.cdef("int usleep(unsigned useconds);")
_LIBC = ffi.dlopen(None)


def run(
    progress: Progress,
    *,
    blocks: int = 2048,
    segments_bytes: Sequence[int] = SEGMENTS_BYTES,
    memory_bytes: int = 1 << 30,
    repeats: int = 15,
    cudart: str = "",
    libcuda: str = "",
) -> list[Result]:
    """Measure `loop_time` in us, `to_device` and `to_host` in GB/s, `slowdown` as a ratio.

    Args:
        blocks: of a restore, each of 32 layers x 2 parts; at random places, and in a row.
        segments_bytes: sizes whose speed is measured; () leaves that out. The limit is one
            cudaMemcpyAsync of as many bytes, the peer a copy for each row of segments.
        memory_bytes: of the GPU, and as much of the host, for the speeds.
        cudart, libcuda: libraries to load instead of those that are found.

    Raises:
        ConfigError: there is no CUDA here, or memory is too small for a block.
    """
    largest = max(segments_bytes, default=0) * LAYERS * PARTS
    if blocks < 1 or memory_bytes < largest:
        raise ConfigError(f"memory_bytes must be at least {largest}, blocks at least 1")
    options = {name: path for name, path in (("cudart", cudart), ("libcuda", libcuda)) if path}
    steps = len(segments_bytes) + 2
    results: list[Result] = []

    async def measure() -> None:
        progress("loop time", 0, steps)
        results.extend(await _loop_times(blocks, repeats, options))
        for done, segment in enumerate(segments_bytes):
            progress(f"speed, {segment >> 10} KiB", done + 1, steps)
            count = memory_bytes // (segment * LAYERS * PARTS)
            results.extend(await _speeds(segment, count, repeats, options))
        progress("slowdown", steps - 1, steps)
        results.extend(await _slowdown(memory_bytes, repeats, options))

    anyio.run(measure)
    progress("done", steps, steps)
    return results


class _Begun:
    """Work that is begun at once, in `elapsed_us` up to its first wait; await it for the rest."""

    def __init__(self, work: Awaitable[None]) -> None:
        self._steps, self._first = work.__await__(), None
        start = time.perf_counter()
        with suppress(StopIteration):
            self._first = next(self._steps)
        self.elapsed_us = (time.perf_counter() - start) * 1e6

    def __await__(self) -> Generator[Any, None, None]:
        if self._first is not None:
            yield self._first
            yield from self._steps


class _Field:
    """Device memory with a layout, an arena, and the backend between them."""

    def __init__(self, cuda: Cuda, backend: CudaBackend, region: Region, services: Services):
        self._cuda, self._backend, self._region = cuda, backend, region
        self._completions, self._arena = services.completions, services.arena
        self._lanes = {to_device: Lane(cuda, 0) for to_device in (True, False)}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, segment: int, blocks: int, options: dict[str, Any], *, block_first: bool = False
    ) -> AsyncIterator[_Field]:
        """Open a backend; memory is [part, block] for each layer, or all of a block in a row."""
        cuda = Cuda(Paths(options.get("cudart", ""), options.get("libcuda", Paths().driver)))
        spec = KVSpec.uniform(LAYERS, 1, segment, "uint8", parts=PARTS, tokens_per_block=1)
        completions, backend = Completions(crew_threads=1), CudaBackend()
        arena, address = Arena(blocks, spec.stride_bytes), ffi.new("uintptr_t *")
        services = Services(completions, arena, Identity("bench", spec=spec), options)
        try:
            with cuda.on(0):
                cuda.call("cudaMalloc", address, blocks * spec.block_bytes)
            await backend.open(services)
            planes = _planes(int(address[0]), segment, blocks, block_first)
            field = cls(cuda, backend, Region(planes, blocks, LAYERS), services)
            yield field
            for lane in field._lanes.values():
                lane.close()
        finally:
            await backend.aclose()
            await completions.aclose()
            arena.close()
            with cuda.on(0, to_release=True):
                cuda.runtime.cudaFree(address[0])

    async def move(self, blocks: SlotIds, slots: SlotIds, to_device: bool) -> None:
        """Copy blocks."""
        await self._backend.copy(BlockCopy(self._region, blocks, slots, to_device))

    async def plain(self, size_bytes: int, to_device: bool) -> None:
        """Copy as many bytes in one piece."""
        lane, ticket = self._lanes[to_device], self._completions.ticket()
        sides = (self._region.planes[0].base, self._arena.base)
        target, source = sides if to_device else sides[::-1]
        with self._cuda.on(0):
            kind = 1 if to_device else 2
            self._cuda.call("cudaMemcpyAsync", target, source, size_bytes, kind, lane.stream)
            self._cuda.call("cudaLaunchHostFunc", lane.stream, LANDED, ticket.number)
        if (await ticket).failed:
            raise TransferError("a plain copy failed")

    def keep_engine_busy(self) -> None:
        """Have the stream that copies wait for stand still for a moment: they are launched while an
        engine computes, and what carries them out does not compete with the launch for a core.
        """
        engine = self._lanes[False].stream
        self._backend.follow(0, engine)
        pause = int(ffi.cast("uintptr_t", ffi.addressof(_LIBC, "usleep")))
        with self._cuda.on(0):
            self._cuda.call("cudaLaunchHostFunc", engine, pause, _BUSY_US)

    async def restore_for_ever(self, pair: tuple[SlotIds, SlotIds]) -> None:
        """Copy the same blocks to the device until cancelled."""
        while True:
            await self.move(*pair, True)


def _planes(base: int, segment: int, blocks: int, block_first: bool) -> tuple[Plane, ...]:
    """The region's planes; see `_Field.open`."""
    inside = PARTS * segment
    if block_first:
        stride = LAYERS * inside
        return tuple(
            Plane(layer, base + layer * inside, stride, (), inside, layer * inside)
            for layer in range(LAYERS)
        )
    loops, size = ((PARTS, blocks * segment),), blocks * inside
    return tuple(
        Plane(layer, base + layer * size, segment, loops, segment, layer * inside)
        for layer in range(LAYERS)
    )


def _scattered(count: int, seed: int) -> tuple[SlotIds, SlotIds]:
    rng = np.random.default_rng(seed)
    one, other = (rng.permutation(count).astype(np.uint32) for _ in range(2))
    return one, other


async def _loop_times(blocks: int, repeats: int, options: dict[str, Any]) -> list[Result]:
    """What a restore takes of the loop: by the kernel, by one batched call, by one copy."""
    row = np.arange(blocks, dtype=np.uint32)
    results = []
    for name, block_first, below, pair in (
        ("scattered, kernel", False, 1 << 30, _scattered(blocks, 1)),
        ("scattered, whole blocks", True, 0, _scattered(blocks, 2)),
        ("in a row, whole blocks", True, 0, (row, row)),
    ):
        chosen = options | {"kernel_below_bytes": below}
        field_of = _Field.open(_LOOP_SEGMENT_BYTES, blocks, chosen, block_first=block_first)
        async with field_of as field:
            samples = []
            for turn in range(repeats + 1):
                field.keep_engine_busy()
                begun = [_Begun(field.move(*pair, True)) for _ in range(_IN_A_ROW)]
                for one in begun:
                    await one
                if turn:  # the first finds no packed region, events and pieces
                    samples += [one.elapsed_us for one in begun]
        params = {"blocks": blocks, "p99_us": percentile(samples, 99), "shape": name}
        results.append(
            Result(
                "loop_time", median(samples), "us", limit=150, samples=len(samples), params=params
            )
        )
    return results


async def _speeds(segment: int, blocks: int, repeats: int, options: dict[str, Any]) -> list[Result]:
    """GB/s of scattered blocks, by direction."""
    pair, size = _scattered(blocks, segment), blocks * LAYERS * PARTS * segment
    by_engines = options | {"kernel_blocks": 0}
    results = []
    async with (
        _Field.open(segment, blocks, options) as field,
        _Field.open(segment, blocks, by_engines) as engines,
    ):
        for to_device in (True, False):
            actions: dict[str, Callable[[], Awaitable[None]]] = {
                "flexkv": partial(field.move, *pair, to_device),
                "plain": partial(field.plain, size, to_device),
                "engines": partial(engines.move, *pair, to_device),
            }
            samples: dict[str, list[float]] = {name: [] for name in actions}
            for turn in range(repeats + 1):
                for name, action in actions.items():
                    start = time.perf_counter()
                    await action()
                    if turn:
                        samples[name].append(size / (time.perf_counter() - start) / 1e9)
            results.append(
                Result(
                    "to_device" if to_device else "to_host",
                    median(samples["flexkv"]),
                    "GB/s",
                    limit=median(samples["plain"]),
                    peer=median(samples["engines"]),
                    ratio=ratio_of_pairs(samples["flexkv"], samples["plain"]),
                    samples=repeats,
                    params={"segment_bytes": segment, "blocks": blocks, "size_bytes": size},
                )
            )
    return results


async def _slowdown(memory_bytes: int, repeats: int, options: dict[str, Any]) -> list[Result]:
    """Time of an engine's matrix products beside restores, to that alone; nothing without a GPU
    that torch uses.
    """
    torch: Any = import_module("torch")
    if not torch.cuda.is_available():
        return []
    matrix = torch.randn(_MATRIX, _MATRIX, device="cuda:0", dtype=torch.float16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    blocks = max(1, memory_bytes // (_SLOWDOWN_SEGMENT_BYTES * LAYERS * PARTS))
    pair = _scattered(blocks, 3)
    async with _Field.open(_SLOWDOWN_SEGMENT_BYTES, blocks, options) as field:

        async def products(beside: bool) -> float:
            async with anyio.create_task_group() as tasks:
                if beside:
                    tasks.start_soon(field.restore_for_ever, pair)
                    await anyio.sleep(0.05)
                begin.record()
                for _ in range(_PRODUCTS):
                    torch.mm(matrix, matrix)
                end.record()
                await anyio.to_thread.run_sync(end.synchronize)
                tasks.cancel_scope.cancel()
            return float(begin.elapsed_time(end))

        await products(False)
        pairs = [(await products(True), await products(False)) for _ in range(repeats)]
    beside, alone = zip(*pairs, strict=True)
    params = {"matrix": _MATRIX, "products": _PRODUCTS, "alone_ms": median(alone)}
    value = ratio_of_pairs(beside, alone)
    return [Result("slowdown", value, "x", limit=1.05, samples=repeats, params=params)]
