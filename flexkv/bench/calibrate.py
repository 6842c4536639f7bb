"""`flexkv calibrate`: what this machine's backends and our own software take, for the simulator.

`run` measures batches through the real backends (device copies and disk I/O, by block size, batch
size, batches at once and direction), then whole gets and puts through a manager; what those take
beyond the batches is the software's share.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv import plugins
from flexkv.bench import replay as plane
from flexkv.bench.rates import codec_rates, prefill_flops_per_s, prefill_rates
from flexkv.bench.report import Progress, machine, median
from flexkv.completion import Completions
from flexkv.errors import ConfigError, TransferError
from flexkv.memory import Arena
from flexkv.model import DEVICE, DISK, HOST, PAGE_BYTES, Identity, KVSpec
from flexkv.protocols import BlockCopy, BlockIO, Services
from flexkv.sim.profiles import HardwareProfile, TierProfile
from flexkv.sim.serving.engine import Edge
from flexkv.sim.serving.legs import CostOf
from flexkv.sim.serving.measured import KINDS, Calibration, Sample, Software
from flexkv.sim.serving.replay import Served, check_config
from flexkv.traces import TraceRequest

BLOCKS_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LARGEST_BYTES = 32 << 20  # of one batch
_AT_ONCE = 4
_LENGTHS = (1, 2, 4, 8, 16, 64, 256)  # of whole gets and puts, in blocks
_ROUNDS = 8  # of two of each length

_Points = list[tuple[int, float]]  # blocks, seconds beyond the batches
_WARM = 6  # requests before anything counts

Batch = Callable[[int], Coroutine[Any, Any, None]]  # move so many blocks once


def run(
    progress: Progress,
    *,
    directory: Path | None = None,
    device: str = "cpu",
    device_options: Mapping[str, Any] | None = None,
    block_bytes: Sequence[int] = BLOCKS_BYTES,
    batches: Sequence[int] = BATCHES,
    repeats: int = 7,
    model: Path | None = None,
) -> Calibration:
    """Measure this machine.

    Args:
        directory: where a disk tier is made (and removed); default: that for temporary files.
        device, device_options: the device plug-in, as in the configuration.
        block_bytes: block sizes in bytes, multiples of 4096; whole gets and puts are of the one
            nearest to 64 KiB.
        model: directory of a causal LM whose prefill rate is measured too.

    Raises:
        ConfigError: a size is no multiple of 4096, or the plug-in refuses its options.
        TransferError: a batch failed.
    """
    wrong = [size for size in block_bytes if size < PAGE_BYTES or size % PAGE_BYTES]
    if wrong or not block_bytes or repeats < 1:
        raise ConfigError(f"block sizes must be multiples of {PAGE_BYTES}, got {wrong[:1]}")
    options = dict(device_options or {})
    sizes = sorted(set(block_bytes))
    samples: dict[Edge, list[Sample]] = {}
    rates: dict[Edge, float] = {}
    with tempfile.TemporaryDirectory(prefix="flexkv-calibrate-", dir=directory) as name:
        for number, size in enumerate(sizes):
            progress(f"batches of {size >> 10} KiB blocks", number, len(sizes) + 1)
            counts = [n for n in sorted(set(batches)) if n * size <= _LARGEST_BYTES] or [1]
            bench = _Bench(Path(name) / str(size), device, options, size, counts, repeats)
            anyio.run(bench.measure)
            for edge, found in bench.samples.items():
                samples.setdefault(edge, []).extend(found)
            for edge, rate in bench.rates.items():
                rates[edge] = max(rate, rates.get(edge, 0.0))
        progress("whole gets and puts", len(sizes), len(sizes) + 1)
        whole = min(sizes, key=lambda size: abs(size - (64 << 10)))
        measured = Calibration(_hardware(samples, rates), samples, rates)
        software = _software(measured, Path(name) / "whole", whole, device, options)
    progress("done", len(sizes) + 1, len(sizes) + 1)
    facts = machine() | {"device": device, "device_options": options, "repeats": repeats}
    facts["codecs"] = codec_rates(repeats)
    if model is not None:
        facts["prefill_tokens_per_s"] = rates_of_model = prefill_rates(model)
        facts["prefill_flops_per_s"] = prefill_flops_per_s(model, rates_of_model)
    return replace(measured, software=software, facts=facts)


class _Bench:
    """One block size on one device and one directory."""

    def __init__(
        self,
        folder: Path,
        device: str,
        options: Mapping[str, Any],
        block_bytes: int,
        counts: Sequence[int],
        repeats: int,
    ) -> None:
        self._folder, self._device, self._options = folder, device, options
        self._block_bytes, self._counts, self._repeats = block_bytes, counts, repeats
        self._blocks = max(counts) * _AT_ONCE
        self._random = np.random.default_rng(0)
        self.samples: dict[Edge, list[Sample]] = {}
        self.rates: dict[Edge, float] = {}

    async def measure(self) -> None:
        """Measure every edge; see `samples` and `rates`."""
        spec = KVSpec.uniform(1, 1, self._block_bytes // 2, "uint8", tokens_per_block=1)
        identity = Identity("calibrate", spec=spec)
        async with AsyncExitStack() as closer:
            arena = Arena(self._blocks, self._block_bytes)
            closer.callback(arena.close)
            completions = Completions()
            closer.push_async_callback(completions.aclose)
            device = plugins.load(plugins.BACKENDS, self._device)()
            await device.open(
                Services(completions, arena, identity, dict(self._options), self._blocks)
            )
            closer.push_async_callback(device.aclose)
            memory = np.zeros((2, self._blocks, 1, 1, self._block_bytes // 2), np.uint8)
            region = device.make_region([memory], spec, "PBNHD")
            store = plugins.load(plugins.BACKENDS, DISK)()
            settings = {"directories": [self._folder]}
            await store.open(Services(completions, arena, identity, settings, self._blocks))
            closer.push_async_callback(store.aclose)

            async def copy(count: int, to_device: bool) -> None:
                await device.copy(
                    BlockCopy(region, self._some(count), self._some(count), to_device)
                )

            async def write(count: int) -> None:
                await self._io(store.write, count)

            async def read(count: int) -> None:
                await self._io(store.read, count)

            everything = np.arange(self._blocks, dtype=np.uint32)
            await store.write(BlockIO(everything, everything, _keys(everything)))  # laid out
            await self._edge((HOST, DEVICE), lambda count: copy(count, True))
            await self._edge((DEVICE, HOST), lambda count: copy(count, False))
            await self._edge((HOST, DISK), write)
            await store.write(BlockIO(everything, everything, _keys(everything)))
            await self._edge((DISK, HOST), read)

    def _some(self, count: int) -> Any:
        return self._random.permutation(self._blocks)[:count].astype(np.uint32)

    async def _io(self, verb: Callable[[BlockIO], Awaitable[Any]], count: int) -> None:
        slots = self._some(count)
        statuses = await verb(BlockIO(self._some(count), slots, _keys(slots)))
        if statuses.any():
            raise TransferError(f"{np.count_nonzero(statuses)} of {count} blocks failed")

    async def _edge(self, edge: Edge, batch: Batch) -> None:
        """Measure batches one at a time, the sizes in no order, so that none always finds what the
        largest one left in the processor's caches; then the largest, several at once.
        """
        taken: dict[int, list[float]] = {count: [] for count in self._counts}
        await batch(self._counts[0])
        for _ in range(self._repeats):
            for count in self._random.permutation(self._counts).tolist():
                begun_s = time.perf_counter()
                await batch(count)
                taken[count].append(time.perf_counter() - begun_s)
        self.samples[edge] = [
            Sample(self._block_bytes, count, median(seconds)) for count, seconds in taken.items()
        ]
        count, seconds = max(self._counts), []
        for _ in range(max(3, self._repeats // 2)):
            begun_s = time.perf_counter()
            async with anyio.create_task_group() as group:
                for _ in range(_AT_ONCE):
                    group.start_soon(batch, count)
            seconds.append(time.perf_counter() - begun_s)
        self.rates[edge] = _AT_ONCE * count * self._block_bytes / median(seconds)


def _keys(slots: Any) -> Any:
    numbers = slots.astype(np.uint64)
    return np.stack([numbers + np.uint64(1), numbers * np.uint64(7)], axis=1)


def _hardware(
    samples: Mapping[Edge, Sequence[Sample]], rates: Mapping[Edge, float]
) -> HardwareProfile:
    """Describe host memory and disk as tiers: the smallest batch's time, the best rate."""

    def latency_s(edge: Edge) -> float:
        return min(sample.seconds for sample in samples[edge])

    source = f"measured by flexkv calibrate on {machine()['cpu']}"
    memory_bytes = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    tiers = [
        TierProfile(
            name,
            capacity_bytes,
            latency_s(down),
            rates[down],
            rates[up],
            queue_depth=64,
            source=source,
        )
        for name, capacity_bytes, down, up in (
            ("dram", memory_bytes, (HOST, DEVICE), (DEVICE, HOST)),
            ("ssd", 1e12, (DISK, HOST), (HOST, DISK)),
        )
    ]
    return HardwareProfile("this machine", {tier.name: tier for tier in tiers}, source=source)


