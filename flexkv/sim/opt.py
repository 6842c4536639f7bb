"""`opt`: the most blocks that any policy could have matched, knowing the future.

Belady's rule (1966) with bypass, for chains: of what is there and what the request brings, keep the
`capacity` blocks that are used again soonest, among equals the ones nearer to the start of a
prompt. A block's ancestors are used again whenever it is, so what is kept is always readable: the
bound is reachable, and no policy for blocks of one size matches more (Mattson et al., 1970).

All blocks that are used next by the same request lie on its path, and the farthest of them leaves
first: how many of them are kept says which. So the state is one number for each future request.

`Future` (next uses, shared by all capacities) - `opt` (Future, capacity -> matched blocks).
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from flexkv.sim.columns import Columns


class Future:
    """For each request, (request that uses them next, how many) for the blocks of its path."""

    def __init__(self, trace: Columns) -> None:
        count = len(trace.times)
        self.lengths = trace.lengths
        self.runs: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        next_use = np.full(len(trace.keys), count, np.int64)
        ends = trace.ends.tolist()
        for number in range(count - 1, -1, -1):
            path = trace.ids[ends[number] : ends[number + 1]]
            uses = next_use[path]
            next_use[path] = number
            again = uses[: int(np.searchsorted(uses, count))]  # never decreases along a path
            if len(again):
                starts = np.flatnonzero(np.diff(again, prepend=-1))
                sizes = np.diff(starts, append=len(again))
                self.runs[number] = list(zip(again[starts].tolist(), sizes.tolist(), strict=True))


def opt(future: Future, capacity_blocks: int) -> NDArray[np.int64]:
    """Return the blocks matched for each request: int64 [requests]."""
    matched = np.zeros(len(future.runs), np.int64)
    kept: dict[int, int] = {}  # request -> blocks that are there and that it uses next
    farthest: list[int] = []  # heap of the requests in `kept`, negative; some twice
    resident = 0
    for number, runs in enumerate(future.runs):
        hits = kept.pop(number, 0)
        matched[number] = hits
        resident -= hits
        for request, count in runs:
            resident += count
            if request not in kept:
                heapq.heappush(farthest, -request)
            kept[request] = kept.get(request, 0) + count
        while resident > capacity_blocks:
            last = -farthest[0]
            leaving = min(kept[last], resident - capacity_blocks)
            resident -= leaving
            kept[last] -= leaving
            if kept[last] == 0:
                del kept[last]
                heapq.heappop(farthest)
    return matched
