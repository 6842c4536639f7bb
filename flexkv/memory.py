"""Host memory that hardware and other processes may reach: the arena, and the only views on it.

`Arena` (slots in one shared mapping): `address`, `view`, `rows`, `close`, `attach` -
`find_shared` (which file a range of memory belongs to) - `map_shared` (a file as an array) -
`available_bytes`.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.errors import CapacityError, ClosedError, ConfigError, InputError
from flexkv.model import PAGE_BYTES

HUGE_PAGE_BYTES = 2 << 20
_PREFAULT_BYTES = 64 << 20  # per call: a few seconds at the very worst, many calls for all threads
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SMALLER = "lower cpu_cache_gb"


class Arena:
    """The host tier's memory: `slots` places of `stride_bytes` in one memfd mapping.

    `base` is its address (4096-aligned, with huge pages 2 MiB-aligned), `size_bytes` what is
    mapped, `fd` the file to hand to other processes, `huge_pages` whether huge pages back it.

    Args:
        slots: places, at least 1.
        stride_bytes: bytes from slot to slot, a multiple of 4096.
        huge_pages: ask for huge pages; plain pages are taken where there are none.
        prefault: make every page present now, so that no transfer pays for its first touch.

    Raises:
        ConfigError: `slots` or `stride_bytes` is not usable.
        CapacityError: the machine, or the limit of its container, lacks the memory.
    """

    def __init__(
        self, slots: int, stride_bytes: int, *, huge_pages: bool = True, prefault: bool = True
    ) -> None:
        size = _checked_size(slots, stride_bytes)
        self.huge_pages = False
        pages: tuple[int, mmap.mmap] | None = _huge_pages(size) if huge_pages else None
        if pages is not None:
            self.huge_pages = True
        else:
            pages = _plain_pages(size)
            if huge_pages and _shmem_takes_huge_pages():
                with suppress(OSError):  # built without transparent huge pages: plain pages do
                    pages[1].madvise(mmap.MADV_HUGEPAGE)
                    self.huge_pages = True
        self._adopt(*pages, slots, stride_bytes)
        if prefault:
            try:
                _prefault(self.base, self.size_bytes)
            except CapacityError:
                self.close()
                raise

    @classmethod
    def attach(cls, fd: int, slots: int, stride_bytes: int) -> Arena:
        """Map the arena of another process, given its `fd` (which stays the caller's).

        Raises:
            ConfigError: the file is smaller than `slots` places of `stride_bytes`.
        """
        size = _checked_size(slots, stride_bytes)
        actual = os.fstat(fd).st_size
        if actual < size:
            raise ConfigError(
                f"the file of {actual} bytes cannot be an arena of {slots} slots of {stride_bytes}"
            )
        arena = cls.__new__(cls)
        arena.huge_pages = False
        own = os.dup(fd)
        arena._adopt(own, mmap.mmap(own, actual), slots, stride_bytes)
        return arena

    def _adopt(self, fd: int, mapping: mmap.mmap, slots: int, stride_bytes: int) -> None:
        self.fd = fd
        self.slots = slots
        self.stride_bytes = stride_bytes
        self.size_bytes = len(mapping)
        self._mapping: mmap.mmap | None = mapping
        # numpy keeps the mapping exported for as long as any view lives, which is what makes
        # `close` safe; casts of ffi.from_buffer and torch.frombuffer do not.
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)
        self.base = int(self._bytes.__array_interface__["data"][0])

    def address(self, slot: int) -> int:
        """Return the address of `slot`, for C.

        Raises:
            InputError: there is no such slot.
            ClosedError: the arena is closed.
        """
        if self._bytes is None:
            raise ClosedError("the arena is closed; its addresses are gone")
        if not 0 <= slot < self.slots:
            raise InputError(f"slot {slot} is not in an arena of {self.slots} slots")
        return self.base + int(slot) * self.stride_bytes  # int: numpy scalars would wrap

    def view(self, slot: int) -> NDArray[np.uint8]:
        """Return the bytes of `slot`, shape [stride_bytes]; the view keeps the memory mapped.

        Raises: as `address`.
        """
        start = self.address(slot) - self.base
        assert self._bytes is not None
        return self._bytes[start : start + self.stride_bytes]

    def rows(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return the bytes of `count` neighbouring slots, shape [count, stride_bytes].

        Raises: as `address`.
        """
        start = self.address(first) - self.base
        self.address(first + count - 1)
        assert self._bytes is not None
        end = start + count * self.stride_bytes
        return self._bytes[start:end].reshape(count, self.stride_bytes)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._bytes is None

    def close(self) -> None:
        """Give the memory back; with views alive that happens when the last of them is gone.

        Twice is fine. Whoever hands addresses to hardware waits for it before closing.
        """
        if self._mapping is None:
            return
        mapping, self._mapping, self._bytes = self._mapping, None, None
        with suppress(BufferError):  # views live on: dropping our reference lets the last one unmap
            mapping.close()
        os.close(self.fd)
        self.fd = -1


def _checked_size(slots: int, stride_bytes: int) -> int:
    if slots < 1:
        raise ConfigError(f"an arena needs at least 1 slot, got {slots}")
    if stride_bytes < PAGE_BYTES or stride_bytes % PAGE_BYTES:
        raise ConfigError(f"stride_bytes must be a multiple of {PAGE_BYTES}, got {stride_bytes}")
    return slots * stride_bytes


def _huge_pages(size: int) -> tuple[int, mmap.mmap] | None:
    """Map reserved huge pages (vm.nr_hugepages), or None when there are not enough of them."""
    rounded = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        fd = os.memfd_create("flexkv-arena", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError:  # the kernel has no hugetlbfs, or no permission
        return None
    try:
        os.ftruncate(fd, rounded)
        return fd, mmap.mmap(fd, rounded)  # mapping reserves: ENOMEM now, never SIGBUS later
    except (OSError, ValueError, OverflowError):
        os.close(fd)
        return None


def _plain_pages(size: int) -> tuple[int, mmap.mmap]:
    # Asked first, because running out while touching pages ends in the OOM killer, not in an error.
    available = available_bytes()
    if available is not None and size > available:
        raise _too_large(size, f"only {_gib(available)} is available")
    fd = -1
    try:
        fd = os.memfd_create("flexkv-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return fd, mmap.mmap(fd, size)
    except (OSError, ValueError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise _too_large(size, str(error)) from error


def _shmem_takes_huge_pages() -> bool:
    """Whether a memfd gets transparent huge pages when asked: "always within_size [advise] ..."."""
    try:
        setting = _SHMEM_HUGE.read_text()
    except OSError:
        return False
    return not any(word in setting for word in ("[never]", "[deny]"))


def _prefault(base: int, size: int) -> None:
    """Touch all pages in C, in several threads: clearing pages is work of seconds per 10 GiB."""
    starts = range(0, size, _PREFAULT_BYTES)
    threads = min(len(starts), len(os.sched_getaffinity(0)), 8)
    with ThreadPoolExecutor(threads, "flexkv-prefault") as pool:
        results = pool.map(
            lambda at: lib.fx_prefault(base + at, min(_PREFAULT_BYTES, size - at)), starts
        )
        failed = [code for code in results if code]
    if failed:
        raise _too_large(size, os.strerror(-failed[0]))


def _too_large(size: int, why: str) -> CapacityError:
    return CapacityError(f"an arena of {_gib(size)} ({size} bytes) does not fit: {why}; {_SMALLER}")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def available_bytes() -> int | None:
    """Return the memory that can still be taken here, None when the system does not say.

    The smaller of MemAvailable and what the control group (version 2) of this process leaves.
    """
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        found.append(int(text.split("MemAvailable:", 1)[1].split()[0]) * 1024)
    with suppress(OSError, ValueError, IndexError, KeyError):
        group = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0]
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        if limit != "max":
            used = int((folder / "memory.current").read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat["inactive_file"])  # page cache that the kernel gives up first
            found.append(max(0, int(limit) - used + cached))
    return min(found, default=None)


def find_shared(address: int, size: int) -> tuple[int, int] | None:
    """Return (fd, offset in the file) of shared memory that covers the range, else None.

    Ordinary memory belongs to no file that another process could map. The descriptor is a new one
    and the caller's to close.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if not (start <= address and address + size <= end):
            continue
        if fields[1][3] != "s" or fields[4] == "0":
            return None
        major, minor = (int(part, 16) for part in fields[3].split(":"))
        path = fields[5] if len(fields) > 5 else ""
        fd = _open_file(path, os.makedev(major, minor), int(fields[4]))
        return None if fd is None else (fd, int(fields[2], 16) + address - start)
    return None


def _open_file(path: str, device: int, inode: int) -> int | None:
    """Open the file behind a mapping: by name, or, when it has none, from our descriptors."""

    def is_it(status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) == (device, inode)

    for name in (path, *(f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd"))):
        try:
            if name and is_it(os.stat(name)):
                return os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENXIO, errno.ENOTDIR):
                raise
    return None


def map_shared(fd: int) -> NDArray[np.uint8]:
    """Map a whole file of another process as bytes; the array keeps it mapped, `fd` may be closed.

    Raises:
        CapacityError: it cannot be mapped.
    """
    try:
        return np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise CapacityError(
            f"cannot map the shared memory behind descriptor {fd}: {error}"
        ) from error
