"""The simulator against the data plane: where they part, and how far the times are off.

`first_difference` (hits, evictions and bytes must be equal to the last block) - `latency_errors`
(per tier and end to end) - `Errors` (of one group of requests).

Errors are (predicted - measured) / measured: MAPE is the mean of their absolute values, MPE their
mean; `p50` and `p99` are percentiles of the absolute values over requests, `of_p50` and `of_p99`
the error of the percentile of all latencies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from flexkv.model import DISK, HOST
from flexkv.sim.serving.replay import Served


@dataclass(frozen=True, slots=True)
class Difference:
    """The first request that the two sides served differently, and what differed."""

    number: int
    measured: dict[str, Any]
    simulated: dict[str, Any]

    def __str__(self) -> str:
        names = [name for name in self.measured if self.measured[name] != self.simulated[name]]
        parts = (
            f"{name} is {self.measured[name]} in the data plane, {self.simulated[name]} in the "
            "simulator"
            for name in names
        )
        return f"request {self.number}: " + "; ".join(parts)


def first_difference(measured: Sequence[Served], simulated: Sequence[Served]) -> Difference | None:
    """Return where the two sides part; None: nowhere."""
    assert len(measured) == len(simulated), "both sides serve the same requests"
    for one, other in zip(measured, simulated, strict=True):
        if one.facts() != other.facts():
            return Difference(one.number, one.facts(), other.facts())
    return None


def middle(replays: Sequence[Sequence[Served]]) -> list[Served]:
    """Return the requests of replays that did the same, with the medians of their times: what a
    request takes, without the moments at which something else had the processor.
    """

    def of(name: str, several: Sequence[Served]) -> float:
        return float(np.median([getattr(one, name) for one in several]))

    return [
        replace(several[0], get_s=of("get_s", several), put_s=of("put_s", several))
        for several in zip(*replays, strict=True)
    ]


def totals(served: Sequence[Served]) -> dict[str, Any]:
    """Sum hits, evictions and bytes over requests."""
    tiers = sorted({tier for one in served for tier in (*one.by_tier, *one.evicted)})
    edges = sorted({edge for one in served for edge in one.moved_bytes})
    return {
        "requests": len(served),
        "blocks": sum(one.blocks for one in served),
        "hit_blocks": {t: sum(one.by_tier.get(t, 0) for one in served) for t in tiers},
        "evicted_blocks": {t: sum(one.evicted.get(t, 0) for one in served) for t in tiers},
        "moved_bytes": {
            f"{source}->{target}": sum(one.moved_bytes.get((source, target), 0) for one in served)
            for source, target in edges
        },
        "stored_blocks": sum(one.stored for one in served),
        "refused_puts": sum(one.refused for one in served),
    }


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predicted latencies are off, as shares of the measured ones."""

    name: str
    requests: int
    measured_p50_ms: float
    measured_p99_ms: float
    mape: float
    mpe: float
    p50: float
    p99: float
    of_p50: float
    of_p99: float

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


def _errors(name: str, measured: list[float], predicted: list[float]) -> Errors:
    real, said = np.array(measured), np.array(predicted)
    error = (said - real) / real
    size = np.abs(error)
    (low, high), (said_low, said_high) = (np.percentile(each, (50, 99)) for each in (real, said))
    p50, p99 = np.percentile(size, (50, 99))
    return Errors(
        name,
        requests=len(real),
        measured_p50_ms=float(low) * 1e3,
        measured_p99_ms=float(high) * 1e3,
        mape=float(size.mean()),
        mpe=float(error.mean()),
        p50=float(p50),
        p99=float(p99),
        of_p50=float(said_low / low - 1),
        of_p99=float(said_high / high - 1),
    )


_GROUPS: tuple[tuple[str, Callable[[Served], bool], Callable[[Served], float]], ...] = (
    ("get, all from host", lambda s: s.matched == s.by_tier.get(HOST, 0) > 0, lambda s: s.get_s),
    ("get, some from disk", lambda s: s.by_tier.get(DISK, 0) > 0, lambda s: s.get_s),
    ("put", lambda s: s.stored > 0, lambda s: s.put_s),
    ("end to end", lambda s: s.blocks > 0 and not s.refused, lambda s: s.get_s + s.put_s),
)


def latency_errors(measured: Sequence[Served], simulated: Sequence[Served]) -> list[Errors]:
    """Compare the times of requests that the two sides served alike, group by group."""
    found = []
    for name, belongs, seconds in _GROUPS:
        pairs = [
            (seconds(one), seconds(other))
            for one, other in zip(measured, simulated, strict=True)
            if belongs(one) and one.facts() == other.facts()
        ]
        if pairs:
            real, said = zip(*pairs, strict=True)
            found.append(_errors(name, list(real), list(said)))
    return found
