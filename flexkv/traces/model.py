"""What a trace is: `Trace`, `TraceRequest`, `Malformed` - `block_keys` - `TraceBuilder`,
`numbered` (ids of any size -> small ones).

Block ids are prefix-chained: two ids are equal if and only if the two whole prefixes up to and
including that block are equal. Only full blocks have ids.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import TraceError
from flexkv.model import KeyArray

Ids = NDArray[np.int64]
_ROOT = -1  # stands before the first block of a prompt
_CLOSE = 1.125  # how far above the block size the best upper bound may lie
_MIX = ((0x9E3779B97F4A7C15, 0xD1B54A32D192ED03), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; `block_ids` are those of the full blocks of its prompt: int64 [blocks]."""

    timestamp_ms: float
    session: str | None
    input_tokens: int
    output_tokens: int
    block_ids: Ids


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line of a file that could not be used, and why. Lines are counted from 1; 0: the file."""

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Trace:
    """Requests sorted by time, with their totals in blocks.

    `tokens_per_block` is 0 where no request has blocks and nothing says how long one would be.
    """

    name: str
    tokens_per_block: int
    requests: Sequence[TraceRequest]
    distinct: int
    accesses: int
    malformed: Sequence[Malformed] = field(default=())

    def first(self, count: int) -> Trace:
        """Return the trace of the first `count` requests."""
        requests = self.requests[:count]
        ids = np.concatenate([request.block_ids for request in requests] or [np.empty(0, np.int64)])
        return replace(self, requests=requests, distinct=len(np.unique(ids)), accesses=len(ids))


def block_keys(ids: Ids) -> KeyArray:
    """Return the key of each chained id: uint64 [blocks, 2], the same on every machine.

    Each half is a bijection of the id (the finalizer of SplitMix64; Steele et al., OOPSLA 2014), so
    different ids have different keys.
    """
    keys = np.empty((len(ids), 2), np.uint64)
    for half, start in enumerate(_MIX[0]):
        mixed = np.asarray(ids).astype(np.uint64) + np.uint64(start)
        for shift, factor in zip((30, 27), _MIX[1], strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        keys[:, half] = mixed ^ (mixed >> np.uint64(31))
    return keys


class TraceBuilder:
    """Collects requests in any order and makes a Trace of them; all ids share one array."""

    def __init__(self, path: str, *, strict: bool = False) -> None:
        self.path, self.strict = path, strict
        self.malformed: list[Malformed] = []
        self._times: list[float] = []
        self._sessions: list[str | None] = []
        self._inputs, self._outputs, self._lines = array("q"), array("q"), array("q")
        self._ids, self._ends = array("q"), array("q", [0])

    def __len__(self) -> int:
        return len(self._times)

    def reject(self, line: int, reason: str, path: str | None = None) -> None:
        """Note that a line (of `path`, where a trace has several files) cannot be used.

        Raises:
            TraceError: the reader is strict.
        """
        problem = Malformed(path or self.path, line, reason)
        if self.strict:
            raise TraceError(f"{problem}; without --strict such lines are counted and skipped")
        self.malformed.append(problem)

    def add(
        self,
        line: int,
        timestamp_ms: float,
        session: str | None,
        input_tokens: int,
        output_tokens: int,
        block_ids: list[int],
    ) -> None:
        """Add one request; one at no finite time is rejected, ids must fit int64."""
        if not isfinite(timestamp_ms):
            self.reject(line, f"time {timestamp_ms} is no moment")
            return
        self._ids.fromlist(block_ids)
        self._ends.append(len(self._ids))
        self._times.append(timestamp_ms)
        self._sessions.append(session if session is None else sys.intern(session))
        self._inputs.append(input_tokens)
        self._outputs.append(output_tokens)
        self._lines.append(line)

    def build(self, name: str, tokens_per_block: int | None, coarsen: int = 1) -> Trace:
        """Sort by time, reject what is not chained, and count.

        Args:
            tokens_per_block: of the ids that were added; None: it is inferred from the lengths.
            coarsen: make one block of so many. As ids name their whole prefix, that of the last
                one names them all; blocks that do not fill another one are dropped.

        Raises:
            TraceError: the block size is not given and the lengths leave it open.
        """
        ids, ends = np.frombuffer(self._ids, np.int64), np.frombuffer(self._ends, np.int64)
        kept = self._chained(ids, ends)
        if tokens_per_block is None:
            tokens = np.frombuffer(self._inputs, np.int64)[kept]
            tokens_per_block = _infer(self.path, tokens, np.diff(ends)[kept])
        order = kept[np.argsort(np.array(self._times, np.float64)[kept], kind="stable")]
        requests = [
            TraceRequest(
                self._times[i],
                self._sessions[i],
                self._inputs[i],
                self._outputs[i],
                ids[ends[i] + coarsen - 1 : ends[i + 1] : coarsen],
            )
            for i in order.tolist()
        ]
        accesses = sum(len(request.block_ids) for request in requests)
        distinct = _distinct([request.block_ids for request in requests], accesses, ids)
        size = tokens_per_block * coarsen
        return Trace(name, size, requests, distinct, accesses, tuple(self.malformed))

    def _chained(self, ids: Ids, ends: Ids) -> NDArray[np.intp]:
        """Return the requests whose every block stands behind the same block as at its first
        appearance.
        """
        if not len(ids):
            return np.arange(len(self), dtype=np.intp)
        before = np.empty_like(ids)
        before[1:] = ids[:-1]
        before[ends[:-1][np.diff(ends) > 0]] = _ROOT
        known, inverse = numbered(ids)
        parents = np.empty(known, np.int64)
        parents[inverse] = before
        if np.array_equal(parents[inverse], before):
            return np.arange(len(self), dtype=np.intp)
        return self._keep_first_come(ids, before, ends)

    def _keep_first_come(self, ids: Ids, before: Ids, ends: Ids) -> NDArray[np.intp]:
        parents: dict[int, int] = {}
        kept = []
        for i in range(len(self)):
            own = slice(ends[i], ends[i + 1])
            chain = dict(zip(ids[own].tolist(), before[own].tolist(), strict=True))
            wrong = next(
                (b for b, parent in chain.items() if parents.get(b, parent) != parent), None
            )
            if wrong is not None or len(chain) != ends[i + 1] - ends[i]:
                which = "a block twice" if wrong is None else f"block {wrong} behind another block"
                self.reject(self._lines[i], f"block ids are not prefix-chained: {which}")
            else:
                parents |= chain
                kept.append(i)
        return np.array(kept, np.intp)


def numbered(ids: Ids) -> tuple[int, Ids]:
    """Return an upper bound and, for each id, a number below it that no other id has."""
    low, high = int(ids.min()), int(ids.max())
    if high - low < 4 * len(ids):
        return high - low + 1, ids - low
    distinct, inverse = np.unique(ids, return_inverse=True)
    return len(distinct), inverse


def _distinct(runs: list[Ids], accesses: int, ids: Ids) -> int:
    if not accesses:
        return 0
    if accesses != len(ids):
        ids = np.concatenate(runs)
    bound, numbers = numbered(ids)
    seen = np.zeros(bound, bool)
    seen[numbers] = True
    return int(np.count_nonzero(seen))


def _infer(path: str, tokens: Ids, blocks: Ids) -> int:
    """Return the only power of two that can be the block size.

    A prompt of n full blocks of size b has n * b <= tokens < (n + 1) * b. The upper bound holds in
    every request and is close in a long trace; the lower one holds in most requests (some traces
    count tokens that no block covers).
    """
    tokens, blocks = tokens[blocks > 0], blocks[blocks > 0]
    if not len(blocks):
        return 0
    low, high = float(np.median(tokens / (blocks + 1))), int(np.min(tokens // blocks))
    size = 1 << max(high, 1).bit_length() - 1
    if not low < size <= high < size * _CLOSE:
        raise TraceError(
            f"{path}: the lengths leave the block size open (at most {high} tokens); give "
            "tokens_per_block (--tokens-per-block)"
        )
    return size
