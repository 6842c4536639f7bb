"""A trace as arrays, made once and shared by all replays of it.

`columns` (a Trace -> Columns) - `Columns.flops_before` (what a hit of so many blocks saves).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.model import KeyArray
from flexkv.traces import Trace, block_keys
from flexkv.worth import prefill_tokens

_SPARSE = 4  # ids that spread over more than so many times their number are numbered anew


@dataclass(frozen=True, slots=True)
class Columns:
    """All requests of a trace: `ids` are dense block numbers, those of request i are
    `ids[ends[i]:ends[i + 1]]`; `keys` has a row for each number.
    """

    name: str
    tokens_per_block: int
    times: NDArray[np.float64]  # seconds
    ids: NDArray[np.int64]
    ends: NDArray[np.int64]
    keys: KeyArray
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    distinct: int

    @property
    def accesses(self) -> int:
        """Blocks that requests asked for."""
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Blocks of each request."""
        return np.diff(self.ends)

    def flops_before(self) -> NDArray[np.float64]:
        """What computing the first n blocks of a prompt costs, n = 0..longest, in units of one
        block without attention; see `flexkv.worth.prefill_tokens`.
        """
        ends = np.arange(int(self.lengths.max(initial=0)) + 1.0) * self.tokens_per_block
        return prefill_tokens(ends) / self.tokens_per_block


def columns(trace: Trace) -> Columns:
    """Lay a trace out in arrays."""
    requests = trace.requests
    ends = np.zeros(len(requests) + 1, np.int64)
    np.cumsum([len(request.block_ids) for request in requests], out=ends[1:])
    ids = np.empty(int(ends[-1]), np.int64)
    if len(ids):
        np.concatenate([request.block_ids for request in requests], out=ids)
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    if high - low < _SPARSE * len(ids):
        known = np.arange(low, high + 1)
        ids -= low
    else:
        known, ids = np.unique(ids, return_inverse=True)
    return Columns(
        trace.name,
        trace.tokens_per_block,
        np.array([request.timestamp_ms / 1e3 for request in requests], np.float64),
        ids,
        ends,
        block_keys(known),
        np.array([request.input_tokens for request in requests], np.int64),
        np.array([request.output_tokens for request in requests], np.int64),
        trace.distinct,
    )
