"""The disk tier: blocks in slots of files, striped over directories, that survive the process.

`DiskBackend` (a slot-addressed store): `open`, `read`, `write`, `discard`, `locate`, `aclose`. A
write clears the slot's old record, moves the data, and only then writes the new record; a read is
verified before it is said to have landed. There is no fsync on the way: checksums, bound to the
key, decide what survived.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Literal

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.backends.disk import engines
from flexkv.backends.disk.engines import Engine
from flexkv.backends.disk.places import Places
from flexkv.backends.disk.records import Crew, RecordFiles, make_rows
from flexkv.backends.disk.recovery import Report, Store, open_patiently
from flexkv.backends.disk.settings import DiskSettings
from flexkv.errors import ClosedError, ConfigError, InputError
from flexkv.model import PAGE_BYTES, BoolArray, IOStatus, SlotIds, Statuses
from flexkv.protocols import API_VERSION, BlockIO, DeviceInfo, Recovered, Services
from flexkv.telemetry import log

_MAX_CHUNKS = 64  # of all batches together; more wait their turn
_CLOSE_TIMEOUT_S = 30

Positions = NDArray[np.intp]


class DiskBackend:
    """A tier on local SSDs. Settings: see `DiskSettings`.

    `engine_name` and `engine_reason` say how bytes are moved and why so, `report` what opening
    found.
    """

    flexkv_api: ClassVar[int] = API_VERSION
    addressing: ClassVar[Literal["slot", "key"]] = "slot"
    alignment_bytes = PAGE_BYTES
    any_block_bytes: ClassVar[bool] = True

    def __init__(self) -> None:
        self.engine_name = ""
        self.engine_reason = ""
        self.report = Report()
        self.damaged_blocks = 0
        self.engine: Engine  # set by `open`, as are the next ones
        self.records: RecordFiles
        self._store: Store | None = None
        self._closing = False
        self._batches = 0
        self._idle = anyio.Event()

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """Say which engine this machine allows; directories are asked when they are opened."""
        failure = lib.fx_ring_probe()
        return [DeviceInfo("disk", 0, engines.explain_ring(failure) if failure else "io_uring")]

    async def open(self, services: Services) -> Recovered | None:
        """Open or make the store; return what a previous life committed, None if nothing.

        Raises:
            ConfigError: a setting is wrong.
            OwnershipError: another process has one of the directories.
            FormatError: the directories hold something else, and `on_mismatch` is "error".
            StorageError: a directory cannot be used, or has no room.
        """
        assert self._store is None, "the disk tier is open already"
        settings = DiskSettings.read(services.settings)
        if services.capacity_blocks < len(settings.directories):
            raise ConfigError(
                f"disk tier: {services.capacity_blocks} slots are too few for "
                f"{len(settings.directories)} directories"
            )
        size = services.block_bytes or services.identity.spec.block_bytes
        if services.arena.stride_bytes < size:
            raise ConfigError(
                f"disk tier: {size} bytes do not fit into slots of {services.arena.stride_bytes}"
            )
        store = await open_patiently(settings, services.identity, services.capacity_blocks, size)
        try:
            engine, self.engine_reason = await engines.choose(
                settings, store.buffered, services.completions, services.arena
            )
        except BaseException:
            store.release()
            raise
        crew = Crew(services.completions, services.arena, size)
        self.work_on(store, engine, crew, settings)
        return store.recovered

    def work_on(self, store: Store, engine: Engine, crew: Crew, settings: DiskSettings) -> None:
        """Take an open store and those who move its bytes; `open` ends with this."""
        self.engine, self.engine_name = engine, engine.name
        self.report = store.report
        self._settings = settings
        self._block_bytes = store.geometry.block_bytes
        self._stride_bytes = store.geometry.stride_bytes
        self.places, self._table = Places(store), store.table
        self._crew, self.records = crew, RecordFiles(store, crew)
        self._chunk_turns = anyio.Semaphore(_MAX_CHUNKS, fast_acquire=True)
        self._store = store
        self._tell()

    @property
    def capacity_blocks(self) -> int:
        """Slots of the tier."""
        return len(self._table)

    @property
    def used_blocks(self) -> int:
        """Slots that hold a committed block."""
        return self._table.used

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a committed block."""
        return self._table.used * self._stride_bytes

    async def read(self, batch: BlockIO) -> Statuses:
        """Fill the arena slots: LANDED only when the bytes are those that were written under this
        key.

        MISSING: the slot holds nothing, or another key. FAILED: the device failed, or the file
        ends too early. DAMAGED: other bytes came back; the block is forgotten.
        """
        slots = self._enter(batch)
        try:
            held = self._table.holds(slots, batch.keys)
            statuses = np.where(held, IOStatus.LANDED, IOStatus.MISSING).astype(np.uint8)

            async def chunk(part: Positions) -> None:
                statuses[part] = await self._read(batch, part)

            await self._in_chunks(np.flatnonzero(held), chunk)
            return statuses
        finally:
            self._leave()

    async def write(self, batch: BlockIO) -> Statuses:
        """Store and commit the arena slots, over whatever the slots held: LANDED or FAILED.

        A slot whose write failed holds nothing.

        Raises:
            InputError: a slot appears twice.
        """
        slots = self._enter(batch)
        try:
            if len(np.unique(slots)) != len(slots):
                raise InputError("disk tier: a batch writes one slot twice")
            statuses = np.full(len(slots), IOStatus.FAILED, np.uint8)

            async def chunk(part: Positions) -> None:
                statuses[part] = await self._write(batch, part)

            await self._in_chunks(np.arange(len(slots)), chunk)
            return statuses
        finally:
            self._leave()

    async def discard(self, batch: BlockIO) -> Statuses:
        """Forget the blocks: LANDED, MISSING (the slot does not hold this key), or FAILED.

        A key of zeros stands for whatever the slot holds. FAILED: the block is not readable any
        more, but may be found again after a restart.
        """
        slots = self._enter(batch)
        try:
            held = self._table.holds(slots, batch.keys)
            held |= ~batch.keys.any(axis=1) & self._table.filled(slots)
            statuses = np.where(held, IOStatus.LANDED, IOStatus.MISSING).astype(np.uint8)
            gone = np.unique(slots[held])
            if len(gone):
                failed = gone[~await self._clear(gone)]
                statuses[held & np.isin(slots, failed)] = IOStatus.FAILED
            return statuses
        finally:
            self._leave()

    async def aclose(self) -> None:
        """Wait for what is in flight, push it to the device, unlock. Calling it twice is fine.

        When the device does not answer for 30 s the files stay open and locked until the process
        ends: somebody else must not get them while it may still write.
        """
        if self._store is None:
            return
        self._closing = True
        with anyio.move_on_after(_CLOSE_TIMEOUT_S) as scope:
            if self._batches:
                await self._idle.wait()
            await self._crew.idle()
            await self.engine.aclose()
        store, self._store = self._store, None
        if scope.cancelled_caught:
            log.error("disk.stuck", timeout_s=_CLOSE_TIMEOUT_S)
        elif store is not None:
            await self.let_go(store)

    async def let_go(self, store: Store) -> None:
        """Push a store to its device and unlock it, in a thread; `aclose` ends with this."""
        await anyio.to_thread.run_sync(store.close, limiter=anyio.CapacityLimiter(1))

    def _tell(self) -> None:
        """Say once how the tier works and what was found."""
        report = self.report
        log.info(
            "disk.opened",
            directories=[str(path) for path in self._settings.directories],
            engine=self.engine_name,
            reason=self.engine_reason,
            capacity_blocks=self.capacity_blocks,
            recovered_blocks=report.recovered,
        )
        report.warn()

    # --- one batch

    def _enter(self, batch: BlockIO) -> SlotIds:
        if self._store is None or self._closing:
            raise ClosedError("the disk tier is closed")
        slots = np.ascontiguousarray(batch.store_slots, np.uint32)
        if len(slots) and int(slots.max()) >= len(self._table):
            raise InputError(
                f"disk tier: slot {int(slots.max())} does not exist; there are {len(self._table)}"
            )
        self._batches += 1
        return slots

    def _leave(self) -> None:
        self._batches -= 1
        if self._batches == 0:
            self._idle.set()
            self._idle = anyio.Event()

    async def _in_chunks(
        self, positions: Positions, work: Callable[[Positions], Awaitable[None]]
    ) -> None:
        """Do `work` on chunks of a batch, a few at a time: big batches leave room for others."""
        per_chunk = max(1, self._settings.chunk_bytes // self._stride_bytes)
        chunks = iter([positions[i : i + per_chunk] for i in range(0, len(positions), per_chunk)])

        async def worker() -> None:
            for part in chunks:
                async with self._chunk_turns:
                    await work(part)

        if len(positions) <= per_chunk:
            return await worker()
        async with anyio.create_task_group() as group:
            for _ in range(min(self._settings.chunks_in_flight, -(-len(positions) // per_chunk))):
                group.start_soon(worker)

    @contextmanager
    def locate(self, batch: BlockIO) -> Iterator[BlockIO]:
        """Lend the batch with the places of its blocks, for devices that read files themselves."""
        slots = self._enter(batch)
        try:
            yield replace(batch, extents=self.places.extents(slots, batch.keys))
        finally:
            self._leave()

    async def _read(self, batch: BlockIO, part: Positions) -> Statuses:
        slots, host_slots = _pick(batch, part)
        keys = batch.keys[part]
        expected = self._table.checksums[slots]
        sequences = self._table.sequences[slots]
        moved = await self.engine.transfer(self.places.moves(False, slots, host_slots))
        landed = moved == self._stride_bytes
        statuses = np.where(landed, IOStatus.LANDED, IOStatus.FAILED).astype(np.uint8)
        if not landed.any():
            return statuses
        sums = await self._crew.begin_checksums(host_slots[landed], keys[landed]).result()
        damaged = np.flatnonzero(landed)[sums != expected[landed]]
        if len(damaged):
            statuses[damaged] = IOStatus.DAMAGED
            self.damaged_blocks += len(damaged)
            same = self._table.sequences[slots[damaged]] == sequences[damaged]
            await self._clear(slots[damaged][same])
        return statuses

    async def _write(self, batch: BlockIO, part: Positions) -> Statuses:
        slots, host_slots = _pick(batch, part)
        keys = np.ascontiguousarray(batch.keys[part])
        statuses = np.full(len(part), IOStatus.FAILED, np.uint8)
        ready = await self._clear_old(slots)
        if not ready.all():
            part, slots, host_slots, keys = (
                part[ready],
                slots[ready],
                host_slots[ready],
                keys[ready],
            )
        if not len(part):
            return statuses
        checksums = self._crew.begin_checksums(host_slots, keys)  # while the data is on its way
        moved = await self.engine.transfer(self.places.moves(True, slots, host_slots))
        sums = await checksums.result()
        landed = moved == self._stride_bytes
        if not landed.any():
            return statuses
        rows = make_rows(batch, part, sums, self._block_bytes)[landed]
        rows["sequence"] = self._table.take_sequences(len(rows))
        slots = slots[landed]
        self._table.doubt(slots)
        written = await self.records.write(slots, rows) == 0
        if not written.all():
            await self._clear(slots[~written])
        self._table.commit(
            slots[written],
            rows["key"][written],
            rows["checksum"][written],
            rows["sequence"][written],
        )
        done = np.flatnonzero(ready)[landed][written]
        statuses[done] = IOStatus.LANDED
        return statuses

    async def _clear_old(self, slots: SlotIds) -> BoolArray:
        """Forget what `slots` hold before their bytes change; which of them may be written."""
        old = self._table.must_clear(slots)
        ready = ~old
        if old.any():
            ready[old] = await self._clear(slots[old])
        return ready

    async def _clear(self, slots: SlotIds) -> BoolArray:
        """Forget what `slots` hold, also on disk; for which of them that worked."""
        self._table.forget(slots)
        self._table.doubt(slots)
        cleared = np.equal(await self.records.clear(slots), 0)
        self._table.trust(slots[cleared])
        return cleared


def _pick(batch: BlockIO, part: Positions) -> tuple[SlotIds, SlotIds]:
    slots = np.ascontiguousarray(batch.store_slots[part], np.uint32)
    return slots, np.ascontiguousarray(batch.host_slots[part], np.uint32)
