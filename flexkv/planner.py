"""From a match to a graph: which blocks come from where, into which slots, after what.

`Planner.match`, `plan_get`, `plan_put`, `launch_put`, `plan_spill` make plans; `release` and
`cancel_put` take them back. It knows routes and residency, not hardware; what the ops achieved is
booked by `flexkv.ledger`. Synchronous and deterministic: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flexkv import groups as grouped
from flexkv import spills
from flexkv.errors import CapacityError
from flexkv.groups import GroupKeys, Match
from flexkv.ledger import Ledger, PromoteMode
from flexkv.model import (
    ABSENT,
    DEVICE,
    HOST,
    LANDING,
    NO_BLOCK,
    PRIORITY_GET,
    PRIORITY_PREFETCH,
    PRIORITY_PUT,
    READY,
    BlockIds,
    BoolArray,
    Copy,
    KeyArray,
    SlotIds,
    Span,
    TransferGraph,
)
from flexkv.planned import GetPlan, PutPlan
from flexkv.prompts import Prompts
from flexkv.routes import Routes


class Planner:
    """Routes and slots for the ledger's blocks."""

    promote: PromoteMode = "always"  # which blocks of a get from a store take host slots

    def __init__(self, ledger: Ledger, *, chunk_blocks: int, chunks_in_flight: int) -> None:
        self.ledger = ledger
        self.index, self.host, self.stores = ledger.index, ledger.host, ledger.stores
        self.prompts = Prompts(self.index, self.host)
        self.chunk_blocks, self.chunks_in_flight = max(1, chunk_blocks), max(1, chunks_in_flight)
        self.routes = Routes(ledger, self.chunk_blocks)

    # matching

    def match(self, groups: Sequence[GroupKeys], first: int = 0) -> Match:
        """Pin and return the longest prefix whose needed blocks are all readable somewhere."""
        found = grouped.match(self.index, groups, first)
        for blocks in found.blocks:
            self.index.pin(blocks)
        return found

    def release(self, blocks: BlockIds) -> None:
        """Drop the pins of a match or of a put."""
        self.index.unpin(blocks)
        for tier in self.ledger.sources:
            if tier.books is not None:
                tier.books.tidy()

    # get and prefetch

    def plan_get(
        self, blocks: BlockIds, keys: KeyArray, device_blocks: SlotIds | None, now: float
    ) -> GetPlan:
        """Plan the way of pinned, readable blocks to the device (with None: to the host)."""
        self.ledger.hints.advance(now)
        self.index.touch(blocks, now)
        count = len(blocks)
        states = self.index.states(self.host.number, blocks)
        in_host = states == READY
        to_host = device_blocks is None
        goal, priority = (HOST, PRIORITY_PREFETCH) if to_host else (DEVICE, PRIORITY_GET)
        saves, by_tier = None, {HOST: count}
        ops: list[Copy] = []
        if np.count_nonzero(in_host) == count:
            if device_blocks is None or count == 0:
                graph = TransferGraph((), blocks, keys, in_host, goal, priority)
                return GetPlan(graph, None, by_tier)
            source = Span(HOST, self.index.slots(self.host.number, blocks))
            everything = Copy(source, Span(DEVICE, device_blocks), np.arange(count))
            arrived = np.zeros(count, np.bool_)
            graph = TransferGraph((everything,), blocks, keys, arrived, goal, priority)
            return GetPlan(graph, None, by_tier)
        joinable = states == LANDING
        if np.count_nonzero(joinable):
            joinable &= self.ledger.landings(blocks) > 0
        if device_blocks is None:
            ops.extend(self._await_landings(blocks, np.flatnonzero(joinable)))
        else:
            if in_host.any():
                ops.append(self._from_host(blocks, np.flatnonzero(in_host), device_blocks))
            if joinable.any():
                positions = np.flatnonzero(joinable)
                joins = _distinct(self.ledger.landings(blocks[positions]))
                ops.append(self._from_host(blocks, positions, device_blocks, joins=joins))
        far = np.flatnonzero(~in_host & ~joinable)
        by_tier = {HOST: count - len(far)}
        if len(far):
            saves = self._plan_reads(ops, by_tier, blocks, far, states, device_blocks, now)
        arrived = in_host if device_blocks is None else np.zeros(count, np.bool_)
        return GetPlan(
            TransferGraph(tuple(ops), blocks, keys, arrived, goal, priority), saves, by_tier
        )

    def _from_host(
        self,
        blocks: BlockIds,
        positions: NDArray[np.int64],
        device_blocks: SlotIds,
        *,
        after: tuple[int, ...] = (),
        joins: tuple[int, ...] = (),
    ) -> Copy:
        slots = self.index.slots(self.host.number, blocks[positions])
        target = Span(DEVICE, device_blocks[positions])
        return Copy(Span(HOST, slots), target, positions, after, joins=joins)

    def _plan_reads(
        self,
        ops: list[Copy],
        by_tier: dict[str, int],
        blocks: BlockIds,
        far: NDArray[np.int64],
        states: NDArray[np.uint8],
        device_blocks: SlotIds | None,
        now: float,
    ) -> TransferGraph | None:
        """Append the ops that bring `far` positions from the stores, in chunks so that legs
        overlap. Few chunks are read at a time: a store serves all it is asked for in turns, so that
        many would all land late and together.

        A block that finds a host slot, and may take it, is promoted on the way; the others go to
        the device directly. Nothing is read from a block on that a store lost since it was matched.
        """
        lost = np.ones(len(far), np.bool_)
        for store in self.ledger.sources:
            lost &= self.index.states(store.number, blocks[far]) != READY
        if lost.any():
            far = far[: int(lost.argmax())]
        absent = far[states[far] == ABSENT]
        room = len(absent)  # as a prefetch takes: it is for the host
        if device_blocks is not None and self.promote != "always":
            room = min(room, self.host.free) if self.promote == "when_room" else 0
        slots, saves, waits = self._host_room(room)
        promoted = absent[: len(slots)]
        self.index.land(self.host.number, blocks[promoted], slots)
        host_slots = np.zeros(len(blocks), np.uint32)
        host_slots[promoted] = slots
        goes_to_host = np.zeros(len(blocks), np.bool_)
        goes_to_host[promoted] = True
        by_tier |= dict.fromkeys((store.name for store in self.ledger.sources), 0)
        for store, mine in self.routes.split(blocks, far, now):
            by_tier[store.name] += len(mine)
            store_slots = np.zeros(len(blocks), np.uint32)
            store_slots[mine] = self.index.slots(store.number, blocks[mine])
            reads: list[int] = []
            for start in range(0, len(mine), self.chunk_blocks):
                chunk = mine[start : start + self.chunk_blocks]
                promotes = goes_to_host[chunk]
                via_host, direct = chunk[promotes], chunk[~promotes]
                if len(via_host):
                    source = Span(store.name, store_slots[via_host])
                    target = Span(HOST, host_slots[via_host])
                    landing = self.ledger.open_landing(blocks[via_host])
                    self.ledger.reads.begin(blocks[via_host])
                    reads.append(len(ops))
                    after = tuple(reads[-1 - self.chunks_in_flight : -self.chunks_in_flight])
                    ops.append(Copy(source, target, via_host, after, landing=landing, joins=waits))
                    if device_blocks is not None:
                        after = (reads[-1],)
                        ops.append(self._from_host(blocks, via_host, device_blocks, after=after))
                if len(direct) and device_blocks is not None:
                    source = Span(store.name, store_slots[direct])
                    target = Span(DEVICE, device_blocks[direct])
                    self.ledger.reads.begin(blocks[direct])
                    ops.append(Copy(source, target, direct))
        return saves

    # put

    def plan_put(
        self, groups: Sequence[GroupKeys], now: float, output_tokens: int | None = None
    ) -> PutPlan:
        """Take host slots for every block, group by group, that the host does not hold.

        A policy that sees prompts may refuse the end of one; it is told `output_tokens` of its
        answer.

        Raises:
            CapacityError: they do not all fit beside what is pinned or in flight; nothing was
            changed.
        """
        self.ledger.hints.advance(now)
        blocks = grouped.find(self.index, groups)
        groups, blocks, bypassed = self.prompts.read(groups, blocks, now, output_tokens)
        keys = grouped.joined([group.keys for group in groups])
        new = blocks == NO_BLOCK
        known, lacking = blocks[~new], new.copy()
        if len(known):
            self.index.pin(known)
            self.index.touch(known, now)
            lacking[~new] = self.index.states(self.host.number, known) == ABSENT
        positions = np.flatnonzero(lacking)
        chosen = self._choose(len(positions))
        if chosen is None:
            self.index.unpin(known)
            raise CapacityError(
                f"put of {len(keys)} blocks needs {len(positions)} free host slots; "
                f"{self.host.free} of {self.host.capacity} are free, the rest is pinned, in flight "
                "or holds ancestors. Raise host_cache_bytes or put less at once"
            )
        try:  # before anything leaves: an index that is full must not cost a block
            grouped.insert(self.index, groups, blocks)
        except CapacityError:
            self.index.unpin(known)
            raise
        self.prompts.place(groups, blocks)
        self.index.pin(blocks[new] if len(known) else blocks)
        slots, saves, waits = self._make_room(*chosen)
        self.index.land(self.host.number, blocks[positions] if len(known) else blocks, slots)
        return PutPlan(blocks, keys, positions, slots, saves, waits[0] if waits else 0, bypassed)

    def launch_put(self, plan: PutPlan, device_blocks: SlotIds) -> TransferGraph:
        """Turn a put plan into its graph. `device_blocks` covers all blocks of the prompt."""
        if len(plan.positions) == len(plan.blocks):  # all of it is new, as most of most puts is
            return self._put_graph(plan, device_blocks, np.zeros(len(plan.blocks), np.bool_), ())
        arrived = self.index.states(self.host.number, plan.blocks) == READY
        others = ~arrived  # landing for somebody else's put: that one is waited for
        others[plan.positions] = False
        if arrived.any():
            self.ledger.offer_unspilled(plan.blocks[arrived], plan.keys[arrived])
        waits = self._await_landings(plan.blocks, np.flatnonzero(others)) if others.any() else ()
        return self._put_graph(plan, device_blocks, arrived, waits)

    def _put_graph(
        self, plan: PutPlan, device_blocks: SlotIds, arrived: BoolArray, waits: tuple[Copy, ...]
    ) -> TransferGraph:
        ops: tuple[Copy, ...] = ()
        if len(plan.positions):
            blocks = plan.blocks
            if len(plan.positions) < len(blocks):
                blocks, device_blocks = blocks[plan.positions], device_blocks[plan.positions]
            landing = self.ledger.open_landing(blocks)
            source, target = Span(DEVICE, device_blocks), Span(HOST, plan.slots)
            joins = (plan.landing,) if plan.landing else ()
            ops = (Copy(source, target, plan.positions, landing=landing, joins=joins),)
        return TransferGraph(ops + waits, plan.blocks, plan.keys, arrived, HOST, PRIORITY_PUT)

    def cancel_put(self, plan: PutPlan) -> None:
        """Give back everything a put plan holds that was not launched."""
        slots = self.index.drop(self.host.number, plan.blocks[plan.positions])
        self.ledger.vacate(self.host, slots)
        self.index.unpin(plan.blocks)

    def _await_landings(self, blocks: BlockIds, positions: NDArray[np.int64]) -> tuple[Copy, ...]:
        """An op that moves nothing: its blocks arrive in the host with landings of other graphs."""
        landings = self.ledger.landings(blocks[positions])
        positions, landings = positions[landings > 0], landings[landings > 0]
        if len(positions) == 0:
            return ()
        place = Span(HOST, self.index.slots(self.host.number, blocks[positions]))
        return (Copy(place, place, positions, joins=_distinct(landings)),)

    # room in the host

    def _choose(self, count: int) -> tuple[int, BlockIds] | None:
        """Who leaves the host so that `count` blocks fit; see `Tier.victims`.

        When that is not enough, also blocks that only stay for descendants in a store: they could
        not be written there, and better lose those descendants than a slot for ever.
        """
        exact = self.ledger.spill == "on_evict"
        chosen = self.host.victims(count, partial=False, exact=exact)
        lacking = count - self.host.free
        if chosen is not None or lacking > self.index.resident(self.host.number):
            return chosen
        victims = self.index.victims(self.host.number, lacking)
        more = lacking - len(victims)
        stranded = self.index.stranded(self.host.number, victims, more)
        if len(stranded) < more or self.ledger.offers[stranded].any():
            return None
        return count, np.concatenate((victims, stranded))

    def _host_room(self, count: int) -> tuple[SlotIds, TransferGraph | None, tuple[int, ...]]:
        """Take up to `count` host slots; see `_make_room`."""
        chosen = self.host.victims(count, partial=True, exact=self.ledger.spill == "on_evict")
        assert chosen is not None
        return self._make_room(*chosen)

    def _make_room(
        self, count: int, victims: BlockIds
    ) -> tuple[SlotIds, TransferGraph | None, tuple[int, ...]]:
        """Evict `victims` from the host and take `count` slots.

        With spill="on_evict", victims that no store holds are saved first: their slots come last,
        and whoever writes into them joins the returned landing.
        """
        if len(victims) == 0:
            return self.host.pool.take(count), None, ()
        if self.ledger.spill != "on_evict":
            self.host.give(self.host.evict(victims))
            return self.host.pool.take(count), None, ()
        dirty = self._only_in_host(victims)
        # clean victims leave first: from here on the store knows that it holds their only copy
        self.host.give(self.host.evict(victims[~dirty]))
        saved, saves = spills.plan_save(self.ledger, victims[dirty])
        found = np.isin(victims, saved)
        self.host.give(self.host.evict(victims[dirty & ~found]))
        if saves is None:
            return self.host.pool.take(count), None, ()
        kept = self.host.evict(victims[found])
        self.ledger.hold(kept)
        return (
            np.concatenate((self.host.pool.take(count - len(kept)), kept)),
            saves,
            (saves.ops[0].landing,),
        )

    def _only_in_host(self, blocks: BlockIds) -> BoolArray:
        elsewhere = np.zeros(len(blocks), np.bool_)
        for store in self.stores:
            elsewhere |= self.index.states(store.number, blocks) != ABSENT
        return ~elsewhere

    # down to the stores

    def plan_spill(self, blocks: BlockIds, keys: KeyArray) -> spills.Spill:
        """Plan to write host blocks to the stores that lack them; see `flexkv.spills`."""
        return spills.plan_spill(self.ledger, blocks, keys)


def _distinct(landings: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(number) for number in np.unique(landings))
