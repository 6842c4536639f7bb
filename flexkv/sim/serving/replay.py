"""A trace, one request after the other: what the cache did for each, and how long it took.

`check_config` (the configuration of a cache of so many small blocks) - `replay` (the simulator's
side; `flexkv.bench.replay` is the data plane's) - `Served` (what was done for one request).

The protocol that makes both sides comparable to the last block: a request is a get, then a put of
the same blocks; behind each of them comes everything that follows from it (spills, saves, discards)
until nothing is under way. The brain's time is that of the trace. A lane takes one op, or one chunk
of it, at a time, so that they are booked in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexkv.coding import Coding
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.model import DEVICE, DISK, HOST, PAGE_BYTES, KeyArray, KVSpec
from flexkv.sim.clock import VirtualClock
from flexkv.sim.serving.cache import Moved, VirtualCache
from flexkv.sim.serving.coded import CodedLeg
from flexkv.sim.serving.engine import Edge
from flexkv.sim.serving.legs import CostOf, Leg, Wire, free
from flexkv.sim.serving.tasks import Task, Tasks
from flexkv.traces import TraceRequest, block_keys

Progress = Callable[[int, int], None]  # requests done, of how many
EDGES: tuple[Edge, ...] = ((HOST, DEVICE), (DEVICE, HOST), (DISK, HOST), (HOST, DISK))


@dataclass(slots=True)
class Served:
    """What was done for one request, and how long it took.

    `evicted` and `moved_bytes` are all that happened until nothing was under way any more, by tier
    and by (source, target); `settle_s` is the time it took behind get and put.
    """

    number: int
    blocks: int
    matched: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    refused: bool = False
    evicted: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[Edge, int] = field(default_factory=dict)
    get_s: float = 0.0
    put_s: float = 0.0
    settle_s: float = 0.0

    def facts(self) -> dict[str, Any]:
        """What must be equal on both sides; zeros are left out."""

        def some(counts: Mapping[Any, int]) -> dict[Any, int]:
            return {key: count for key, count in sorted(counts.items()) if count}

        return {
            "blocks": self.blocks,
            "matched": self.matched,
            "by_tier": some(self.by_tier),
            "stored": self.stored,
            "refused": self.refused,
            "evicted": some(self.evicted),
            "moved_bytes": some(self.moved_bytes),
        }


def check_config(
    *,
    block_bytes: int,
    host_blocks: int,
    disk_blocks: int = 0,
    directory: Path | None = None,
    chunk_bytes: int = 1 << 24,
    **settings: Any,
) -> FlexKVConfig:
    """Return the configuration of a cache of `host_blocks` and `disk_blocks` blocks, a token each.

    Raises:
        ConfigError: `block_bytes` is no whole number of pages, or a setting is wrong.
    """
    if block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
        raise ConfigError(f"block_bytes must be a multiple of {PAGE_BYTES}, got {block_bytes}")
    spec = KVSpec.uniform(1, 1, block_bytes // 2, "uint8", tokens_per_block=1)
    return FlexKVConfig(
        model="trace",
        spec=spec,
        host_cache_bytes=host_blocks * block_bytes,
        disk_cache_bytes=disk_blocks * block_bytes,
        disk_dirs=(directory or Path("flexkv_ssd"),),
        chunk_bytes=max(chunk_bytes, block_bytes),
        device_bytes_in_flight=1,  # more than fits has a lane alone
        **settings,
    )


@dataclass(frozen=True, slots=True)
class Costs:
    """What moving costs: by edge, seconds of a batch of so many blocks; and what the software adds
    to a get of (blocks from the host, blocks from stores) and to a put of (blocks, new ones).

    With a codec the edges of the disk cost what encoded blocks do. `by_cores`: the device's copies
    are made by the cores that run the codec.
    """

    edges: Mapping[Edge, CostOf] = field(default_factory=dict)
    get_s: Callable[[int, int], float] = lambda near, far: 0.0
    put_s: Callable[[int, int], float] = lambda blocks, new: 0.0
    coding: Coding | None = None
    by_cores: bool = False

    def legs(self, tasks: Tasks) -> dict[Edge, Leg]:
        """Return a leg for every edge; reads and writes of a store share its wire."""
        disk, cores = Wire(), Wire()
        wires = {(DISK, HOST): disk, (HOST, DISK): disk}
        if self.coding is not None and self.by_cores:
            wires |= {(HOST, DEVICE): cores, (DEVICE, HOST): cores}
        legs: dict[Edge, Leg] = {}
        for edge in EDGES:
            wire, cost = wires.get(edge, Wire()), self.edges.get(edge, free)
            if self.coding is not None and DISK in edge:
                reads = edge == (DISK, HOST)
                legs[edge] = CodedLeg(tasks, wire, cost, self.coding, cores, reads=reads)
            else:
                legs[edge] = Leg(tasks, wire, cost)
        return legs


def replay(
    config: FlexKVConfig,
    requests: Iterable[TraceRequest],
    costs: Costs | None = None,
) -> Iterator[Served]:
    """Serve the requests one after the other in virtual time.

    Raises:
        AssertionError: the cache's books do not balance at the end.
    """
    costs = costs or Costs()
    clock = VirtualClock()
    tasks = Tasks(clock)
    cache = VirtualCache(config, tasks, costs.legs(tasks))
    moved, evicted = Counter(cache.moved_bytes), Counter(cache.evicted())
    for number, request in enumerate(requests):
        served = Served(number, len(request.block_ids))
        cache.now_s = request.timestamp_ms / 1e3
        keys, got, put = block_keys(request.block_ids), Moved(), Moved()
        served.get_s, rest_s = _timed(tasks, _get(tasks, cache, costs, keys, got))
        served.put_s, more_s = _timed(tasks, _put(tasks, cache, costs, keys, put))
        served.settle_s = rest_s + more_s
        served.matched, served.by_tier = got.matched, got.by_tier
        served.stored, served.refused = put.stored, put.refused
        served.moved_bytes = dict(cache.moved_bytes - moved)
        served.evicted = {tier: count - evicted[tier] for tier, count in cache.evicted().items()}
        moved, evicted = Counter(cache.moved_bytes), Counter(cache.evicted())
        yield served
    cache.check_idle()


def _timed(tasks: Tasks, work: Task) -> tuple[float, float]:
    """Run a task and all that follows; return the seconds of both."""
    clock = tasks.clock
    begun_s, over_s = clock.now_s, []

    def watched() -> Task:
        yield from work
        over_s.append(clock.now_s)

    tasks.spawn(watched())
    clock.run()
    return over_s[0] - begun_s, clock.now_s - over_s[0]


def _get(tasks: Tasks, cache: VirtualCache, costs: Costs, keys: KeyArray, got: Moved) -> Task:
    yield from cache.get(keys, got)
    near = got.by_tier.get(HOST, 0)
    yield tasks.after(costs.get_s(near, got.matched - near))


def _put(tasks: Tasks, cache: VirtualCache, costs: Costs, keys: KeyArray, put: Moved) -> Task:
    yield from cache.put(keys, put)
    yield tasks.after(costs.put_s(len(keys), put.stored))