# whole gets and puts


def _software(
    measured: Calibration, folder: Path, block_bytes: int, device: str, options: Mapping[str, Any]
) -> dict[str, Software]:
    """Return what a manager adds to the batches, by kind."""
    lengths = [count for count in _LENGTHS if count * block_bytes <= _LARGEST_BYTES]
    longest = max(lengths) + 1
    config = check_config(
        block_bytes=block_bytes,
        host_blocks=3 * longest,
        disk_blocks=8 * _ROUNDS * sum(lengths) + 8 * longest,
        directory=folder,
        device=device,
        device_options=dict(options),
    )
    served = plane.replay(config, _requests(lengths, longest))[_WARM:]
    costs = {edge: measured.cost_of(edge, block_bytes) for edge in measured.batches}
    kinds: dict[str, _Points] = {name: [] for name in KINDS}
    for one in served:
        if one.by_tier.get(DISK):
            kind = "get_mixed" if one.by_tier.get(HOST) else "get_far"
            kinds[kind].append((one.matched, _far(one, costs)))
        elif one.matched:
            kinds["get"].append((one.matched, one.get_s - costs[HOST, DEVICE](one.matched).total_s))
        else:
            kinds["get_none"].append((0, one.get_s))
        if one.stored:
            seconds = one.put_s - costs[DEVICE, HOST](one.stored).total_s
            kind = "put" if one.stored == one.blocks else "put_more"
            kinds[kind].append((one.blocks, seconds))
        elif not one.refused:
            kinds["put_known"].append((one.blocks, one.put_s))
    return {kind: _fit(points) for kind, points in kinds.items()}


