"""What the other nodes of a cluster hold, as a tier of the local index.

`Holdings.join` (a node -> its number), `apply` (a Delta of it), `leave` - `sweep` (forget, in small
steps, what those held who left) - `holders` (of slots: who can be asked) - `lost` (somebody was,
and had nothing) - `forget`, `clear` (for the ledger). A holding is a hint: nothing is read on its
word alone. Synchronous and deterministic: `now` is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.cluster.delta import MEDIA, Delta
from flexkv.errors import CapacityError
from flexkv.ledger import Ledger
from flexkv.model import BlockIds, KeyArray, SlotIds
from flexkv.order import as_blocks, as_keys, done, u32, u64
from flexkv.tier import Tier

HOST_MEDIUM, DISK_MEDIUM, REMOTE_MEDIUM = range(len(MEDIA))
MAX_HOLDERS = int(lib.FX_HOLDERS)
NOBODY = int(lib.FX_NOBODY)
HOLDER = np.dtype([("node", np.uint16), ("medium", np.uint8), ("unused", np.uint8)])
MAX_DELTA = 4096  # blocks; more at once would keep the event loop
_SWEEP_ROWS, _SWEEP_LEAVES = 1 << 16, 1 << 12
_OWN = np.uint8(1 << HOST_MEDIUM | 1 << DISK_MEDIUM)
_ALL = np.uint8(0xFF)


class Holdings:
    """Keeps the books of a tier whose slots are rows: a block, and the nodes that hold it.

    A node is known by a number. What one number held is forgotten as a whole by giving the node
    another *life*: rows name lives, and those of lives that are over are swept in small steps.
    """

    def __init__(self, ledger: Ledger, tier: Tier, *, own_node: str | None = None) -> None:
        self._index, self._tier, self._own = ledger.index, tier, own_node
        rows = lib.fx_holders_open(self._index.handle, tier.number, tier.capacity)
        if rows == ffi.NULL:
            raise MemoryError(f"no memory for the holders of {tier.capacity} blocks")
        self._rows = ffi.gc(rows, lib.fx_holders_close)
        counts = lib.fx_holders_counts(self._rows)
        self._counts = np.frombuffer(ffi.buffer(counts, 4 * (NOBODY + 1)), np.uint32)
        tier.books = self
        self.orphans = self.overflowed = self.crowded = 0
        self.changed_at = 0.0  # when a delta was applied last
        self._numbers: dict[str, int] = {}  # of nodes
        self._names: dict[int, str] = {}
        self._life: dict[int, int] = {}  # of those who are there, by number
        self._past: dict[int, set[int]] = {}  # lives that are over, of which something may be left
        self._spare_lives = list(range(NOBODY - 1, -1, -1))
        self._spare_numbers = list(range(NOBODY - 1, -1, -1))
        self._of_life = np.full(NOBODY + 1, NOBODY, np.uint16)
        self._gone = np.zeros(NOBODY + 1, np.uint8)  # media to be swept, as bits
        self._sweep_at = 0
        self._sweeping: dict[int, int] = {}  # lives in this pass, and whose they are
        self._dying: dict[int, int] = {}  # those for the next

    # nodes

    def join(self, node: str) -> int:
        """Return the number of a node: a new one, or the one it has had since it joined.

        Raises:
            CapacityError: there are too many nodes.
        """
        number = self._numbers.get(node)
        if number is not None and number in self._life:
            return number
        if not self._spare_lives or (number is None and not self._spare_numbers):
            raise CapacityError(f"a cluster has at most {NOBODY} nodes; {node!r} is one too many")
        if number is None:
            number = self._numbers[node] = self._spare_numbers.pop()
            self._names[number] = node
        self._begin(number)
        return number

    def name(self, number: int) -> str | None:
        """Return the name of a node, None if there is none of this number."""
        return self._names.get(number)

    def leave(self, number: int) -> None:
        """Forget what a node held in its own tiers; its share of a shared store stays until the
        node comes back and tells anew. Nothing of it is given out from now on; `sweep` tidies up.
        """
        if number in self._life:
            self._end(self._life.pop(number), _OWN)

    def _begin(self, number: int) -> None:
        life = self._life[number] = self._spare_lives.pop()
        self._of_life[life] = number
        self._past.setdefault(number, set())

    def _end(self, life: int, media: np.uint8) -> None:
        self._gone[life] |= media
        self._dying[life] = int(self._of_life[life])
        self._past[self._dying[life]].add(life)

    def _lives(self, number: int) -> set[int]:
        """All lives of a node of which there may be rows."""
        current = {self._life[number]} if number in self._life else set()
        return current | self._past.get(number, set())

    # what they hold

    def apply(self, number: int, delta: Delta, now: float) -> None:
        """Book a change of what a node holds; at most MAX_DELTA blocks of it at a time.

        Blocks whose parent is not here are counted as `orphans`; when the tier is full the oldest
        leave, and what then finds no room is counted as `overflowed`.
        """
        assert len(delta) <= MAX_DELTA, f"{len(delta)} blocks at once, {MAX_DELTA} are allowed"
        if delta.cleared:
            for life in self._lives(number):
                self._end(life, _ALL)
            self._begin(number)
        self.changed_at = now
        life = self._life[number]
        if len(delta.removed_keys):
            self._part(life, delta.removed_keys, np.left_shift(1, delta.removed_media))
        if len(delta.stored_keys):
            self._store(life, delta, now)
        self.tidy()

    def _store(self, life: int, delta: Delta, now: float) -> None:
        keys, parents = as_keys(delta.stored_keys), as_keys(delta.stored_parents)
        media = np.left_shift(1, delta.stored_media).astype(np.uint8)
        count = len(keys)
        assert len(parents) == len(media) == count, "ragged columns"
        blocks, missing = np.empty(2 * count, np.uint32), np.empty(count, np.uint32)
        counts, bits = np.zeros(3, np.uint32), ffi.from_buffer("uint8_t[]", media)
        given = (self._rows, life, u64(keys), u64(parents), bits)
        lib.fx_holders_join(*given, count, u32(blocks), u32(missing), u32(counts))
        found, lacking, crowded = counts.tolist()
        order = self._index.order(self._tier.number)
        order.rank(blocks[:found], now)
        self.crowded += crowded
        if not lacking:
            return
        slots = self._room(lacking)
        orphans = ffi.new("uint32_t *")
        rest = (u32(missing), len(slots), u32(slots), u32(blocks), orphans)
        made = done(lib.fx_holders_add(*given, *rest))
        order.rank(blocks[:made], now)
        self._tier.pool.give(slots[made:])
        self.orphans += orphans[0]
        self.overflowed += lacking - made - orphans[0]

    def _room(self, count: int) -> SlotIds:
        """Take up to `count` slots; the oldest blocks leave for it."""
        pool = self._tier.pool
        if count > pool.free:
            self._collect(lib.fx_holders_waiting(self._rows))
        if count > pool.free:
            victims = self._index.order(self._tier.number).take(count - pool.free)
            self._tier.evicted_blocks += len(victims)
            self._tier.count_evicted(len(victims))
            self.forget(victims)
        return pool.take(min(count, pool.free))

    def _part(self, life: int, keys: KeyArray, bits: NDArray[np.integer]) -> int:
        keys, media = as_keys(keys), np.ascontiguousarray(bits, np.uint8)
        assert len(media) == len(keys), "ragged columns"
        given = (self._rows, life, u64(keys), ffi.from_buffer("uint8_t[]", media), len(keys))
        return int(lib.fx_holders_part(*given))

    def lost(self, number: int, keys: KeyArray, *, shared: bool = False) -> None:
        """Note that a node was asked and has these no more; `shared`: the store it shares has."""
        media = 1 << REMOTE_MEDIUM if shared else int(_OWN)
        bits = np.full(len(keys), media, np.uint8)
        for life in self._lives(number):
            self._part(life, keys, bits)
        self.tidy()

    def holders(self, slots: SlotIds) -> NDArray[np.void]:
        """Who can be asked for the blocks in these slots: HOLDER of shape [slots, MAX_HOLDERS],
        cheapest medium first, then nodes of number NOBODY.
        """
        slots = as_blocks(slots)
        found = np.empty((len(slots), MAX_HOLDERS), HOLDER)
        numbers = ffi.from_buffer("uint16_t[]", self._of_life)
        gone = ffi.from_buffer("uint8_t[]", self._gone)
        answers = ffi.from_buffer("fx_holding[]", found)
        given = (u32(slots), len(slots), numbers, gone, REMOTE_MEDIUM)
        lib.fx_holders_of(self._rows, *given, answers)
        return found

    def count(self, number: int) -> int:
        """How many blocks a node is known to hold."""
        return sum(int(self._counts[life]) for life in self._lives(number))

    def nodes(self) -> Mapping[str, int]:
        """Blocks by node."""
        return {node: self.count(number) for node, number in self._numbers.items()}

    # what is over

    def sweep(self) -> bool:
        """Do a bounded piece of tidying up after those who left; True while there is more to do."""
        if not self._sweeping:
            self._sweeping, self._dying, self._sweep_at = self._dying, {}, 0
        if self._sweeping:
            gone = ffi.from_buffer("uint8_t[]", self._gone)
            at, limits = self._sweep_at, (_SWEEP_ROWS, _SWEEP_LEAVES)
            self._sweep_at = int(lib.fx_holders_sweep(self._rows, gone, at, *limits))
            if self._sweep_at == 0:
                self._swept()
        self.tidy()
        return bool(self._sweeping or self._dying)

    def _swept(self) -> None:
        """End a pass over all rows: lives of which nothing is left may be given out again, and
        numbers of nodes that are gone.
        """
        for life, number in self._sweeping.items():
            if self._counts[life] or life in self._dying:
                continue
            self._gone[life] = 0
            self._of_life[life] = NOBODY
            self._spare_lives.append(life)
            self._past[number].discard(life)
            if number not in self._life and not self._past[number]:
                del self._numbers[self._names.pop(number)], self._past[number]
                self._spare_numbers.append(number)
        self._sweeping = {}

    def forget(self, blocks: BlockIds) -> None:
        """Forget blocks, whoever holds them. What is pinned keeps its row until it is not."""
        blocks = as_blocks(blocks)
        lib.fx_holders_forget(self._rows, u32(blocks), len(blocks))
        self._collect(2 * len(blocks) + MAX_DELTA)

    def clear(self) -> None:
        """Forget what everybody holds, as the index was cleared; who they are stays known."""
        lib.fx_holders_clear(self._rows)
        self._sweeping |= self._dying
        self._dying = {}
        self._swept()

    def tidy(self) -> None:
        """Take back rows that only pins kept, if those are gone."""
        self._collect(2 * MAX_DELTA)

    def _collect(self, limit: int) -> None:
        limit = min(limit, lib.fx_holders_waiting(self._rows))
        if limit:
            slots = np.empty(limit, np.uint32)
            self._tier.give(slots[: lib.fx_holders_collect(self._rows, u32(slots), limit)])

    def check_integrity(self) -> None:
        """Scan all rows; AssertionError when they and the index do not agree."""
        wrong = lib.fx_holders_check(self._rows)
        if wrong != ffi.NULL:
            raise AssertionError(f"holdings: {ffi.string(wrong).decode()}")
