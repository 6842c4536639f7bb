"""Looking at a store from outside, without opening or changing it.

`inspect` (superblock, counts, sizes, who owns it) - `verify` (read every committed block again and
compare checksums). Both block, and work on one directory of a store at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.backends.disk import format as disk_format
from flexkv.backends.disk.files import (
    Directory,
    DirectoryBusyError,
    direct_io_problem,
    filesystem_of,
)
from flexkv.backends.disk.format import FORMATTING, RECORDS_NAME, Superblock, pointer
from flexkv.errors import FormatError, StorageError
from flexkv.memory import Arena

_THREADS = 4
_BATCH_BYTES = 8 << 20

Progress = Callable[[int, int], None]  # blocks done, blocks in all


@dataclass(slots=True)
class Verdict:
    """What `verify` found in one directory; slots are numbered within the directory."""

    directory: str
    committed: int = 0
    good: int = 0
    damaged_slots: list[int] = field(default_factory=list)  # other bytes than were written
    unreadable_slots: list[int] = field(default_factory=list)  # the device failed
    damaged_records: int = 0
    cut_off: int = 0  # the data file ends before the slot does

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return self.good == self.committed and not self.damaged_records and not self.cut_off


def inspect(path: Path) -> dict[str, Any]:
    """Describe a directory as plain data; works beside a live owner, whose counts may move.

    Raises:
        FormatError: it holds no store, or one that cannot be read; the message names the directory.
        StorageError: its files cannot be opened.
    """
    directory = Directory(path, 0)
    with _opened(directory):
        superblock = _superblock(directory)
        _, states, whole = _records(directory, superblock)
        good = (states == disk_format.GOOD) & whole
        geometry = superblock.geometry
        problem = direct_io_problem(directory.data_fd, path)
        return {
            "directory": str(path),
            "state": "being made" if superblock.state == FORMATTING else "in use",
            "format_version": superblock.format_version,
            "identity": json.loads(superblock.identity or "{}"),
            "identity_digest": superblock.digest.hex(),
            "set_id": superblock.set_id.hex(),
            "index": superblock.index,
            "directories": geometry.directories,
            "slots": len(states),
            "slots_of_all_directories": geometry.slots,
            "stride_bytes": geometry.stride_bytes,
            "block_bytes": geometry.block_bytes,
            "committed_blocks": int(np.count_nonzero(good)),
            "used_bytes": int(np.count_nonzero(good)) * geometry.stride_bytes,
            "damaged_records": int(np.count_nonzero(states == disk_format.DAMAGED)),
            "cut_off_blocks": int(np.count_nonzero((states == disk_format.GOOD) & ~whole)),
            "data_bytes": directory.data_bytes,
            "records_bytes": directory.records_bytes,
            "filesystem": filesystem_of(path),
            "direct_io": not problem,
            "direct_io_problem": problem,
            "locked": (locked := not _lock_shared(directory)),
            "owner": directory.owner() if locked else 0,
        }


def verify(path: Path, progress: Progress = lambda done, total: None) -> Verdict:
    """Read every committed block of a directory and compare its checksum; changes nothing.

    Raises:
        OwnershipError: a live process uses the directory.
        FormatError: it holds no store, or one that cannot be read.
        StorageError: its files cannot be opened.
    """
    directory = Directory(path, 0)
    with _opened(directory):
        if not _lock_shared(directory):
            raise DirectoryBusyError(path, directory.owner())
        superblock = _superblock(directory)
        records, states, whole = _records(directory, superblock)
        verdict = Verdict(str(path))
        good = states == disk_format.GOOD
        verdict.damaged_records = int(np.count_nonzero(states == disk_format.DAMAGED))
        verdict.cut_off = int(np.count_nonzero(good & ~whole))
        slots = np.flatnonzero(good & whole)
        verdict.committed = len(slots)
        if len(slots):
            direct_io_problem(directory.data_fd, path)  # reads past the page cache if it can
            _read_all(directory, superblock, records, slots, verdict, progress)
        return verdict


@contextmanager
def _opened(directory: Directory) -> Iterator[None]:
    try:
        directory.open_for_reading()
    except FileNotFoundError as error:
        raise FormatError(f"{directory.path} holds no disk tier: {error.strerror}") from error
    except OSError as error:
        raise StorageError(f"{directory.path} cannot be read: {error}") from error
    try:
        yield
    finally:
        directory.close()


def _superblock(directory: Directory) -> Superblock:
    try:
        return Superblock.decode(directory.superblock())
    except FormatError as error:
        raise FormatError(f"{directory.path / RECORDS_NAME} cannot be used: {error}") from error


def _lock_shared(directory: Directory) -> bool:
    """Keep owners out while we look; False when one is in."""
    try:
        fcntl.flock(directory.records_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _records(
    directory: Directory, superblock: Superblock
) -> tuple[NDArray[np.void], NDArray[np.uint8], NDArray[np.bool_]]:
    """All records, what their checks say, and whether the data file reaches that far."""
    geometry = superblock.geometry
    records = directory.read_records(geometry.local_slots(superblock.index))
    states = disk_format.check(records, 0, superblock.seed)
    whole = np.arange(len(records)) < directory.data_bytes // geometry.stride_bytes
    return records, states, whole


def _read_all(
    directory: Directory,
    superblock: Superblock,
    records: NDArray[np.void],
    slots: NDArray[np.intp],
    verdict: Verdict,
    progress: Progress,
) -> None:
    stride = superblock.geometry.stride_bytes
    per_batch = max(1, min(len(slots), _BATCH_BYTES // stride))
    batches = [slots[i : i + per_batch] for i in range(0, len(slots), per_batch)]
    arena = Arena(_THREADS * per_batch, stride, huge_pages=False)

    def check(batch: NDArray[np.intp], room: int) -> tuple[list[int], list[int]]:
        first = room * per_batch
        unreadable = [
            int(slot)
            for place, slot in enumerate(batch, first)
            if not _read_slot(directory.data_fd, arena, place, int(slot) * stride)
        ]
        places = np.arange(first, first + len(batch), dtype=np.uint32)
        keys = np.ascontiguousarray(records["key"][batch])
        sums = np.zeros(len(batch), np.uint64)
        lib.fx_checksum_blocks(
            arena.base,
            stride,
            pointer("uint32_t", places),
            superblock.geometry.block_bytes,
            pointer("uint64_t", keys),
            len(batch),
            pointer("uint64_t", sums),
        )
        other = batch[sums != records["checksum"][batch]].tolist()
        return unreadable, [slot for slot in other if slot not in unreadable]

    done = 0
    with ThreadPoolExecutor(_THREADS, "flexkv-verify") as pool:
        for start in range(0, len(batches), _THREADS):
            together = batches[start : start + _THREADS]
            for unreadable, damaged in pool.map(check, together, range(_THREADS)):
                verdict.unreadable_slots += unreadable
                verdict.damaged_slots += damaged
            done += sum(map(len, together))
            progress(done, len(slots))
    arena.close()
    verdict.good = len(slots) - len(verdict.damaged_slots) - len(verdict.unreadable_slots)


def _read_slot(fd: int, arena: Arena, place: int, offset: int) -> bool:
    try:
        return os.preadv(fd, [arena.view(place).data], offset) == arena.stride_bytes
    except OSError:
        return False