def _far(served: Served, costs: Mapping[Edge, CostOf]) -> float:
    """Return what a get from disk took beyond reading and copying."""
    far = served.by_tier[DISK]
    near = served.matched - far
    moved_s = costs[DISK, HOST](far).total_s + costs[HOST, DEVICE](far).total_s
    return served.get_s - max(moved_s, costs[HOST, DEVICE](near).total_s if near else 0.0)


def _requests(lengths: Sequence[int], longest: int) -> list[TraceRequest]:
    """Prompts of every length, in rounds, so that no length has one bad moment alone: new ones,
    again while the host has them, one block longer; and, when others have driven them out, again
    from disk, or all but the first block.
    """
    numbers = itertools.count()

    def text(length: int) -> NDArray[np.int64]:
        """A prompt that shares nothing, and room behind it for one more block."""
        return np.arange(length, dtype=np.int64) + next(numbers) * (longest + 1)

    order = [text(longest) for _ in range(_WARM)]
    for _ in range(_ROUNDS):
        pairs = [(text(length), text(length)) for length in lengths]
        for one in itertools.chain.from_iterable(pairs):
            order += [one, one, np.append(one, one[-1] + 1)]
        order += [text(longest) for _ in range(4)]
        for far, mixed in pairs:
            order += [far, mixed[:1], mixed]
    return [TraceRequest(float(number), None, len(ids), 0, ids) for number, ids in enumerate(order)]


def _fit(points: _Points) -> Software:
    """Keep the medians by length, and fit base and seconds per block; short ones count more."""
    if not points:
        return Software()
    lengths = sorted({length for length, _ in points})
    middle = [median([s for length, s in points if length == one]) for one in lengths]
    if len(lengths) == 1:
        return Software(max(0.0, middle[0]))
    weights = 1 / np.sqrt(np.array(lengths, float))
    slope, base = np.polyfit(lengths, middle, 1, w=weights)
    return Software(float(base), float(slope), tuple(zip(lengths, middle, strict=True)))
