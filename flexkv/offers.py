"""Blocks that wait to be written to lower tiers: the queue that every driver serves.

`Offers.add` (the oldest leave when it is full), `take` (the next batch), `defer` and `landed`
(blocks whose ancestors are still on their way to the host), `settle` (a batch is dealt with) -
`next_wave`, `outstanding` (offers before and after a moment are told apart). Synchronous and
deterministic: the manager's tasks and the simulator serve the same queue in the same order.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from flexkv.ledger import Ledger
from flexkv.model import BlockIds, KeyArray


class Offer(NamedTuple):
    """Blocks for the lower tiers, and the wave they belong to."""

    blocks: BlockIds
    keys: KeyArray
    wave: int


class Offers:
    """A bounded queue of offers; `ledger.offers` counts those of each block not yet dealt with."""

    def __init__(self, ledger: Ledger, *, queue_blocks: int, batch_blocks: int) -> None:
        self._queue_blocks, self._batch_blocks = queue_blocks, max(1, batch_blocks)
        self._pending = ledger.offers
        self._queue: deque[Offer] = deque()
        self._early: list[Offer] = []
        self._outstanding: Counter[int] = Counter()  # blocks of a wave not yet dealt with
        self.wave = 0
        self.queued_blocks = 0

    def __bool__(self) -> bool:
        """Whether a batch can be taken."""
        return bool(self._queue)

    @property
    def deferred(self) -> bool:
        """Whether blocks wait for something to land."""
        return bool(self._early)

    @property
    def waiting(self) -> bool:
        """Whether blocks are queued or deferred."""
        return bool(self._queue or self._early)

    def add(self, offer: Offer) -> int:
        """Queue blocks; when it is full the oldest leave unwritten. Returns blocks that left."""
        self._queue.append(offer)
        self.queued_blocks += len(offer.blocks)
        self._count(offer)
        dropped = 0
        while self.queued_blocks > self._queue_blocks and len(self._queue) > 1:
            oldest = self.take()
            self.settle(oldest)
            dropped += len(oldest.blocks)
        return dropped

    def take(self) -> Offer:
        """Take the next batch; it stays counted until it is settled."""
        blocks, keys, wave = self._queue.popleft()
        limit = self._batch_blocks
        if len(blocks) > limit:
            self._queue.appendleft(Offer(blocks[limit:], keys[limit:], wave))
            blocks, keys = blocks[:limit], keys[:limit]
        self.queued_blocks -= len(blocks)
        return Offer(blocks, keys, wave)

    def defer(self, offer: Offer) -> None:
        """Keep blocks until something lands in the host: it may be an ancestor of theirs."""
        self._early.append(offer)
        self._count(offer)

    def landed(self) -> int:
        """Queue what was deferred: something has landed, or never will. Returns as `add`."""
        early, self._early = self._early, []
        dropped = 0
        for offer in early:
            self.settle(offer)
            dropped += self.add(offer)
        return dropped

    def settle(self, offer: Offer) -> None:
        """Count a batch as dealt with."""
        self._pending[offer.blocks] -= 1
        self._outstanding[offer.wave] -= len(offer.blocks)
        if self._outstanding[offer.wave] <= 0:
            del self._outstanding[offer.wave]

    def _count(self, offer: Offer) -> None:
        self._pending[offer.blocks] += 1
        self._outstanding[offer.wave] += len(offer.blocks)

    def next_wave(self) -> int:
        """Begin a new wave; returns the one that ends."""
        wave, self.wave = self.wave, self.wave + 1
        return wave

    def outstanding(self, wave: int) -> bool:
        """Whether offers of a wave, or of one before it, are not dealt with."""
        return any(other <= wave for other in self._outstanding)
