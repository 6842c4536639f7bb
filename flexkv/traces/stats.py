"""What a trace is like: `summarize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.traces.model import Trace, numbered

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Figures of a trace.

    `ideal_hit_rate`: of an infinite cache that starts empty, every block counted once: 1 - distinct
    / accesses; None without blocks. `one_hit_share`: of the distinct blocks, those that are asked
    for once. `top_tenth_share`: of all reuses, those of the tenth of the blocks that is reused
    most. `reuse_gap_s`: from one request for a block to the next. Percentiles are
    {"p50": ..., "p90": ..., "p99": ..., "max": ...}.
    """

    name: str
    tokens_per_block: int
    requests: int
    without_full_block: int
    sessions: int
    accesses: int
    distinct: int
    ideal_hit_rate: float | None
    span_s: float
    input_tokens: Mapping[str, float]
    output_tokens: Mapping[str, float]
    request_blocks: Mapping[str, float]
    reuse_gap_s: Mapping[str, float]
    one_hit_share: float | None
    top_tenth_share: float | None
    malformed: int


def summarize(trace: Trace) -> TraceStats:
    """Count a trace: one pass over its blocks."""
    items = trace.requests
    counts = np.array([len(item.block_ids) for item in items], np.int64)
    uses, gaps_s = _reuse(trace)
    reuses = np.sort(uses[uses > 0] - 1)[::-1]
    return TraceStats(
        name=trace.name,
        tokens_per_block=trace.tokens_per_block,
        requests=len(items),
        without_full_block=int(np.count_nonzero(counts == 0)),
        sessions=len({item.session for item in items if item.session is not None}),
        accesses=trace.accesses,
        distinct=trace.distinct,
        ideal_hit_rate=1 - trace.distinct / trace.accesses if trace.accesses else None,
        span_s=(items[-1].timestamp_ms - items[0].timestamp_ms) / 1e3 if items else 0.0,
        input_tokens=_percentiles(np.array([item.input_tokens for item in items])),
        output_tokens=_percentiles(np.array([item.output_tokens for item in items])),
        request_blocks=_percentiles(counts),
        reuse_gap_s=_percentiles(gaps_s),
        one_hit_share=float(np.mean(reuses == 0)) if len(reuses) else None,
        top_tenth_share=_top_tenth(reuses),
        malformed=len(trace.malformed),
    )


def _reuse(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the uses of each block, and the seconds between two uses of a block."""
    if not trace.accesses:
        return np.empty(0, np.int64), np.empty(0, np.float32)
    bound, numbers = numbered(np.concatenate([item.block_ids for item in trace.requests]))
    last_s = np.full(bound, np.nan)
    gaps_s, begin = np.empty(trace.accesses, np.float32), 0
    for item in trace.requests:
        end = begin + len(item.block_ids)
        own, now_s = numbers[begin:end], item.timestamp_ms / 1e3
        gaps_s[begin:end] = now_s - last_s[own]
        last_s[own] = now_s
        begin = end
    return np.bincount(numbers, minlength=bound), gaps_s[~np.isnan(gaps_s)]


def _top_tenth(reuses: NDArray[np.int64]) -> float | None:
    total = int(reuses.sum())
    return float(reuses[: -(-len(reuses) // 10)].sum() / total) if total else None


def _percentiles(values: NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    found = np.percentile(values, [*PERCENTILES, 100], method="inverted_cdf")
    names = [*(f"p{percent}" for percent in PERCENTILES), "max"]
    return {name: round(float(value), 3) for name, value in zip(names, found, strict=True)}
