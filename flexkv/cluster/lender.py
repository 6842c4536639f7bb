"""What an owner does for readers: find blocks, hold them, bring them near, vouch for their bytes.

`Lender.lend` (keys -> `Loan`: pinned arena slots under a lease), `vouch` (checksums) - `release` -
`revoke`, `drained` (before everything is forgotten) - `close`. Readers come after the node's own
work: what they hold at once is limited, and what lies on disk is brought into the host with the
priority of a prefetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.cluster.blocks import Sums
from flexkv.cluster.leases import Lease, LeaseError, LeaseTable, Token
from flexkv.completion import Completions
from flexkv.errors import CapacityError, FlexKVError
from flexkv.lanes import Lane
from flexkv.memory import Arena
from flexkv.model import (
    DISK,
    LANDED,
    MISSING,
    NO_BLOCK,
    READY,
    SKIPPED,
    BlockIds,
    BoolArray,
    KeyArray,
    SlotIds,
    Statuses,
)
from flexkv.planner import Planner
from flexkv.telemetry import log
from flexkv.transfer import Transfer
from flexkv.waiting import Deadlines, Signal

_NO_SUMS = np.empty(0, np.uint64)
Promote: TypeAlias = Callable[[BlockIds, KeyArray], Transfer]
"""Starts to bring blocks from the stores into the host; takes over one pin of each."""


@dataclass(frozen=True, slots=True)
class Loan:
    """What a reader gets: an IOStatus for each key (SKIPPED: there, but not now), and of those
    LANDED slots and keys. Without any there is no lease.
    """

    statuses: Statuses
    lease: Lease | None
    slots: SlotIds
    keys: KeyArray


class Lender:
    """Lends the blocks of one node.

    Args:
        incarnation: a number that no other life of this node has.
        promote: brings blocks from disk into the host; None: what is on disk is not lent.
        ttl_s: how long a lease lasts.
        bytes_in_flight: what all readers may hold at once, and half of the host at most: the
            node works, too; one of them half of that.
    """

    def __init__(
        self,
        planner: Planner,
        completions: Completions,
        arena: Arena,
        *,
        incarnation: int,
        block_bytes: int,
        promote: Promote | None,
        ttl_s: float,
        bytes_in_flight: int,
    ) -> None:
        self._index, self._ledger = planner.index, planner.ledger
        self._completions, self._promote = completions, promote
        self._sums = Sums(completions, arena, block_bytes)
        blocks = max(2, min(bytes_in_flight // block_bytes, planner.host.capacity // 2))
        self._lane = Lane("peers", blocks)
        self._held: dict[int, int] = {}  # of the lane, by lease
        self._loans: dict[int, Loan] = {}  # by lease
        self.leases = LeaseTable(
            incarnation,
            self._give_back,
            ttl_s=ttl_s,
            max_blocks=blocks,
            max_reader_blocks=blocks // 2,
        )
        self._deadlines: Deadlines[Lease] = Deadlines(completions, ttl_s, self._expire)
        self._returned = Signal()
        self.accepts = True  # False: nothing is lent any more

    async def lend(self, reader: str, keys: KeyArray, deadline_s: float) -> Loan:
        """Hold what is readable here of `keys`, within `deadline_s` seconds, as far as it fits.

        Raises:
            CapacityError: readers hold too much, or it took too long; nothing is held.
            FlexKVError: this node's manager is closing or broken.
        """
        with anyio.move_on_after(deadline_s):
            return await self._lend(reader, keys)
        raise CapacityError(f"no room for {len(keys)} blocks of {reader!r} in {deadline_s:.3f} s")

    async def _lend(self, reader: str, keys: KeyArray) -> Loan:
        count = int(np.count_nonzero(self._lendable(self._index.alone.find(keys))))
        if not count:
            return _nothing(len(keys))
        most = self.leases.max_reader_blocks
        while self.accepts and self.leases.of_reader(reader) + min(count, most) > most:
            await self._returned.wait()
        if not self.accepts:
            raise CapacityError("nothing is lent any more")
        held = await self._lane.acquire(min(count, most))
        # what was there may have left while we waited
        blocks = self._index.alone.find(keys)
        there = np.flatnonzero(self._lendable(blocks))
        if not len(there) or not self.accepts:
            self._lane.release(held)
            return _nothing(len(keys))
        statuses = np.full(len(keys), MISSING, np.uint8)
        statuses[there] = SKIPPED
        there = there[:held]
        self._index.pin(blocks[there])
        try:
            lease = self.leases.grant(reader, blocks[there], keys[there], self._completions.now())
        except CapacityError:
            self._index.unpin(blocks[there])
            self._lane.release(held)
            raise
        self._held[lease.token.number] = held
        return await self._prepare(lease, there, statuses)

    async def _prepare(self, lease: Lease, there: NDArray[np.int64], statuses: Statuses) -> Loan:
        """Bring the blocks of a lease into the host."""
        table, host = self.leases, self._ledger.host.number
        table.begin(lease.token, self._completions.now())
        table.pause(lease)
        try:
            far = self._index.states(host, lease.blocks) != READY
            if far.any() and self._promote is not None:
                await self._bring(self._promote, lease.blocks[far], lease.keys[far])
            near = self._index.states(host, lease.blocks) == READY
            lease.slots = self._index.slots(host, lease.blocks[near])
            statuses[there[near]] = LANDED
        except BaseException:
            table.release([lease.token], self._completions.now())
            raise
        finally:
            table.end(lease)
        if not near.any() or lease.over:
            self.release([lease.token])
            return Loan(statuses, None, lease.slots[:0], lease.keys[:0])
        table.renew(lease, self._completions.now())
        self._deadlines.add(lease)
        loan = self._loans[lease.token.number] = Loan(
            statuses, lease, lease.slots, lease.keys[near]
        )
        return loan

    async def _bring(self, promote: Promote, blocks: BlockIds, keys: KeyArray) -> None:
        """Wait until blocks have come into the host, or could not."""
        self._index.pin(blocks)
        try:
            transfer = promote(blocks, keys)
        except FlexKVError:  # the manager is closing, or broken: the pins are still ours
            self._index.unpin(blocks)
            raise
        await transfer.settled()

    async def vouch(self, loan: Loan) -> NDArray[np.uint64]:
        """Return the checksums of blocks that are on lease, and keep them with it.

        Raises:
            CapacityError: all tickets are out.
            LeaseError: the lease is over.
        """
        if loan.lease is None:
            return np.empty(0, np.uint64)
        self.leases.begin(loan.lease.token, self._completions.now())
        try:
            sums = loan.lease.sums = await self._sums.of(loan.slots, loan.keys)
            return sums
        finally:
            self.leases.end(loan.lease)

    async def proof(self, token: Token) -> NDArray[np.uint64]:
        """Return the checksums of a lease that is open, and none otherwise."""
        loan = self._loans.get(token.number)
        if loan is None or loan.lease is None or loan.lease.token != token:
            return _NO_SUMS
        if loan.lease.sums is None:
            try:
                return await self.vouch(loan)
            except (CapacityError, LeaseError) as error:
                log.debug("lease.unproven", reader=loan.lease.reader, error=str(error))
                return _NO_SUMS
        return loan.lease.sums

    def _lendable(self, blocks: BlockIds) -> BoolArray:
        """Which entries are readable in the host, or on disk."""
        known: BoolArray = blocks != NO_BLOCK
        found = known.copy()
        states = self._index.states(self._ledger.host.number, blocks[known]) == READY
        disk = self._ledger.tiers.get(DISK)
        if disk is not None and self._promote is not None:
            states |= self._index.states(disk.number, blocks[known]) == READY
        found[known] = states
        return found

    def now(self) -> float:
        """The owner's time in seconds."""
        return self._completions.now()

    # --- giving back

    def release(self, tokens: Sequence[Token]) -> list[bool]:
        """Take leases back; False for those that were over."""
        return self.leases.release(tokens, self._completions.now())

    def revoke(self, reader: str | None = None) -> int:
        """End the leases of a reader, or all; blocks that are being sent stay until they are."""
        return self.leases.revoke(reader)

    async def drained(self) -> None:
        """Wait until nothing is on lease."""
        while len(self.leases):
            await self._returned.wait()

    def close(self) -> None:
        """Lend nothing any more, and take back what nobody is reading."""
        self.accepts = False
        self.revoke()
        self._deadlines.clear()

    def _expire(self, lease: Lease) -> None:
        expired = self.leases.expire(self._completions.now())
        if expired:
            log.info("lease.expired", reader=lease.reader, leases=expired)

    def _give_back(self, lease: Lease) -> None:
        self._deadlines.remove(lease)
        self._loans.pop(lease.token.number, None)
        self._index.unpin(lease.blocks)
        self._lane.release(self._held.pop(lease.token.number))
        self._returned.raise_()


def _nothing(count: int) -> Loan:
    none = np.empty(0, np.uint32)
    return Loan(np.full(count, MISSING, np.uint8), None, none, np.empty((0, 2), np.uint64))
