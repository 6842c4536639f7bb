"""A simulated disk below the real disk tier: what it holds, what of that survives a crash.

`Platter` (records and data of all slots, and which writes are not safe yet): `crash`, `sync` -
`WorldDisk` (the disk tier on a platter; its code, checksums and recovery are the real ones).
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.backends.disk import DiskBackend
from flexkv.backends.disk import format as disk_format
from flexkv.backends.disk.engines import Moves
from flexkv.backends.disk.files import Directory
from flexkv.backends.disk.format import RECORD, Geometry, Superblock
from flexkv.backends.disk.records import Checksums, Crew
from flexkv.backends.disk.recovery import Opening, Store
from flexkv.backends.disk.settings import DiskSettings
from flexkv.completion import Ticket
from flexkv.memory import Arena
from flexkv.model import KeyArray, SlotIds
from flexkv.protocols import Recovered, Services
from flexkv.testing.worlds.chance import mix
from flexkv.testing.worlds.hardware import IO_ERROR, NO_SPACE, Hardware

Crash = Literal["kill", "power"]
_UNSAFE_WRITES = 24  # what a device may still hold in its cache
_SET_ID = b"flexkv world 001"


class _Write(NamedTuple):
    """A write that a power failure may undo: the bytes of a row before and after it."""

    row: NDArray[np.uint8]
    before: NDArray[np.uint8]
    after: NDArray[np.uint8]


class Platter:
    """Slots of a simulated disk. Reads see every write; a power failure loses some late ones."""

    def __init__(self, slots: int, stride_bytes: int) -> None:
        self.superblock = b""
        self.records = np.zeros(slots, RECORD)
        self.data = np.zeros((slots, stride_bytes), np.uint8)
        self._unsafe: deque[_Write] = deque(maxlen=_UNSAFE_WRITES)
        self._raw_records = self.records.view(np.uint8).reshape(slots, -1)

    def write_data(self, slot: int, content: NDArray[np.uint8]) -> None:
        """Replace the first bytes of a slot by `content`."""
        self._write(self.data, slot, content)

    def write_record(self, slot: int, record: NDArray[np.uint8]) -> None:
        """Replace the first bytes of the record of a slot."""
        self._write(self._raw_records, slot, record)

    def _write(self, place: NDArray[np.uint8], slot: int, content: NDArray[np.uint8]) -> None:
        before = place[slot].copy()
        place[slot, : len(content)] = content
        self._unsafe.append(_Write(place[slot], before, place[slot].copy()))

    def sync(self) -> None:
        """Make everything safe."""
        self._unsafe.clear()

    def crash(self, how: Crash, seed: int) -> Platter:
        """What the next life finds: after a kill every write that landed, after a power failure
        some of the last ones not, or only in part.
        """
        if how == "power":
            for write in reversed(self._unsafe):
                write.row[:] = write.before
            for number, write in enumerate(self._unsafe):
                reached = (0, len(write.row) // 2, len(write.row), len(write.row))
                count = reached[mix(seed, number) % 4]
                write.row[:count] = write.after[:count]
        found = Platter(len(self.data), self.data.shape[1])
        found.superblock = self.superblock
        found.records[:] = self.records
        found.data[:] = self.data
        return found


class _PlatterDirectory(Directory):
    """A platter as the recovery of the disk tier sees a directory."""

    def __init__(self, platter: Platter) -> None:
        super().__init__(Path("platter"), 0)
        self._platter = platter

    @property
    def data_bytes(self) -> int:
        return self._platter.data.size

    def superblock(self) -> bytes:
        return self._platter.superblock

    def write_superblock(self, superblock: Superblock) -> None:
        self._platter.superblock = superblock.encode()

    def allocate(self, geometry: Geometry) -> None:
        assert geometry.slots == len(self._platter.data)

    def read_records(self, count: int) -> NDArray[np.void]:
        return self._platter.records[:count].copy()

    def clear_records(self, slots: NDArray[np.int64]) -> None:
        for slot in slots.tolist():
            self._platter.write_record(slot, np.zeros(RECORD.itemsize, np.uint8))


def _cell_of(hardware: Hardware, arena: Arena) -> str:
    """What slots are called in which a disk finds its blocks: behind a codec not the host's."""
    return "host" if arena is hardware.arena else "encoded"


