"""What must be true of a manager after every turn of its loop.

`Contents` (the bytes that belong to each block of each prompt) - `Watch.look` (all of it, now) -
`Watch.look_idle` (what must be true besides when nothing is under way).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv._core import lib
from flexkv.backends.disk import DiskBackend
from flexkv.backends.disk.table import SlotTable
from flexkv.encodedstore import EncodedStore
from flexkv.keys import Keyring
from flexkv.model import ABSENT, DISK, HOST, NO_BLOCK, READY, REMOTE
from flexkv.order import u32, u64
from flexkv.testing.worlds.device import BLOCK_BYTES, MASK, TOKENS
from flexkv.testing.worlds.hardware import Hardware, Journal
from flexkv.testing.worlds.remote import WorldRemote
from flexkv.testing.worlds.story import Path

if TYPE_CHECKING:
    from flexkv import KVManager

Key = tuple[int, int]
_MASKED = bytes(byte ^ MASK for byte in range(256))


class Contents:
    """The bytes of every block: a digest of its whole prompt up to there, whatever its key."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._known: dict[tuple[Path, tuple[str, ...]], list[bytes]] = {}
        self.of_key: dict[Key, bytes] = {}

    @staticmethod
    def tokens(path: Path) -> list[int]:
        """The tokens of a prompt."""
        return [branch * 1000 + i for branch in path for i in range(TOKENS)]

    def of(self, path: Path, namespace: tuple[str, ...]) -> list[bytes]:
        """The bytes of the blocks of a prompt; AssertionError if two blocks share a key."""
        found = self._known.get((path, namespace))
        if found is None:
            found = self._known[path, namespace] = [
                _block(hashlib.shake_256(repr((namespace, path[: i + 1])).encode()))
                for i in range(len(path))
            ]
            tokens = np.array(self.tokens(path), np.int64)
            keys = self._keyring.chain(tokens, self._keyring.root(namespace))
            for key, content in zip(keys.tolist(), found, strict=True):
                assert self.of_key.setdefault((key[0], key[1]), content) == content, "a shared key"
        return found


