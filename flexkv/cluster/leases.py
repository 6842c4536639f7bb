"""Leases: promises of an owner that blocks stay where they are while a reader pulls them.

`LeaseTable.grant`, `pause`, `renew` - `begin`, `end` (somebody works on the blocks: they stay, even
if it expires) - `release`, `expire`, `revoke` (give back; each lease exactly once). A token names
the owner's incarnation and a number that is never used again, so that whoever comes late is
refused. Time is the owner's alone: `now` is an argument, in seconds, and never goes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import CapacityError, TransferError
from flexkv.model import BlockIds, KeyArray, SlotIds


class Token(NamedTuple):
    """What a reader shows: the owner's incarnation, and the number of the lease within it."""

    incarnation: int
    number: int


class LeaseError(TransferError):
    """A lease is not open: released, expired, or of another life of its owner."""


@dataclass(eq=False, slots=True)
class Lease:
    """Blocks (index entries, pinned) that `reader` may read until `expires`, in arena `slots`."""

    token: Token
    reader: str
    blocks: BlockIds
    keys: KeyArray
    expires: float
    slots: SlotIds = field(default_factory=lambda: np.empty(0, np.uint32))
    sums: NDArray[np.uint64] | None = None  # checksums of what lies there, once they were taken
    users: int = 0  # who work on the blocks now: these are not given back under their hands
    over: bool = False  # given back as soon as nobody works on it


class LeaseTable:
    """The leases of one owner.

    Args:
        incarnation: a number that no other life of this node has.
        give_back: called once with each lease, when it is over.
        ttl_s: how long a lease lasts.
        max_leases, max_blocks: limits of the table, blocks counted once for each lease.
        max_reader_blocks: limit of one reader.
    """

    def __init__(
        self,
        incarnation: int,
        give_back: Callable[[Lease], None],
        *,
        ttl_s: float,
        max_leases: int = 1024,
        max_blocks: int = 65_536,
        max_reader_blocks: int = 16_384,
    ) -> None:
        self.incarnation, self.ttl_s = incarnation, ttl_s
        self.max_leases, self.max_blocks = max_leases, max_blocks
        self.max_reader_blocks = max_reader_blocks
        self._give_back = give_back
        self._leases: dict[int, Lease] = {}  # in the order of their grant; expiry may be renewed
        self._of_reader: dict[str, int] = {}
        self._last = 0
        self.leased_blocks = 0
        self.expired = 0  # leases that nobody gave back in time, so far
        self.refused = 0  # tokens that were shown too late, so far

    def __len__(self) -> int:
        return len(self._leases)

    def of_reader(self, reader: str) -> int:
        """Blocks that a reader has on lease."""
        return self._of_reader.get(reader, 0)

    def grant(self, reader: str, blocks: BlockIds, keys: KeyArray, now: float) -> Lease:
        """Make a lease on blocks that the caller has pinned; the table gives the pins back.

        Raises:
            CapacityError: too many leases or blocks, of all or of this reader; the pins are still
            the caller's.
        """
        count, has = len(blocks), self.of_reader(reader)
        assert count, "a lease is on at least one block"
        if len(self._leases) >= self.max_leases:
            raise CapacityError(f"all {self.max_leases} leases are out; read again later")
        if self.leased_blocks + count > self.max_blocks:
            raise CapacityError(
                f"{count} more blocks than the {self.leased_blocks} on lease exceed "
                f"{self.max_blocks}; read again later"
            )
        if has + count > self.max_reader_blocks:
            raise CapacityError(
                f"reader {reader!r} has {has} blocks on lease and wants {count} more, which "
                f"exceeds {self.max_reader_blocks}; release some first"
            )
        self._last += 1
        lease = Lease(Token(self.incarnation, self._last), reader, blocks, keys, now + self.ttl_s)
        self._leases[self._last] = lease
        self._of_reader[reader] = has + count
        self.leased_blocks += count
        return lease

    def find(self, token: Token, now: float) -> Lease:
        """Return the open lease of a token.

        Raises:
            LeaseError: it is over, whether or not anybody has noticed, or another life's.
        """
        lease = self._leases.get(token.number)
        if token.incarnation != self.incarnation or lease is None or lease.over:
            self.refused += 1
            raise LeaseError(f"lease {token.number} of incarnation {token.incarnation} is over")
        if now >= lease.expires:
            self.refused += 1
            self._end(lease, expired=True)
            raise LeaseError(f"lease {token.number} expired {now - lease.expires:.3f} s ago")
        return lease

    def begin(self, token: Token, now: float) -> Lease:
        """Start to work on the blocks of a lease: until `end`, they stay.

        Raises: as `find`.
        """
        lease = self.find(token, now)
        lease.users += 1
        return lease

    def end(self, lease: Lease) -> None:
        """Stop to work on the blocks; a lease that was over meanwhile is given back now."""
        assert lease.users > 0, "a lease is ended as often as it was begun"
        lease.users -= 1
        if lease.over and not lease.users:
            self._drop(lease)

    def pause(self, lease: Lease) -> None:
        """Stop the time of a lease whose owner has to work for it first, until `renew`."""
        lease.expires = math.inf

    def renew(self, lease: Lease, now: float) -> None:
        """Let the time of a lease start again, if it is not over."""
        if not lease.over:
            lease.expires = now + self.ttl_s

    def release(self, tokens: Sequence[Token], now: float) -> list[bool]:
        """Give leases back; False for a token that is late, shown twice or foreign."""
        released: list[bool] = []
        for token in tokens:
            try:
                self._end(self.find(token, now))
            except LeaseError:
                released.append(False)
            else:
                released.append(True)
        return released

    def expire(self, now: float) -> int:
        """Give back what is past its time; returns how many leases that were."""
        late = [lease for lease in self._leases.values() if now >= lease.expires and not lease.over]
        for lease in late:
            self._end(lease, expired=True)
        return len(late)

    def next_expiry(self) -> float | None:
        """When the next lease is past its time; None while there is none."""
        open_ = [lease.expires for lease in self._leases.values() if not lease.over]
        return min(open_, default=None)

    def revoke(self, reader: str | None = None) -> int:
        """End the leases of a reader that is gone, or all of them; returns how many."""
        ended = [
            lease
            for lease in self._leases.values()
            if not lease.over and (reader is None or lease.reader == reader)
        ]
        for lease in ended:
            self._end(lease)
        return len(ended)

    def _end(self, lease: Lease, *, expired: bool = False) -> None:
        lease.over = True
        self.expired += expired
        if not lease.users:
            self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.token.number]
        count, left = len(lease.blocks), self._of_reader[lease.reader] - len(lease.blocks)
        self.leased_blocks -= count
        self._of_reader[lease.reader] = left
        if not left:
            del self._of_reader[lease.reader]
        self._give_back(lease)