class _PlatterEngine:
    """Moves blocks between a platter and the arena, as an io_uring or threads would."""

    name: ClassVar[str] = "world"

    def __init__(self, hardware: Hardware, platter: Platter, arena: Arena) -> None:
        self._hardware, self._platter, self._arena = hardware, platter, arena
        self._cell = _cell_of(hardware, arena)
        self._tickets: list[Ticket] = []

    async def transfer(self, moves: Moves) -> NDArray[np.int32]:
        """Move the blocks; per block bytes moved or -errno."""
        slots = (moves.offsets // np.uint64(moves.size_bytes)).astype(np.int64).tolist()
        places = moves.host_slots.tolist()
        place = "write" if moves.write else "read"
        fault = self._hardware.fault(place)
        results = np.full(len(slots), moves.size_bytes, np.int32)
        failing = self._hardware.chance(len(slots), f"{place} fails", slots[0])
        move = self._write if moves.write else self._read

        def land() -> None:
            for number, (slot, host) in enumerate(zip(slots, places, strict=True)):
                kind = fault if number >= failing else ""
                results[number] = move(kind, slot, self._arena.view(host))

        host, disk = [(self._cell, at) for at in places], [("disk", slot) for slot in slots]
        reads, writes = (host, disk) if moves.write else (disk, host)
        if not moves.write:
            for at in places:  # nobody may take a slot for filled while bytes are on their way
                self._arena.view(at)[:] = 0xEE
        ticket = self._hardware.start(place, reads, writes, land, fault=fault)
        self._tickets.append(ticket)
        await ticket
        return results

    def _read(self, fault: str, slot: int, target: NDArray[np.uint8]) -> int:
        if fault == "EIO":
            return IO_ERROR
        size = len(target) // 2 if fault == "short" else len(target)
        target[:size] = self._platter.data[slot, :size]
        if fault == "flip":
            target[7] ^= 0x10
        return size

    def _write(self, fault: str, slot: int, source: NDArray[np.uint8]) -> int:
        if fault in ("EIO", "ENOSPC"):
            self._platter.write_data(slot, source[:32])
            return IO_ERROR if fault == "EIO" else NO_SPACE
        if fault == "short":
            self._platter.write_data(slot, source[:32])
            return 32
        if fault != "lost":
            self._platter.write_data(slot, source)
        if fault == "flip":
            self._platter.data[slot, 3] ^= 0x01
        return len(source)

    async def aclose(self) -> None:
        """Wait for what is in flight, whoever gave up on it."""
        for ticket in self._tickets:
            await ticket


class _PlatterCrew(Crew):
    """Checksums and records without threads."""

    def __init__(
        self, hardware: Hardware, platter: Platter, services: Services, block_bytes: int
    ) -> None:
        super().__init__(services.completions, services.arena, block_bytes)
        self._hardware, self._platter = hardware, platter
        self._cell = _cell_of(hardware, services.arena)

    def begin_checksums(self, slots: SlotIds, keys: KeyArray) -> Checksums:
        job = self._job(slots, keys)
        reads = [(self._cell, slot) for slot in job.slots.tolist()]
        compute = partial(lib.fx_checksum_blocks, *self._checksum_arguments(job))
        job.ticket = self._hardware.start("checksum", reads, (), compute)
        return job

    async def write_records(
        self, fds: NDArray[np.int32], offsets: NDArray[np.uint64], records: NDArray[np.void]
    ) -> NDArray[np.int32]:
        first, size = np.uint64(disk_format.SUPERBLOCK_BYTES), np.uint64(disk_format.RECORD_BYTES)
        slots = ((offsets - first) // size).astype(np.int64).tolist()
        rows = records.copy().view(np.uint8).reshape(len(records), -1)
        results = np.zeros(len(rows), np.int32)
        fault = self._hardware.fault("record")

        def land() -> None:
            for number, slot in enumerate(slots):
                if fault == "EIO":
                    results[number] = -errno.EIO
                elif fault == "torn":
                    self._platter.write_record(slot, rows[number, :40])
                elif fault != "lost":
                    self._platter.write_record(slot, rows[number])

        writes = [("record", slot) for slot in slots]
        await self._hardware.start("record", (), writes, land, fault=fault)
        return results


class WorldDisk(DiskBackend):
    """The disk tier on a platter. `begin` gives the hardware and the platter of this life."""

    begin: Callable[[Services], tuple[Hardware, Platter]]

    async def open(self, services: Services) -> Recovered | None:
        """Open what the platter holds, in no time and without threads."""
        settings = DiskSettings.read(services.settings)
        size = services.block_bytes or services.identity.spec.block_bytes
        stride = services.arena.stride_bytes
        hardware, platter = type(self).begin(services)
        self._platter = platter
        geometry = Geometry(services.capacity_blocks, 1, stride, size)
        if not platter.superblock:
            text = disk_format.identity_text(services.identity)
            made = Superblock(services.identity.digest(), text, _SET_ID, 0, geometry)
            platter.superblock = made.encode()
        store = Opening(settings, services.identity, geometry, [_PlatterDirectory(platter)]).run()
        engine = _PlatterEngine(hardware, platter, services.arena)
        crew = _PlatterCrew(hardware, platter, services, size)
        self.work_on(store, engine, crew, settings)
        return store.recovered

    async def let_go(self, store: Store) -> None:
        """Make everything safe."""
        self._platter.sync()
