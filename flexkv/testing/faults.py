"""Things that go wrong with storage, on purpose: for tests of flexkv and of its plug-ins.

`inject` puts faults below a real `DiskBackend` (between its code and the device) - `FaultyStorage`
wraps any storage backend and spoils its answers - `Fault`, `Faults`, `Gate` say what, how often and
until when - `flip_bit`, `cut_file`, `swap_ranges` spoil files on disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk import DiskBackend
from flexkv.backends.disk import format as disk_format
from flexkv.backends.disk.engines import Engine, Moves
from flexkv.backends.disk.records import RecordFiles
from flexkv.memory import Arena
from flexkv.model import PAGE_BYTES, IOStatus, SlotIds, Statuses
from flexkv.protocols import BlockIO, DeviceInfo, Recovered, Services, StorageBackend

Where = Literal["read", "write", "record", "discard"]
_ERRNO = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
_STATUS = {
    "failed": IOStatus.FAILED,
    "damaged": IOStatus.DAMAGED,
    "missing": IOStatus.MISSING,
}


class Gate:
    """Holds I/O until it is opened; `reached` is set when something waits at it."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self._opened = anyio.Event()

    def open(self) -> None:
        """Let through what waits, and what comes later."""
        self._opened.set()

    async def wait(self) -> None:
        """Wait until the gate is open."""
        self.reached.set()
        await self._opened.wait()


@dataclass(slots=True)
class Fault:
    """One kind of trouble: `times` blocks after the first `skip` ones (None: all of them).

    `on` is "read" or "write" (data), "record" (a slot's record) or, for `FaultyStorage`, "discard".
    `kind` is, below a `DiskBackend`: "EIO", "ENOSPC" (nothing is moved), "short" (half is moved and
    no more comes), "flip" (one bit arrives wrong), "swap" (blocks take each other's place, two by
    two), "lost" (said to be done, but not done), "torn" (a record of which only `size_bytes` were
    written). For `FaultyStorage` it is "failed", "damaged", "missing" or "raise" (`error`).
    """

    on: Where
    kind: str
    skip: int = 0
    times: int | None = None
    size_bytes: int = 0
    error: Exception | None = None

    def pick(self, count: int) -> NDArray[np.intp]:
        """Positions of the next `count` blocks that this fault hits; counts them."""
        first = min(self.skip, count)
        self.skip -= first
        hit = count - first if self.times is None else min(self.times, count - first)
        if self.times is not None:
            self.times -= hit
        return np.arange(first, first + hit)


class Faults:
    """The faults in force at one backend; `calls` counts batches by where they went."""

    def __init__(self) -> None:
        self.active: list[Fault] = []
        self.calls: dict[str, int] = {}
        self._gates: dict[str, Gate] = {}

    def add(self, on: Where, kind: str, **more: Any) -> Fault:
        """Put a fault in force; see `Fault` for `more`."""
        fault = Fault(on, kind, **more)
        self.active.append(fault)
        return fault

    def hold(self, on: Where) -> Gate:
        """Stop every batch of this kind at a new gate."""
        self._gates[on] = Gate()
        return self._gates[on]

    def clear(self) -> None:
        """Take all faults back and open all gates."""
        self.active.clear()
        for gate in self._gates.values():
            gate.open()
        self._gates.clear()

    async def enter(self, on: Where) -> None:
        """Count a batch, and hold it if there is a gate."""
        self.calls[on] = self.calls.get(on, 0) + 1
        if gate := self._gates.get(on):
            await gate.wait()

    def hits(self, on: Where, count: int) -> list[tuple[Fault, NDArray[np.intp]]]:
        """The faults that hit blocks of a batch of `count`, and which."""
        found = [(fault, fault.pick(count)) for fault in self.active if fault.on == on]
        return [(fault, blocks) for fault, blocks in found if len(blocks)]


def inject(backend: DiskBackend, arena: Arena) -> Faults:
    """Put a layer of faults below an open `backend`; nothing goes wrong until some are added."""
    faults = Faults()
    backend.engine = _FaultyEngine(backend.engine, faults, arena)
    backend.records = _FaultyRecords(backend.records, faults)
    return faults


