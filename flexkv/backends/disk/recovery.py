"""Opening a store: is it ours, is it whole, what did a previous life commit.

`open_store` (blocking) locks the directories; `Opening.run` decides by the rule `on_mismatch`,
makes or mends the files, and reads the records into a `Store`: its `SlotTable`, the `Recovered`
rows and a `Report` of what was dropped and why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk import format as disk_format
from flexkv.backends.disk.files import Directory, DirectoryBusyError, direct_io_problem
from flexkv.backends.disk.format import FORMATTING, IN_USE, Geometry, Superblock
from flexkv.backends.disk.settings import DiskSettings
from flexkv.backends.disk.table import SlotTable
from flexkv.errors import FormatError
from flexkv.model import PAGE_BYTES, BoolArray, Identity
from flexkv.protocols import Recovered
from flexkv.telemetry import log

_LOCK_RETRY_S = 0.05


@dataclass(slots=True)
class Report:
    """What opening found: rows kept, and rows dropped by reason."""

    recovered: int = 0
    damaged_records: int = 0
    duplicates: int = 0
    cut_off: int = 0  # the data file ends before the slot does
    remade: list[str] = field(default_factory=list)  # directories that were lost
    cleared: str = ""  # why the store was emptied
    set_aside: list[str] = field(default_factory=list)  # foreign files, renamed

    def warn(self) -> None:
        """Log what was lost, if anything."""
        if self.cleared:
            log.warning("disk.cleared", reason=self.cleared, set_aside=self.set_aside)
        if self.damaged_records or self.cut_off or self.duplicates or self.remade:
            log.warning(
                "disk.mended",
                damaged_records=self.damaged_records,
                cut_off_blocks=self.cut_off,
                duplicate_blocks=self.duplicates,
                remade_directories=self.remade,
            )


@dataclass(slots=True)
class Store:
    """An open, locked store."""

    directories: list[Directory]
    geometry: Geometry
    seeds: list[int]
    table: SlotTable
    recovered: Recovered | None
    report: Report
    buffered: str = ""  # why not all data files are read with O_DIRECT

    def release(self) -> None:
        """Unlock and close all directories."""
        for directory in self.directories:
            directory.release()

    def close(self) -> None:
        """Push what was written to the devices, then `release`."""
        for directory in self.directories:
            try:
                directory.sync()
            except OSError as error:  # what did not get there fails its checksum when it is read
                log.warning("disk.sync_failed", directory=str(directory.path), error=str(error))
        self.release()


def open_store(
    settings: DiskSettings, identity: Identity, slots: int, block_bytes: int = 0
) -> Store:
    """Open or make the store of `slots` slots in the directories of `settings`; `block_bytes` is
    the size of its blocks, 0: the spec's.

    Raises:
        OwnershipError: another process has one of the directories.
        FormatError: what they hold cannot be used, and `on_mismatch` is "error".
        StorageError: a directory cannot be used, or has no room.
    """
    size = block_bytes or identity.spec.block_bytes
    stride = -(-size // PAGE_BYTES) * PAGE_BYTES
    geometry = Geometry(slots, len(settings.directories), stride, size)
    directories = [Directory(path, index) for index, path in enumerate(settings.directories)]
    try:
        for directory in directories:
            directory.acquire()
        store = Opening(settings, identity, geometry, directories).run()
        reasons = [direct_io_problem(item.data_fd, item.path) for item in directories]
        store.buffered = next(filter(None, reasons), "")
        return store
    except BaseException:
        for directory in directories:
            directory.release()
        raise


async def open_patiently(
    settings: DiskSettings, identity: Identity, slots: int, block_bytes: int = 0
) -> Store:
    """Do `open_store` in a thread; wait a little for an owner that is dead but whose last I/O the
    kernel still does."""
    deadline = anyio.current_time() + settings.lock_timeout_ms / 1000
    limiter = anyio.CapacityLimiter(1)
    while True:
        try:
            return await anyio.to_thread.run_sync(
                open_store, settings, identity, slots, block_bytes, limiter=limiter
            )
        except DirectoryBusyError as error:
            if error.owner_lives or anyio.current_time() >= deadline:
                raise
        await anyio.sleep(_LOCK_RETRY_S)


class Opening:
    """The steps of one opening, and what they know of each other."""

    def __init__(
        self,
        settings: DiskSettings,
        identity: Identity,
        geometry: Geometry,
        directories: list[Directory],
    ) -> None:
        self.clear = settings.on_mismatch == "clear"
        self.digest = identity.digest()
        self.text = disk_format.identity_text(identity)
        self.geometry = geometry
        self.directories = directories
        self.members: dict[int, Superblock] = {}
        self.blank: list[Directory] = []  # never used: may be emptied again when making fails
        self.problems: list[str] = []
        self.report = Report()

    def run(self) -> Store:
        for directory in self.directories:
            self._look_at(directory)
        self._compare_members()
        if self.problems and not self.clear:
            raise FormatError(
                f"{'; '.join(self.problems)}. "
                'Name other directories, or set on_mismatch="clear" to start empty'
            )
        if self.problems:
            self.report.cleared = "; ".join(self.problems)
            for directory in self.directories:
                self.report.set_aside += map(str, directory.set_aside())
        if self.problems or not self.members:
            set_id = os.urandom(16)
            self._make(set_id, self.directories)
            table, recovered = SlotTable(self.geometry.slots), None
        else:
            set_id = next(iter(self.members.values())).set_id
            table, recovered = self._adopt(set_id)
        seeds = [self._superblock(set_id, d.index).seed for d in self.directories]
        return Store(self.directories, self.geometry, seeds, table, recovered, self.report)

    def _superblock(self, set_id: bytes, index: int, state: int = IN_USE) -> Superblock:
        return Superblock(self.digest, self.text, set_id, index, self.geometry, state)

    def _look_at(self, directory: Directory) -> None:
        """Sort a directory into members, lost ones and problems."""
        block = directory.superblock()
        if not block:
            if directory.data_bytes == 0:
                self.blank.append(directory)
            return
        try:
            found = Superblock.decode(block)
        except FormatError as error:
            self.problems.append(f"{_records(directory)} cannot be used: {error}")
            return
        if found.state == FORMATTING:
            return  # its maker was killed before anything was committed
        self.members[directory.index] = found
        self._compare_identity(directory, found)

    def _compare_identity(self, directory: Directory, found: Superblock) -> None:
        if found.digest != self.digest:
            what = disk_format.differences(self.text, found.identity) or ["the digest differs"]
            self.problems.append(f"{_records(directory)} is of another identity: {', '.join(what)}")
            return
        for name in ("directories", "stride_bytes", "block_bytes"):
            there, here = getattr(found.geometry, name), getattr(self.geometry, name)
            if there != here:
                self.problems.append(
                    f"{_records(directory)} was made with {name}={there}, now it is {here}"
                )
        if found.index != directory.index:
            self.problems.append(
                f"{_records(directory)} was directory {found.index} of its store, now it is "
                f"{directory.index}: the order of the directories changed"
            )

    def _compare_members(self) -> None:
        if len({member.set_id for member in self.members.values()}) > 1:
            names = ", ".join(str(self.directories[index].path) for index in self.members)
            self.problems.append(f"{names} hold parts of different stores")
        if self.members or self.problems:
            return
        for directory in self.directories:
            if not directory.superblock() and directory.data_bytes:
                self.problems.append(
                    f"{directory.path} holds {disk_format.DATA_NAME} of {directory.data_bytes} "
                    f"bytes, but {disk_format.RECORDS_NAME} is gone"
                )

    def _make(self, set_id: bytes, directories: list[Directory]) -> None:
        """Make directories empty members of the store. A kill at any point leaves them FORMATTING
        or done.
        """
        try:
            for directory in directories:
                directory.write_superblock(self._superblock(set_id, directory.index, FORMATTING))
                os.ftruncate(directory.records_fd, disk_format.SUPERBLOCK_BYTES)
                directory.allocate(self.geometry)
        except BaseException:
            for directory in directories:
                if directory in self.blank:
                    directory.shrink_to_nothing()
            raise
        for directory in directories:
            directory.write_superblock(self._superblock(set_id, directory.index))

    def _adopt(self, set_id: bytes) -> tuple[SlotTable, Recovered | None]:
        lost = [d for d in self.directories if d.index not in self.members]
        self.report.remade = [str(directory.path) for directory in lost]
        data_bytes = {index: self.directories[index].data_bytes for index in self.members}
        self._make(set_id, lost)
        kept, slots, dropped = [], [], {}
        for index in self.members:
            directory = self.directories[index]
            directory.allocate(self.geometry)
            directory.write_superblock(self._superblock(set_id, index))
            records = directory.read_records(self.geometry.local_slots(index))
            good, dropped[index] = self._sort_out(index, records, data_bytes[index])
            kept.append(records if len(good) == len(records) else records[good])
            slots.append(good * self.geometry.directories + index)
        rows = kept[0] if len(kept) == 1 else np.concatenate(kept)
        places = np.concatenate(slots)
        newest = _newest(rows)
        self.report.duplicates = len(rows) - int(np.count_nonzero(newest))
        stale = places[~newest]
        for index, directory in enumerate(self.directories):
            older = stale[stale % self.geometry.directories == index] // self.geometry.directories
            directory.clear_records(np.sort(np.append(dropped.get(index, older[:0]), older)))
        return self._table(rows, places.astype(np.uint32), newest)

    def _sort_out(
        self, index: int, records: NDArray[np.void], data_bytes: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Local slots with a usable record, and those whose record must go."""
        states = disk_format.check(
            records, 0, self._superblock(self.members[index].set_id, index).seed
        )
        good = states == disk_format.GOOD
        fits = (records["size"] == self.geometry.block_bytes) & (records["flags"] == 0)
        whole = np.arange(len(records)) < data_bytes // self.geometry.stride_bytes
        self.report.damaged_records += int(
            np.count_nonzero((states != disk_format.EMPTY) & ~(good & fits))
        )
        self.report.cut_off += int(np.count_nonzero(good & fits & ~whole))
        usable = good & fits & whole
        return np.flatnonzero(usable), np.flatnonzero((states != disk_format.EMPTY) & ~usable)

    def _table(
        self, rows: NDArray[np.void], slots: NDArray[np.uint32], newest: BoolArray
    ) -> tuple[SlotTable, Recovered | None]:
        table = SlotTable(self.geometry.slots)
        if not len(rows):
            return table, None
        table.next_sequence = int(rows["sequence"].max()) + 1
        if not newest.all():
            rows, slots = rows[newest], slots[newest]
        keys = np.ascontiguousarray(rows["key"])
        table.commit(slots, keys, rows["checksum"], rows["sequence"])
        self.report.recovered = len(rows)
        parents = np.ascontiguousarray(rows["parent"])
        return table, Recovered(keys, parents, np.ascontiguousarray(rows["depth"]), slots)


def _newest(rows: NDArray[np.void]) -> BoolArray:
    """Mark, for every key, the row with the highest sequence."""
    newest = np.ones(len(rows), np.bool_)
    first_half = rows["key"][:, 0]
    order = np.argsort(first_half, kind="stable")
    ordered = first_half[order]
    same = np.zeros(len(rows), np.bool_)
    equal = ordered[1:] == ordered[:-1]
    if not equal.any():
        return newest
    same[1:] |= equal
    same[:-1] |= equal
    suspects = order[same]
    keys = rows["key"][suspects]
    ranked = suspects[np.lexsort((rows["sequence"][suspects], keys[:, 1], keys[:, 0]))]
    keys = rows["key"][ranked]
    newest[ranked[:-1][(keys[1:] == keys[:-1]).all(axis=1)]] = False
    return newest


def _records(directory: Directory) -> Path:
    return directory.path / disk_format.RECORDS_NAME
