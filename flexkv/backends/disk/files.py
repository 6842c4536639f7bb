"""The files of one directory: who owns them, how large they are, whether O_DIRECT works.

`Directory`: `acquire` (lock) or `open_for_reading`, `superblock`, `write_superblock`, `set_aside`,
`allocate`, `read_records`, `clear_records`, `sync`, `release` - `direct_io_problem` (try it) -
`filesystem_of` (its type). Everything here blocks: call it off the loop.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk.format import (
    DATA_NAME,
    OWNER_NAME,
    RECORD,
    RECORD_BYTES,
    RECORDS_NAME,
    SUPERBLOCK_BYTES,
    Geometry,
    Superblock,
    is_ours,
)
from flexkv.errors import OwnershipError, StorageError
from flexkv.model import PAGE_BYTES

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


class DirectoryBusyError(OwnershipError):
    """A directory is locked. `owner_lives`: by a process that still runs, as far as can be seen."""

    def __init__(self, path: Path, owner: int) -> None:
        who = f"process {owner}" if owner else "another process"
        super().__init__(
            f"{path} belongs to {who}; one process may use a directory at a time: "
            "stop that one or name another directory"
        )
        self.owner_lives = _lives(owner)


class Directory:
    """One directory of a store, locked while it is open."""

    def __init__(self, path: Path, index: int) -> None:
        self.path = path
        self.index = index
        self.records_fd = -1
        self.data_fd = -1

    @property
    def data_bytes(self) -> int:
        """Real size of the data file."""
        return os.fstat(self.data_fd).st_size

    @property
    def records_bytes(self) -> int:
        """Real size of the records file."""
        return os.fstat(self.records_fd).st_size

    def acquire(self) -> None:
        """Make the directory if need be, open its files and lock them.

        Both files are locked: what a killed owner's kernel threads still have to write holds
        the data file.

        Raises:
            OwnershipError: another process has it.
            StorageError: it cannot be made, read or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.records_fd = self._open(RECORDS_NAME)
            self._lock(self.records_fd)
            self.data_fd = self._open(DATA_NAME)
            self._lock(self.data_fd)
            self._name_owner(f"{os.getpid()}\n")
        except OSError as error:
            self.release()
            raise StorageError(f"{self.path}: cannot be used as a disk tier: {error}") from error
        except StorageError:
            self.release()
            raise

    def superblock(self) -> bytes:
        """The first 4 KiB of the records file, shorter if it ends before."""
        return os.pread(self.records_fd, SUPERBLOCK_BYTES, 0)

    def write_superblock(self, superblock: Superblock) -> None:
        """Replace the superblock."""
        _write_all(self.records_fd, superblock.encode(), 0)

    def set_aside(self) -> list[Path]:
        """Rename files that flexkv did not make, and lock new empty ones in their place."""
        moved = []
        foreign = not is_ours(self.superblock())
        for name in (RECORDS_NAME, DATA_NAME):
            path = self.path / name
            if foreign and path.stat().st_size > 0:
                target = next(
                    candidate
                    for number in range(1, 10_000)
                    if not (candidate := path.with_name(f"{name}.foreign-{number}")).exists()
                )
                path.rename(target)
                moved.append(target)
        if moved:
            self.release()
            self.acquire()
        return moved

    def allocate(self, geometry: Geometry) -> None:
        """Give both files their size, with their blocks reserved on the device.

        Raises:
            StorageError: the file system has no room; files are as large as before.
        """
        self._reserve(self.records_fd, RECORDS_NAME, geometry.records_bytes(self.index))
        self._reserve(self.data_fd, DATA_NAME, geometry.data_bytes(self.index))

    def open_for_reading(self) -> None:
        """Open the files as they are, without a lock; OSError when they are not there."""
        self.records_fd = os.open(self.path / RECORDS_NAME, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.data_fd = os.open(self.path / DATA_NAME, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise

    def read_records(self, count: int) -> NDArray[np.void]:
        """The records of local slots 0 to `count` - 1 as an array of RECORD; past the end of the
        file: empty.
        """
        records = np.zeros(count, RECORD)
        view = memoryview(records.view(np.uint8).data)
        position = 0
        while position < len(view):
            moved = os.preadv(self.records_fd, [view[position:]], SUPERBLOCK_BYTES + position)
            if moved == 0:
                break
            position += moved
        return records

    def clear_records(self, slots: NDArray[np.int64]) -> None:
        """Make the records of these local slots (ascending) empty."""
        if not len(slots):
            return
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        for run in np.split(slots, breaks):
            offset = SUPERBLOCK_BYTES + int(run[0]) * RECORD_BYTES
            _write_all(self.records_fd, bytes(len(run) * RECORD_BYTES), offset)

    def sync(self) -> None:
        """Push both files to the device."""
        os.fdatasync(self.data_fd)
        os.fdatasync(self.records_fd)

    def shrink_to_nothing(self) -> None:
        """Undo `allocate` of a directory that held nothing before."""
        os.ftruncate(self.data_fd, 0)
        os.ftruncate(self.records_fd, 0)

    def release(self) -> None:
        """Unlock and close. Calling it twice is fine."""
        if self.data_fd >= 0:
            self._name_owner("")
        self.close()

    def close(self) -> None:
        """Close the files. Calling it twice is fine."""
        for fd in (self.data_fd, self.records_fd):
            if fd >= 0:
                os.close(fd)
        self.data_fd = self.records_fd = -1

    def owner(self) -> int:
        """Process id of who locked the directory last, 0 if it is not known."""
        try:
            return int((self.path / OWNER_NAME).read_text() or 0)
        except (OSError, ValueError):
            return 0

    def _open(self, name: str) -> int:
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DirectoryBusyError(self.path, self.owner()) from error

    def _name_owner(self, text: str) -> None:
        with suppress(OSError):  # for messages only: a full device must not keep us out
            (self.path / OWNER_NAME).write_text(text)

    def _reserve(self, fd: int, name: str, size: int) -> None:
        before = os.fstat(fd)
        if before.st_size > size:
            os.ftruncate(fd, size)
        need = size - before.st_blocks * 512
        if size == 0 or (need <= 0 and before.st_size >= size):
            return
        room = os.fstatvfs(fd)
        free = room.f_bavail * room.f_frsize
        if need > free:
            raise StorageError(self._no_room(name, size, need, free))
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.ftruncate(fd, min(before.st_size, size))
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                text = f"{self._no_room(name, size, need, free)} ({error.strerror})"
                raise StorageError(text) from error
            raise StorageError(f"{self.path / name} cannot be allocated: {error}") from error

    def _no_room(self, name: str, size: int, need: int, free: int) -> str:
        return (
            f"{self.path}: {name} of {size} bytes needs {need} bytes more, {free} bytes are free; "
            "lower the capacity of the disk tier, free some space or name another directory"
        )


def direct_io_problem(fd: int, path: Path) -> str:
    """Switch an open data file in directory `path` to O_DIRECT if that works, tried by one read.

    Returns "" when it does, else why not.

    Raises:
        StorageError: the file cannot be read at all.
    """
    kind = filesystem_of(path)
    if kind in _MEMORY_FILESYSTEMS:
        return f"{path} is on {kind}, which lives in memory"
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise StorageError(f"{path / DATA_NAME} cannot be read: {error}") from error
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return f"{path} ({kind}) does not take O_DIRECT"
    return ""


def filesystem_of(path: Path) -> str:
    """Type of the file system that holds `path` ("ext4", "tmpfs", ...), "unknown" if the kernel
    does not say.
    """
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        words = line.split()
        if words[2] == wanted:
            return words[words.index("-") + 1]
    return "unknown"


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        moved = os.pwrite(fd, view, offset)
        view, offset = view[moved:], offset + moved
