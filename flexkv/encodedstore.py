"""A store whose blocks are encoded: they are encoded on the way in and decoded on the way out.

`EncodedStore` wraps a storage backend: `open` (the store, over an arena of its own for encoded
blocks), `read`, `write`, `discard`, `aclose`. The store below sees encoded bytes only, so its
checksums are of those, bound to the key. It lends no extents: devices that read files by themselves
would find encoded bytes there.

Codecs run in threads, without the interpreter's lock if they are native, share by share: while one
is decoded, the disk reads the next. A batch takes its slots of the encoding arena all at once and
waits for them behind others; it gives them back when nothing can land in them any more, and never
if it was torn away (native cancellation, or hardware that was silent for 30 s after everybody gave
up) while something could.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from flexkv.coding import MOST_CORES, SHARE_BYTES
from flexkv.errors import CapacityError, ClosedError, ConfigError, TransferError
from flexkv.lanes import Lane
from flexkv.memory import Arena
from flexkv.model import LANDED, PAGE_BYTES, IOStatus, SlotIds, Statuses
from flexkv.pool import SlotPool
from flexkv.protocols import (
    API_VERSION,
    BlockIO,
    DeviceInfo,
    Recovered,
    Services,
    StorageBackend,
    as_statuses,
)
from flexkv.telemetry import log
from flexkv.tiercodec import TierCodec

Rows = NDArray[np.uint8]
Work = Callable[[Rows, Rows], None]  # decoded rows, encoded rows
Verb = Callable[[BlockIO, SlotIds], Awaitable[Statuses]]  # a share, its slots in our arena


_CLOSE_TIMEOUT_S = 30
_kept: list[Arena] = []  # hardware may still write to them


@dataclass(slots=True)
class _Loan:
    """Slots of the encoding arena; `over`: nothing can land in them any more."""

    slots: SlotIds
    over: bool = False


class EncodedStore:
    """Blocks of `store`, encoded by `codec`; at most `buffer_bytes` of them are on their way, in
    shares of `share_bytes` of decoded blocks.
    """

    flexkv_api: ClassVar[int] = API_VERSION
    addressing: ClassVar[Literal["slot", "key"]] = "slot"

    def __init__(
        self,
        store: StorageBackend,
        codec: TierCodec,
        buffer_bytes: int,
        share_bytes: int = SHARE_BYTES,
    ) -> None:
        if store.addressing != self.addressing or not getattr(store, "any_block_bytes", False):
            raise ConfigError(
                f"{type(store).__name__} stores blocks of the spec's size only; disk_codec needs "
                "a backend with slots and any_block_bytes, such as disk"
            )
        self.store, self.codec = store, codec
        self._buffer_bytes, self._share_bytes = buffer_bytes, share_bytes
        self.alignment_bytes = store.alignment_bytes
        self._arena: Arena | None = None  # while it is open
        self._limiter = anyio.CapacityLimiter(min(MOST_CORES, len(os.sched_getaffinity(0))))
        self._batches, self._idle = 0, anyio.Event()
        self._closing = False

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """Find nothing: it stands before a store that does."""
        return []

    async def open(self, services: Services) -> Recovered | None:
        """Open the store below with slots of encoded size; raises as it does, and CapacityError
        when there is no memory for the encoding arena.
        """
        self._spec = services.identity.spec
        self._encoded_bytes = self.codec.stored_bytes(self._spec)
        stride = -(-self._encoded_bytes // PAGE_BYTES) * PAGE_BYTES
        slots = max(2, self._buffer_bytes // stride)
        self._pool, self._lane = SlotPool(slots), Lane("encoding", slots)
        self._torn = 0  # slots that something may still land in, for ever
        self._host, self._completions = services.arena, services.completions
        arena = Arena(slots, stride, huge_pages=False, prefault=False)
        below = replace(services, arena=arena, block_bytes=self._encoded_bytes)
        try:
            found = await self.store.open(below)
        except BaseException:
            arena.close()
            raise
        self._arena = arena
        return found

    async def read(self, batch: BlockIO) -> Statuses:
        """Read and decode: LANDED means verified by the store and decoded."""
        return await self._in_parts(self._read, batch)

    async def write(self, batch: BlockIO) -> Statuses:
        """Encode and write; one status per block, as the store says."""
        return await self._in_parts(self._write, batch)

    async def discard(self, batch: BlockIO) -> Statuses:
        """Forget the blocks, as the store does."""
        return await self.store.discard(batch)

    async def aclose(self) -> None:
        """Wait for batches that are in, close the store below, then give the arena back.

        When the store does not answer for 30 s its batches are left behind, and the arena stays
        mapped until the process ends: something may still write to it.
        """
        self._closing = True
        with anyio.move_on_after(_CLOSE_TIMEOUT_S):
            while self._batches:
                await self._idle.wait()
        await self.store.aclose()
        arena, self._arena = self._arena, None
        if arena is None:
            return
        if self._batches or (self._torn and self._completions.in_flight):
            log.error("encoding.stuck", timeout_s=_CLOSE_TIMEOUT_S, batches=self._batches)
            _kept.append(arena)
        else:
            arena.close()

    # slots of the encoding arena

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Count a batch: closing waits for it.

        Raises:
            ClosedError: the store is not open.
        """
        if self._arena is None or self._closing:
            raise ClosedError("the encoded store is not open")
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            if not self._batches:
                self._idle.set()
                self._idle = anyio.Event()

    def _parts(self, blocks: int) -> list[slice]:
        """Cut a batch so that two of its size fit into the arena."""
        step = max(1, self._lane.limit // 2)
        return [slice(at, at + step) for at in range(0, blocks, step)]

    @asynccontextmanager
    async def _borrow(self, count: int) -> AsyncIterator[_Loan]:
        if self._pool.capacity - self._torn < count:
            raise CapacityError("the encoding arena is lost to transfers that were torn away")
        held = await self._lane.acquire(count)
        loan = _Loan(self._pool.take(held))
        try:
            yield loan
        finally:
            if loan.over:
                self._pool.give(loan.slots)
                self._lane.release(held)
            else:
                self._torn += held

    # codecs, in threads

    async def _in_parts(self, verb: Verb, batch: BlockIO) -> Statuses:
        """Do all of a batch, as much of it at once as the arena has room for."""
        statuses = np.full(len(batch), IOStatus.FAILED, np.uint8)
        with self._batch():
            for part in self._parts(len(batch)):
                piece = _cut(batch, part)
                async with self._borrow(len(piece)) as loan:
                    statuses[part] = await self._to_its_end(verb, piece, loan)
        return statuses

    async def _to_its_end(self, verb: Verb, piece: BlockIO, loan: _Loan) -> Statuses:
        """Do a piece to its end, whoever gives up on it, but then for 30 s more at most."""
        answers: list[Statuses] = []
        errors: list[Exception] = []
        shield = anyio.CancelScope(shield=True)

        async def watch() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                shield.deadline = anyio.current_time() + _CLOSE_TIMEOUT_S

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            with shield:
                try:
                    answers.append(await self._in_shares(verb, piece, loan.slots))
                except Exception as error:  # refused; nothing of it is on its way
                    errors.append(error)
                loan.over = True
            group.cancel_scope.cancel()
        if errors:
            raise errors[0]
        if not answers:
            raise TransferError(f"the store does not answer: {len(piece)} blocks were given up")
        return answers[0]

    async def _in_shares(self, verb: Verb, piece: BlockIO, slots: SlotIds) -> Statuses:
        """Do the shares of a piece side by side: while one is decoded, the disk reads others.

        No share is cancelled when another fails: what is on its way may land in our slots.
        """
        statuses = np.full(len(piece), IOStatus.FAILED, np.uint8)
        errors: list[Exception] = []

        async def one(share: slice) -> None:
            try:
                statuses[share] = await verb(_cut(piece, share), slots[share])
            except Exception as error:
                errors.append(error)

        step = max(1, self._share_bytes // self._spec.block_bytes)
        if len(piece) <= step:
            await one(slice(0, len(piece)))
        else:
            async with anyio.create_task_group() as group:
                for at in range(0, len(piece), step):
                    group.start_soon(one, slice(at, at + step))
        if errors:
            raise errors[0]
        return statuses

    async def _read(self, share: BlockIO, slots: SlotIds) -> Statuses:
        answer = as_statuses(await self.store.read(replace(share, host_slots=slots)), len(slots))
        found = answer == LANDED
        if found.any():
            await self._in_thread(self._decode, share.host_slots[found], slots[found])
        return answer

    async def _write(self, share: BlockIO, slots: SlotIds) -> Statuses:
        await self._in_thread(self._encode, share.host_slots, slots)
        return as_statuses(await self.store.write(replace(share, host_slots=slots)), len(slots))

    def _encode(self, decoded: Rows, encoded: Rows) -> None:
        self.codec.codec.encode(self._spec, decoded, encoded)

    def _decode(self, decoded: Rows, encoded: Rows) -> None:
        self.codec.codec.decode(self._spec, encoded, decoded)

    async def _in_thread(self, work: Work, host_slots: SlotIds, slots: SlotIds) -> None:
        await anyio.to_thread.run_sync(self._work, work, host_slots, slots, limiter=self._limiter)

    def _work(self, work: Work, host_slots: SlotIds, slots: SlotIds) -> None:
        arena = self._arena
        if arena is None:  # who asked is gone, torn away, and the store was closed meanwhile
            raise ClosedError("the encoded store is not open")
        for first, stop in _runs(host_slots, slots):
            length = stop - first
            host = self._host.rows(int(host_slots[first]), length)
            encoded = arena.rows(int(slots[first]), length)
            work(host[:, : self._spec.block_bytes], encoded[:, : self._encoded_bytes])


def _cut(batch: BlockIO, part: slice) -> BlockIO:
    return replace(
        batch,
        host_slots=batch.host_slots[part],
        store_slots=batch.store_slots[part],
        keys=batch.keys[part],
        parents=None if batch.parents is None else batch.parents[part],
        depths=None if batch.depths is None else batch.depths[part],
    )


def _runs(left: SlotIds, right: SlotIds) -> Iterator[tuple[int, int]]:
    """Half-open ranges in which both sides are neighbours."""
    breaks = (np.diff(left.astype(np.int64)) != 1) | (np.diff(right.astype(np.int64)) != 1)
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(left)]
    yield from pairwise(edges)
