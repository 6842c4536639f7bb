"""What there is and what happened, as messages: `Snapshot` (of all that the index says can be
read, in pieces), `message_of` (events), `portions` (events cut to the size of messages).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio.to_thread
import numpy as np

from flexkv.cluster.changes import (
    MEDIUM_OF,
    Changes,
    Masks,
    chain_order,
    coalesce,
    parent_positions,
)
from flexkv.cluster.wire import MAX_BLOCKS, pack
from flexkv.events import BlockEvent, EventStream
from flexkv.model import KeyArray


class Snapshot:
    """A snapshot that is being written under `name`; it covers the log up to position `base`."""

    def __init__(self, events: EventStream, epoch: int, base: int, name: str) -> None:
        self._survey = events.survey(MEDIUM_OF)
        self._order = np.empty(0, np.int64)
        self._epoch, self.base, self.name = epoch, base, name
        self._at = 0
        self.chunks = self.holdings = 0  # so far

    @property
    def complete(self) -> bool:
        """Whether there are no more pieces."""
        return self._at >= len(self._order)

    async def begin(self) -> None:
        """Find an order for the blocks."""
        self._order = await anyio.to_thread.run_sync(lambda: chain_order(self._survey.arrange()))

    async def pieces(self, count: int) -> list[bytes]:
        """Return the next messages, at most `count` of them."""
        messages: list[bytes] = []
        while len(messages) < count and not self.complete:
            some = self._order[self._at : self._at + MAX_BLOCKS]
            self._at += len(some)
            keys, parents, readable = self._survey.piece(some)
            masks = np.zeros(len(keys), np.uint8)
            for tier, here in readable.items():
                masks |= here.astype(np.uint8) << np.uint8(MEDIUM_OF[tier])
                self.holdings += int(np.count_nonzero(here))
            piece = partial(_piece, keys, parents, masks, self._epoch)
            messages.append(await anyio.to_thread.run_sync(piece))
        self.chunks += len(messages)
        return messages


def _piece(keys: KeyArray, parents: KeyArray, masks: Masks, epoch: int) -> bytes:
    """The message of a piece. Its entries were put in order when the snapshot began; those that
    hold other blocks by now stand anywhere.
    """
    order = chain_order(parent_positions(keys, parents))
    return pack(Changes(keys[order], parents[order], masks[order]), epoch)


def message_of(events: Sequence[BlockEvent], epoch: int, strict: bool) -> tuple[bytes, int, int]:
    """A message, how many blocks it names, and how many more holdings there are after it."""
    changes = coalesce(events, strict=strict)
    balance = _bits(changes.masks) - _bits(changes.removed_masks)
    return pack(changes, epoch), len(changes), balance


def _bits(masks: Masks) -> int:
    return int(np.unpackbits(masks).sum())


def portions(events: Sequence[BlockEvent], most: int) -> list[list[BlockEvent]]:
    """Cut events into portions of at most `most` blocks."""
    portions: list[list[BlockEvent]] = [[]]
    room = most
    for event in events:
        at = 0
        while at < len(event):
            count = min(room, len(event) - at)
            part = slice(at, at + count)
            portions[-1].append(
                BlockEvent(event.kind, event.tier, event.keys[part], event.parents[part])
            )
            at, room = at + count, room - count
            if not room:
                portions.append([])
                room = most
    return [portion for portion in portions if portion]
