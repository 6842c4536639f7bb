"""The ranked leaf order of a tier, who is told of its blocks, and how arrays go in and out of the C
index.

`TierOrder.rank`, `rank_each`, `ranks`, `take` (see `flexkv.protocols.LeafOrder`), `ask` (a policy
for victims), `evictable`, `hold` - `Audience.came`, `left`, `emptied` (for policy, holder, watcher)
- `as_blocks`, `as_keys`, `u32`, `u64` (arrays for C) - `done` (what C refused, as an
AssertionError: it is a misuse by our own code).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.model import BlockIds, BoolArray, KeyArray
from flexkv.protocols import EvictionPolicy

U32 = np.dtype(np.uint32)  # a dtype, not the scalar type: nothing to look up
U64 = np.dtype(np.uint64)
_REFUSALS = {
    lib.FX_INDEX_NO_BLOCK: "a block is not in the index",
    lib.FX_INDEX_KNOWN: "a key to insert is known already",
    lib.FX_INDEX_STATE: "a block is not in the state that the call needs",
    lib.FX_INDEX_PINS: "a block is unpinned more often than pinned",
    lib.FX_INDEX_RANK: "a rank is not a number",
}


def done(code: int) -> int:
    """Pass on what a C call returned. AssertionError if it refused."""
    if code >= 0:
        return code
    if code == lib.FX_INDEX_MEMORY:
        raise MemoryError("no memory for the index")
    raise AssertionError(f"prefix index: {_REFUSALS[code]}")


def as_blocks(values: Any) -> NDArray[np.uint32]:
    """Return block or slot numbers as a contiguous uint32 array."""
    if isinstance(values, np.ndarray) and values.dtype == U32 and values.flags.c_contiguous:
        return values
    return np.ascontiguousarray(values, np.uint32)


def as_keys(values: KeyArray) -> KeyArray:
    """Return keys as a contiguous uint64 array of shape [blocks, 2]."""
    keys = np.ascontiguousarray(values, U64)
    assert keys.shape == (len(keys), 2), f"keys have shape [blocks, 2], got {keys.shape}"
    return keys


# u32(array), u64(array): a C pointer to an array that keeps the array alive. Made thus they cost a
# third of a function: every call of the index needs a few.
u32 = partial(ffi.from_buffer, "uint32_t[]")
u64 = partial(ffi.from_buffer, "uint64_t[]")


class TierOrder:
    """The leaf order of one tier (see `flexkv.protocols.LeafOrder`)."""

    def __init__(self, index: Any, tier: int) -> None:
        self._index, self._tier = index, tier

    def rank(self, blocks: BlockIds, value: float) -> None:
        """Give all `blocks` the same rank."""
        blocks = as_blocks(blocks)
        done(lib.fx_order_rank(self._index, self._tier, u32(blocks), len(blocks), value))

    def rank_each(self, blocks: BlockIds, values: NDArray[np.float64]) -> None:
        """Give every block its own rank."""
        blocks, values = as_blocks(blocks), np.ascontiguousarray(values, np.float64)
        assert len(values) == len(blocks), "one rank per block"
        numbers = ffi.from_buffer("double[]", values)
        done(lib.fx_order_rank_each(self._index, self._tier, u32(blocks), len(blocks), numbers))

    def ranks(self, blocks: BlockIds) -> NDArray[np.float64]:
        """Return the ranks of blocks; 0 for one that was never ranked."""
        blocks = as_blocks(blocks)
        values = np.empty(len(blocks), np.float64)
        numbers = ffi.from_buffer("double[]", values)
        done(lib.fx_order_ranks(self._index, self._tier, u32(blocks), len(blocks), numbers))
        return values

    def take(self, count: int) -> BlockIds:
        """Return up to `count` evictable blocks, lowest rank first, leaves before their parents."""
        count = min(count, lib.fx_index_resident(self._index, self._tier))
        blocks = np.empty(max(count, 0), np.uint32)
        taken = lib.fx_order_take(self._index, self._tier, len(blocks), u32(blocks))
        return blocks[:taken]

    def evictable(self, blocks: BlockIds) -> BoolArray:
        """See `PrefixIndex.evictable`."""
        blocks = as_blocks(blocks)
        mask = np.empty(len(blocks), np.uint8)
        target = ffi.from_buffer("uint8_t[]", mask)
        done(lib.fx_index_evictable(self._index, self._tier, u32(blocks), len(blocks), target))
        return mask.view(np.bool_)

    def ask(self, policy: EvictionPolicy | None, count: int) -> BlockIds:
        """Return up to `count` victims of a policy's choice, leaves first; change nothing."""
        if policy is None or getattr(policy, "ranked", False):
            return self.take(count)
        chosen, found = np.empty(count, U32), 0
        try:
            while found < count:
                asked = as_blocks(policy.victims(count - found, self.evictable))
                rest = chosen[found:]
                given = (u32(asked), len(asked), len(rest), u32(rest))
                accepted = done(lib.fx_trial_accept(self._index, self._tier, *given))
                if accepted == 0:
                    break
                found += accepted
        finally:
            lib.fx_trial_end(self._index, self._tier)
        return chosen[:found]

    def hold(self, blocks: BlockIds, on: bool) -> None:
        """Keep blocks out of the order, and out of `evictable`, or let them in again."""
        blocks = as_blocks(blocks)
        done(lib.fx_index_hold(self._index, self._tier, u32(blocks), len(blocks), on))


class Holder(Protocol):
    """Who holds blocks of a tier back from eviction as long as others can leave."""

    def came(self, blocks: BlockIds) -> None:
        """Hear that blocks are readable from now on; the policy knows them already."""

    def left(self, blocks: BlockIds) -> None:
        """Hear that blocks are not readable any more."""

    def cleared(self) -> None:
        """Hear that nothing is readable any more."""

    def victims(self, count: int, choose: Callable[[int], BlockIds]) -> BlockIds:
        """What `choose` (the policy) picks, and what is held only when that is not enough."""
        ...


class Watcher(Protocol):
    """Who wants to know what can be read in a tier."""

    def stored(self, blocks: BlockIds) -> None:
        """Hear that blocks are readable from now on."""

    def removed(self, blocks: BlockIds) -> None:
        """Hear that blocks are not readable any more. The index still knows their keys."""

    def cleared(self) -> None:
        """Hear that nothing is readable any more."""


class Audience:
    """Who is told what becomes readable in one tier and what leaves it: its policy, a holder while
    there are hints, a watcher.
    """

    __slots__ = ("holder", "policy", "watcher")

    def __init__(self) -> None:
        self.policy: EvictionPolicy | None = None
        self.holder: Holder | None = None
        self.watcher: Watcher | None = None

    def came(self, blocks: BlockIds, now: float) -> None:
        """Tell them of blocks that became readable."""
        if len(blocks):
            if self.policy is not None:
                self.policy.inserted(blocks, now)
            if self.holder is not None:
                self.holder.came(blocks)
            if self.watcher is not None:
                self.watcher.stored(blocks)

    def left(self, blocks: BlockIds) -> None:
        """Tell them of blocks that cannot be read any more."""
        if len(blocks):
            if self.policy is not None:
                self.policy.removed(blocks)
            if self.holder is not None:
                self.holder.left(blocks)
            if self.watcher is not None:
                self.watcher.removed(blocks)

    def emptied(self, blocks: BlockIds) -> None:
        """Tell them that the tier is empty from now on; `blocks` is all that was readable."""
        if self.policy is not None and len(blocks):
            self.policy.removed(blocks)
        if self.holder is not None:
            self.holder.cleared()
        if self.watcher is not None:
            self.watcher.cleared()
