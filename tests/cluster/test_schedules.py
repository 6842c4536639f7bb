"""Leases, eviction, news and crashes in any order: nobody ever gets a block that is not its key's.

Three nodes with the real ledger, planner, holdings, lender and lease table, on a clock that moves
when a step says so. Memory is real and holds what keys say; reads are torn into asking, copying
and verifying, and everything else may happen in between.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import groups_of, keys_of

from flexkv.backends.remote.heads import checksums
from flexkv.brain import build_brain
from flexkv.cluster.delta import MEDIA, Delta
from flexkv.cluster.holdings import NOBODY, Holdings
from flexkv.cluster.leases import LeaseError
from flexkv.cluster.lender import Lender, Loan
from flexkv.errors import CapacityError
from flexkv.events import EventLog
from flexkv.memory import Arena
from flexkv.model import DAMAGED, HOST, LANDED, MISSING, PEER, Copy, KeyArray, TransferGraph
from flexkv.planned import PutPlan
from flexkv.testing.loop import VirtualLoop

HOST_BLOCKS, ROWS, BLOCK_BYTES = 5, 12, 64
TTL_S = 10.0
NAMES = ("a", "b", "c")
Path = tuple[int, ...]


def content(keys: KeyArray) -> np.ndarray:
    """What the blocks of these keys hold: bytes [blocks, BLOCK_BYTES] that differ for every key."""
    words = np.arange(BLOCK_BYTES // 8, dtype=np.uint64)
    mixed = (keys[:, :1] ^ (words + np.uint64(1)) * keys[:, 1:]) * np.uint64(0x9E3779B97F4A7C15)
    return np.ascontiguousarray(mixed).view(np.uint8)


class Clock:
    """Stands where a manager has its Completions: time, and what is to happen at a time."""

    def __init__(self) -> None:
        self.time, self._due, self._order = 0.0, [], itertools.count()

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, call: Any) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._due, (self.time + delay_s, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while self._due and self._due[0][0] <= end:
            self.time, _, timer = heapq.heappop(self._due)
            if not timer.cancelled:
                timer.call()
        self.time = end


@dataclass
class Timer:
    call: Any
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Read:
    """An op of a get under way: what was lent for which of its blocks, and what has come."""

    graph: TransferGraph
    op: Copy
    owner: Life | None
    wanted: np.ndarray  # positions within the op that the owner was asked for
    loan: Loan | None
    sums: np.ndarray  # what the owner vouched for when it lent them
    came: bool = False


class Life:
    """One life of a node."""

    def __init__(self, name: str, incarnation: int, clock: Clock) -> None:
        self.name, self.incarnation, self.clock = name, incarnation, clock
        brain = build_brain(
            {HOST: HOST_BLOCKS, PEER: ROWS}, lambda tier: "lru", tokens_per_block=1, foreign=(PEER,)
        )
        self.index, self.ledger, self.planner = brain.index, brain.ledger, brain.planner
        self.holdings = Holdings(self.ledger, self.ledger.tiers[PEER])
        self.arena = Arena(HOST_BLOCKS, 4096, huge_pages=False, prefault=False)
        self.lender = Lender(
            self.planner,
            clock,  # type: ignore[arg-type]
            self.arena,
            incarnation=incarnation,
            block_bytes=BLOCK_BYTES,
            promote=None,
            ttl_s=TTL_S,
            bytes_in_flight=8 * BLOCK_BYTES,
        )
        events = EventLog(self.index, 1 << 16, lambda blocks: None, (HOST,))
        self.news = events.listen()
        self.log: list[Delta] = []
        self.read_to: dict[tuple[str, int], int] = {}  # of the logs of others, by member
        self.puts: list[tuple[PutPlan, TransferGraph]] = []
        self.reads: list[Read] = []

    @property
    def member(self) -> tuple[str, int]:
        return self.name, self.incarnation

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        for slot, row in zip(slots.tolist(), rows, strict=True):
            self.arena.view(slot)[:BLOCK_BYTES] = row

    def bytes_of(self, slots: np.ndarray) -> np.ndarray:
        rows = [self.arena.view(slot)[:BLOCK_BYTES].copy() for slot in slots.tolist()]
        return np.array(rows, np.uint8).reshape(-1, BLOCK_BYTES)

    # own blocks

    def begin_put(self, path: Path) -> None:
        try:
            plan = self.planner.plan_put(groups_of(path)[:1], self.clock.time)
        except CapacityError:
            return
        graph = self.planner.launch_put(plan, np.arange(len(path), dtype=np.uint32))
        self.write(plan.slots, np.full((len(plan.slots), BLOCK_BYTES), 0xAB, np.uint8))  # half done
        self.puts.append((plan, graph))

    def end_put(self, number: int, *, fails: bool) -> None:
        plan, graph = self.puts.pop(number % len(self.puts))
        for op in graph.ops:
            if op.source.place == op.target.place:
                continue
            statuses = np.full(len(op), MISSING if fails else LANDED, np.uint8)
            if not fails:
                self.write(op.target.ids, content(graph.keys[op.positions]))
            self.ledger.commit(graph, op, op.positions, statuses, self.clock.time)
        self.planner.release(plan.blocks)

    # news

    def publish(self) -> None:
        for event in self.news.take():
            stored = event.keys if event.kind == "stored" else event.keys[:0]
            parents = event.parents if event.kind == "stored" else event.keys[:0]
            removed = event.keys if event.kind == "removed" else event.keys[:0]
            media = [np.full(len(keys), MEDIA.index(HOST), np.uint8) for keys in (stored, removed)]
            news = Delta(stored, parents, media[0], removed, media[1], event.kind == "cleared")
            self.log.append(news)

    def hear(self, other: Life) -> None:
        """Book the next message of another node."""
        at = self.read_to.get(other.member, 0)
        if at < len(other.log):
            number = self.holdings.join(f"{other.name}/{other.incarnation:016x}")
            self.holdings.apply(number, other.log[at], self.clock.time)
            self.read_to[other.member] = at + 1

    def forget(self, member: tuple[str, int]) -> None:
        if member in self.read_to:
            self.holdings.leave(self.holdings.join(f"{member[0]}/{member[1]:016x}"))
            del self.read_to[member]

    # blocks of others

    def end_read(self, read: Read) -> None:
        """Verify what has come, as a reader does, and book it."""
        statuses = np.full(len(read.op), MISSING, np.uint8)
        loan, slots = read.loan, read.op.target.ids
        if loan is not None and read.came:
            near = read.wanted[loan.statuses == LANDED]
            keys = read.graph.keys[read.op.positions[near]]
            right = checksums(self.arena, slots[near], keys, BLOCK_BYTES) == read.sums
            statuses[near] = np.where(right, LANDED, DAMAGED)
            if read.owner is not None:
                read.owner.lender.release([loan.lease.token] if loan.lease else [])
        positions = read.op.positions
        landed = statuses == LANDED
        expected = content(read.graph.keys[positions[landed]])
        assert np.array_equal(self.bytes_of(slots[landed]), expected), "another key's bytes"
        self.ledger.commit(read.graph, read.op, positions, statuses, self.clock.time)

    def check(self) -> None:
        self.index.check_integrity()
        self.holdings.check_integrity()
        blocks = self.index.readable(0)
        slots, keys = self.index.slots(0, blocks), self.index.keys(blocks)
        assert np.array_equal(self.bytes_of(slots), content(keys)), "a readable block is wrong"


PATHS = st.sampled_from([(0,), (0, 0), (0, 0, 0), (0, 1), (1, 0), (1, 0, 1), (2, 2, 2), (3, 3, 3)])
NODES = st.sampled_from(NAMES)
SOME = st.integers(0, 7)


@dataclass
class Open:
    """A get of one node: it is over when all of its reads are."""

    life: Life
    blocks: np.ndarray
    reads: list[Read] = field(default_factory=list)


class Schedules(RuleBasedStateMachine):
    """Every interleaving of a few prompts on three small nodes."""

    loop = VirtualLoop(limit_turns=1 << 62)

    @initialize()
    def begin(self) -> None:
        self.clock, self.lives, self.serial = Clock(), {}, itertools.count(1)
        self.graves: list[Life] = []
        self.gets: list[Open] = []
        for name in NAMES:
            self.lives[name] = Life(name, next(self.serial), self.clock)

    # a node by itself

    @rule(name=NODES, path=PATHS)
    def begin_put(self, name: str, path: Path) -> None:
        self.lives[name].begin_put(path)

    @rule(name=NODES, number=SOME, fails=st.sampled_from([False, False, False, True]))
    def end_put(self, name: str, number: int, fails: bool) -> None:
        if self.lives[name].puts:
            self.lives[name].end_put(number, fails=fails)

    @rule(name=NODES, path=PATHS)
    def put(self, name: str, path: Path) -> None:
        life = self.lives[name]
        before = len(life.puts)
        life.begin_put(path)
        if len(life.puts) > before:
            life.end_put(before, fails=False)

    @rule(name=NODES, path=PATHS)
    def remove(self, name: str, path: Path) -> None:
        self.lives[name].ledger.remove(groups_of(path)[0])

    @rule(name=NODES)
    def crash(self, name: str) -> None:
        old = self.lives[name]
        self.graves.append(old)
        self.gets = [get for get in self.gets if get.life is not old]
        self.lives[name] = Life(name, next(self.serial), self.clock)

    @rule(seconds=st.sampled_from([0.1, 4.0, 6.0, 11.0]))
    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # news

    @rule(name=NODES, path=PATHS)
    def share(self, name: str, path: Path) -> None:
        """Store a prompt, and all the others hear of it."""
        self.put(name, path)
        self.gossip(name)

    @rule(name=NODES, other=NODES, path=PATHS)
    def share_and_ask(self, name: str, other: str, path: Path) -> None:
        """Another node asks for it at once; what happens then is up to the schedule."""
        self.share(name, path)
        if other != name:
            self.begin_get(other, path)

    @rule(name=NODES, label=st.integers(7, 9))
    def fill(self, name: str, label: int) -> None:
        """Push everything out that may leave."""
        self.put(name, (label,) * HOST_BLOCKS)

    @rule(name=NODES)
    def gossip(self, name: str) -> None:
        life = self.lives[name]
        life.publish()
        for other in NAMES:
            while other != name and self.lives[other].read_to.get(life.member, 0) < len(life.log):
                self.lives[other].hear(life)

    @rule(name=NODES)
    def publish(self, name: str) -> None:
        self.lives[name].publish()

    @rule(name=NODES, other=NODES)
    def hear(self, name: str, other: str) -> None:
        if name != other:
            self.lives[name].hear(self.lives[other])

    @rule(name=NODES, number=SOME)
    def hear_late(self, name: str, number: int) -> None:
        """News of a node that is gone still arrive."""
        if self.graves:
            grave = self.graves[number % len(self.graves)]
            if grave.name != name:
                self.lives[name].hear(grave)

    @rule(name=NODES, number=SOME)
    def notice_death(self, name: str, number: int) -> None:
        if self.graves:
            self.lives[name].forget(self.graves[number % len(self.graves)].member)

    @rule(name=NODES)
    def sweep(self, name: str) -> None:
        self.lives[name].holdings.sweep()

    # reads of others

    @rule(name=NODES, path=PATHS)
    def begin_get(self, name: str, path: Path) -> None:
        """Match, take host slots, and ask the cheapest holders for a lease."""
        life = self.lives[name]
        found = life.planner.match(groups_of(path)[:1])
        blocks = found.blocks[0]
        keys = keys_of(path)[: len(blocks)]
        plan = life.planner.plan_get(blocks, keys, None, self.clock.time)
        get = Open(life, blocks)
        for op in plan.graph.ops:
            if op.source.place == PEER:
                get.reads += self._ask(life, plan.graph, op)
        self.gets.append(get)

    def _ask(self, life: Life, graph: TransferGraph, op: Copy) -> list[Read]:
        rows = life.holdings.holders(op.source.ids)
        first = rows["node"][:, 0]
        owner = loan = None
        sums = np.empty(0, np.uint64)
        wanted = np.flatnonzero(first == first[0])
        if first[0] != NOBODY:
            name, _, incarnation = (life.holdings.name(int(first[0])) or "").partition("/")
            owner = self.lives[name]
            if owner.incarnation != int(incarnation, 16):
                owner = None  # fenced: another life answers there now
        if owner is not None:
            keys = graph.keys[op.positions[wanted]]
            try:
                loan = self.loop.run_until_complete(owner.lender.lend(life.name, keys, 1.0))
            except CapacityError:
                loan = None
            else:
                sums = self.loop.run_until_complete(owner.lender.vouch(loan))
                missing = keys[loan.statuses == MISSING]
                if len(missing):
                    life.holdings.lost(int(first[0]), missing)
        life.write(op.target.ids, np.full((len(op), BLOCK_BYTES), 0xCD, np.uint8))
        return [Read(graph, op, owner, wanted, loan, sums)]

    @rule()
    def copy_under_lease(self) -> None:
        """The owners send: only what is on lease, and then it is what they said."""
        for read, life in self._reads():
            if read.loan is None or read.loan.lease is None or read.owner is None:
                continue
            if self.lives[read.owner.name] is not read.owner:
                continue  # it crashed: nobody answers
            try:
                lease = read.owner.lender.leases.begin(read.loan.lease.token, self.clock.time)
            except LeaseError:
                continue
            near = read.wanted[read.loan.statuses == LANDED]
            rows = read.owner.bytes_of(lease.slots)
            expected = content(read.graph.keys[read.op.positions[near]])
            assert np.array_equal(rows, expected), "a leased slot was given to another block"
            life.write(read.op.target.ids[near], rows)
            read.owner.lender.leases.end(lease)
            read.came = True

    @rule()
    def copy_blindly(self) -> None:
        """A one-sided engine reads memory that it was shown, lease or not, life or not."""
        for read, life in self._reads():
            if read.loan is None or read.owner is None:
                continue
            memory = self.lives[read.owner.name]
            near = read.wanted[read.loan.statuses == LANDED]
            life.write(read.op.target.ids[near], memory.bytes_of(read.loan.slots))
            read.came = True

    @rule(number=SOME)
    def end_get(self, number: int) -> None:
        if self.gets:
            self._end(self.gets.pop(number % len(self.gets)))

    @rule(name=NODES, path=PATHS)
    def get(self, name: str, path: Path) -> None:
        self.begin_get(name, path)
        self.copy_under_lease()
        self.end_get(len(self.gets) - 1)

    def _end(self, get: Open) -> None:
        for read in get.reads:
            get.life.end_read(read)
        get.life.planner.release(get.blocks)

    def _reads(self) -> list[tuple[Read, Life]]:
        return [(read, get.life) for get in self.gets for read in get.reads]

    @invariant()
    def right(self) -> None:
        for life in getattr(self, "lives", {}).values():
            life.check()

    def teardown(self) -> None:
        if not hasattr(self, "lives"):
            return
        for get in self.gets:
            self._end(get)
        for life in self.lives.values():
            while life.puts:
                life.end_put(0, fails=False)
        self.clock.advance(TTL_S + 1)
        for life in [*self.lives.values()]:
            life.check()
            life.lender.close()
            assert len(life.lender.leases) == 0
            life.planner.release(np.empty(0, np.uint32))
            assert life.index.pinned == 0
            for tier in life.ledger.tiers.values():
                assert life.index.resident(tier.number) + tier.free == tier.capacity
        for life in [*self.lives.values(), *self.graves]:
            life.arena.close()


STEPS_EACH = 50


def test_no_schedule_gives_a_block_that_is_not_its_keys(request: pytest.FixtureRequest) -> None:
    steps = int(request.config.getoption("--steps"))
    case = Schedules.TestCase
    case.settings = settings(
        max_examples=max(1, steps // STEPS_EACH),
        stateful_step_count=STEPS_EACH,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case("runTest").runTest()
