"""The prefix index: which blocks are known, where they can be read, and who leaves first.

`PrefixIndex.match`, `find`, `alone` (keys -> blocks) - `insert` - `land`, `ready`, `drop`
(residency in a tier) - `pin`, `unpin` - `touch` - `victims`, `evict` - `restore`, `clear`. The
Python face of the C index (`_core/index.h`): everything takes arrays and costs time in proportion
to the blocks passed; a misuse by our own code is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, held, lib
from flexkv.alone import AloneBlocks
from flexkv.errors import CapacityError, ConfigError
from flexkv.model import NO_BLOCK, BlockIds, BoolArray, KeyArray, SlotIds
from flexkv.order import U32, Audience, TierOrder, Watcher, as_blocks, as_keys, done, u32, u64
from flexkv.protocols import EvictionPolicy, PolicyContext, Recovered

MAX_TIERS = 8
MAX_BLOCKS = 1 << 30


class PrefixIndex:
    """Blocks by key, their parents, and their residency in each of `tiers` (by position)."""

    def __init__(
        self, max_blocks: int, tiers: Sequence[str], *, find_any: bool = False
    ) -> None:  # find_any: `alone.find` finds blocks without what stands before them, too
        if not 0 <= max_blocks <= MAX_BLOCKS or not 1 <= len(tiers) <= MAX_TIERS:
            raise ConfigError(
                f"an index holds up to {MAX_BLOCKS} blocks in 1..{MAX_TIERS} tiers, "
                f"got {max_blocks} blocks and tiers {tuple(tiers)}"
            )
        if (index := lib.fx_index_open(max_blocks, len(tiers))) == ffi.NULL:
            raise MemoryError(f"no memory for an index of {max_blocks} blocks")
        self.max_blocks, self.tiers = max_blocks, tuple(tiers)
        self.handle = self._index = ffi.gc(index, lib.fx_index_close)
        if find_any:
            lib.fx_index_find_any(index)
        self.alone, self._audiences = AloneBlocks(self._index), tuple(Audience() for _ in tiers)
        self._orders = tuple(TierOrder(self._index, tier) for tier in range(len(tiers)))

    def __len__(self) -> int:
        """Entries: blocks that are somewhere, on their way, pinned, or ancestors of such."""
        return int(lib.fx_index_count(self._index))

    @property
    def pinned(self) -> int:
        """Sum of all pins."""
        return int(lib.fx_index_pinned(self._index))

    def resident(self, tier: int) -> int:
        """Blocks that are LANDING or READY in a tier."""
        self._check_tier(tier)
        return int(lib.fx_index_resident(self._index, tier))

    # keys -> blocks

    def match(self, keys: KeyArray) -> BlockIds:
        """Return the longest prefix of `keys` whose every block is READY in at least one tier."""
        keys = as_keys(keys)
        blocks = np.empty(len(keys), U32)
        return blocks[: held.index_match(self._index, u64(keys), len(keys), u32(blocks))]

    def find(self, keys: KeyArray) -> BlockIds:
        """Return the longest prefix of `keys` that has entries, readable or not."""
        keys = as_keys(keys)
        blocks = np.empty(len(keys), U32)
        return blocks[: lib.fx_index_find(self._index, u64(keys), len(keys), u32(blocks))]

    def insert(self, keys: KeyArray, parent: int) -> BlockIds:
        """Chain new entries below `parent` (NO_BLOCK: at the root). `keys` must be unknown.

        They are ABSENT everywhere: land or pin them, else a later `drop` or `unpin` prunes them.

        Raises:
            CapacityError: the index is full; nothing was done.
        """
        self.require(len(keys))
        keys = as_keys(keys)
        blocks = np.empty(len(keys), U32)
        done(lib.fx_index_insert(self._index, u64(keys), len(keys), parent, u32(blocks)))
        return blocks

    def require(self, count: int) -> None:
        """Raise CapacityError if there is no room for `count` new entries."""
        if len(self) + count > self.max_blocks:
            room = f"{len(self)} of {self.max_blocks} entries are used"
            raise CapacityError(f"{count} new blocks do not fit into the index: {room}")

    # residency

    def land(self, tier: int, blocks: BlockIds, slots: SlotIds) -> None:
        """Mark ABSENT blocks LANDING in a tier: they hold a slot there and cannot be read yet."""
        self._check_tier(tier)
        blocks, slots = as_blocks(blocks), as_blocks(slots)
        assert len(slots) == len(blocks), "one slot per block"
        done(lib.fx_index_land(self._index, tier, u32(blocks), u32(slots), len(blocks)))

    def ready(self, tier: int, blocks: BlockIds, now: float) -> None:
        """Mark LANDING blocks READY: readable from now on. The tier's policy is told `inserted`."""
        self._check_tier(tier)
        blocks = as_blocks(blocks)
        done(lib.fx_index_ready(self._index, tier, u32(blocks), len(blocks)))
        self._audiences[tier].came(blocks, now)

    def drop(self, tier: int, blocks: BlockIds) -> SlotIds:
        """Make blocks ABSENT in a tier and return their slots (NO_SLOT where they were already).

        The policy is told `removed` for those that were READY. Entries with no residency, pin or
        child left are pruned, and then their ancestors that are left with nothing. Blocks come in
        prompt order or leaves first.
        """
        self._check_tier(tier)
        blocks = as_blocks(blocks)
        slots, ready = np.empty(len(blocks), U32), np.empty(len(blocks), U32)
        count = ffi.new("uint32_t *")
        done(
            lib.fx_index_drop(
                self._index, tier, u32(blocks), len(blocks), u32(slots), u32(ready), count
            )
        )
        self._audiences[tier].left(ready[: count[0]])
        return slots

    def slots(self, tier: int, blocks: BlockIds) -> SlotIds:
        """Return the slots of blocks in a tier, NO_SLOT where ABSENT."""
        self._check_tier(tier)
        blocks = as_blocks(blocks)
        slots = np.empty(len(blocks), U32)
        done(lib.fx_index_slots(self._index, tier, u32(blocks), len(blocks), u32(slots)))
        return slots

    def states(self, tier: int, blocks: BlockIds) -> NDArray[np.uint8]:
        """Return the TierState of blocks in a tier; ABSENT for entries that are gone."""
        self._check_tier(tier)
        blocks = as_blocks(blocks)
        states = np.empty(len(blocks), np.uint8)
        target = ffi.from_buffer("uint8_t[]", states)
        done(lib.fx_index_states(self._index, tier, u32(blocks), len(blocks), target))
        return states

    # use

    def touch(self, blocks: BlockIds, now: float) -> None:
        """Tell every tier's policy which `blocks`, in prompt order, READY there, were used."""
        blocks = as_blocks(blocks)
        here = np.empty(len(blocks), U32)
        for tier, audience in enumerate(self._audiences):
            policy = audience.policy
            if policy is None:
                continue
            count = done(
                lib.fx_index_select(self._index, tier, u32(blocks), len(blocks), u32(here))
            )
            if count:
                policy.touched(blocks if count == len(blocks) else here[:count].copy(), now)

    def pin(self, blocks: BlockIds) -> None:
        """Count one more reason not to evict each block."""
        blocks = as_blocks(blocks)
        done(held.index_pin(self._index, u32(blocks), len(blocks)))

    def unpin(self, blocks: BlockIds) -> None:
        """Count one reason less; entries that have nothing left are pruned."""
        blocks = as_blocks(blocks)
        done(lib.fx_index_unpin(self._index, u32(blocks), len(blocks)))

    def removable(self, blocks: BlockIds) -> int:
        """How many of the last `blocks` of a chain nothing else uses.

        Those are not pinned, LANDING nowhere, and have no child outside the chain.
        """
        blocks = as_blocks(blocks)
        return int(done(lib.fx_index_removable(self._index, u32(blocks), len(blocks))))

    def lacking(self, tier: int, lower: int, blocks: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Those of `blocks` that are ABSENT in `lower`, and ancestors of theirs that are so and
        READY in `tier`, each once, ancestors first; and those that must not go there yet, because
        they would be there without an ancestor.
        """
        blocks = as_blocks(blocks)
        limit = len(blocks) + self.resident(tier) + 1
        places, alone = np.empty((2, limit), np.uint64), ffi.new("uint32_t *")
        given, room = (u32(blocks), len(blocks)), (u64(places[0]), u64(places[1]))
        lacking = lib.fx_index_lacking(self._index, tier, lower, *given, *room, limit, alone)
        count = done(lacking)
        found = places[0, :count].astype(U32)  # the low half of a place is its block
        return found[: count - alone[0]], found[count - alone[0] :]

    # eviction

    def stranded(self, tier: int, gone: BlockIds, count: int) -> BlockIds:
        """Up to `count` blocks that could leave after `gone` if only children in `tier` count."""
        self._check_tier(tier)
        given, found = as_blocks(gone), np.empty(count, U32)
        wanted = (u32(given), len(given), count, u32(found))
        return found[: done(lib.fx_index_stranded(self._index, tier, *wanted))]

    def set_policy(
        self,
        tier: int,
        policy: EvictionPolicy,
        settings: Mapping[str, Any] | None = None,
        *,
        capacity_blocks: int = 0,
        tokens_per_block: int = 1,
    ) -> None:
        """Open `policy` for a tier that is still empty."""
        assert self.resident(tier) == 0, "a policy is set before blocks come"
        name, order, size = self.tiers[tier], self._orders[tier], self.max_blocks
        given = (capacity_blocks or size, size, order, dict(settings or {}))
        policy.open(PolicyContext(name, *given, tokens_per_block, self.depths, self.keys))
        self._audiences[tier].policy = policy

    def order(self, tier: int) -> TierOrder:
        """The ranked leaf order of a tier."""
        return self._orders[tier]

    def audience(self, tier: int) -> Audience:
        """Who is told of a tier's blocks."""
        return self._audiences[tier]

    def evictable(self, tier: int, blocks: BlockIds) -> BoolArray:
        """Say which blocks could leave the tier now.

        They are READY there, neither pinned nor held, have no child READY or LANDING there, and are
        READY in another tier too or have no child at all.
        """
        self._check_tier(tier)
        return self._orders[tier].evictable(blocks)

    def victims(self, tier: int, count: int) -> BlockIds:
        """Ask the policy for up to `count` blocks to evict, leaves first; change nothing."""
        self._check_tier(tier)
        count = max(0, min(count, self.resident(tier)))
        audience, order = self._audiences[tier], self._orders[tier]
        if audience.holder is None:
            return order.ask(audience.policy, count)
        return audience.holder.victims(count, partial(order.ask, audience.policy))

    def evict(self, tier: int, count: int) -> tuple[BlockIds, SlotIds]:
        """Choose victims and drop them: `victims` and `drop` in one step.

        `keys` still answers for the returned blocks until the next `insert`.
        """
        self._check_tier(tier)
        audience = self._audiences[tier]
        asks = audience.policy is not None and not getattr(audience.policy, "ranked", False)
        if asks or audience.holder is not None:
            return (blocks := self.victims(tier, count)), self.drop(tier, blocks)
        count = max(0, min(count, self.max_blocks))
        blocks, slots = np.empty(count, U32), np.empty(count, U32)
        taken = lib.fx_index_evict(self._index, tier, count, u32(blocks), u32(slots))
        blocks, slots = (blocks, slots) if taken == count else (blocks[:taken], slots[:taken])
        audience.left(blocks)
        return blocks, slots

    # what an entry is

    def keys(self, blocks: BlockIds) -> KeyArray:
        """Return the keys of blocks, shape [blocks, 2]; for an entry that is gone, its last key."""
        blocks = as_blocks(blocks)
        keys = np.empty((len(blocks), 2), np.uint64)
        done(lib.fx_index_keys(self._index, u32(blocks), len(blocks), u64(keys)))
        return keys

    def parents(self, blocks: BlockIds) -> BlockIds:
        """Return the parents of blocks, NO_BLOCK for first blocks of prompts."""
        blocks = as_blocks(blocks)
        parents = np.empty(len(blocks), U32)
        done(lib.fx_index_parents(self._index, u32(blocks), len(blocks), u32(parents)))
        return parents

    def parent_keys(self, blocks: BlockIds) -> KeyArray:
        """Return the keys of the parents of blocks, zeros for first blocks of prompts."""
        parents = self.parents(blocks)
        first = np.flatnonzero(parents == NO_BLOCK)
        parents[first] = 0  # any entry will do
        keys = self.keys(parents)
        keys[first] = 0
        return keys

    def depths(self, blocks: BlockIds) -> NDArray[np.uint32]:
        """Return how many blocks stand before each in its prompt (0 = first block)."""
        blocks = as_blocks(blocks)
        depths = np.empty(len(blocks), U32)
        done(lib.fx_index_depths(self._index, u32(blocks), len(blocks), u32(depths)))
        return depths

    # the whole

    def watch(self, tier: int, watcher: Watcher | None) -> None:
        """Tell `watcher` (None: nobody) which blocks become READY in a tier, or cease to be."""
        self._check_tier(tier)
        self._audiences[tier].watcher = watcher

    def restore(self, tier: int, recovered: Recovered, now: float) -> BoolArray:
        """Rebuild entries from what a store kept, READY in `tier`; say which rows were taken.

        Rows without their ancestors, second rows of a key and rows that do not fit are not. The
        policy is told `inserted`, ancestors first.
        """
        self._check_tier(tier)
        keys, parents = as_keys(recovered.keys), as_keys(recovered.parents)
        depths, slots = as_blocks(recovered.depths), as_blocks(recovered.slots)
        rows = len(keys)
        assert len(parents) == len(depths) == len(slots) == rows, "ragged columns"
        kept, blocks = np.empty(rows, np.uint8), np.empty(rows, U32)
        columns = (u64(keys), u64(parents), u32(depths), u32(slots))
        found = (ffi.from_buffer("uint8_t[]", kept), u32(blocks))
        count = done(lib.fx_index_restore(self._index, tier, *columns, rows, *found))
        self._audiences[tier].came(blocks[:count], now)
        return kept.view(np.bool_)

    def readable(self, tier: int) -> BlockIds:
        """Return all blocks that are READY in a tier, in no order; it looks at every entry."""
        blocks = np.empty(self.max_blocks, U32)
        return blocks[: lib.fx_index_all(self._index, tier, u32(blocks))]

    def clear(self) -> None:
        """Forget everything. Nothing may be pinned."""
        assert self.pinned == 0, "an index with pins is not cleared"
        for tier, audience in enumerate(self._audiences):
            audience.emptied(self.readable(tier))
        lib.fx_index_clear(self._index)

    def check_integrity(self) -> None:
        """Derive counts, links and orders again by a full scan; AssertionError if one differs."""
        wrong = lib.fx_index_check(self._index)
        if wrong != ffi.NULL:
            raise AssertionError(f"prefix index: {ffi.string(wrong).decode()}")

    def _check_tier(self, tier: int) -> None:
        if not 0 <= tier < len(self.tiers):
            raise AssertionError(f"tier {tier} is none of {self.tiers}")
