"""The cache of the simulator: the brain that serves, moved by tasks in virtual time.

`VirtualCache.get`, `put` (tasks that end when their bytes have landed) - `idle`, `usage` - what
follows from them by itself: spills in the order and within the limits of the manager's own queue,
saves of victims, slots that stores forget.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexkv.brain import Brain, brain_for
from flexkv.config import FlexKVConfig
from flexkv.cuts import read
from flexkv.errors import CapacityError, ConfigError
from flexkv.groups import GroupKeys
from flexkv.model import Copy, KeyArray, KVSpec, Statuses, TransferGraph
from flexkv.offers import Offer, Offers
from flexkv.sim.serving.engine import Edge, Run, VirtualEngine
from flexkv.sim.serving.legs import Leg
from flexkv.sim.serving.tasks import Task, Tasks

SPILLS_IN_FLIGHT = 2


@dataclass(slots=True)
class Moved:
    """What one get or put did: blocks `matched` by a get, by the tier they came from, and those
    that it `declined` by the tier they were in; blocks that a put `stored` anew, or that it was
    `refused`; bytes of its own graph by edge.
    """

    matched: int = 0
    declined: dict[str, int] = field(default_factory=dict)
    by_tier: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    refused: bool = False
    moved_bytes: dict[Edge, int] = field(default_factory=dict)


class VirtualCache:
    """What a KVManager is for its callers, without bytes."""

    def __init__(
        self, config: FlexKVConfig, tasks: Tasks, legs: dict[Edge, Leg], *, discard_s: float = 0.0
    ) -> None:
        if config.spec is None:
            raise ConfigError("spec is not set: the simulator must know the bytes of a block")
        self.spec: KVSpec = config.spec
        self._tasks, self._discard_s = tasks, discard_s
        self.brain: Brain = brain_for(config, self.spec)
        self.ledger, self.planner = self.brain.ledger, self.brain.planner
        chunk_blocks = self.planner.chunk_blocks
        self.engine = VirtualEngine(
            tasks,
            legs,
            chunk_blocks=chunk_blocks,
            block_bytes=self.spec.block_bytes,
            lane_bytes=config.device_bytes_in_flight,
            staging_blocks=config.staging_slots(self.spec),
            commit=self._commit,
            worth=self.brain.worth,
        )
        self._offers = Offers(
            self.ledger, queue_blocks=config.spill_queue_blocks, batch_blocks=chunk_blocks
        )
        self._spilling = 0
        self.now_s: float | None = None  # what the brain is told; None: the clock's time
        self.dropped_blocks = 0  # of spills, given up

    @property
    def _now(self) -> float:
        return self._tasks.clock.now_s if self.now_s is None else self.now_s

    @property
    def moved_bytes(self) -> Counter[Edge]:
        """Bytes by edge so far."""
        return self.engine.moved_bytes

    def evicted(self) -> dict[str, int]:
        """Blocks evicted so far, by tier."""
        return {tier.name: tier.evicted_blocks for tier in self.ledger.tiers.values()}

    def resident(self) -> dict[str, int]:
        """Slots in use, by tier: readable, landing, or waiting to be forgotten."""
        return {tier.name: tier.capacity - tier.free for tier in self.ledger.tiers.values()}

    # what callers do

    def get(self, keys: KeyArray, result: Moved) -> Task:
        """Match and bring the longest readable prefix to the device, as far as it is worth that."""
        clock = self._tasks.clock
        found = read(self.planner, self.brain.worth, [GroupKeys(keys)], 0, clock.now_s)
        result.declined = found.declined
        blocks = found.match.blocks[0]
        count = len(blocks)
        places = np.arange(count, dtype=np.uint32)
        get = self.planner.plan_get(blocks, keys[:count], places, self._now)
        result.matched, result.by_tier = count, get.by_tier
        self._save(get.saves)
        yield from self._carry(get.graph, result)

    def put(self, keys: KeyArray, result: Moved, output_tokens: int | None = None) -> Task:
        """Take the blocks that the host lacks from the device."""
        try:
            plan = self.planner.plan_put([GroupKeys(keys)], self._now, output_tokens)
        except CapacityError:
            result.refused = True
            return
        self._save(plan.saves)
        places = np.arange(len(keys), dtype=np.uint32)
        result.stored = len(plan.positions)
        yield from self._carry(self.planner.launch_put(plan, places), result)

    def _carry(self, graph: TransferGraph, result: Moved) -> Task:
        run = self.engine.start(graph)
        self._pass_on()
        if graph.ops:
            yield from self.engine.run(run)
        self.planner.release(graph.blocks)
        result.moved_bytes = run.moved_bytes

    def computed(self, tokens: int, past_tokens: int, elapsed_s: float, share: float) -> None:
        """See KVManager.computed."""
        if self.brain.worth is not None:
            now_s = self._tasks.clock.now_s
            self.brain.worth.computed(tokens, past_tokens, elapsed_s, now_s, share)

    # what follows by itself

    def _commit(
        self, graph: TransferGraph, copy: Copy, positions: NDArray[np.int64], statuses: Statuses
    ) -> None:
        self.ledger.commit(graph, copy, positions, statuses, self._now)
        self._pass_on()

    def _pass_on(self) -> None:
        """Hand on the work that the ledger has collected."""
        offers, spills = self._offers, self.ledger.spills
        if offers.deferred:
            self.dropped_blocks += offers.landed()
        if spills:
            for blocks, keys in spills:
                self.dropped_blocks += offers.add(Offer(blocks, keys, offers.wave))
            spills.clear()
        while self._spilling < SPILLS_IN_FLIGHT and offers:
            self._spilling += 1
            self._tasks.spawn(self._spill())
        if self.ledger.discards:
            self._tasks.spawn(self._forget())

    def _spill(self) -> Task:
        while self._offers:
            offer = self._offers.take()
            graph, dropped, early = self.planner.plan_spill(offer.blocks, offer.keys)
            if len(early):
                self._offers.defer(Offer(early, self.brain.index.keys(early), offer.wave))
            self.dropped_blocks += dropped
            if graph is not None:
                yield from self.engine.run(self.engine.start(graph))
                self.planner.release(graph.blocks)
            self._offers.settle(offer)
        self._spilling -= 1

    def _save(self, graph: TransferGraph | None) -> None:
        """Start to save victims; whoever waits for their slots can join from now on."""
        if graph is not None:
            self._tasks.spawn(self._finish_save(self.engine.start(graph)))

    def _finish_save(self, run: Run) -> Task:
        yield from self.engine.run(run)
        self.planner.release(run.graph.blocks)

    def _forget(self) -> Task:
        discards = self.ledger.discards[:]
        self.ledger.discards.clear()
        if self._discard_s:
            yield self._tasks.after(self._discard_s)
        for discard in discards:
            discard.tier.give(discard.slots)

    # books

    def check_idle(self) -> None:
        """Hold the books of an idle cache: nothing pinned, queued or in flight, tiers add up."""
        assert not self._offers.waiting, "spills are queued"
        assert self.brain.index.pinned == 0, "blocks are pinned"
        for tier in self.ledger.tiers.values():
            resident = self.brain.index.resident(tier.number)
            assert tier.free + resident == tier.capacity, f"slots of {tier.name} are lost"
        self.brain.index.check_integrity()
