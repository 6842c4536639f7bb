"""What happened, made small: `coalesce` (events -> `Changes`), `chain_order` (children right behind
their parents, so that a chain of blocks is written as its keys alone). Plain numpy on arrays of its
own: it may run in another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.cluster.delta import MEDIA
from flexkv.events import BlockEvent
from flexkv.model import KeyArray

MEDIUM_OF = {name: number for number, name in enumerate(MEDIA)}
Masks = NDArray[np.uint8]  # one per block: bit m is set for medium m
Positions = NDArray[np.int64]


def no_keys() -> KeyArray:
    """An array of no keys."""
    return np.empty((0, 2), np.uint64)


def no_masks() -> Masks:
    """An array of no masks."""
    return np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Changes:
    """Each block once among the stored, with its parent, and once among the removed; masks say on
    which media. Parents stand before children.
    """

    keys: KeyArray = field(default_factory=no_keys)
    parents: KeyArray = field(default_factory=no_keys)
    masks: Masks = field(default_factory=no_masks)
    removed: KeyArray = field(default_factory=no_keys)
    removed_masks: Masks = field(default_factory=no_masks)

    def __len__(self) -> int:
        return len(self.keys) + len(self.removed)


def coalesce(events: Sequence[BlockEvent], *, strict: bool = False) -> Changes:
    """Return what `events` ("stored" and "removed") come to: the last one of a block in a tier.

    A block that came and went is nothing, unless `strict`: then it was removed. That is needed
    while somebody reads what there is, who may have seen it. Tiers outside MEDIA do not count.
    """
    told = [event for event in events if event.tier in MEDIUM_OF and len(event)]
    if not told:
        return Changes()
    keys = np.concatenate([event.keys for event in told])
    parents = np.concatenate(
        [event.parents if event.kind == "stored" else np.zeros_like(event.keys) for event in told]
    )
    counts = [len(event) for event in told]
    media = np.repeat(np.array([MEDIUM_OF[event.tier] for event in told], np.uint8), counts)
    stored = np.repeat(np.array([event.kind == "stored" for event in told]), counts)
    order = np.lexsort((media, keys[:, 1], keys[:, 0]))  # stable: in order of time within a group
    sorted_keys, sorted_media, sorted_stored = keys[order], media[order], stored[order]
    new_key = np.ones(len(order), np.bool_)
    new_key[1:] = (sorted_keys[1:] != sorted_keys[:-1]).any(axis=1)
    first = new_key.copy()
    first[1:] |= sorted_media[1:] != sorted_media[:-1]
    firsts = np.flatnonzero(first)
    lasts = np.append(firsts[1:], len(order)) - 1
    came = sorted_stored[lasts]
    went = ~came if strict else ~came & ~sorted_stored[firsts]
    at, masks = _by_block(order, new_key, lasts[came], sorted_media)
    gone, gone_masks = _by_block(order, new_key, lasts[went], sorted_media)
    arranged = chain_order(parent_positions(keys[at], parents[at]))
    at, masks = at[arranged], masks[arranged]
    return Changes(keys[at], parents[at], masks, keys[gone], gone_masks)


def _by_block(
    order: Positions, new_key: NDArray[np.bool_], chosen: Positions, media: Masks
) -> tuple[Positions, Masks]:
    """Positions and masks of the blocks of `chosen` rows, each block once, in order of time."""
    if not len(chosen):
        return np.empty(0, np.int64), no_masks()
    block = np.cumsum(new_key)[chosen]
    starts = np.flatnonzero(np.append(True, block[1:] != block[:-1]))
    masks = np.bitwise_or.reduceat(np.left_shift(np.uint8(1), media[chosen]), starts)
    at = np.minimum.reduceat(order[chosen], starts)
    by_time = np.argsort(at, kind="stable")
    return at[by_time], masks[by_time]


def parent_positions(keys: KeyArray, parents: KeyArray) -> Positions:
    """Return where each parent stands in `keys`, -1 where it does not."""
    if not len(keys):
        return np.empty(0, np.int64)
    order = np.argsort(keys[:, 0], kind="stable")
    at = np.searchsorted(keys[order, 0], parents[:, 0])
    found = order[np.minimum(at, len(keys) - 1)]
    return np.where((keys[found] == parents).all(axis=1), found, -1)


def chain_order(parents: Positions) -> Positions:
    """Return an order in which parents come before children and chains are kept together.

    `parents` are positions, -1 for none. Each block is followed by one of its children, where it
    has any; chains begin in order of the depth of their first block, which is below the depth of
    whatever chain hangs from them.
    """
    count = len(parents)
    here = np.arange(count)
    rooted = parents < 0
    above = np.where(rooted, here, parents)
    heir = np.full(count, -1)
    heir[parents[~rooted]] = here[~rooted]
    head = np.where(~rooted & (heir[above] == here), above, here)
    depth, jump = (~rooted).astype(np.int64), above
    for _ in range(max(1, count.bit_length())):
        further = depth + depth[jump]
        if np.array_equal(further, depth):
            break
        depth, jump = further, jump[jump]
    for _ in range(max(1, count.bit_length())):
        beyond = head[head]
        if np.array_equal(beyond, head):
            break
        head = beyond
    return np.lexsort((depth, head, depth[head]))
