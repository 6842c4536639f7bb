"""Which tier a block is read from that several hold: `Routes.split` (for a plan), `sources` (for
those who weigh a match).

The nearest, in the order of tiers, unless another one is expected to have all of a plan there much
sooner: by what its reads took before, and behind what it is reading now. A tier that was passed
over for `PROBE_S` gets a chunk of the next plan, for it may be better by now. What was never
measured keeps its place. Synchronous and deterministic: `now` is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv.ledger import Ledger
from flexkv.model import READY, BlockIds
from flexkv.tier import Tier

PROBE_S = 10.0
_MARGIN = 0.2  # by which a tier must be better than one before it

Positions = NDArray[np.int64]


class Costs(Protocol):
    """What reads take."""

    def expected_s(self, tier: str, blocks: int) -> float | None:
        """Seconds until so many blocks of a tier are there; None: not known."""
        ...


class Routes:
    """The tiers that blocks are read from. `costs` None: the nearest one, always."""

    def __init__(self, ledger: Ledger, chunk_blocks: int) -> None:
        self._index, self._ledger, self._chunk_blocks = ledger.index, ledger, chunk_blocks
        self.costs: Costs | None = None
        self.probes = 0  # chunks for a tier that had been passed over, so far
        self._tried_at = 0.0  # when the nearest was last asked first

    def split(
        self, blocks: BlockIds, wanted: Positions, now: float
    ) -> list[tuple[Tier, Positions]]:
        """Share out the positions `wanted` of `blocks` among the tiers that can be read, in the
        order in which they are to be asked; what none of them has is left out.
        """
        nearest = self._ledger.sources
        cheapest = self._by_cost(len(wanted))
        if cheapest is nearest:
            self._tried_at = now
            return self._shared(nearest, blocks, wanted)
        if now - self._tried_at < PROBE_S:
            return self._shared(cheapest, blocks, wanted)
        self._tried_at = now
        self.probes += 1
        first, rest = wanted[: self._chunk_blocks], wanted[self._chunk_blocks :]
        return self._shared(nearest, blocks, first) + self._shared(cheapest, blocks, rest)

    def sources(self, blocks: BlockIds) -> NDArray[np.int64]:
        """The number of the tier that each block would come from now: the host, or a store."""
        found = np.zeros(len(blocks), np.int64)
        away = self._index.states(self._ledger.host.number, blocks) != READY
        away &= self._ledger.landings(blocks) == 0
        wanted = np.flatnonzero(away)
        for tier, mine in self._shared(self._by_cost(len(wanted)), blocks, wanted):
            found[mine] = tier.number
        return found

    def _shared(
        self, tiers: Sequence[Tier], blocks: BlockIds, wanted: Positions
    ) -> list[tuple[Tier, Positions]]:
        shares = []
        for tier in tiers:
            here = self._index.states(tier.number, blocks[wanted]) == READY
            shares.append((tier, wanted[here]))
            wanted = wanted[~here]
        return shares

    def _by_cost(self, count: int) -> Sequence[Tier]:
        """The tiers, the cheapest first for `count` blocks; the same object if nothing changes."""
        nearest = self._ledger.sources
        if self.costs is None or len(nearest) < 2:
            return nearest
        costs = [self.costs.expected_s(tier.name, count) for tier in nearest]
        known = [place for place, cost in enumerate(costs) if cost is not None]
        order = list(known)
        for end in range(1, len(order)):  # stable: a tier passes those that are clearly worse
            at = end
            while at and _s(costs[order[at]]) < (1 - _MARGIN) * _s(costs[order[at - 1]]):
                order[at - 1], order[at] = order[at], order[at - 1]
                at -= 1
        if order == known:
            return nearest
        tiers = list(nearest)
        for place, chosen in zip(known, order, strict=True):
            tiers[place] = nearest[chosen]
        return tiers


def _s(cost: float | None) -> float:
    return math.inf if cost is None else cost