class _FaultyEngine:
    """An engine whose device misbehaves."""

    name: ClassVar[str] = "faulty"

    def __init__(self, inner: Engine, faults: Faults, arena: Arena) -> None:
        self._inner = inner
        self._faults = faults
        self._arena = arena

    async def transfer(self, moves: Moves) -> NDArray[np.int32]:
        on: Where = "write" if moves.write else "read"
        await self._faults.enter(on)
        results = np.full(len(moves), moves.size_bytes, np.int32)
        untouched = np.ones(len(moves), np.bool_)
        host_slots = moves.host_slots.copy()
        hits = self._faults.hits(on, len(moves))
        for fault, blocks in hits:
            if fault.kind in _ERRNO:
                results[blocks] = -_ERRNO[fault.kind]
                untouched[blocks] = False
            elif fault.kind == "lost":
                untouched[blocks] = False
            elif fault.kind == "short":
                half = _some(moves, blocks, moves.size_bytes // 2 // PAGE_BYTES * PAGE_BYTES)
                results[blocks] = half.size_bytes and await self._inner.transfer(half)
                untouched[blocks] = False
            elif fault.kind == "swap":
                pairs = blocks[: len(blocks) // 2 * 2].reshape(-1, 2)
                host_slots[pairs] = host_slots[pairs[:, ::-1]]
        rest = np.flatnonzero(untouched)
        if len(rest):
            swapped = replace(moves, host_slots=host_slots)
            results[rest] = await self._inner.transfer(_some(swapped, rest, moves.size_bytes))
        for fault, blocks in hits:
            if fault.kind == "flip":
                self._flip(moves, blocks)
        return results

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _flip(self, moves: Moves, blocks: NDArray[np.intp]) -> None:
        for i in blocks:
            if moves.write:
                path = Path(f"/proc/self/fd/{moves.fds[i]}")
                flip_bit(path, int(moves.offsets[i]) + 77, 3)
            else:
                self._arena.view(int(moves.host_slots[i]))[77] ^= 1 << 3


def _some(moves: Moves, blocks: NDArray[np.intp], size_bytes: int) -> Moves:
    return Moves(
        moves.write, moves.fds[blocks], moves.offsets[blocks], moves.host_slots[blocks], size_bytes
    )


class _FaultyRecords(RecordFiles):
    """Records files on a device that misbehaves."""

    def __init__(self, inner: RecordFiles, faults: Faults) -> None:
        self.__dict__.update(inner.__dict__)
        self._faults = faults

    async def store(
        self,
        directories: NDArray[np.uint32],
        local: NDArray[np.uint64],
        records: NDArray[np.void],
    ) -> NDArray[np.int32]:
        await self._faults.enter("record")
        records = records.copy()
        results = np.zeros(len(records), np.int32)
        untouched = np.ones(len(records), np.bool_)
        for fault, blocks in self._faults.hits("record", len(records)):
            if fault.kind == "torn":
                raw = records.view(np.uint8).reshape(-1, disk_format.RECORD_BYTES)
                raw[blocks, fault.size_bytes :] = 0
                continue
            results[blocks] = -_ERRNO[fault.kind] if fault.kind in _ERRNO else 0
            untouched[blocks] = False
        rest = np.flatnonzero(untouched)
        if len(rest):
            results[rest] = await super().store(directories[rest], local[rest], records[rest])
        return results


class FaultyStorage:
    """A storage backend that answers what `faults` say instead of what is true.

    Blocks that a fault hits are not handed to the inner backend at all. Other attributes are those
    of the inner backend.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.inner = inner
        self.faults = Faults()
        # named here and not only forwarded: since 3.12, isinstance of a protocol looks for them
        self.flexkv_api, self.addressing = inner.flexkv_api, inner.addressing
        self.alignment_bytes = inner.alignment_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def probe(self) -> Sequence[DeviceInfo]:
        """As the inner backend."""
        return self.inner.probe()

    async def open(self, services: Services) -> Recovered | None:
        """As the inner backend."""
        return await self.inner.open(services)

    async def read(self, batch: BlockIO) -> Statuses:
        """Read what no fault hits."""
        return await self._spoil("read", batch)

    async def write(self, batch: BlockIO) -> Statuses:
        """Write what no fault hits."""
        return await self._spoil("write", batch)

    async def discard(self, batch: BlockIO) -> Statuses:
        """Discard what no fault hits."""
        return await self._spoil("discard", batch)

    async def aclose(self) -> None:
        """Open all gates and close the inner backend."""
        self.faults.clear()
        await self.inner.aclose()

    async def _spoil(self, on: Where, batch: BlockIO) -> Statuses:
        await self.faults.enter(on)
        statuses = np.zeros(len(batch), np.uint8)
        untouched = np.ones(len(batch), np.bool_)
        for fault, blocks in self.faults.hits(on, len(batch)):
            if fault.kind == "raise":
                raise fault.error or OSError(errno.EIO, "fault")
            statuses[blocks] = _STATUS[fault.kind]
            untouched[blocks] = False
        rest = np.flatnonzero(untouched)
        if len(rest):
            verb = getattr(self.inner, on)
            statuses[rest] = await verb(_rows(batch, rest))
        return statuses


def _rows(batch: BlockIO, rows: NDArray[np.intp]) -> BlockIO:
    def take(array: Any) -> Any:
        return None if array is None else array[rows]

    slots: SlotIds = batch.store_slots[rows]
    return BlockIO(
        batch.host_slots[rows], slots, batch.keys[rows], take(batch.parents), take(batch.depths)
    )


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ (1 << bit)]), offset)
    finally:
        os.close(fd)


def cut_file(path: Path, size_bytes: int) -> None:
    """Shorten a file."""
    os.truncate(path, size_bytes)


def swap_ranges(path: Path, first: int, second: int, size_bytes: int) -> None:
    """Exchange two ranges of a file, given their offsets."""
    fd = os.open(path, os.O_RDWR)
    try:
        here, there = os.pread(fd, size_bytes, first), os.pread(fd, size_bytes, second)
        os.pwrite(fd, there, first)
        os.pwrite(fd, here, second)
    finally:
        os.close(fd)
