"""What this node tells the others: `Publisher.run` (its changes, its snapshots, that it lives),
`restart`, `hurry`, `leave`.

Changes are messages in a log (a stream) of the node's own, numbered without gaps. A snapshot is
read from the index in pieces while the log goes on: who reads it and then the log from where the
snapshot began has the truth, because the last word on each block is in the log. What the server no
longer has, or what cannot be told as changes, begins a new *generation*: another log, and a
snapshot before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from flexkv.cluster.beat import GENERATION, Beat, number_of, scores_of
from flexkv.cluster.changes import Changes
from flexkv.cluster.redisclient import Link, LinkError
from flexkv.cluster.settings import ClusterSettings, Names, member_of
from flexkv.cluster.snapshot import Snapshot, message_of, portions
from flexkv.cluster.wire import NodeRecord, encode_record, pack
from flexkv.events import EventStream
from flexkv.telemetry import Telemetry, log

_ROSTER = 1024  # entries of the roster; who missed some finds the nodes by their heartbeats
_PIECES = 8  # of a snapshot that are written at once
_AT_ONCE = 8  # messages that are sent at once
_LEAST_LOGGED = 4096  # blocks; below that, a snapshot saves nothing
_STAMPS = 4096


class _LostError(Exception):
    """The server does not have what we wrote, or changes are not all there is to tell."""


class Publisher:
    """Writes one node's records. `told` is awaited with each `Beat`; what it changes of `record`
    by `restart` or `mark` is published next.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        record: NodeRecord,
        events: EventStream,
        now: Callable[[], float],
        telemetry: Telemetry,
        told: Callable[[Beat], Awaitable[None]],
    ) -> None:
        self._settings, self._names = settings, Names(settings)
        self.record, self._events, self._now = record, events, now
        self._telemetry, self._told = telemetry, told
        self.member = member_of(record.node, record.incarnation)
        self.link = Link(settings)
        self.connected = False
        self.position = 0  # of the last message that the server has, and
        self.stamps: dict[int, float] = {}  # since when the oldest change of a message was waiting
        self._trimmed = 0  # how many messages are not in the log any more
        self._queue: deque[tuple[bytes, int, float]] = deque()  # messages not known to be there
        self._snapshot: Snapshot | None = None
        self._surveyed = False  # since changes were taken the last time
        self._taken_s = now()
        self._logged = self._held = 0  # blocks in the log since the snapshot; holdings
        self._registered = self._changed = False
        self._lost = True
        self._beats, self._next_beat = 0, 0.0
        self._nap: anyio.CancelScope | None = None

    # --- what others may ask

    def restart(self, record: NodeRecord) -> None:
        """Tell everything anew, under another record."""
        self.record, self._lost = record, True

    def mark(self, state: Any) -> None:
        """Show another state from the next heartbeat on."""
        self.record = msgspec.structs.replace(self.record, state=state)
        self._changed = True

    def move(self, courier: str, address: str) -> None:
        """Show where a courier is now, from the next heartbeat on; "": nowhere."""
        addresses = dict(self.record.addresses)
        addresses.pop(courier, None)
        if address:
            addresses[courier] = address
        self.record = msgspec.structs.replace(self.record, addresses=addresses)
        self._changed = True

    def hurry(self) -> None:
        """Have a heartbeat now."""
        self._next_beat = 0.0
        if self._nap is not None:
            self._nap.cancel()

    async def leave(self) -> None:
        """Take away what is on the server; best effort."""
        if not self.connected:
            return
        names, member = self._names, self.member
        gone = (names.record(member), self._log, names.snapshot(member, *self._covered))
        commands: list[tuple[Any, ...]] = [("UNLINK", name) for name in gone]
        commands += [("ZREM", names.members, member), ("SREM", names.draining, member)]
        try:
            await self.link.ask_all([*commands, self._notice("gone", member)])
        except LinkError as error:
            log.info("directory.not_left", problem=str(error))

    # --- the loop

    async def run(self) -> None:
        """Publish until cancelled; a server that does not answer is tried again."""
        retry_s = first_s = self._settings.retry_ms / 1e3
        while not self._events.closed:
            try:
                await (self._begin() if self._lost else self._resume())
                self._say(True)
                retry_s = first_s
                while not self._events.closed:
                    await self._turn()
            except _LostError:
                self._lost, self._snapshot = True, None
                await anyio.sleep(first_s)
            except LinkError as error:
                self._lost = self._lost or error.refused or not self._registered
                if self._snapshot is not None:  # some of it may have been written
                    self._snapshot, self._logged = None, self._held
                self._say(False, str(error))
                await anyio.sleep(retry_s)
                retry_s = min(2 * retry_s, 64 * first_s)

    async def _turn(self) -> None:
        if self._now() >= self._next_beat:
            await self._beat()
        if self._events.behind:
            raise _LostError
        if self._snapshot is not None:
            await self._write_pieces(self._snapshot)
        elif not self._events.pending and not self._queue:
            await self._rest()
        if self._events.pending:
            await self._take()
        await self._send()
        if self._snapshot is None and self._logged > max(
            _LEAST_LOGGED, self._settings.snapshot_share * self._held
        ):
            await self._survey()

    async def _rest(self) -> None:
        """Wait for changes, then a little for more of them; but not beyond the next heartbeat."""
        with anyio.move_on_after(max(0.0, self._next_beat - self._now())) as self._nap:
            await self._events.changed()
            self._taken_s = self._now()
            await anyio.sleep(self._settings.linger_ms / 1e3)
        self._nap = None

    # --- generations

    async def _begin(self) -> None:
        """Start a generation: an empty log, then a snapshot; others hear of it when it is there."""
        generation = self.record.generation + 1
        old, covered = self._log, self._covered
        self.record = msgspec.structs.replace(
            self.record, generation=generation, snapshot=0, chunks=0
        )
        self._queue.clear()
        self.stamps.clear()
        self._registered = False
        self._events.catch_up()
        ttl_ms = self._settings.node_ttl_ms
        await self.link.ask_all(
            [
                ("UNLINK", self._names.record(self.member)),
                ("UNLINK", old),
                ("UNLINK", self._names.snapshot(self.member, *covered)),
                ("UNLINK", self._log),
                ("XADD", self._log, "1-0", "d", pack(Changes(), self.record.epoch)),
                ("PEXPIRE", self._log, ttl_ms),
            ]
        )
        self.position, self._trimmed, self._logged = 1, 0, 0
        self._lost = False
        await self._survey()

    async def _resume(self) -> None:
        """See what the server has after it did not answer, and go on from there."""
        (length,) = await self.link.ask_all([("XLEN", self._log)])
        extra = length - (self.position - self._trimmed)
        if not 0 <= extra <= len(self._queue):
            raise _LostError
        for _ in range(extra):
            self._sent()

    @property
    def _log(self) -> str:
        return self._names.log(self.member, self.record.generation)

    @property
    def _covered(self) -> tuple[int, int]:
        return self.record.generation, self.record.snapshot

    @property
    def _score(self) -> int:
        return self.record.generation * GENERATION + self._beats

    # --- heartbeats

    async def _beat(self) -> None:
        settings, names = self._settings, self._names
        self._beats += 1
        ttl_ms = settings.node_ttl_ms
        self.record = msgspec.structs.replace(self.record, blocks=self._held)
        snapshot = self._snapshot.name if self._snapshot else ""
        answers = await self.link.ask_all(
            [
                ("SET", names.record(self.member), encode_record(self.record), "XX", "PX", ttl_ms),
                ("PEXPIRE", self._log, ttl_ms),
                ("PEXPIRE", names.snapshot(self.member, *self._covered), ttl_ms),
                ("XLEN", self._log),
                ("ZADD", names.epoch, "GT", self.record.epoch, "epoch"),
                ("ZSCORE", names.epoch, "epoch"),
                ("ZRANGE", names.members, 0, -1, "WITHSCORES"),
                ("SISMEMBER", names.draining, self.member),
                *([("PEXPIRE", snapshot, ttl_ms)] if snapshot else []),
                *([self._notice("record", self.member)] if self._changed else []),
                *(
                    [
                        ("ZADD", names.members, self._score, self.member),
                        ("PEXPIRE", names.members, 8 * ttl_ms),
                    ]
                    if self._registered
                    else []
                ),
            ]
        )
        self._changed = False
        self._next_beat = self._now() + settings.heartbeat_ms / 1e3
        there, log_there, covered, length, _, epoch, members, drain = answers[:8]
        await self._told(Beat(number_of(epoch), scores_of(members), bool(drain)))
        complete = there and log_there and (covered or not self.record.chunks)
        if self._lost or length != self.position - self._trimmed:
            raise _LostError
        if self._registered and not complete:
            raise _LostError

    def _notice(self, what: str, text: str | int) -> tuple[Any, ...]:
        return ("XADD", self._names.roster, "MAXLEN", "~", _ROSTER, "*", what, text)

    # --- changes

    async def _take(self) -> None:
        since, self._taken_s = self._taken_s, self._now()
        events = self._events.take()
        strict, self._surveyed = self._surveyed, self._snapshot is not None
        if any(event.kind == "cleared" for event in events):
            raise _LostError
        for some in portions(events, self._settings.batch_blocks):
            message, blocks, balance = await anyio.to_thread.run_sync(
                message_of, some, self.record.epoch, strict
            )
            self._held = max(0, self._held + balance)
            if blocks:
                self._queue.append((message, blocks, since))

    async def _send(self) -> None:
        while self._queue:
            some = list(self._queue)[:_AT_ONCE]
            answers = await self.link.ask_all(
                [
                    ("XADD", self._log, "NOMKSTREAM", f"{self.position + 1 + at}-0", "d", message)
                    for at, (message, _, _) in enumerate(some)
                ]
            )
            if not all(answers):
                raise _LostError
            for _ in some:
                self._sent()

    def _sent(self) -> None:
        _, blocks, since = self._queue.popleft()
        self.position += 1
        self._logged += blocks
        self.stamps[self.position] = since
        if len(self.stamps) > _STAMPS:
            del self.stamps[next(iter(self.stamps))]
        self._telemetry.add("directory_published_blocks", blocks)

    # --- snapshots

    async def _survey(self) -> None:
        """Begin a snapshot of what is there now."""
        self._surveyed = True
        name = self._names.snapshot(self.member, self.record.generation, self.position)
        self._snapshot = Snapshot(self._events, self.record.epoch, self.position, name)
        self._logged = 0
        await self._snapshot.begin()

    async def _write_pieces(self, snapshot: Snapshot) -> None:
        """Write some pieces; after the last one, others may use the snapshot."""
        first = snapshot.chunks == 0
        messages = await snapshot.pieces(_PIECES)
        if messages:
            await self.link.ask_all(
                [
                    *([("UNLINK", snapshot.name)] if first else []),
                    ("RPUSH", snapshot.name, *messages),
                    ("PEXPIRE", snapshot.name, self._settings.node_ttl_ms),
                ]
            )
        if snapshot.complete:
            await self._finish(snapshot)

    async def _finish(self, snapshot: Snapshot) -> None:
        """Make the snapshot the one that counts. The log keeps what was behind the one before."""
        names, ttl_ms = self._names, self._settings.node_ttl_ms
        before = self.record.snapshot
        self._held = self._held if self._registered else snapshot.holdings
        record = msgspec.structs.replace(
            self.record, snapshot=snapshot.base, chunks=snapshot.chunks, blocks=self._held
        )
        old = names.snapshot(self.member, *self._covered)
        await self.link.ask_all(
            [
                ("SET", names.record(self.member), encode_record(record), "PX", ttl_ms),
                ("ZADD", names.members, self._score, self.member),
                ("XTRIM", self._log, "MINID", before + 1),
                *([("UNLINK", old)] if self._registered and old != snapshot.name else []),
                *([] if self._registered else [self._notice("record", self.member)]),
            ]
        )
        self.record, self._trimmed, self._registered = record, before, True
        self._snapshot = None
        self._telemetry.add("directory_snapshots")

    def _say(self, connected: bool, problem: str = "") -> None:
        if connected != self.connected:
            self.connected = connected
            if connected:
                log.info("directory.connected", generation=self.record.generation)
            else:
                log.warning("directory.down", problem=problem)
