"""How much memory and disk: `Setup`, `Setup.run`, `sweep`, `plan`, `hardware_costs`, `kv_spec`;
`CodecRule`, when a codec pays.

`Setup` (a trace on a machine: what does not change) - `Trial` (one pair of sizes and what it came
to) - `sweep` (every pair) - `plan` (for every host size, the smallest disk whose TTFT percentile is
within the limit, by bisection; the cheapest of them, and who is not dominated).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from flexkv.coding import Coding
from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.model import DEVICE, DISK, HOST, KVSpec
from flexkv.sim.compute import ComputeModel, ModelShape
from flexkv.sim.profiles import HardwareProfile
from flexkv.sim.serving.legs import Cost, CostOf
from flexkv.sim.serving.prices import Prices
from flexkv.sim.serving.replay import Costs
from flexkv.sim.serving.serve import Report, serve
from flexkv.traces import Trace

# Traces have blocks of hundreds of tokens; a smaller chunk would be cut block by block.
CHUNK_BLOCKS = 4

Progress = Callable[[str, int, int], None]  # what is running, requests done, of how many


def hardware_costs(
    profile: HardwareProfile, block_bytes: int, coding: Coding | None = None
) -> Costs:
    """Return what moving blocks costs by a data sheet: latency, and bytes over the slower of tier
    and link; `coding` is of the disk tier.

    Raises:
        ConfigError: the profile has no tier "dram" or "ssd".
    """

    def cost_of(tier_name: str, write: bool) -> CostOf:
        if tier_name not in profile.tiers:
            raise ConfigError(
                f"profile {profile.name!r} has no tier {tier_name!r}, only {sorted(profile.tiers)}"
            )
        tier = profile.tiers[tier_name]
        rates = [tier.write_bytes_per_s if write else tier.read_bytes_per_s]
        latency_s = tier.latency_s
        if tier.behind is not None:
            link = profile.links[tier.behind]
            rates.append(link.write_bytes_per_s if write else link.read_bytes_per_s)
            latency_s += link.latency_s
        stored_bytes = coding.stored_bytes if coding and tier_name == "ssd" else block_bytes
        block_s = stored_bytes / min(rates)
        return lambda blocks: Cost(blocks * block_s, latency_s + blocks * block_s)

    return Costs(
        {
            (HOST, DEVICE): cost_of("dram", False),
            (DEVICE, HOST): cost_of("dram", True),
            (DISK, HOST): cost_of("ssd", False),
            (HOST, DISK): cost_of("ssd", True),
        },
        coding=coding,
    )


def kv_spec(model: ModelShape, tokens_per_block: int) -> KVSpec:
    """Return what a block of a model's KV holds; items of 2 bytes are taken for bfloat16."""
    dtype = {1.0: "uint8", 2.0: "bfloat16", 4.0: "float32"}[model.kv_item_bytes]
    return KVSpec.uniform(
        model.layers, model.kv_heads, model.head_dim, dtype, tokens_per_block=tokens_per_block
    )


@dataclass(frozen=True)
class CodecRule:
    """Whether a codec saves time on a get of `blocks` blocks from disk: `flexkv.coding` on the disk
    as the simulation has it. `break_even_bytes_per_s`: on every slower disk it does.
    """

    codec: str
    stored_bytes: int  # of a block
    blocks: int
    disk_bytes_per_s: float
    break_even_bytes_per_s: float
    speedup: float  # of the reads; that more blocks fit is not in it

    @property
    def pays(self) -> bool:
        """Whether it saves time."""
        return self.speedup > 1