def _block(digest: Any) -> bytes:
    """The first half says it all: see codec.py."""
    half: bytes = digest.digest(BLOCK_BYTES // 2)
    return half + half.translate(_MASKED)


class Watch:
    """Looks at a manager from outside and inside; accuses it in the journal."""

    def __init__(
        self, kv: KVManager, hardware: Hardware, contents: Contents, journal: Journal
    ) -> None:
        self._kv, self._hardware, self._contents, self._journal = kv, hardware, contents, journal
        self._stack = kv._host.stack()
        index = self._stack.index
        self._index = index._index
        self._keys = np.zeros((index.max_blocks, 2), np.uint64)
        self._entries = np.zeros((index.max_blocks, 2 + 2 * len(index.tiers)), np.uint32)
        self._room = (u64(self._keys), u32(self._entries))
        arena = self._stack.arena
        self._host_bytes = arena.rows(0, arena.slots)[:, :BLOCK_BYTES]
        self._seen: tuple[Any, ...] = ()
        self._commits = 0
        commit = self._stack.engine._commit

        def count(*arguments: Any) -> None:
            self._commits += 1
            commit(*arguments)

        self._stack.engine._commit = count

    def _state(self) -> tuple[Any, ...]:
        """Something that changes whenever anything worth looking at may have changed."""
        host, stack, index = self._kv._host, self._stack, self._index
        discarder, spiller = stack.discarder, stack.spiller
        state = [
            *(self._hardware.moved, self._commits, len(stack.plans)),
            *(len(host.transfers), len(host._saves), spiller._active, spiller.queued_blocks),
            *(len(discarder._underway), len(stack.ledger.discards)),
            *(lib.fx_index_pinned(index), lib.fx_index_count(index)),
        ]
        for tier in stack.ledger.tiers.values():
            state.append(lib.fx_runs_free(tier.pool._runs))
            state.append(lib.fx_index_resident(index, tier.number))
        return tuple(state)

    def look(self, *, perfect: bool) -> None:
        """Check everything; the manager is open. `perfect`: nothing was lost or cancelled yet."""
        host, stack = self._kv._host, self._stack
        if host.failure is not None:
            self._journal.accuse("broken", f"the manager crashed: {host.failure!r}")
            return
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            stack.index.check_integrity()
            for tier in stack.ledger.tiers.values():
                tier.pool.check_integrity()
        except AssertionError as error:
            self._journal.accuse("books", str(error))
            return
        self._look_at_slots()
        self._look_at_pins()
        count = lib.fx_index_dump(self._index, *self._room)
        keys: list[Key] = list(map(tuple, self._keys[:count].tolist()))
        entries = self._entries[:count].tolist()
        self._look_at_bytes(keys, entries)
        if perfect:
            self._look_at_parents(entries)
        for tier in stack.ledger.stores:
            if tier.name == DISK:
                self._look_at_disk(2 + 2 * tier.number, keys, entries)
            elif perfect:
                self._look_at_server(2 + 2 * tier.number, entries)

    def _look_at_slots(self) -> None:
        ledger = self._stack.ledger
        forgetting = self._stack.discarder.forgetting
        for tier in ledger.tiers.values():
            out = sum(len(discard.slots) for discard in forgetting if discard.tier is tier)
            out += len(ledger.reads.kept(tier))
            if tier.name == HOST and ledger.spill == "on_evict":
                out += int(np.count_nonzero(ledger._free_when_saved))
            resident, free = self._stack.index.resident(tier.number), tier.free
            if free + resident + out != tier.capacity:
                self._journal.accuse(
                    "slots",
                    f"{tier.name}: {free} free + {resident} resident + {out} being forgotten "
                    f"are not {tier.capacity}",
                )

    def _look_at_pins(self) -> None:
        host, stack = self._kv._host, self._stack
        plans = sum(len(plan.blocks) for plan in stack.plans._open.items())
        running = sum(len(transfer.blocks) for transfer in host.transfers)
        saves = sum(len(run.graph.blocks) for run in host._saves)
        pinned, known = stack.index.pinned, plans + running + saves
        if pinned < known or (pinned > known and not stack.spiller.busy):
            self._journal.accuse(
                "pins", f"{pinned} pins; plans {plans}, transfers {running}, saves {saves}"
            )

    def _look_at_bytes(self, keys: list[Key], entries: list[list[int]]) -> None:
        """What the host calls readable is there, and nothing writes to it."""
        written, of_key = self._hardware.written("host"), self._contents.of_key
        held = self._host_bytes.tobytes()
        for key, entry in zip(keys, entries, strict=True):
            if entry[2] != READY:
                continue
            slot = entry[3]
            if slot in written:
                self._journal.accuse("early", f"host[{slot}] is readable while it is written")
            elif held[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] != of_key.get(key):
                self._journal.accuse("bytes", f"host[{slot}] is readable, its bytes are wrong")

    def _look_at_parents(self, entries: list[list[int]]) -> None:
        """What the host can read has its parent somewhere, what is in a store has it there."""
        for column in range(2, len(self._entries[0]), 2):
            stores = column > 2
            columns = (column,) if stores else range(2, len(self._entries[0]), 2)
            there = {entry[0] for entry in entries if any(entry[at] for at in columns)}
            for entry in entries:
                here = entry[column] != ABSENT if stores else entry[column] == READY
                if here and entry[1] != NO_BLOCK and entry[1] not in there:
                    kind = "alone" if stores else "orphan"
                    self._journal.accuse(kind, "a block is there, its parent is not")

    def _look_at_server(self, column: int, entries: list[list[int]]) -> None:
        """What the index calls readable on the server is there."""
        store = self._stack.engine.stores[REMOTE]
        ready = [entry[column] == READY for entry in entries]
        assert isinstance(store, WorldRemote)
        lacking = store.lacks(self._keys[: len(entries)][ready])
        if lacking:
            self._journal.accuse("server", f"{lacking} readable blocks are not on the server")

    def _look_at_disk(self, column: int, keys: list[Key], entries: list[list[int]]) -> None:
        """Nothing is on disk outside the index; what is readable there has its own record."""
        known, wrong = set(), []
        sequences, records = self.table.sequences.tolist(), self.table.keys.tolist()
        for key, entry in zip(keys, entries, strict=True):
            if entry[column] == ABSENT:
                continue
            slot = entry[column + 1]
            known.add(slot)
            if entry[column] == READY and sequences[slot] and tuple(records[slot]) != key:
                wrong.append(slot)
        for discard in self._stack.discarder.forgetting:
            known.update(discard.slots.tolist())
        known.update(self._stack.ledger.reads.kept(self._stack.ledger.tiers[DISK]).tolist())
        outside = [s for s, sequence in enumerate(sequences) if sequence and s not in known]
        if outside:
            self._journal.accuse("outside", f"disk{outside} hold forgotten keys")
        if wrong:
            self._journal.accuse("record", f"disk{wrong} hold other keys")

    @property
    def table(self) -> SlotTable:
        """What the disk tier believes to be in its slots."""
        store = self._stack.engine.stores[DISK]
        if isinstance(store, EncodedStore):
            store = store.store
        assert isinstance(store, DiskBackend)
        return store._table

    def look_idle(self) -> None:
        """Nothing is pinned, planned, in flight or waiting."""
        usage = self._kv.usage()["manager"]
        for name in ("plans", "transfers", "pinned", "tickets", "spilling"):
            if usage[name]:
                self._journal.accuse("idle", f"{usage[name]} {name} when nothing is under way")
        for lane in self._stack.engine.lanes.values():
            if lane.in_flight or lane.waiting:
                self._journal.accuse("idle", f"lane {lane.name} holds {lane.in_flight} bytes")

    def look_at_match(self, blocks: Sequence[int]) -> None:
        """What was just matched is readable somewhere."""
        index = self._stack.index
        found = np.array(blocks, np.uint32)
        readable = np.zeros(len(found), np.bool_)
        for tier in range(len(index.tiers)):
            readable |= index.states(tier, found) == READY
        if not readable.all():
            self._journal.accuse("match", "a block was matched that no tier can read")
