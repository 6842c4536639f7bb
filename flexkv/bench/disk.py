"""`flexkv bench disk`: the disk tier next to fio on the same file system, in the same minute.

`run` measures `write` and `read` (GB/s at several block sizes, as used: with checksums, two batches
in flight; fio has as many I/Os and bytes in flight), `read_cpu` (CPU seconds per GB next to a pool
of threads, once both without and once both with checksums) and `loop_stall_p99`.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiofiles.os
import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.backends.disk import DiskBackend, DiskSettings
from flexkv.backends.disk.files import direct_io_problem
from flexkv.backends.disk.format import DATA_NAME, pointer
from flexkv.bench.report import Progress, Result, interleave, median, percentile, ratio_of_pairs
from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec, LayerGroup
from flexkv.protocols import BlockIO, Services

_ARENA_BYTES = 128 << 20
_TICK_S = 0.001
_POOL_THREADS = 8

# engine: reads without checksums; watched: reads, while a task notes how late the loop wakes it
Mode = Literal["read", "write", "engine", "watched"]


@dataclass(slots=True)
class _Rig:
    """One block size on one directory; every measurement opens the tier anew."""

    folder: Path
    block_bytes: int
    total_bytes: int
    settings: DiskSettings
    engine: str = ""
    reason: str = ""
    cpu: dict[str, list[float]] = field(default_factory=dict)  # seconds per GB
    stalls_ms: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return self.total_bytes // self.block_bytes

    @property
    def depth(self) -> int:
        """I/Os in flight, for fio too."""
        return max(
            1, min(self.settings.queue_depth, self.settings.in_flight_bytes // self.block_bytes)
        )

    def measure(self, mode: Mode) -> float:
        """Move all blocks once, in random order; GB/s."""
        return anyio.run(self._measure, mode)

    async def _measure(self, mode: Mode) -> float:
        completions = Completions()
        arena = Arena(max(2, _ARENA_BYTES // self.block_bytes), self.block_bytes)
        _fill(arena)
        backend = DiskBackend()
        settings = {
            "directories": [self.folder / "tier"],
            "engine": self.settings.engine,
            "queue_depth": self.settings.queue_depth,
            "in_flight_bytes": self.settings.in_flight_bytes,
        }
        await backend.open(
            Services(completions, arena, _identity(self.block_bytes), settings, self.blocks)
        )
        self.engine, self.reason = backend.engine_name, backend.engine_reason
        try:
            async with anyio.create_task_group() as watch:
                if mode == "watched":
                    await self._watch(self.idle_ms, 50)
                    watch.start_soon(self._watch, self.stalls_ms, None)
                    await anyio.sleep(2 * _TICK_S)
                cpu, started = _cpu(), time.perf_counter()
                await self._move(backend, arena, mode)
                elapsed = time.perf_counter() - started
                self._note_cpu(mode, _cpu() - cpu)
                watch.cancel_scope.cancel()
        finally:
            await backend.aclose()
            await completions.aclose()
            arena.close()
        return self.total_bytes / elapsed / 1e9

    async def _move(self, backend: DiskBackend, arena: Arena, mode: Mode) -> None:
        """Two batches in flight at all times, each with its half of the arena."""
        half = arena.slots // 2
        order = np.random.default_rng(2).permutation(self.blocks).astype(np.uint32)
        verbs: dict[str, Callable[[BlockIO], Awaitable[NDArray[Any]]]] = {
            "read": backend.read,
            "watched": backend.read,
            "write": backend.write,
            "engine": lambda batch: _transfer(backend, batch, self.block_bytes),
        }

        async def side(number: int) -> None:
            for first in range(number * half, self.blocks, 2 * half):
                slots = order[first : first + half]
                host = np.arange(number * half, number * half + len(slots), dtype=np.uint32)
                statuses = await verbs[mode](BlockIO(host, slots, _keys(slots)))
                if statuses.any():
                    raise RuntimeError(f"{mode}: {np.count_nonzero(statuses)} blocks failed")

        async with anyio.create_task_group() as group:
            group.start_soon(side, 0)
            group.start_soon(side, 1)

    async def _watch(self, late_ms: list[float], ticks: int | None) -> None:
        """Note how late the loop wakes a task that sleeps for a millisecond at a time."""
        while ticks is None or ticks > 0:
            started = time.perf_counter()
            await anyio.sleep(_TICK_S)
            late_ms.append((time.perf_counter() - started - _TICK_S) * 1e3)
            ticks = None if ticks is None else ticks - 1

    def _note_cpu(self, name: str, seconds: float) -> None:
        self.cpu.setdefault(name, []).append(seconds / (self.total_bytes / 1e9))

    def pool(self, checksums: bool) -> float:
        """Read all blocks with preadv in a pool of threads, a call per block; GB/s.

        With `checksums` each thread computes that of the block it has read, as the tier does.
        """
        return anyio.run(self._pool, checksums)

    async def _pool(self, checksums: bool) -> float:
        arena = Arena(max(2, _ARENA_BYTES // self.block_bytes), self.block_bytes)
        _fill(arena)
        fd = os.open(self.folder / "tier" / DATA_NAME, os.O_RDONLY)
        direct_io_problem(fd, self.folder)
        order = np.random.default_rng(2).permutation(self.blocks).astype(np.uint32)
        calls = iter(enumerate(order.tolist()))  # each reader takes the next one
        places = (np.arange(self.blocks) % arena.slots).astype(np.uint32)
        keys, sums = _keys(order), np.zeros(self.blocks, np.uint64)

        def fetch(number: int, slot: int) -> int:
            view = arena.view(number % arena.slots).data
            moved = os.preadv(fd, [view], slot * self.block_bytes)
            if checksums:
                one = pointer("uint32_t", places[number:]), self.block_bytes
                key, total = (pointer("uint64_t", each[number:]) for each in (keys, sums))
                lib.fx_checksum_blocks(arena.base, arena.stride_bytes, *one, key, 1, total)
            return moved

        in_thread = aiofiles.os.wrap(fetch)

        async def reader() -> None:
            for number, slot in calls:
                if await in_thread(number, slot, executor=executor) != self.block_bytes:
                    raise RuntimeError("a short read")

        with ThreadPoolExecutor(_POOL_THREADS) as executor:
            cpu, started = _cpu(), time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(_POOL_THREADS):
                    group.start_soon(reader)
            rate = self.total_bytes / (time.perf_counter() - started) / 1e9
            self._note_cpu("pool with checksums" if checksums else "pool", _cpu() - cpu)
        os.close(fd)
        arena.close()
        return rate

    def fio(self, mode: Literal["read", "write"]) -> float:
        """Let fio move as many bytes, at the same size and depth; GB/s."""
        command = [
            *("fio", "--name=flexkv", f"--filename={self.folder / 'fio.dat'}"),
            *(f"--rw=rand{mode}", f"--bs={self.block_bytes}", f"--size={self.total_bytes}"),
            *("--direct=1", "--ioengine=io_uring", f"--iodepth={self.depth}", "--overwrite=1"),
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return float(job[mode]["bw_bytes"]) / 1e9


def run(
    progress: Progress,
    *,
    directory: Path | None = None,
    block_kib: tuple[int, ...] | list[int] = (64, 256, 1024, 4096),
    repeats: int = 5,
    size_mib: int = 512,
    engine: str = "auto",
    fio: bool = True,
) -> list[Result]:
    """Measure the disk tier in `directory` (default: the directory for temporary files).

    `size_mib` are moved per measurement. Without fio on the PATH, or with `fio=False`, there is
    nothing to compare with and `ratio` stays empty; the params say so.
    """
    settings = DiskSettings.read({"directories": ["."], "engine": engine})
    peer = fio and shutil.which("fio") is not None
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="flexkv-bench-", dir=directory) as name:
        folder = Path(name)
        for number, kib in enumerate(block_kib):
            rig = _Rig(folder, kib << 10, size_mib << 20, settings)
            progress(f"{kib} KiB blocks", number, len(block_kib))
            results += _measure_size(rig, repeats, peer)
            for path in (folder / "tier").glob("flexkv.*"):
                path.unlink()
        progress("done", len(block_kib), len(block_kib))
    return results


def _measure_size(rig: _Rig, repeats: int, peer: bool) -> list[Result]:
    rig.measure("write")  # lays the files out: the first pass over new extents is another thing
    if peer:
        rig.fio("write")
    writes: dict[str, Callable[[], float]] = {"ours": lambda: rig.measure("write")}
    reads: dict[str, Callable[[], float]] = {"ours": lambda: rig.measure("read")}
    if peer:
        writes["fio"] = lambda: rig.fio("write")
        reads["fio"] = lambda: rig.fio("read")
    reads["engine"] = lambda: rig.measure("engine")
    reads["pool"] = lambda: rig.pool(False)
    reads["pool with checksums"] = lambda: rig.pool(True)
    reads["watched"] = lambda: rig.measure("watched")
    write_figures = interleave(writes, repeats)
    rig.cpu.clear()
    read_figures = interleave(reads, repeats)
    return [
        _rate(rig, "write", write_figures),
        _rate(rig, "read", read_figures),
        _cpu_result(rig),
        _stall_result(rig),
    ]


def _rate(rig: _Rig, name: str, figures: dict[str, list[float]]) -> Result:
    params: dict[str, Any] = {
        "block_bytes": rig.block_bytes,
        "depth": rig.depth,  # of fio too
        "in_flight_bytes": rig.depth * rig.block_bytes,
        "engine": rig.engine,
        "engine_reason": rig.reason,
        "checksums": True,
    }
    ours, theirs = figures["ours"], figures.get("fio")
    if "engine" in figures:
        params["without_checksums"] = round(median(figures["engine"]), 3)
        if theirs:
            params["without_checksums_ratio"] = round(ratio_of_pairs(figures["engine"], theirs), 3)
    if not theirs:
        params["note"] = "no fio here: nothing to compare with"
    return Result(
        name,
        median(ours),
        "GB/s",
        limit=median(theirs) if theirs else None,
        ratio=ratio_of_pairs(ours, theirs) if theirs else None,
        samples=len(ours),
        params=params,
    )


def _cpu_result(rig: _Rig) -> Result:
    """Like with like: value, peer and ratio are of moving the bytes, without checksums."""
    ours, pool = rig.cpu["engine"], rig.cpu["pool"]
    verified, pool_verified = rig.cpu["read"], rig.cpu["pool with checksums"]
    return Result(
        "read_cpu",
        median(ours),
        "s/GB",
        peer=median(pool),
        ratio=ratio_of_pairs(ours, pool),
        samples=len(ours),
        params={
            "block_bytes": rig.block_bytes,
            "peer": f"preadv in {_POOL_THREADS} threads, awaited block by block",
            "checksums": False,
            "with_checksums": round(median(verified), 4),
            "peer_with_checksums": round(median(pool_verified), 4),
            "with_checksums_ratio": round(ratio_of_pairs(verified, pool_verified), 3),
        },
    )


def _stall_result(rig: _Rig) -> Result:
    p99 = percentile(rig.stalls_ms, 99)
    return Result(
        "loop_stall_p99",
        p99,
        "ms",
        limit=1.0,
        ratio=p99,
        samples=len(rig.stalls_ms),
        params={
            "block_bytes": rig.block_bytes,
            "p50": round(percentile(rig.stalls_ms, 50), 3),
            "max": round(max(rig.stalls_ms), 3),
            "idle_p99": round(percentile(rig.idle_ms, 99), 3),
        },
    )


def _identity(block_bytes: int) -> Identity:
    group = LayerGroup((0,), 1, block_bytes // 32, "uint8", 2)
    return Identity("bench", spec=KVSpec((group,)))


def _keys(slots: NDArray[np.uint32]) -> NDArray[np.uint64]:
    numbers = slots.astype(np.uint64)
    return np.stack([numbers + np.uint64(1), numbers * np.uint64(7)], axis=1)


def _fill(arena: Arena) -> None:
    """Bytes that no device can compress away."""
    noise = np.random.default_rng(1).integers(0, 256, arena.stride_bytes, np.uint8)
    for slot in range(arena.slots):
        arena.view(slot)[:] = noise
        arena.view(slot)[:8] = np.frombuffer(slot.to_bytes(8, "little"), np.uint8)


async def _transfer(backend: DiskBackend, batch: BlockIO, size: int) -> NDArray[Any]:
    moves = backend.places.moves(False, batch.store_slots, batch.host_slots)
    moved = await backend.engine.transfer(moves)
    return np.not_equal(moved, size)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