@dataclass(frozen=True)
class Setup:
    """A trace on a machine: what stays the same while sizes change."""

    trace: Trace
    compute: ComputeModel
    costs: Costs
    accelerators: int = 1
    speed: float = 1.0
    prices: Prices = field(default_factory=Prices)
    settings: dict[str, Any] = field(default_factory=dict)  # of FlexKVConfig

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the model, over all layers."""
        return self.spec.block_bytes

    @property
    def spec(self) -> KVSpec:
        """What a block of the trace holds."""
        return kv_spec(self.compute.model, self.trace.tokens_per_block)

    def codec_rule(self) -> CodecRule | None:
        """Return when the disk's codec pays on gets of as many blocks as the median prompt of the
        trace has; None: there is no codec, nothing to get, or a disk that takes no time.
        """
        coding = self.costs.coding
        prompts = [len(request.block_ids) for request in self.trace.requests]
        blocks = int(np.median(prompts)) if prompts else 0
        if coding is None or not blocks:
            return None
        elapsed_s = self.costs.edges[DISK, HOST](blocks).total_s
        if not elapsed_s:
            return None
        rate = blocks * coding.stored_bytes / elapsed_s
        return CodecRule(
            str(self.settings.get("disk_codec")),
            coding.stored_bytes,
            blocks,
            rate,
            coding.break_even_bytes_per_s(blocks),
            coding.payoff(blocks, rate).speedup,
        )

    def config(self, host_blocks: int, disk_blocks: int) -> FlexKVConfig:
        """Return the configuration of a cache of this size."""
        spec = self.spec
        return FlexKVConfig(
            model="trace",
            spec=spec,
            host_cache_bytes=host_blocks * spec.stride_bytes,
            disk_cache_bytes=disk_blocks * spec.stride_bytes,
            **{
                "chunk_bytes": CHUNK_BLOCKS * spec.stride_bytes,
                "prefill_crossover_tokens": self.compute.model.crossover_tokens(),
            }
            | self.settings,
        )

    def run(
        self,
        host_blocks: int,
        disk_blocks: int,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> Trial:
        """Serve the trace with a cache of so many blocks."""
        report = serve(
            self.config(host_blocks, disk_blocks),
            self.trace,
            self.costs,
            self.compute.prefill_seconds,
            accelerators=self.accelerators,
            decode_s_per_token=self.compute.decode_seconds([2048]),
            speed=self.speed,
            progress=progress,
        )
        host_bytes, disk_bytes = host_blocks * self.block_bytes, disk_blocks * self.block_bytes
        tokens = report.input_tokens + report.output_tokens
        sizes = {"host_bytes": float(host_bytes), "disk_bytes": float(disk_bytes)}
        return Trial(
            host_blocks,
            disk_blocks,
            host_bytes,
            disk_bytes,
            report,
            self.prices.usd_per_hour(self.accelerators, **sizes),
            self.prices.usd_per_mtoken(
                tokens, report.elapsed_s, accelerators=self.accelerators, **sizes
            ),
        )


@dataclass(frozen=True)
class Trial:
    """A pair of sizes, and what it came to."""

    host_blocks: int
    disk_blocks: int
    host_bytes: int
    disk_bytes: int
    report: Report
    usd_per_hour: float
    usd_per_mtoken: float

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "host_blocks": self.host_blocks,
            "disk_blocks": self.disk_blocks,
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_mtoken": self.usd_per_mtoken,
            **self.report.as_json(),
        }


def sweep(
    setup: Setup, host_blocks: Sequence[int], disk_blocks: Sequence[int], progress: Progress
) -> Iterator[Trial]:
    """Run every pair of sizes."""
    for host in host_blocks:
        for disk in disk_blocks:
            name = f"host {host}, disk {disk} blocks"
            yield setup.run(host, disk, partial(progress, name))


@dataclass(frozen=True)
class Plan:
    """The cheapest trial within the limit (None: none is), all trials, and those that no other one
    beats in both cost and TTFT, by cost.
    """

    limit_s: float
    percent: float
    best: Trial | None
    trials: Sequence[Trial]

    def pareto(self) -> list[Trial]:
        """Return the trials that no other one beats in both cost and TTFT, the cheapest first."""
        order = sorted(self.trials, key=lambda t: (t.usd_per_hour, t.report.ttft_s(self.percent)))
        kept: list[Trial] = []
        for trial in order:
            ttft_s = trial.report.ttft_s(self.percent)
            if not kept or ttft_s < kept[-1].report.ttft_s(self.percent):
                kept.append(trial)
        return kept


def plan(
    setup: Setup,
    limit_s: float,
    *,
    percent: float = 95,
    host_blocks: Sequence[int],
    most_disk_blocks: int,
    steps: int = 5,
    progress: Progress = lambda *_: None,
) -> Plan:
    """Find, for every host size, the smallest disk with which the TTFT percentile is within
    `limit_s`, to `most_disk_blocks` / 2**`steps` blocks.

    A bigger disk is taken for a faster one; where queueing makes that untrue the answer is a size
    that is within the limit, not the smallest.
    """
    trials: list[Trial] = []

    def meets(host: int, disk: int) -> bool:
        name = f"host {host}, disk {disk} blocks"
        trial = setup.run(host, disk, partial(progress, name))
        trials.append(trial)
        return trial.report.ttft_s(percent) <= limit_s

    for host in sorted(host_blocks):
        if meets(host, 0):
            break  # more memory costs more and is not needed
        if not meets(host, most_disk_blocks):
            continue
        low, high = 0, most_disk_blocks
        for _ in range(steps):
            middle = (low + high) // 2
            if middle in (low, high):
                break
            low, high = (low, middle) if meets(host, middle) else (middle, high)
    within = [trial for trial in trials if trial.report.ttft_s(percent) <= limit_s]
    best = min(within, key=lambda trial: trial.usd_per_hour, default=None)
    return Plan(limit_s, percent, best, trials)
