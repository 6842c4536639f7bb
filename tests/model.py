"""The brain without a body: graphs are carried out by hand, and slots hold labels instead of bytes.

`World` (ledger and planner over memories of labels) - `World.put`, `get`, `spill`, `discard`,
`step` (move some blocks of an op) - `World.check` (what must be true after every step). A label is
the key of a block: whatever a slot is said to hold must be what it does hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flexkv import plugins
from flexkv.errors import CapacityError
from flexkv.groups import GroupKeys
from flexkv.index import PrefixIndex
from flexkv.ledger import Ledger, SpillMode
from flexkv.model import DEVICE, HOST, Copy, IOStatus, KeyArray, TierState, TransferGraph
from flexkv.planned import PutPlan
from flexkv.planner import Planner
from flexkv.pool import SlotPool
from flexkv.protocols import Recovered
from flexkv.tier import Tier

DISK = "disk"
Path = tuple[int, ...]
Label = tuple[int, int]


def key_of(path: Path) -> Label:
    """The key of the last block of a path: any function that is different for every path."""
    low = 1
    for step in path:
        low = low * 7 + step + 1
    return low, low * 0x9E3779B97F4A7C15 % 2**64


def keys_of(path: Path) -> KeyArray:
    """The keys of all blocks of a path."""
    rows = [key_of(path[: i + 1]) for i in range(len(path))]
    return np.array(rows, np.uint64).reshape(-1, 2)


WINDOWS = (2, 3)  # blocks


def groups_of(path: Path) -> list[GroupKeys]:
    """The keys of a prompt in a model of three groups: full attention and two windows."""
    keys = keys_of(path)
    marked = [keys ^ np.uint64((i + 1) << 60) for i in range(len(WINDOWS))]
    return [GroupKeys(keys), *map(GroupKeys, marked, WINDOWS)]


@dataclass(eq=False)
class Op:
    """An op under way: positions left, source labels when it began, slots that turned out good."""

    copy: Copy
    run: Run
    joins: list[Op]
    done: int = 0
    began: list[Label | None] | None = None
    good: set[int] = field(default_factory=set)
    wanted: bool = False

    @property
    def over(self) -> bool:
        return self.done == len(self.copy)


@dataclass(eq=False)
class Run:
    """A graph under way."""

    graph: TransferGraph
    ops: list[Op] = field(default_factory=list)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.alive = np.ones(len(self.graph.blocks), np.bool_)
        self.arrived = self.graph.arrived.copy()


class World:
    """A ledger, its planner, and everything that would be hardware."""

    def __init__(self, host: int, disk: int, spill: SpillMode, policy: str, spare: int = 8) -> None:
        self.capacities = {HOST: host, DISK: disk} if disk else {HOST: host}
        self.spill_mode, self.policy = spill, policy
        self.max_blocks = 2 * host + disk + spare
        self.memory: dict[str, dict[int, Label]] = {HOST: {}, DISK: {}, DEVICE: {}}
        self.records: dict[int, tuple[Label, Label, int]] = {}  # what a restart finds on disk
        self.now, self.perfect, self._device = 0.0, True, 0
        self._begin()

    def _begin(self) -> None:
        index = PrefixIndex(self.max_blocks, list(self.capacities))
        tiers = []
        for number, (name, slots) in enumerate(self.capacities.items()):
            index.set_policy(number, plugins.load(plugins.POLICIES, self.policy)(), {})
            tiers.append(Tier(name, number, index, SlotPool(slots)))
        self.ledger = Ledger(index, tiers, max_blocks=self.max_blocks, spill=self.spill_mode)
        self.planner = Planner(self.ledger, chunk_blocks=2, chunks_in_flight=2)
        self.index, self.tiers = index, self.ledger.tiers
        self.puts: list[tuple[PutPlan, list[int]]] = []
        self.runs: list[Run] = []
        self.landings: dict[int, Op] = {}

    # what a manager does

    def start(self, graph: TransferGraph | None) -> None:
        if graph is None:
            return
        run = Run(graph)
        for copy in graph.ops:
            joins = [self.landings[number] for number in copy.joins if number in self.landings]
            for other in joins:
                other.wanted |= other.copy.target.place == copy.source.place
            run.ops.append(Op(copy, run, joins))
            if copy.landing:
                self.landings[copy.landing] = run.ops[-1]
        self.runs.append(run)
        self._reap(run)

    def plan_put(self, path: Path, *held: list[int]) -> None:
        """Put a prompt; of the groups with a window, these blocks."""
        self.now += 1
        groups = groups_of(path)[: 1 + len(held)]
        groups[1:] = [group.only(some) for group, some in zip(groups[1:], held, strict=True)]
        put = self.planner.plan_put(groups, self.now)
        self.start(put.saves)
        self.puts.append((put, self._fill_device(put.keys)))

    def launch_put(self, number: int) -> None:
        put, device = self.puts.pop(number)
        self.start(self.planner.launch_put(put, np.array(device, np.uint32)))

    def cancel_put(self, number: int) -> None:
        self.planner.cancel_put(self.puts.pop(number)[0])
        self.perfect = False

    def get(self, path: Path, *, prefetch: bool = False) -> int:
        return self.get_groups(groups_of(path)[:1], 0, prefetch=prefetch)

    def get_groups(self, groups: list[GroupKeys], first: int, *, prefetch: bool = False) -> int:
        """Get the longest prefix from block `first` on, which is what it should be."""
        self.now += 1
        end, parts, reach = self.planner.match(groups, first)
        assert reach >= end
        blocks = np.concatenate(parts)
        keys = np.concatenate(
            [g.keys[end - len(part) : end] for g, part in zip(groups, parts, strict=True)]
        )
        for block, key in zip(blocks.tolist(), keys.tolist(), strict=True):
            assert self._readable(block, tuple(key)), "matched, but no tier holds its bytes"
        count = len(groups[0].keys)
        needed = [set(self._needed(groups, first, length)) for length in range(count + 1)]
        known = self._all_readable()
        longest = max(length for length in range(count + 1) if needed[length] <= known)
        assert max(end, first) == max(longest, first), "a longer prefix could be read"
        if longest > first:
            assert {tuple(key) for key in keys.tolist()} >= needed[end] - needed[first]
        device = None
        if not prefetch:
            device = np.arange(self._device, self._device + len(blocks), dtype=np.uint32)
            self._device += len(blocks)
        plan = self.planner.plan_get(blocks, keys, device, self.now)
        self.start(plan.saves)
        self.start(plan.graph)
        return len(blocks)

    def _needed(self, groups: list[GroupKeys], first: int, length: int) -> list[Label]:
        """Keys that must be readable for a prefix of this length."""
        keys: list[Label] = []
        for group in groups:
            start = 0 if group.window is None else max(first, length - group.window)
            keys += [(key[0], key[1]) for key in group.keys[start:length].tolist()]
        return keys

    def _all_readable(self) -> set[Label]:
        known: set[Label] = set()
        blocks = np.arange(self.max_blocks, dtype=np.uint32)
        for tier in self.tiers.values():
            ready = blocks[self.index.states(tier.number, blocks) == TierState.READY]
            known |= {(key[0], key[1]) for key in self.index.keys(ready).tolist()}
        return known

    def spill(self) -> None:
        """Write down the oldest offer."""
        if self.ledger.spills:
            spill = self.planner.plan_spill(*self.ledger.spills.pop(0))
            self.start(spill.graph)
            if len(spill.early):
                self.ledger.spills.append((spill.early, self.index.keys(spill.early)))

    def discard(self) -> None:
        """Make the disk forget the oldest slots to forget."""
        if self.ledger.discards:
            tier, slots, _ = self.ledger.discards.pop(0)
            for slot in slots.tolist():
                self.records.pop(slot, None)
                self.memory[DISK].pop(slot, None)
            tier.give(slots)

    def restart(self) -> None:
        """Lose everything but what was committed on disk."""
        self.memory[HOST].clear()
        rows = [(key, parent, depth, slot) for slot, (key, parent, depth) in self.records.items()]
        self._begin()
        self.ledger.restore(
            self.tiers[DISK],
            Recovered(
                np.array([row[0] for row in rows], np.uint64).reshape(-1, 2),
                np.array([row[1] for row in rows], np.uint64).reshape(-1, 2),
                np.array([row[2] for row in rows], np.uint32),
                np.array([row[3] for row in rows], np.uint32),
            ),
            self.now,
        )

    # what an engine does

    def startable(self) -> list[Op]:
        """Ops that wait for nothing any more."""
        return [op for run in self.runs for op in run.ops if not op.over and self._free(op)]

    def _free(self, op: Op) -> bool:
        before = [op.run.ops[number] for number in op.copy.after]
        return all(other.over for other in [*before, *op.joins])

    def begin(self, op: Op) -> None:
        """Start an op: from here on its source must not change, and its targets are its own."""
        copy, source = op.copy, self.memory[op.copy.source.place]
        for other in op.joins:
            if other.copy.target.place == copy.source.place:
                filled = {int(slot) for slot in other.copy.target.ids} - other.good
                bad = np.isin(copy.source.ids, list(filled))
                op.run.alive[copy.positions[bad]] = False
        op.began = [source.get(int(slot)) for slot in copy.source.ids]
        for slot in copy.target.ids.tolist():
            if copy.target.place == DISK and self.records.pop(slot, None):
                self.memory[DISK].pop(slot, None)

    def step(self, op: Op, statuses: Sequence[int]) -> None:
        """Move the next len(statuses) blocks of an op with these outcomes."""
        copy, run = op.copy, op.run
        if op.began is None:
            self.begin(op)
        if copy.source.place == copy.target.place:
            run.arrived[copy.positions] = run.alive[copy.positions]
            op.done = len(copy)
            self._reap(run)
            return
        part = slice(op.done, op.done + len(statuses))
        positions = copy.positions[part]
        results = np.array(statuses, np.uint8)[: len(positions)]
        skipped = ~run.alive[positions] | (run.cancelled and not op.wanted)
        results[skipped] = IOStatus.SKIPPED
        for i, position in enumerate(positions.tolist()):
            at = part.start + i
            if not skipped[i]:
                self._move(op, at, position, landed=bool(results[i] == IOStatus.LANDED))
            if results[i] == IOStatus.LANDED:
                op.good.add(int(copy.target.ids[at]))
        landed = results == IOStatus.LANDED
        self.perfect &= bool(landed.all())
        run.alive[positions[~landed]] = False
        if copy.target.place == run.graph.goal:
            run.arrived[positions[landed]] = True
        op.done += len(positions)
        self.now += 1
        self.ledger.commit(run.graph, copy, positions, results, self.now)
        self._reap(run)

    def _move(self, op: Op, at: int, position: int, *, landed: bool) -> None:
        """Move a label; a failed move leaves rubbish."""
        source, target = op.copy.source, op.copy.target
        assert op.began is not None
        label = self.memory[source.place].get(int(source.ids[at]))
        assert label == op.began[at], f"{source.place} slot was written while it was being read"
        if landed:
            assert label == tuple(op.run.graph.keys[position].tolist()), "the wrong block is moved"
        slot = int(target.ids[at])
        self.memory[target.place][slot] = label if landed and label else (0, 0)
        if target.place == DISK and landed:
            graph = op.run.graph
            assert graph.parents is not None
            assert graph.depths is not None
            parent = tuple(graph.parents[position].tolist())
            self.records[slot] = (label or (0, 0), parent, int(graph.depths[position]))

    def _reap(self, run: Run) -> None:
        """End a run whose ops are over; what arrived must be there."""
        for op in run.ops:
            if op.over:
                self.landings.pop(op.copy.landing, None)
        if not all(op.over for op in run.ops):
            return
        if run.graph.goal == DEVICE:
            for op in run.ops:
                for position, slot in zip(op.copy.positions, op.copy.target.ids, strict=True):
                    if op.copy.target.place == DEVICE and run.arrived[position]:
                        wanted = tuple(run.graph.keys[position].tolist())
                        assert self.memory[DEVICE][int(slot)] == wanted, "wrong bytes were served"
        self.planner.release(run.graph.blocks)
        self.runs.remove(run)

    def drain(self) -> None:
        """Let everything that is under way succeed."""
        while self.runs or self.ledger.spills or self.ledger.discards:
            for op in self.startable():
                self.step(op, [IOStatus.LANDED] * (len(op.copy) - op.done))
            self.spill()
            self.discard()

    # what must be true

    def check(self) -> None:
        """The invariants, after every step."""
        self.index.check_integrity()
        pins = sum(len(put.blocks) for put, _ in self.puts)
        pins += sum(len(run.graph.blocks) for run in self.runs)
        assert self.index.pinned == pins
        for tier in self.tiers.values():
            forgetting = sum(len(item.slots) for item in self.ledger.discards if item.tier is tier)
            forgetting += len(self.ledger.reads.kept(tier))
            if tier.name == HOST:
                forgetting = int(np.count_nonzero(self.ledger._free_when_saved))
            taken = self.index.resident(tier.number) + forgetting
            assert tier.free + taken == tier.capacity, tier.name
            self._check_tier(tier)
        if not self.runs and not self.puts:
            assert not self.landings

    def _check_tier(self, tier: Tier) -> None:
        blocks = np.arange(self.max_blocks, dtype=np.uint32)
        states = self.index.states(tier.number, blocks)
        ready = blocks[states == TierState.READY]
        slots = self.index.slots(tier.number, blocks[states != TierState.ABSENT]).tolist()
        assert len(set(slots)) == len(slots), "two blocks in one slot"
        keys, held = self.index.keys(ready).tolist(), self.index.slots(tier.number, ready).tolist()
        for key, slot in zip(keys, held, strict=True):
            assert self.memory[tier.name].get(slot) == tuple(key), f"{tier.name} lies about a slot"
        if self.perfect and len(ready):  # ancestors outlive descendants, leaves leave first
            parents = self.index.parents(ready)
            parents = parents[parents != 0xFFFF_FFFF]
            somewhere = np.zeros(len(parents), np.bool_)
            for other in self.tiers.values():
                somewhere |= self.index.states(other.number, parents) != TierState.ABSENT
            assert somewhere.all(), "a block is readable, its parent is nowhere"
        if self.perfect and tier.name == DISK:
            here = blocks[states != TierState.ABSENT]
            parents = self.index.parents(here)
            parents = parents[parents != 0xFFFF_FFFF]
            above = self.index.states(tier.number, parents)
            assert (above != TierState.ABSENT).all(), "a store holds a block without its parent"

    def _readable(self, block: int, key: Label) -> bool:
        here = np.array([block], np.uint32)
        return any(
            self.index.states(tier.number, here)[0] == TierState.READY
            and self.memory[tier.name].get(int(self.index.slots(tier.number, here)[0])) == key
            for tier in self.tiers.values()
        )

    def _fill_device(self, keys: KeyArray) -> list[int]:
        first, self._device = self._device, self._device + len(keys)
        for i, key in enumerate(keys.tolist()):
            self.memory[DEVICE][first + i] = (key[0], key[1])
        return list(range(first, first + len(keys)))

    def put_always_fits(self, path: Path) -> None:
        """With nothing pinned or under way, any put that the tier could hold at all fits."""
        try:
            self.plan_put(path)
        except CapacityError as error:
            raise AssertionError("an idle host is stuck") from error
        self.launch_put(len(self.puts) - 1)
        self.drain()
