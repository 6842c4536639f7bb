"""The engine's rules in virtual time: which op starts when, in which pieces, and what it books.

`VirtualEngine.start` (enter a graph) - `run` (a task that moves it) - `moved` (bytes by edge). The
same rules as `flexkv.engine`: chains of ops, a few at a time, slices of a chunk, two of them in
flight, lanes of bytes, staging for what does not stay in the host. Nothing fails here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from flexkv.model import DEVICE, HOST, Copy, Statuses, TransferGraph
from flexkv.sim.serving.legs import Lane, Leg
from flexkv.sim.serving.tasks import Happening, Task, Tasks
from flexkv.worth import Worth

Edge = tuple[str, str]  # source, target
Commit = Callable[[TransferGraph, Copy, NDArray[np.int64], Statuses], None]
OPS_IN_FLIGHT, SLICES_IN_FLIGHT = 8, 2


class _Op:
    """One op under way."""

    __slots__ = ("copy", "joins", "over")

    def __init__(self, copy: Copy, joins: list[_Op]) -> None:
        self.copy, self.joins = copy, joins
        self.over = Happening()


class Run:
    """A graph being run; `moved_bytes` by edge."""

    __slots__ = ("graph", "moved_bytes", "ops")

    def __init__(self, graph: TransferGraph, ops: list[_Op]) -> None:
        self.graph, self.ops = graph, ops
        self.moved_bytes: dict[Edge, int] = {}


class VirtualEngine:
    """Runs graphs on legs.

    Args:
        legs: by edge; stores need both directions from and to the host.
        chunk_blocks, block_bytes, lane_bytes, staging_blocks: as the engine has them.
        commit: told what an op, or a slice of it, achieved.
        worth: told how long batches took.
    """

    def __init__(
        self,
        tasks: Tasks,
        legs: Mapping[Edge, Leg],
        *,
        chunk_blocks: int,
        block_bytes: int,
        lane_bytes: int,
        staging_blocks: int,
        commit: Commit,
        worth: Worth | None = None,
    ) -> None:
        self._tasks, self.legs, self._commit = tasks, legs, commit
        self._worth = worth
        self._chunk_blocks, self._block_bytes = chunk_blocks, block_bytes
        self._lanes = {edge: Lane(tasks, lane_bytes) for edge in (*legs, *_past_the_host(legs))}
        self._staging_blocks = max(1, staging_blocks)
        self._staging = Lane(tasks, self._staging_blocks)
        self._landings: dict[int, _Op] = {}
        self.moved_bytes: Counter[Edge] = Counter()
        self.ops = 0

    def start(self, graph: TransferGraph) -> Run:
        """Enter a graph; its landings can be joined from now on."""
        ops = []
        for copy in graph.ops:
            joins = [self._landings[number] for number in copy.joins if number in self._landings]
            op = _Op(copy, joins)
            if copy.landing:
                self._landings[copy.landing] = op
            ops.append(op)
        if self._worth is not None:
            self._worth.watch(graph)
        return Run(graph, ops)

    def run(self, run: Run) -> Task:
        """Move all blocks of a graph."""
        if len(run.ops) == 1:
            yield from self._op(run, run.ops[0])
            return
        pending = iter(run.graph.chains())
        yield from self._together(lambda: self._work(run, pending), OPS_IN_FLIGHT)

    def _work(self, run: Run, chains: Iterator[list[int]]) -> Task:
        for chain in chains:
            for number in chain:
                yield from self._op(run, run.ops[number])

    def _together(self, work: Callable[[], Task], tasks: int) -> Task:
        """Run `work` in so many tasks; be over when all are."""
        left, all_over = [tasks], Happening()

        def one() -> Task:
            yield from work()
            left[0] -= 1
            if not left[0]:
                self._tasks.happen(all_over)

        for _ in range(tasks):
            self._tasks.spawn(one())
        yield all_over

    def _op(self, run: Run, op: _Op) -> Task:
        copy = op.copy
        for number in copy.after:
            yield run.ops[number].over
        for other in op.joins:
            yield other.over
        if copy.source.place != copy.target.place:
            size, blocks = self._chunk_blocks, len(copy)
            if blocks <= size:
                yield from self._slice(run, copy, copy.positions)
            else:
                parts = iter([copy.positions[at : at + size] for at in range(0, blocks, size)])
                tasks = min(SLICES_IN_FLIGHT, -(-blocks // size))
                yield from self._together(lambda: self._slices(run, copy, parts), tasks)
        if copy.landing:
            self._landings.pop(copy.landing, None)
        self._tasks.happen(op.over)

    def _slices(self, run: Run, copy: Copy, parts: Iterator[NDArray[np.int64]]) -> Task:
        for positions in parts:
            yield from self._slice(run, copy, positions)

    def _slice(self, run: Run, copy: Copy, positions: NDArray[np.int64]) -> Task:
        edge, blocks = (copy.source.place, copy.target.place), len(positions)
        size_bytes = blocks * self._block_bytes
        lane = self._lanes[edge]
        turn = lane.acquire(size_bytes, run.graph.priority)
        if turn is not None:
            yield turn
        worth, clock = self._worth, self._tasks.clock
        batch = worth.begin(run.graph, copy, clock.now_s, blocks) if worth is not None else None
        if copy.target.place == DEVICE and copy.source.place != HOST:
            yield from self._through_staging(run, copy.source.place, blocks)
        else:
            yield self.legs[edge].move(blocks)
        lane.release(size_bytes)
        self.ops += 1
        self.moved_bytes[edge] += size_bytes
        run.moved_bytes[edge] = run.moved_bytes.get(edge, 0) + size_bytes
        statuses = np.zeros(blocks, np.uint8)
        if worth is not None:
            worth.end(batch, clock.now_s, statuses)
        self._commit(run.graph, copy, positions, statuses)

    def _through_staging(self, run: Run, store: str, blocks: int) -> Task:
        for start in range(0, blocks, self._staging_blocks):
            part = min(self._staging_blocks, blocks - start)
            turn = self._staging.acquire(part, run.graph.priority)
            if turn is not None:
                yield turn
            yield self.legs[store, HOST].move(part)
            yield self.legs[HOST, DEVICE].move(part)
            self._staging.release(part)


def _past_the_host(legs: Mapping[Edge, Leg]) -> list[Edge]:
    """Edges on which blocks stay in staging memory only."""
    return [(store, DEVICE) for store, target in legs if target == HOST and store != DEVICE]
