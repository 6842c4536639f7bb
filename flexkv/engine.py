"""The body's core: runs transfer graphs, one coroutine per op, each awaiting its batch of hardware
work.

`Engine.start` (enter a graph, so that others can join its landings), `Engine.run` (run it to its
end), `Run.cancel` (drop ops not yet started). The engine knows backends only by their protocols and
never the index: what an op achieved goes to the `commit` callback. A backend that raises has failed
its blocks, nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.completion import Completions, Latch
from flexkv.errors import CapacityError
from flexkv.lanes import Lane, Staging
from flexkv.model import (
    DAMAGED,
    DEVICE,
    FAILED,
    HOST,
    LANDED,
    MISSING,
    SKIPPED,
    BoolArray,
    Copy,
    SlotIds,
    Statuses,
    TransferGraph,
)
from flexkv.protocols import (
    BlockCopy,
    BlockIO,
    DeviceBackend,
    DirectStorage,
    LocatableStorage,
    Region,
    StorageBackend,
    as_statuses,
)
from flexkv.telemetry import Telemetry, log
from flexkv.worth import Worth

Positions: TypeAlias = NDArray[np.int64]
# Of one op: while one is told to be over and the next is sent off, another keeps the hardware busy.
_SLICES_IN_FLIGHT = 2

Commit: TypeAlias = Callable[[TransferGraph, Copy, Positions, Statuses], None]


class _Op:
    """One op under way: what it waits for, and, once over, which of its target slots are good."""

    __slots__ = ("copy", "good_slots", "joins", "over", "wanted")

    def __init__(self, copy: Copy, joins: list[_Op]) -> None:
        self.copy, self.joins = copy, joins
        self.over = Latch()
        self.good_slots: SlotIds | None = None
        self.wanted = False  # another graph reads what this op brings: it is not dropped


class Run:
    """A graph being run: `alive` positions have not failed, `arrived` ones reached the goal."""

    __slots__ = ("alive", "arrived", "cancelled", "graph", "moved_bytes", "ops", "region", "tag")

    def __init__(
        self, graph: TransferGraph, ops: list[_Op], region: Region | None, tag: Any
    ) -> None:
        self.graph, self.ops, self.region, self.tag = graph, ops, region, tag
        self.alive: BoolArray = np.ones(len(graph.blocks), np.bool_)
        self.arrived = graph.arrived.copy()
        self.cancelled = False
        self.moved_bytes = 0

    def cancel(self) -> None:
        """Drop the ops that have not started; those that have run to completion."""
        self.cancelled = True


class Engine:
    """Runs graphs on one device backend and the storage backends of the tiers."""

    def __init__(
        self,
        completions: Completions,
        device: DeviceBackend,
        stores: Mapping[str, StorageBackend],
        staging: Staging,
        *,
        block_bytes: int,
        chunk_blocks: int,
        lane_bytes: int,
        ops_in_flight: int,
        commit: Commit,
        telemetry: Telemetry,
        worth: Worth | None = None,
    ) -> None:
        self.completions, self.device, self.stores = completions, device, stores
        self.block_bytes, self.chunk_blocks = block_bytes, max(1, chunk_blocks)
        self.ops_in_flight = max(2, ops_in_flight)
        self._commit, self._telemetry = commit, telemetry
        self._staging, self._worth = staging, worth
        places = [(DEVICE, HOST), (HOST, DEVICE)]
        places += [
            pair for store in stores for pair in ((store, HOST), (HOST, store), (store, DEVICE))
        ]
        self.lanes = {pair: Lane(f"{pair[0]}->{pair[1]}", lane_bytes) for pair in places}
        self._landings: dict[int, _Op] = {}

    def start(self, graph: TransferGraph, region: Region | None = None, tag: Any = None) -> Run:
        """Enter a graph. Its landings can be joined from now on; nothing moves before `run`."""
        ops = []
        for copy in graph.ops:
            joins = [self._landings[number] for number in copy.joins if number in self._landings]
            for other in joins:
                other.wanted |= other.copy.target.place == copy.source.place
            op = _Op(copy, joins)
            if copy.landing:
                self._landings[copy.landing] = op
            ops.append(op)
        if self._worth is not None:
            self._worth.watch(graph)
        return Run(graph, ops, region, tag)

    async def run(self, run: Run) -> None:
        """Run all ops of a graph; return when none can move a byte any more. Ops start in order, a
        few at a time.
        """
        if len(run.ops) == 1:
            await self._run_op(run, run.ops[0])
            return
        chains = run.graph.chains()
        pending = iter(chains)

        async def work() -> None:
            for chain in pending:
                for number in chain:
                    await self._run_op(run, run.ops[number])

        await self._in_tasks(work, min(self.ops_in_flight, len(chains)))

    async def _in_tasks(self, work: Callable[[], Coroutine[Any, Any, None]], tasks: int) -> None:
        """Run `work` so many times at once."""
        if tasks <= 1:
            await work()
            return
        async with anyio.create_task_group() as group:
            for _ in range(tasks):
                group.start_soon(work)

    async def _run_op(self, run: Run, op: _Op) -> None:
        """Wait for what the op needs, move its blocks in slices, tell those who wait for it."""
        copy = op.copy
        landed: list[SlotIds] = []  # only those who join a landing ask
        try:
            for number in copy.after:
                await run.ops[number].over.wait()
            for other in op.joins:
                await other.over.wait()
                if other.copy.target.place == copy.source.place:
                    self._drop_what_failed(run, op, other)
            if copy.source.place == copy.target.place:  # nothing to move: it was waited for
                run.arrived[copy.positions] = run.alive[copy.positions]
                return
            size = self.chunk_blocks * self.block_bytes // copy.size_bytes(self.block_bytes)
            blocks = len(copy)
            if blocks <= size:
                await self._run_slice(run, op, slice(0, blocks), landed)
                return
            slices = iter([slice(at, at + size) for at in range(0, blocks, size)])

            async def work() -> None:
                for part in slices:
                    await self._run_slice(run, op, part, landed)

            await self._in_tasks(work, min(_SLICES_IN_FLIGHT, -(-blocks // size)))
        finally:
            if copy.landing:
                op.good_slots = np.concatenate(landed) if landed else np.empty(0, np.uint32)
                self._landings.pop(copy.landing, None)
            op.over.set()

    def _drop_what_failed(self, run: Run, op: _Op, other: _Op) -> None:
        """Mark those of our source slots that the joined op was to fill and did not."""
        assert other.good_slots is not None
        source = op.copy.source.ids
        bad = np.isin(source, other.copy.target.ids) & ~np.isin(source, other.good_slots)
        run.alive[op.copy.positions[bad]] = False

    async def _run_slice(self, run: Run, op: _Op, part: slice, landed: list[SlotIds]) -> None:
        """Move one slice of an op and book it; positions that failed earlier, and cancelled ones,
        are skipped. Target slots that are good now go to `landed`.
        """
        copy = op.copy
        positions = copy.positions[part]
        statuses = np.full(len(positions), SKIPPED, np.uint8)
        lane = self.lanes[copy.source.place, copy.target.place]
        held = await lane.acquire(
            len(positions) * copy.size_bytes(self.block_bytes), run.graph.priority
        )
        worth, now = self._worth, self.completions.now
        batch = worth.begin(run.graph, copy, now(), len(positions)) if worth is not None else None
        try:
            wanted = run.alive[positions]
            if run.cancelled and not op.wanted:
                wanted[:] = False
            count = np.count_nonzero(wanted)
            if count == len(wanted):
                statuses = await self._move(
                    run, copy, positions, copy.source.ids[part], copy.target.ids[part]
                )
            elif count:
                sources, targets = copy.source.ids[part][wanted], copy.target.ids[part][wanted]
                statuses[wanted] = await self._move(run, copy, positions[wanted], sources, targets)
        finally:
            lane.release(held)
            if worth is not None:
                worth.end(batch, now(), statuses)
            self._book(run, copy, positions, statuses)
        if copy.landing:
            good = copy.target.ids[part]
            landed.append(good[statuses == LANDED] if np.count_nonzero(statuses) else good)

    def _book(self, run: Run, copy: Copy, positions: Positions, statuses: Statuses) -> None:
        landed = statuses == LANDED
        blocks = int(np.count_nonzero(landed))
        whole = blocks == len(positions)
        if not whole:
            run.alive[positions[~landed]] = False
        if copy.target.place == run.graph.goal and copy.is_last:
            run.arrived[positions if whole else positions[landed]] = True
        size_bytes = blocks * copy.size_bytes(self.block_bytes)
        run.moved_bytes += size_bytes
        labels = {"source": copy.source.place, "target": copy.target.place}
        add = self._telemetry.add
        add("transfer_ops", 1, **labels)
        add("transfer_blocks", blocks if copy.is_last else 0, **labels)
        add("transfer_bytes", size_bytes, **labels)
        if not whole:
            damaged = (statuses == DAMAGED) | (statuses == MISSING)
            add("failed_blocks", int(np.count_nonzero(statuses == FAILED)), **labels)
            add("damaged_blocks", int(np.count_nonzero(damaged)), tier=copy.source.place)
        self._commit(run.graph, copy, positions, statuses)

    async def _move(
        self, run: Run, copy: Copy, positions: Positions, sources: SlotIds, targets: SlotIds
    ) -> Statuses:
        """Move blocks along one edge of the graph. Whatever a backend raises is a failure of these
        blocks.
        """
        source, target = copy.source.place, copy.target.place
        try:
            if source == HOST and target == DEVICE:
                return await self._copy(run, targets, sources, copy.layers, to_device=True)
            if source == DEVICE and target == HOST:
                return await self._copy(run, sources, targets, copy.layers, to_device=False)
            keys = run.graph.keys[positions]
            if target == HOST:
                answer = await self.stores[source].read(BlockIO(targets, sources, keys))
                return as_statuses(answer, len(keys))
            if source == HOST:
                parents, depths = run.graph.parents, run.graph.depths
                assert parents is not None
                assert depths is not None
                batch = BlockIO(sources, targets, keys, parents[positions], depths[positions])
                return as_statuses(await self.stores[target].write(batch), len(keys))
            return await self._read_to_device(run, copy, sources, targets, positions)
        except Exception as error:
            log.warning(
                "op.failed", source=source, target=target, blocks=len(positions), error=repr(error)
            )
            status = SKIPPED if _no_room(error) else FAILED
            return np.full(len(positions), status, np.uint8)

    async def _copy(
        self,
        run: Run,
        device_blocks: SlotIds,
        slots: SlotIds,
        layers: tuple[int, int] | None,
        *,
        to_device: bool,
    ) -> Statuses:
        assert run.region is not None, "a graph that touches the device needs a region"
        batch = BlockCopy(run.region, device_blocks, slots, to_device, layers, run.tag)
        await self.device.copy(batch)
        return np.zeros(len(slots), np.uint8)

    async def _read_to_device(
        self, run: Run, copy: Copy, sources: SlotIds, targets: SlotIds, positions: Positions
    ) -> Statuses:
        """Bring stored blocks to the device: directly where the device can, else through staging
        slots.
        """
        store, keys = self.stores[copy.source.place], run.graph.keys[positions]
        assert run.region is not None
        if isinstance(self.device, DirectStorage) and isinstance(store, LocatableStorage):
            with store.locate(BlockIO(np.empty(0, np.uint32), sources, keys)) as batch:
                answer = await self.device.read_into(batch, run.region, targets)
            return as_statuses(answer, len(keys))
        statuses = np.full(len(sources), FAILED, np.uint8)
        step = self._staging.capacity
        for start in range(0, len(sources), step):
            part = slice(start, start + step)
            borrowed = self._staging.borrow(len(sources[part]), run.graph.priority)
            async with borrowed as slots:
                answer = await store.read(BlockIO(slots, sources[part], keys[part]))
                read = as_statuses(answer, len(slots))
                good = read == LANDED
                if good.any():
                    read[good] = await self._from_staging(
                        run, copy, targets[part][good], slots[good]
                    )
                statuses[part] = read
        return statuses

    async def _from_staging(
        self, run: Run, copy: Copy, targets: SlotIds, slots: SlotIds
    ) -> Statuses:
        """Copy blocks that were read to the device; when that fails, the store is not to blame."""
        try:
            return await self._copy(run, targets, slots, copy.layers, to_device=True)
        except Exception as error:
            log.warning(
                "op.failed", source=HOST, target=DEVICE, blocks=len(slots), error=repr(error)
            )
            self._telemetry.add("failed_blocks", len(slots), source=HOST, target=DEVICE)
            return np.full(len(slots), SKIPPED, np.uint8)


def _no_room(error: BaseException) -> bool:
    """Whether a backend refused for want of tickets or queue: no block is bad for it."""
    if isinstance(error, BaseExceptionGroup):
        return all(_no_room(inner) for inner in error.exceptions)
    return isinstance(error, CapacityError)
