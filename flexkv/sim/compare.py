"""Policies side by side: `compare` (traces x policies x capacities -> Results), `parse_policies`,
`parse_capacities`.

Besides installed policies there are `default` (what a manager with no settings uses), the bound
`opt` and the classics of `flexkv.sim.alone`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from flexkv import plugins
from flexkv.config import FlexKVConfig
from flexkv.errors import InputError
from flexkv.model import HOST
from flexkv.sim.alone import ALONE, alone
from flexkv.sim.columns import Columns
from flexkv.sim.opt import Future, opt
from flexkv.sim.replay import replay

DEFAULT, OPT = "default", "opt"
Progress = Callable[[int], None]  # told how many block accesses were done since


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy to run: the name asked for, the one that is meant, and its own settings."""

    label: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A size of the tier: in percent of the distinct blocks of a trace, or in blocks."""

    percent: float | None
    blocks: int = 0

    def of(self, trace: Columns) -> int:
        """Return the size in blocks, at least one."""
        if self.percent is None:
            return self.blocks
        return max(1, int(trace.distinct * self.percent / 100))


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one trace at one capacity. Percentages are of what was asked for: blocks, input
    tokens, and FLOPs of the prefill (a block at token p costs 1 + p / 30,000).

    Blocks in and out are None for the bound and the classics. `seconds` is the time the run took.
    """

    trace: str
    policy: str
    policy_name: str
    capacity_percent: float
    capacity_blocks: int
    block_hit_percent: float
    token_hit_percent: float
    flop_saved_percent: float
    requests: int
    accesses: int
    hits: int
    inserted_blocks: int | None
    evicted_blocks: int | None
    seconds: float


def known_policies() -> dict[str, str]:
    """Every name that `parse_policies` takes, and what it is."""
    there = {DEFAULT: f"the policy of an unconfigured manager, {FlexKVConfig().policy_of(HOST)}"}
    there |= {OPT: "the offline bound"} | dict.fromkeys(ALONE, "a classic without the prefix rule")
    return there | plugins.available(plugins.POLICIES)


def parse_policies(text: str) -> list[Policy]:
    """Read `lru,opt,gdsf:gdsf_crossover_tokens=20000`: names, each with settings after colons.

    Raises:
        InputError: no name is given, one is unknown, or a setting is not NAME=VALUE.
    """
    known = known_policies()
    found = []
    for label in filter(None, (word.strip() for word in text.split(","))):
        name, *words = label.split(":")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise InputError(f"no policy is called {name!r}{meant}; there are {', '.join(known)}")
        meant_name = FlexKVConfig().policy_of(HOST) if name == DEFAULT else name
        found.append(Policy(label, meant_name, _settings(label, words)))
    if not found:
        raise InputError(f"no policy to compare; there are {', '.join(known)}")
    return found


def _settings(label: str, words: list[str]) -> dict[str, Any]:
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise InputError(f"{label!r}: write a setting of a policy as NAME=VALUE")
        settings[key] = yaml.safe_load(value)
    return settings


def parse_capacities(text: str) -> list[Capacity]:
    """Read `1%,5%,4096`: percent of the distinct blocks of a trace, or blocks.

    Raises:
        InputError: one is neither, or not above 0.
    """
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        number, percent = word.removesuffix("%"), word.endswith("%")
        try:
            capacity = Capacity(float(number)) if percent else Capacity(None, int(number))
        except ValueError:
            capacity = Capacity(None)
        if not 0 < (capacity.percent or capacity.blocks) < 2**30:
            raise InputError(
                f"capacity {word!r} is none: write a share of the distinct blocks, as in 5%, or a "
                "number of blocks from 1, as in 4096"
            )
        found.append(capacity)
    if not found:
        raise InputError("no capacity to compare at; write 1%,5% or a number of blocks")
    return found


def compare(
    traces: Sequence[Columns],
    policies: Sequence[Policy],
    capacities: Sequence[Capacity],
    *,
    clock: Callable[[], float],
    progress: Progress,
    warmup_percent: float = 0.0,
) -> Iterator[Result]:
    """Run everything, one result after the other. Requests before `warmup_percent` of the trace
    fill the cache and are not counted.

    Raises:
        InputError: a trace asks for no block, or the warm-up leaves nothing to count.
        PluginError, ConfigError: a policy does not load, or refuses its settings.
    """
    if not 0.0 <= warmup_percent < 100.0:
        raise InputError(f"the warm-up is 0 to below 100 percent, got {warmup_percent:g}")
    for trace in traces:
        if trace.accesses == 0:
            raise InputError(f"trace {trace.name}: no request has a full block, nothing to cache")
        future = Future(trace) if any(policy.name == OPT for policy in policies) else None
        for policy in policies:
            for capacity in capacities:
                yield _run(trace, policy, capacity, future, clock, progress, warmup_percent)


def _run(
    trace: Columns,
    policy: Policy,
    capacity: Capacity,
    future: Future | None,
    clock: Callable[[], float],
    progress: Progress,
    warmup_percent: float,
) -> Result:
    blocks, began, done = capacity.of(trace), clock(), 0

    def advance(accesses: int) -> None:
        nonlocal done
        progress(accesses - done)
        done = accesses

    inserted = evicted = None
    if policy.name == OPT:
        assert future is not None, "opt looks into the future"
        matched = opt(future, blocks)
        advance(trace.accesses)
    elif policy.name in ALONE:
        matched = alone(policy.name, trace, blocks, advance)
    else:
        settings = {**FlexKVConfig().policy_settings(), **policy.settings}
        run = replay(trace, policy.name, blocks, settings, advance)
        matched, inserted, evicted = run.matched, run.inserted_blocks, run.evicted_blocks
    first = int(len(matched) * warmup_percent / 100)
    return Result(
        trace.name,
        policy.label,
        policy.name,
        100.0 * blocks / trace.distinct if capacity.percent is None else capacity.percent,
        blocks,
        *_shares(trace, matched, first),
        requests=len(matched) - first,
        accesses=int(trace.lengths[first:].sum()),
        hits=int(matched[first:].sum()),
        inserted_blocks=inserted,
        evicted_blocks=evicted,
        seconds=clock() - began,
    )


def _shares(trace: Columns, matched: NDArray[np.int64], first: int) -> tuple[float, float, float]:
    """Percent of blocks, tokens and FLOPs that were there, from request `first` on."""
    lengths, costs = trace.lengths[first:], trace.flops_before()
    hits, tokens = int(matched[first:].sum()), int(trace.input_tokens[first:].sum())
    saved, all_flops = costs[matched[first:]].sum(), costs[lengths].sum()
    if all_flops == 0.0:
        raise InputError(f"trace {trace.name}: the warm-up leaves no block to count")
    return (
        100.0 * hits / int(lengths.sum()),
        100.0 * hits * trace.tokens_per_block / max(1, tokens),
        100.0 * float(saved / all_flops),
    )
