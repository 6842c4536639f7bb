"""Work that nobody waits for: spilling blocks to lower tiers, and making stores forget.

`Spiller.offer`, `Spiller.run` (a bounded loop in the manager's task group), `Spiller.pending`,
`Spiller.reached`; `Discarder.run`; both have `drained` (nothing is left to do) and `caught_up`
(what was there when it was asked is done). Spill is best effort: under load the oldest offers are
dropped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flexkv.engine import Engine
from flexkv.errors import TransferError
from flexkv.ledger import Discard, Ledger
from flexkv.model import FAILED, LANDING, READY, BlockIds, BoolArray, KeyArray
from flexkv.offers import Offer, Offers
from flexkv.planner import Planner
from flexkv.protocols import BlockIO, StorageBackend, as_statuses
from flexkv.telemetry import Telemetry, log
from flexkv.waiting import Signal

_ATTEMPTS = 3  # writes of a block that fail in a row before it is given up


class Spiller:
    """Writes host blocks to the stores that lack them, a few batches at a time."""

    def __init__(
        self,
        planner: Planner,
        engine: Engine,
        telemetry: Telemetry,
        *,
        queue_blocks: int,
        batch_blocks: int,
        batches_in_flight: int = 2,
    ) -> None:
        self._planner, self._engine, self._telemetry = planner, engine, telemetry
        self.workers = batches_in_flight
        self._offers = Offers(planner.ledger, queue_blocks=queue_blocks, batch_blocks=batch_blocks)
        self._failures = np.zeros(planner.ledger.max_blocks, np.uint8)  # of a block, in a row
        self._active = 0
        self._stopped = False
        self._work = Signal()
        self.progress = Signal()

    @property
    def queued_blocks(self) -> int:
        """Blocks that wait for their turn."""
        return self._offers.queued_blocks

    @property
    def busy(self) -> bool:
        """Whether blocks are queued or being written."""
        return self._offers.waiting or self._active > 0

    def offer(self, blocks: BlockIds, keys: KeyArray) -> None:
        """Queue blocks for the lower tiers; when it is full the oldest leave unwritten."""
        self._enqueue(Offer(blocks, keys, self._offers.wave))

    def _enqueue(self, offer: Offer) -> None:
        self._queued(self._offers.add(offer))

    def _queued(self, dropped: int) -> None:
        """Wake the workers, and those who wait for what was dropped."""
        if dropped:
            self._telemetry.add("dropped_blocks", dropped, work="spill")
            self.progress.raise_()
        self._work.raise_()

    def landed(self) -> None:
        """Say that something has landed, or never will."""
        dropped = self._offers.landed()
        if self._offers:
            self._queued(dropped)

    def pending(self, blocks: BlockIds) -> BoolArray:
        """Which blocks are queued or being written."""
        return self._planner.ledger.offers[blocks] > 0

    def _settle(self, offer: Offer) -> None:
        self._offers.settle(offer)
        self.progress.raise_()

    async def run(self) -> None:
        """Serve the queue until cancelled. Run `workers` of these to keep the device busy between
        batches.
        """
        while True:
            while not self._offers:
                await self._work.wait()
            offer = self._offers.take()
            self._active += 1
            try:
                await self._spill(offer)
            finally:
                self._active -= 1
                self._settle(offer)

    async def _spill(self, offer: Offer) -> None:
        graph, dropped, early = self._planner.plan_spill(offer.blocks, offer.keys)
        if len(early):
            self._offers.defer(Offer(early, self._planner.index.keys(early), offer.wave))
        if dropped:
            self._telemetry.add("dropped_blocks", dropped, work="spill")
        if graph is None:
            return
        run = self._engine.start(graph)
        await self._engine.run(run)
        self._planner.release(graph.blocks)
        self._failures[graph.blocks[run.alive]] = 0
        if not run.alive.all():
            log.warning("spill.failed", blocks=int(np.count_nonzero(~run.alive)), goal=graph.goal)
            self._try_again(Offer(graph.blocks[~run.alive], graph.keys[~run.alive], offer.wave))

    def _try_again(self, offer: Offer) -> None:
        """Offer blocks whose write failed once more, a few times in a row at most."""
        blocks, keys, wave = offer
        self._failures[blocks] += 1
        again = self._failures[blocks] < _ATTEMPTS
        self._failures[blocks[~again]] = 0
        if again.any():
            self._enqueue(Offer(blocks[again], keys[again], wave))

    async def reached(self, blocks: BlockIds, keys: KeyArray) -> None:
        """Wait until the lowest tier holds the blocks; with spill="on_evict" bring them there.

        Raises:
            TransferError: some did not get there and nobody is bringing them any more.
        """
        ledger = self._planner.ledger
        if ledger.spill == "never":
            return
        if ledger.spill == "on_evict":
            self.offer(blocks, keys)
        index, lowest = ledger.index, ledger.stores[-1]
        while True:
            there = (index.keys(blocks) == keys).all(axis=1)
            there &= index.states(lowest.number, blocks) == READY
            pending = self.pending(blocks)
            on_the_way = pending | (index.states(lowest.number, blocks) == LANDING)
            if there.all():
                if self._stopped or not pending.any():  # nor is any of them pinned by a spill
                    return
            elif self._stopped or not on_the_way[~there].any():
                raise TransferError(
                    f"{np.count_nonzero(~there)} of {len(blocks)} blocks of a put did not reach "
                    f"{lowest.name}: dropped under load, evicted before their turn, or an I/O "
                    "error (see the log)"
                )
            await self.progress.wait()

    def stop(self) -> None:
        """Say that nothing will be written any more."""
        self._stopped = True
        self.progress.raise_()

    async def drained(self) -> None:
        """Wait until nothing is queued or being written."""
        while self.busy and not self._stopped:
            await self.progress.wait()

    async def caught_up(self) -> None:
        """Wait until what has been offered by now was written or given up."""
        wave = self._offers.next_wave()
        while self._offers.outstanding(wave) and not self._stopped:
            await self.progress.wait()


class Discarder:
    """Makes stores forget slots, then gives the slots back to their pools."""

    def __init__(self, ledger: Ledger, stores: Mapping[str, StorageBackend]) -> None:
        self._ledger, self._stores = ledger, stores
        self._work, self._idle = Signal(), Signal()
        self._underway: list[Discard] = []  # one at most
        self._done = 0  # so far
        self._stopped = False

    def stop(self) -> None:
        """Say that nothing will be forgotten any more."""
        self._stopped = True
        self._idle.raise_()

    def wake(self) -> None:
        """Say that the ledger has discards."""
        if self._ledger.discards:
            self._work.raise_()

    @property
    def forgetting(self) -> list[Discard]:
        """What is being forgotten or waits for it: slots that are in no pool yet."""
        return self._underway + self._ledger.discards

    async def run(self) -> None:
        """Serve the ledger's discards until cancelled."""
        while True:
            while not self._ledger.discards:
                self._idle.raise_()
                await self._work.wait()
            self._underway = [self._ledger.discards.pop(0)]
            await self._discard(self._underway[0])
            self._underway = []
            self._done += 1
            self._idle.raise_()

    async def _discard(self, discard: Discard) -> None:
        if len(discard.keys):
            await self._make_forget(discard)
        discard.tier.give(discard.slots)

    async def _make_forget(self, discard: Discard) -> None:
        store, count = self._stores[discard.tier.name], len(discard.keys)
        slots = discard.slots if store.addressing == "slot" else np.zeros(count, np.uint32)
        batch = BlockIO(slots, slots, discard.keys)
        try:
            failed = as_statuses(await store.discard(batch), len(batch)) == FAILED
        except Exception as error:
            log.warning("discard.raised", tier=discard.tier.name, error=repr(error))
            failed = np.ones(len(batch), np.bool_)
        if failed.any():
            # the record may survive on the medium; its checksum still guards every later read
            log.warning(
                "discard.failed", tier=discard.tier.name, blocks=int(np.count_nonzero(failed))
            )

    async def drained(self) -> None:
        """Wait until there is nothing to forget."""
        while self.forgetting and not self._stopped:
            self._work.raise_()
            await self._idle.wait()

    async def caught_up(self) -> None:
        """Wait until what is to be forgotten by now is forgotten."""
        until = self._done + len(self.forgetting)
        while self._done < until and not self._stopped:
            self._work.raise_()
            await self._idle.wait()
