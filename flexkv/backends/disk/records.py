"""Slot records on their way to disk, and other work for the crew: nothing here blocks the loop.

`Crew`: `begin_checksums` (XXH3-64 of arena blocks, bound to their keys), `write_records`, `idle` -
`RecordFiles`: `write` and `clear` the records of slots - `make_rows` (what is to be written).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.backends.disk import format as disk_format
from flexkv.backends.disk.format import pointer
from flexkv.model import KeyArray, SlotIds
from flexkv.protocols import BlockIO

if TYPE_CHECKING:
    from flexkv.backends.disk.recovery import Store
    from flexkv.completion import Completions, Ticket
    from flexkv.memory import Arena


@dataclass(slots=True)
class Checksums:
    """Checksums under way: `await job.result()`."""

    ticket: Ticket | None
    slots: SlotIds
    keys: KeyArray
    sums: NDArray[np.uint64]
    crew: Crew

    async def result(self) -> NDArray[np.uint64]:
        """The checksums, in the order of the blocks."""
        if self.ticket is not None:
            await self.ticket
        else:
            await self.crew.checksums_in_thread(self)
        return self.sums


class Crew:
    """Work for the crew's threads; when their queue is full, for one thread of our own."""

    def __init__(self, completions: Completions, arena: Arena, block_bytes: int) -> None:
        self._completions = completions
        self._arena = arena
        self._block_bytes = block_bytes
        self._limiter = anyio.CapacityLimiter(1)
        self._out: list[Ticket] = []

    def _take_ticket(self, keep: object) -> Ticket:
        ticket = self._completions.ticket(keep=keep)
        self._out = [other for other in self._out if other.done is None]
        self._out.append(ticket)
        return ticket

    async def idle(self) -> None:
        """Wait until no thread works for us, also for those who went away: files may be closed."""
        for ticket in self._out:
            await ticket

    def begin_checksums(self, slots: SlotIds, keys: KeyArray) -> Checksums:
        """Start the checksums of arena `slots`, each seeded by its key."""
        job = self._job(slots, keys)
        ticket = self._take_ticket((job, self._arena))
        arguments = (*self._checksum_arguments(job), ticket.number)
        queued = lib.fx_crew_checksum(self._completions.crew, *arguments)
        if queued < 0:
            self._completions.fail(ticket, -queued)
        else:
            job.ticket = ticket
        return job

    def _job(self, slots: SlotIds, keys: KeyArray) -> Checksums:
        slots = np.ascontiguousarray(slots, np.uint32)
        keys = np.ascontiguousarray(keys, np.uint64)
        return Checksums(None, slots, keys, np.zeros(len(slots), np.uint64), self)

    def _checksum_arguments(self, job: Checksums) -> tuple[Any, ...]:
        """What fx_checksum_blocks takes; valid as long as `job` lives."""
        return (
            self._arena.base,
            self._arena.stride_bytes,
            pointer("uint32_t", job.slots),
            self._block_bytes,
            pointer("uint64_t", job.keys),
            len(job.slots),
            pointer("uint64_t", job.sums),
        )

    async def checksums_in_thread(self, job: Checksums) -> None:
        """Do the work of `job` in our own thread."""
        arguments = self._checksum_arguments(job)
        await anyio.to_thread.run_sync(lib.fx_checksum_blocks, *arguments, limiter=self._limiter)

    async def write_records(
        self, fds: NDArray[np.int32], offsets: NDArray[np.uint64], records: NDArray[np.void]
    ) -> NDArray[np.int32]:
        """Write `records` (dtype RECORD); per record 0 or -errno."""
        results = np.zeros(len(records), np.int32)
        arguments = (
            len(records),
            pointer("int32_t", fds),
            pointer("uint64_t", offsets),
            pointer("fx_record", records),
            pointer("int32_t", results),
        )
        ticket = self._take_ticket(results)
        queued = lib.fx_crew_write_records(self._completions.crew, *arguments, ticket.number)
        if queued < 0:
            self._completions.fail(ticket, -queued)
            await anyio.to_thread.run_sync(lib.fx_records_write, *arguments, limiter=self._limiter)
        else:
            await ticket
        return results


class RecordFiles:
    """The records files of a store as one array of slots."""

    def __init__(self, store: Store, crew: Crew) -> None:
        self._geometry = store.geometry
        self._fds = np.array([d.records_fd for d in store.directories], np.int32)
        self._seeds = np.array(store.seeds, np.uint64)
        self._crew = crew

    async def write(self, slots: SlotIds, records: NDArray[np.void]) -> NDArray[np.int32]:
        """Seal and write the records of `slots`; per slot 0 or -errno."""
        directories, local = self._geometry.locate(slots)
        disk_format.seal(records, local.astype(np.uint32), self._seeds[directories])
        return await self.store(directories, local, records)

    async def clear(self, slots: SlotIds) -> NDArray[np.int32]:
        """Make the records of `slots` empty; per slot 0 or -errno."""
        directories, local = self._geometry.locate(slots)
        empty = np.zeros(len(slots), disk_format.RECORD)
        return await self.store(directories, local, empty)

    async def store(
        self,
        directories: NDArray[np.uint32],
        local: NDArray[np.uint64],
        records: NDArray[np.void],
    ) -> NDArray[np.int32]:
        """Write `records` as they are into local slots of directories; per record 0 or -errno."""
        order = np.lexsort((local, directories))  # neighbours go out together
        offsets = local[order] * disk_format.RECORD_BYTES + disk_format.SUPERBLOCK_BYTES
        written = await self._crew.write_records(
            self._fds[directories[order]], offsets, records[order]
        )
        results = np.empty_like(written)
        results[order] = written
        return results


def make_rows(
    batch: BlockIO, part: NDArray[np.intp], sums: NDArray[np.uint64], block_bytes: int
) -> NDArray[np.void]:
    """Records of the blocks `part` of a batch, without sequence and check."""
    rows = np.zeros(len(part), disk_format.RECORD)
    rows["key"] = batch.keys[part]
    if batch.parents is not None:
        rows["parent"] = batch.parents[part]
    if batch.depths is not None:
        rows["depth"] = batch.depths[part]
    rows["size"] = block_bytes
    rows["checksum"] = sums
    return rows
