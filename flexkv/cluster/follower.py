"""What the others tell: `Follower.run` (reads all logs at once, books what they say), `heard` (who
is there, from the own heartbeat), `start_over`, `forget`.

A node is known by a snapshot and its log from there. One whose log has a gap, or another
generation, is read again from its snapshot. A node leaves when it says so, or when nothing has been
heard of it for `node_ttl_ms` of our own time in which we could hear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import numpy as np

from flexkv.cluster.beat import GENERATION
from flexkv.cluster.delta import Delta
from flexkv.cluster.publisher import Publisher
from flexkv.cluster.redisclient import Link, LinkError, Word
from flexkv.cluster.settings import ClusterSettings, Names, is_member, member_of
from flexkv.cluster.wire import MAX_BLOCKS, NodeRecord, WireError, cut, decode_record, unpack
from flexkv.errors import CapacityError
from flexkv.telemetry import Telemetry, log

MAX_MEMBERS = 4096
_PIECES = 8  # of a snapshot that are read at once
_ENTRIES = 256  # of all logs that are read at once


class Books(Protocol):
    """Where holdings are kept; see flexkv.cluster.holdings.Holdings."""

    def join(self, node: str) -> int:
        """Return the number of a node."""

    def name(self, number: int) -> str | None:
        """Return the node that has a number."""

    def leave(self, number: int) -> None:
        """Forget what a node held."""

    def apply(self, number: int, delta: Delta, now: float) -> None:
        """Book a change, of at most 4,096 blocks."""

    def sweep(self) -> bool:
        """Tidy up a little; True while there is more to do."""


@dataclass(slots=True)
class Peer:
    """Another node, or our own log (number -1): that is read for its delay alone."""

    record: NodeRecord
    number: int
    position: int = 0  # of the last message that was booked
    score: int = 0
    heard_s: float = 0.0  # in time in which we could hear
    whole: bool = False  # whether its log may be followed


class Follower:
    """Reads what other nodes publish and books it. It belongs to the loop's thread."""

    def __init__(
        self,
        settings: ClusterSettings,
        publisher: Publisher,
        books: Books,
        now: Callable[[], float],
        telemetry: Telemetry,
    ) -> None:
        self._settings, self._names = settings, Names(settings)
        self._publisher, self._books = publisher, books
        self._now, self._telemetry = now, telemetry
        self.link = Link(settings, patience_ms=settings.heartbeat_ms)
        self.peers: dict[str, Peer] = {}  # by member, our own log among them
        self._wanted: dict[str, None] = {}  # members whose records are to be read
        self._refused: dict[str, int] = {}  # members that are none of ours, and their generation
        self._listened_s = 0.0
        self._last_heard: float | None = None
        self._roster = "0-0"
        self._untidy = False

    # --- what others tell us

    def heard(self, members: dict[str, int]) -> None:
        """Take notice of who has shown signs of life, and let go of those who have not."""
        now = self._now()
        if self._last_heard is not None:
            most = 2 * self._settings.heartbeat_ms / 1e3
            self._listened_s += min(now - self._last_heard, most)
        self._last_heard = now
        for member, score in list(members.items())[:MAX_MEMBERS]:
            peer = self.peers.get(member)
            generation = score // GENERATION
            if peer is None:
                if self._refused.get(member) != generation and is_member(member):
                    self._wanted[member] = None
                continue
            if score != peer.score:
                peer.score, peer.heard_s = score, self._listened_s
            if generation != peer.record.generation or not peer.whole:
                self._wanted[member] = None
        self._refused = {name: of for name, of in self._refused.items() if name in members}
        ttl_s = self._settings.node_ttl_ms / 1e3
        for member, peer in list(self.peers.items()):
            if self._listened_s - peer.heard_s > ttl_s and peer.number >= 0:
                log.info("directory.node_expired", node=member)
                self._leave(member)

    def forget(self) -> None:
        """Let go of everybody."""
        for member in list(self.peers):
            self._leave(member)
        self._refused.clear()

    def start_over(self) -> None:
        """Read everybody again from their snapshots: the books were emptied."""
        for member, peer in self.peers.items():
            peer.whole = False
            self._wanted[member] = None

    def _leave(self, member: str) -> None:
        peer = self.peers.pop(member)
        if peer.number >= 0 and self._books.name(peer.number) == member:
            self._books.leave(peer.number)
        self._untidy = True

    # --- the loop

    async def run(self) -> None:
        """Follow until cancelled; a server that does not answer is tried again."""
        retry_s = first_s = self._settings.retry_ms / 1e3
        while True:
            try:
                await self._enter()
                while True:
                    await self._turn()
                    retry_s = first_s
            except LinkError:
                await anyio.sleep(retry_s)
                retry_s = min(2 * retry_s, 64 * first_s)

    async def _enter(self) -> None:
        last = await self.link.ask("XREVRANGE", self._names.roster, "+", "-", "COUNT", 1)
        self._roster = last[0][0].decode() if last else "0-0"
        members = await self.link.ask("ZRANGE", self._names.members, 0, -1)
        for member in members[:MAX_MEMBERS]:
            if is_member(name := member.decode("ascii", "replace")):
                self._wanted[name] = None

    async def _turn(self) -> None:
        while self._wanted:
            member = next(iter(self._wanted))
            del self._wanted[member]
            await self._read(member)
        while self._untidy:
            self._untidy = self._books.sweep()
            await anyio.lowlevel.checkpoint()
        logs = {
            self._names.log(member, peer.record.generation).encode(): (member, peer)
            for member, peer in self.peers.items()
            if peer.whole
        }
        count = max(1, _ENTRIES // (1 + len(logs)))
        starts = [f"{peer.position}-0" for _, peer in logs.values()]
        words: list[Word] = ["XREAD", "COUNT", count, "BLOCK", self._settings.heartbeat_ms]
        words += ["STREAMS", self._names.roster, *logs, self._roster, *starts]
        answer = await self.link.ask(*words)
        full = False
        for name, entries in answer or ():
            full = full or len(entries) == count
            if name in logs:
                await self._follow(*logs[name], entries)
            else:
                self._note(entries)
        if answer and not full:
            await anyio.sleep(self._settings.linger_ms / 1e3)

    def _note(self, entries: list[Any]) -> None:
        """Read the roster."""
        for number, fields in entries:
            self._roster = number.decode()
            for what, text in (fields or {}).items():
                member = text.decode("ascii", "replace")
                if what == b"epoch":
                    self._publisher.hurry()
                elif what == b"record" and is_member(member):
                    self._refused.pop(member, None)
                    self._wanted[member] = None
                elif what == b"gone" and member in self.peers:
                    self._leave(member)

    # --- records and snapshots

    async def _read(self, member: str) -> None:
        """Read a record, and what it speaks of where that is new."""
        data = await self.link.ask("GET", self._names.record(member))
        if data is None:
            return
        try:
            record = decode_record(data)
            if member_of(record.node, record.incarnation) != member:
                raise WireError("a record under another name")
        except WireError as error:
            self._reject("record", error)
            return
        own = self._publisher.record
        if record.epoch > own.epoch:
            self._publisher.hurry()
        if record.identity != own.identity or record.epoch != own.epoch:
            self._refused[member] = record.generation
            if member in self.peers:
                self._leave(member)
            return
        peer = self._peer(member, record)
        if peer is None or (peer.whole and peer.record.generation == record.generation):
            if peer is not None:
                peer.record = record
            return
        peer.record, peer.whole = record, False
        if peer.number < 0:
            peer.position, peer.whole = self._publisher.position, True
        else:
            await self._rebuild(member, peer)

    def _peer(self, member: str, record: NodeRecord) -> Peer | None:
        peer = self.peers.get(member)
        if peer is None:
            if len(self.peers) >= MAX_MEMBERS:
                return None
            peer = self.peers[member] = Peer(record, -1, heard_s=self._listened_s)
        if member != self._publisher.member and self._books.name(peer.number) != member:
            try:
                peer.number, peer.whole = self._books.join(member), False
            except CapacityError as error:
                log.warning("directory.too_many_nodes", problem=str(error))
                del self.peers[member]
                return None
        return peer

    async def _rebuild(self, member: str, peer: Peer) -> None:
        """Book a node's snapshot in place of all that was known of it."""
        record, number = peer.record, peer.number
        name = self._names.snapshot(member, record.generation, record.snapshot)
        none = np.empty((0, 2), np.uint64), np.empty(0, np.uint8)
        self._books.apply(number, Delta(none[0], *none, *none, cleared=True), self._now())
        self._untidy = True
        for at in range(0, record.chunks, _PIECES):
            last = min(at + _PIECES, record.chunks) - 1
            messages = await self.link.ask("LRANGE", name, at, last)
            if len(messages) != last + 1 - at:
                return  # there is a newer one by now: the next heartbeat finds it
            for message in messages:
                if not await self._book(member, peer, message):
                    return
        peer.position, peer.whole = record.snapshot, True
        self._telemetry.add("directory_rebuilds")

    # --- logs

    async def _follow(self, member: str, peer: Peer, entries: list[Any]) -> None:
        """Book messages of a log."""
        for text, fields in entries:
            position = int(text.partition(b"-")[0])
            if position != peer.position + 1:
                peer.whole = False  # the next heartbeat has it read again
                self._telemetry.add("directory_gaps")
                return
            if peer.number < 0:
                self._measure(position)
            elif not await self._book(member, peer, (fields or {}).get(b"d", b"")):
                return
            peer.position = position
            peer.heard_s = self._listened_s

    async def _book(self, member: str, peer: Peer, message: bytes) -> bool:
        """Book one message in pieces; False when the node is not there any more."""
        try:
            delta = unpack(message, peer.record.epoch)
        except WireError as error:
            self._reject("message", error)
            return True
        for piece in cut(delta, MAX_BLOCKS):
            if self.peers.get(member) is not peer:
                return False
            if self._books.name(peer.number) != member:
                peer.whole = False
                self._wanted[member] = None
                return False
            self._books.apply(peer.number, piece, self._now())
            self._telemetry.add("directory_applied_blocks", len(piece))
            await anyio.lowlevel.checkpoint()
        return True

    def _measure(self, position: int) -> None:
        since = self._publisher.stamps.pop(position, None)
        if since is not None:
            self._telemetry.observe("directory_lag_seconds", self._now() - since)

    def _reject(self, what: str, error: WireError) -> None:
        self._telemetry.add("directory_rejected", what=what)
        log.warning("directory.rejected", what=what, problem=str(error))

    def live(self) -> Iterator[tuple[str, Peer]]:
        """The other nodes, by member."""
        return ((member, peer) for member, peer in self.peers.items() if peer.number >= 0)
