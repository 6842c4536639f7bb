"""What `flexkv calibrate` measured, and what follows from it for blocks of any size.

`Calibration` (read, write) - `Sample` (one batch: blocks, their size, seconds) - `Software` (what
planning and the event loop add) - `Calibration.costs`, `prefill_flops_per_s` (for the simulator). A
file is a hardware profile of `flexkv.sim.profiles` with one more table, "serving".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flexkv.coding import Coding
from flexkv.errors import ConfigError
from flexkv.model import DISK, KVSpec
from flexkv.sim.profiles import HardwareProfile, as_json, read_profile
from flexkv.sim.serving.coded import coding_by
from flexkv.sim.serving.engine import Edge
from flexkv.sim.serving.legs import Cost, CostOf
from flexkv.sim.serving.replay import Costs

# of the software's share: gets of blocks that are all in host memory, all in a store, in both, or
# nowhere; puts of prompts that are all new, of those whose beginning is there, and of those that
# are all there
KINDS = ("get", "get_far", "get_mixed", "get_none", "put", "put_more", "put_known")


class Sample(NamedTuple):
    """The median time of one batch of `blocks` blocks, alone on its backend."""

    block_bytes: int
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Software:
    """Seconds that planning and the event loop add to what the backends need for a transfer:
    `base_s` and `block_s` per block; between `points` (blocks, seconds) where there are some.
    """

    base_s: float = 0.0
    block_s: float = 0.0
    points: tuple[tuple[int, float], ...] = ()

    @classmethod
    def read(cls, part: Mapping[str, Any]) -> Software:
        """Return what `asdict` made of a share and a file kept."""
        points = tuple((int(blocks), float(s)) for blocks, s in part.get("points", ()))
        return cls(float(part["base_s"]), float(part["block_s"]), points)

    def seconds(self, blocks: int) -> float:
        """Return what it adds to a transfer of `blocks` blocks, never less than nothing."""
        if not self.points:
            return max(0.0, self.base_s + self.block_s * blocks)
        lengths = [length for length, _ in self.points]
        between_s = float(np.interp(blocks, lengths, [seconds for _, seconds in self.points]))
        return max(0.0, between_s + max(0, blocks - lengths[-1]) * self.block_s)


@dataclass(frozen=True)
class Calibration:
    """A machine as measured: batches by edge, bytes per second of many batches at once by edge, and
    the software's share by kind.
    """

    hardware: HardwareProfile
    batches: Mapping[Edge, Sequence[Sample]]
    bytes_per_s: Mapping[Edge, float]
    software: Mapping[str, Software] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prefill_flops_per_s(self) -> float | None:
        """What prefill reached on this machine; None: calibrate was given no model."""
        found = self.facts.get("prefill_flops_per_s")
        return float(found) if found else None

    def costs(self, block_bytes: int, coding: Coding | None = None) -> Costs:
        """Return what moving blocks of `block_bytes` costs, with `coding` on the disk tier."""
        shares = (self.software.get(kind, Software()) for kind in KINDS)
        get, far_get, mixed, none, put, more, known = shares
        stored_bytes = block_bytes if coding is None else coding.stored_bytes
        return Costs(
            {
                edge: self.cost_of(edge, stored_bytes if DISK in edge else block_bytes)
                for edge in self.batches
            },
            lambda near, far: (
                far_get if far and not near else mixed if far else get if near else none
            ).seconds(near + far),
            lambda blocks, new: (known if not new else more if new < blocks else put).seconds(
                blocks
            ),
            coding,
            by_cores=self.facts.get("device") == "cpu",
        )

    def coding(self, name: str, spec: KVSpec) -> Coding:
        """Return the figures of a codec as they were measured here; raises as `coding_by`."""
        return coding_by(name, spec, self.facts.get("codecs", {}), int(self.facts.get("cores", 1)))

    def with_rate(self, edge: Edge, bytes_per_s: float) -> Calibration:
        """Return the same machine with other bytes per second on an edge."""
        return replace(self, bytes_per_s={**self.bytes_per_s, edge: bytes_per_s})

    def cost_of(self, edge: Edge, block_bytes: int) -> CostOf:
        """Return the cost of a batch on an edge, by its blocks."""
        counts, seconds = _curve(self.batches[edge], block_bytes)
        rate = self.bytes_per_s.get(edge, math.inf)
        slope = block_bytes / rate
        if len(counts) > 1:
            slope = max(slope, (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]))
        known: dict[int, Cost] = {}

        def cost(blocks: int) -> Cost:
            found = known.get(blocks)
            if found is None:
                total_s = float(np.interp(blocks, counts, seconds))
                total_s += max(0.0, blocks - counts[-1]) * slope
                found = known[blocks] = Cost(min(total_s, blocks * block_bytes / rate), total_s)
            return found

        return cost

    # files

    def write(self, path: Path) -> None:
        """Write a JSON file that `read` and `flexkv.sim.profiles.read_profile` read."""
        serving = {
            "batches": {
                _name(edge): [list(sample) for sample in samples]
                for edge, samples in self.batches.items()
            },
            "bytes_per_s": {_name(edge): rate for edge, rate in self.bytes_per_s.items()},
            "software": {kind: asdict(part) for kind, part in self.software.items()},
            "facts": dict(self.facts),
        }
        text = json.dumps(as_json(self.hardware) | {"serving": serving}, indent=1)
        path.write_text(text + "\n")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a file that `flexkv calibrate` wrote.

        Raises:
            ConfigError: it cannot be read, or was not made by `flexkv calibrate`.
        """
        hardware = read_profile(path)
        try:
            serving = json.loads(path.read_text())["serving"]
            return cls(
                hardware,
                {
                    _edge(name): [Sample(*sample) for sample in samples]
                    for name, samples in serving["batches"].items()
                },
                {_edge(name): float(rate) for name, rate in serving["bytes_per_s"].items()},
                {kind: Software.read(part) for kind, part in serving["software"].items()},
                serving.get("facts", {}),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} was not written by `flexkv calibrate` ({error!r}); run it with --out"
            ) from error


def _name(edge: Edge) -> str:
    return "->".join(edge)


def _edge(name: str) -> Edge:
    source, _, target = name.partition("->")
    return source, target


def _curve(samples: Sequence[Sample], block_bytes: int) -> tuple[list[int], list[float]]:
    """Return seconds by blocks for one block size: interpolated between the two measured sizes
    around it, and scaled beyond them where the bytes dominate.
    """
    sizes = sorted({sample.block_bytes for sample in samples})
    if not sizes:
        raise ConfigError("nothing was measured on this path")
    below = max((size for size in sizes if size <= block_bytes), default=sizes[0])
    above = min((size for size in sizes if size >= block_bytes), default=sizes[-1])
    low, high = (
        {sample.blocks: sample.seconds for sample in samples if sample.block_bytes == size}
        for size in (below, above)
    )
    if below == above:
        factor = 1.0 if below == block_bytes else block_bytes / below
        counts = sorted(low)
        return counts, [low[count] * (factor if factor > 1 else 1.0) for count in counts]
    share = (block_bytes - below) / (above - below)
    counts = sorted(low.keys() & high.keys())
    return counts, [low[n] + (high[n] - low[n]) * share for n in counts]
