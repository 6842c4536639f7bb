"""Fetch or recompute: how much of a prefix is there sooner than it is computed.

`Worth.watch`, `begin`, `end` (what transfers take, by tier) - `Worth.computed` (what prefill takes)
- `Worth.keep` (how many blocks of a match to fetch) - `prefill_tokens` (FLOPs of positions).
Synchronous, without a clock: `now` is an argument.

A prefix is fetched from its beginning, without gaps, and what is behind it is computed when it is
there: each token attends to all before it. So the two do not overlap within a request, and

    time(k) = fetch(blocks before k) + compute(blocks from k on) * weight / (1 - busy)

is least for the k to keep. A second of computing that is put on an accelerator which is busy for
the share `busy` of the time keeps it from idling for 1 / (1 - busy) seconds (the busy period of a
queue, Kleinrock 1975, volume 1, 5.8), and whoever comes meanwhile waits for it. Stores are read
side by side, all blocks share the way from the host to the device, and the last piece of a read
passes that way alone. What other gets have under way counts as far as they take turns with this
one: min(what they still move, what it moves).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.estimates import LineEstimate, Units
from flexkv.model import DEVICE, HOST, PRIORITY_GET, Copy, Statuses, TransferGraph

CROSSOVER_TOKENS = 30_000.0  # where attention takes as many FLOPs as the rest, for 8B parameters


def prefill_tokens(tokens: Units, crossover_tokens: float = CROSSOVER_TOKENS) -> Units:
    """Return how many tokens without attention cost as many FLOPs as a prompt's first `tokens`.

    A token at position p costs 1 + p / crossover: linear layers, and attention to what is before.
    """
    return tokens * (1.0 + tokens / (2.0 * crossover_tokens))


_BUSY_S = 30.0  # over which the share is taken
_BUSIEST = 0.98  # more is not believed: what is measured lags behind


@dataclass(frozen=True, slots=True)
class WorthLimits:
    """What decides between fetching and computing; see the settings of the same names.

    `prefill_tokens_per_s` of 0: nothing is known until `computed` was told often enough. Without
    `declines` everything is fetched: it is known what that takes, and no more.
    """

    prefill_tokens_per_s: float = 0.0
    crossover_tokens: float = CROSSOVER_TOKENS
    weight: float = 1.0
    margin: float = 0.1
    probe_s: float = 10.0
    declines: bool = True


@dataclass(slots=True)
class Load:
    """A get under way: bytes that it still has to move, by the tier they come from."""

    left: dict[str, int]


@dataclass(slots=True)
class Batch:
    """Bytes on their way up from a tier, with what was before them when they began."""

    graph: TransferGraph
    tier: str
    size_bytes: int
    queued_bytes: int
    load: Load | None
    begun_at: float


class Worth:
    """Costs of fetching, by tier, and of computing, learned while both go on."""

    def __init__(
        self,
        tiers: Sequence[str],
        *,
        tokens_per_block: int,
        block_bytes: int,
        chunk_blocks: int,
        limits: WorthLimits,
    ) -> None:
        self.tiers = list(tiers)
        self.tokens_per_block, self.block_bytes = tokens_per_block, block_bytes
        self.chunk_blocks, self.limits = chunk_blocks, limits
        rate = limits.prefill_tokens_per_s
        self.fetching = {tier: LineEstimate(limits.margin) for tier in tiers}
        self.prefill = LineEstimate(limits.margin, 1 / rate if rate else None)
        self.probes = 0
        self._busy_s, self._busy_at = 0.0, -math.inf  # fading
        self._tried_at = dict.fromkeys(tiers, 0.0)
        self._loads: dict[int, Load] = {}  # by the id of the graph that is being moved
        self._flying = dict.fromkeys(tiers, 0)  # bytes between begin and end
        self._beside = dict.fromkeys(tiers, 0)  # those of them that no get moves

    # what transfers take

    def watch(self, graph: TransferGraph) -> None:
        """Note what a get is about to move."""
        if graph.priority != PRIORITY_GET:
            return
        left: dict[str, int] = {}
        for copy in graph.ops:
            if self._goes_up(copy):
                size_bytes = len(copy) * copy.size_bytes(self.block_bytes)
                left[copy.source.place] = left.get(copy.source.place, 0) + size_bytes
        if left:
            self._loads[id(graph)] = Load(left)

    def begin(self, graph: TransferGraph, copy: Copy, now: float, blocks: int) -> Batch | None:
        """Note that `blocks` blocks of an op set out from a tier; None: it does not go up."""
        if not self._goes_up(copy):
            return None
        tier, size_bytes = copy.source.place, blocks * copy.size_bytes(self.block_bytes)
        load = self._loads.get(id(graph))
        queued_bytes = self._flying[tier]
        self._flying[tier] += size_bytes
        if load is None:
            self._beside[tier] += size_bytes
        return Batch(graph, tier, size_bytes, queued_bytes, load, now)

    def end(self, batch: Batch | None, now: float, statuses: Statuses) -> None:
        """Note that it has ended; if all of it landed, it tells how fast the tier is.

        It waited for the bytes before it, so that both together took this long.
        """
        if batch is None:
            return
        tier, load = batch.tier, batch.load
        self._flying[tier] -= batch.size_bytes
        if load is None:
            self._beside[tier] -= batch.size_bytes
        else:
            load.left[tier] -= batch.size_bytes
            if not any(load.left.values()):
                del self._loads[id(batch.graph)]
        if not np.count_nonzero(statuses):  # others than LANDED
            moved_bytes = batch.size_bytes + batch.queued_bytes
            self.fetching[tier].add(moved_bytes, now - batch.begun_at, now)

    def _goes_up(self, copy: Copy) -> bool:
        source, target = copy.source.place, copy.target.place
        return source in self.fetching and source != target and target in (HOST, DEVICE)

    # what computing takes

    def computed(
        self, tokens: int, past_tokens: int, elapsed_s: float, now: float, share: float = 1.0
    ) -> None:
        """Take in that the engine computed `tokens` behind `past_tokens` in `elapsed_s`, with this
        share of its accelerators.
        """
        self._busy_s = self.busy(now) * _BUSY_S + elapsed_s * share
        self._busy_at = now
        crossover = self.limits.crossover_tokens
        before = prefill_tokens(float(past_tokens), crossover)
        units = prefill_tokens(float(past_tokens + tokens), crossover) - before
        self.prefill.add(units, elapsed_s, now)

    def busy(self, now: float) -> float:
        """Return the share of the time that accelerators computed lately."""
        return self._busy_s / _BUSY_S * math.exp((self._busy_at - now) / _BUSY_S)

    # the decision

    def keep(self, sources: Sequence[NDArray[np.int64]], first: int, now: float) -> int:
        """Return how many blocks to fetch of a match that begins with block `first`.

        All of them unless it is known that fewer are there sooner, by the margin. A tier that was
        declined for `probe_s` is tried again, with a chunk of blocks.

        Args:
            sources: for each group of layers the number of the tier that each block comes from.
        """
        count = len(sources[0])
        seconds = self.seconds(sources, first, now)
        if seconds is None:
            return count
        best = count - int(np.argmin(seconds[::-1]))  # the longest of equals
        if seconds[best] >= (1 - self.limits.margin) * seconds[count]:
            return count
        tier = self.tiers[max(int(part[best]) for part in sources)]
        tried_at = max(self._tried_at[tier], self.fetching[tier].seen_at)
        if now - tried_at < self.limits.probe_s:
            return best
        self._tried_at[tier] = now
        self.probes += 1
        return min(count, best + self.chunk_blocks)

    def seconds(
        self, sources: Sequence[NDArray[np.int64]], first: int, now: float
    ) -> NDArray[np.float64] | None:
        """Return time(k) for k = 0..blocks, as the module says; None where something is not known
        that it takes.
        """
        if not self.prefill.known:
            return None
        count, chunk_bytes = len(sources[0]), self.chunk_blocks * self.block_bytes
        link = self.fetching[HOST]
        fetch_s = np.zeros(count + 1)
        if link.known:
            step_bytes = len(sources) * self.block_bytes
            sizes: NDArray[np.float64] = np.arange(count + 1.0) * step_bytes
            fetch_s[1:] = link.seconds(sizes + self._before(HOST, sizes))[1:]
        for number, tier in enumerate(self.tiers):
            here = np.zeros(count)
            for part in sources:
                here += part == number
            if not here.any():
                continue
            line = self.fetching[tier]
            if not line.known:
                return None
            if tier != HOST:
                sizes = np.concatenate(([0.0], np.cumsum(here))) * float(self.block_bytes)
                read_s = line.seconds(sizes + self._before(tier, sizes))
                if link.known:  # where reads end in the device, nothing is known of the way there
                    read_s += link.seconds(np.minimum(sizes, chunk_bytes))
                np.maximum(fetch_s, np.where(sizes > 0, read_s, 0.0), out=fetch_s)
        ends: NDArray[np.float64] = (first + np.arange(count + 1.0)) * self.tokens_per_block
        done = prefill_tokens(ends, self.limits.crossover_tokens)
        weight = self.limits.weight / (1 - min(_BUSIEST, self.busy(now)))
        compute_s = weight * self.prefill.share_s * (done[-1] - done)
        return np.asarray(fetch_s + compute_s, np.float64)

    def _before(self, tier: str, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes of others that go before the last of so many of ours."""
        lefts = [load.left[tier] for load in self._loads.values() if load.left.get(tier)]
        left = np.sort(np.array(lefts, np.float64))
        before = np.full(len(sizes), float(self._beside[tier]))
        if len(left):
            shorter = np.searchsorted(left, sizes)
            sums = np.concatenate(([0.0], np.cumsum(left)))
            before += sums[shorter] + (len(left) - shorter) * sizes
        return before

    def expected_s(self, tier: str, blocks: int) -> float | None:
        """Return the seconds until `blocks` blocks of a tier are there, behind what it reads now;
        None: not known.
        """
        line = self.fetching[tier]
        size_bytes = self._flying[tier] + blocks * self.block_bytes
        return line.seconds(float(size_bytes)) if line.known else None

    # for those who look

    def latency_s(self, tier: str) -> float:
        """Seconds that a batch from a tier takes beside its bytes, as decisions have it."""
        return self.fetching[tier].first_s

    def bytes_per_s(self, tier: str) -> float:
        """Bytes per second from a tier, as decisions have it; 0: not known."""
        unit_s = self.fetching[tier].unit_s
        return 1 / unit_s if unit_s else 0.0

    def tokens_per_s(self) -> float:
        """Tokens prefilled per second at the start of a prompt, in steps of the mean size of those
        that were told; 0: not known.
        """
        share_s = self.prefill.share_s
        return 1 / share_s if share_s else 0.0
