"""What must be true of a manager after every turn of its loop.

`Contents` (the bytes that belong to each block of each prompt) - `Watch.look` (all of it, now) -
`Watch.look_idle` (what must be true besides when nothing is under way).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv.backends.disk import DiskBackend
from flexkv.backends.disk.table import SlotTable
from flexkv.keys import Keyring
from flexkv.model import ABSENT, HOST, NO_BLOCK, READY, BlockIds
from flexkv.testing.worlds.device import BLOCK_BYTES, TOKENS
from flexkv.testing.worlds.hardware import Hardware, Journal
from flexkv.testing.worlds.story import Path

if TYPE_CHECKING:
    from flexkv.manager import KVManager

Key = tuple[int, int]


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
                hashlib.blake2b(
                    repr((namespace, path[: i + 1])).encode(), digest_size=BLOCK_BYTES
                ).digest()
                for i in range(len(path))
            ]
            tokens = np.array(self.tokens(path), np.int64)
            keys = self._keyring.chain(tokens, self._keyring.root(namespace))
            for key, content in zip(keys.tolist(), found, strict=True):
                assert self.of_key.setdefault((key[0], key[1]), content) == content, "a shared key"
        return found


class Watch:
    """Looks at a manager from outside and inside; accuses it in the journal."""

    def __init__(
        self, kv: KVManager, hardware: Hardware, contents: Contents, journal: Journal
    ) -> None:
        self._kv, self._hardware, self._contents, self._journal = kv, hardware, contents, journal
        self._stack = kv._host.stack()
        self._blocks = np.arange(self._stack.ledger.max_blocks, dtype=np.uint32)
        self._seen: tuple[Any, ...] = ()
        self._commits = 0
        commit = self._stack.engine._commit

        def count(*arguments: Any) -> None:
            self._commits += 1
            commit(*arguments)

        self._stack.engine._commit = count

    def _state(self) -> tuple[Any, ...]:
        """Something that changes whenever anything worth looking at may have changed."""
        host, stack = self._kv._host, self._stack
        index, tiers = stack.index, stack.ledger.tiers.values()
        return (
            *(self._hardware.moved, self._commits, index.pinned, len(index), len(stack.plans)),
            *(len(host.transfers), len(host._saves), len(stack.discarder.forgetting)),
            *(stack.spiller.busy, stack.spiller.queued_blocks),
            *((tier.free, index.resident(tier.number)) for tier in tiers),
        )

    def look(self, *, perfect: bool) -> None:
        """Check everything; the manager is open. `perfect`: nothing was lost or cancelled yet."""
        host, stack = self._kv._host, self._stack
        if host._failure is not None:
            self._journal.accuse("broken", f"the manager crashed: {host._failure!r}")
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
        states = [stack.index.states(tier, self._blocks) for tier in range(len(stack.index.tiers))]
        ready = np.flatnonzero(states[0] == READY).astype(np.uint32)
        if len(ready):
            self._look_at_bytes(ready)
            if perfect:
                self._look_at_parents(ready)
        if len(states) > 1:
            here = np.flatnonzero(states[1] != ABSENT).astype(np.uint32)
            self._look_at_disk(here)
            if perfect:
                parents = stack.index.parents(here)
                if (states[1][parents[parents != NO_BLOCK]] == ABSENT).any():
                    self._journal.accuse("alone", "a block is on disk without its parent")

    def _look_at_slots(self) -> None:
        ledger, index = self._stack.ledger, self._stack.index
        for tier in ledger.tiers.values():
            waiting = [d for d in self._stack.discarder.forgetting if d.tier is tier]
            out = sum(len(discard.slots) for discard in waiting)
            if tier.name == HOST and ledger.spill == "on_evict":
                out += int(np.count_nonzero(ledger._free_when_saved))
            resident = index.resident(tier.number)
            if tier.free + resident + out != tier.capacity:
                self._journal.accuse(
                    "slots",
                    f"{tier.name}: {tier.free} free + {resident} resident + {out} being forgotten "
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

    def _look_at_bytes(self, ready: BlockIds) -> None:
        """What the host calls readable is there, and nothing writes to it."""
        index = self._stack.index
        slots, written = index.slots(0, ready).tolist(), self._hardware.written("host")
        for key, slot in zip(index.keys(ready).tolist(), slots, strict=True):
            if slot in written:
                self._journal.accuse("early", f"host[{slot}] is readable while it is written")
            elif self._bytes_of(slot) != self._contents.of_key.get((key[0], key[1])):
                self._journal.accuse("bytes", f"host[{slot}] is readable, its bytes are wrong")

    def _bytes_of(self, slot: int) -> bytes:
        return self._stack.arena.view(slot)[:BLOCK_BYTES].tobytes()

    def _look_at_parents(self, ready: BlockIds) -> None:
        index = self._stack.index
        parents = index.parents(ready)
        parents = parents[parents != NO_BLOCK]
        somewhere = np.zeros(len(parents), np.bool_)
        for tier in range(len(index.tiers)):
            somewhere |= index.states(tier, parents) != ABSENT
        if not somewhere.all():
            self._journal.accuse("orphan", "a block is readable, its parent is nowhere")

    def _look_at_disk(self, here: BlockIds) -> None:
        """Nothing is on disk outside the index; what is readable there has its own record."""
        index, table = self._stack.index, self.table
        slots = index.slots(1, here)
        known = set(slots.tolist())
        for discard in self._stack.discarder.forgetting:
            known.update(discard.slots.tolist())
        filled = np.flatnonzero(table.sequences).tolist()
        if not known.issuperset(filled):
            self._journal.accuse("outside", f"disk{sorted(set(filled) - known)} hold forgotten keys")
        ready = index.states(1, here) == READY
        wrong = table.filled(slots[ready])
        wrong &= (table.keys[slots[ready]] != index.keys(here[ready])).any(axis=1)
        if wrong.any():
            self._journal.accuse("record", f"disk{slots[ready][wrong].tolist()} hold other keys")

    @property
    def table(self) -> SlotTable:
        """What the disk tier believes to be in its slots."""
        store = self._stack.engine.stores["disk"]
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
