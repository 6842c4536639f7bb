"""What of a match is fetched: `read` (match, and let go of a tail that is computed sooner).

Where there is nothing to weigh (`worth` is None) it is the whole match.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flexkv.groups import GroupKeys, Match
from flexkv.planner import Planner
from flexkv.worth import Worth


class Cut(NamedTuple):
    """A match, pinned; how many blocks behind it were there and are not fetched, by tier; the end
    of all that was there.
    """

    match: Match
    declined: dict[str, int]
    end: int


def read(
    planner: Planner, worth: Worth | None, groups: Sequence[GroupKeys], first: int, now: float
) -> Cut:
    """Pin the longest readable prefix from block `first` on, as far as it is worth fetching.

    Blocks of windows are not weighed: they are few, and about as many wherever a prefix ends.
    """
    found = planner.match(groups, first)
    chained = [
        blocks
        for blocks, group in zip(found.blocks, groups, strict=True)
        if group.window is None and len(blocks)
    ]
    if worth is None or not worth.limits.declines or not chained:
        return Cut(found, {}, found.end)
    sources = [planner.routes.sources(blocks) for blocks in chained]
    keep = worth.keep(sources, first, now)
    if keep == len(chained[0]):
        return Cut(found, {}, found.end)
    if len(groups) == 1:
        planner.release(chained[0][keep:])
        kept = Match(first + keep, [chained[0][:keep]], found.reach)
    else:  # windows lie elsewhere, and may have gaps there: what is left may be shorter
        for blocks in found.blocks:
            planner.release(blocks)
        shorter = [GroupKeys(group.keys[: first + keep], group.window) for group in groups]
        kept = planner.match(shorter, first)._replace(reach=found.reach)
    behind = max(0, kept.end - first)
    left = np.concatenate([part[behind:] for part in sources])
    counts = np.bincount(left, minlength=len(worth.tiers))
    names = zip(worth.tiers, counts.tolist(), strict=True)
    return Cut(kept, {tier: count for tier, count in names if count}, found.end)
