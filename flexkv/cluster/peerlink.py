"""One peer, seen by a reader: connections to it, what it costs, and whether it is well.

`Me` (how we introduce ourselves) - `PeerLink.lease` (ask the owner to hold blocks; with `read`, its
answer fills our slots) - `release` - `Cost` (measured: latency and bytes per second) - `close`.
Every answer is checked against its question; a connection on which something is wrong is given up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv.cluster import peerwire as wire
from flexkv.cluster import tcp
from flexkv.cluster.blocks import Passage
from flexkv.cluster.leases import Token
from flexkv.errors import CapacityError, TransferError
from flexkv.model import LANDED, MISSING, SKIPPED, KeyArray, Statuses

T = TypeVar("T", wire.Leased, wire.Released)

_WEIGHT = 0.25  # of the newest sample in the averages


class RefusedError(TransferError):
    """The owner said no, and why."""


@dataclass(frozen=True, slots=True)
class Me:
    """Who asks, and for blocks of which identity and size."""

    node: str
    identity: bytes
    block_bytes: int
    handshake: wire.Handshake


@dataclass(slots=True)
class Cost:
    """What reads have taken: seconds until the answer began, and bytes per second from then on.

    0 stands for not measured yet: such a peer is tried before it is judged.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    pending_bytes: int = 0

    def measured(self, latency_s: float, size_bytes: int, elapsed_s: float) -> None:
        """Take a sample in."""
        self.latency_s = _blend(self.latency_s, latency_s)
        if size_bytes and elapsed_s > 0:
            self.bytes_per_s = _blend(self.bytes_per_s, size_bytes / elapsed_s)

    def expected_s(self, size_bytes: int) -> float:
        """Seconds that `size_bytes` more would take, behind what is on its way."""
        rate = self.bytes_per_s
        return self.latency_s + ((self.pending_bytes + size_bytes) / rate if rate else 0.0)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)


@dataclass(slots=True)
class Grant:
    """An owner's answer: a status for each key; token and slots there of those LANDED.

    `arrival` says which of them have come, in this order, and what checksums they should have;
    `error` why not all of them.
    """

    token: Token
    ttl_s: float
    statuses: Statuses
    landed: NDArray[np.int64]
    slots: NDArray[np.uint32]
    welcome: wire.Welcome
    answered_s: float = 0.0  # after it was asked
    arrival: Passage | None = None
    error: str = ""
    late: bool = False  # it was over before it was released
    told: NDArray[np.uint64] | None = None  # checksums, where it was released in time

    def offsets(self) -> NDArray[np.uint64]:
        """Where the blocks on lease begin, in bytes from the owner's `welcome.base`."""
        return self.slots.astype(np.uint64) * np.uint64(self.welcome.stride_bytes)


@dataclass(eq=False, slots=True)
class _Line:
    """A connection that has let us in; `used`: it has answered a question before."""

    link: tcp.Wire
    welcome: wire.Welcome
    used: bool = False


Room: TypeAlias = Callable[[NDArray[np.int64]], Passage]
"""Where blocks belong, given their positions among the keys."""


class PeerLink:
    """The connections to one address of one peer, at most `connections`."""

    def __init__(
        self,
        address: str,
        me: Me,
        threads: anyio.CapacityLimiter,
        connections: int,
        now: Callable[[], float],
    ) -> None:
        self.address, self._me, self._threads, self._now = address, me, threads, now
        self._places = anyio.CapacityLimiter(connections)
        self._idle: list[_Line] = []
        self._last_request = 0
        self._closed = False

    # --- verbs

    async def lease(
        self,
        keys: KeyArray,
        *,
        incarnation: int,
        epoch: int,
        deadline_s: float,
        room: Room | None = None,
    ) -> Grant:
        """Ask for blocks. With `room` their bytes come too, and the lease is over afterwards;
        without, it is the caller's to release.

        Raises:
            OSError, EOFError, ProtocolError: connection or answer are no good; TimeoutError: no
            answer in time. Once there is one, the grant says what went wrong.
            CapacityError: the owner has no room now.
            RefusedError: it is another incarnation or epoch.
        """
        grants: list[Grant] = []
        with anyio.move_on_after(deadline_s) as scope:
            limit_ms = max(1, int(deadline_s * 1e3))
            data = wire.keys_to_bytes(keys)
            request = wire.Lease(0, incarnation, epoch, data, limit_ms, room is not None)
            await self._converse(request, lambda line: self._leased(line, request, room, grants))
        if not grants:
            raise TimeoutError(f"no answer within {deadline_s:.3f} s")
        (grant,) = grants
        if scope.cancelled_caught and not grant.error:
            grant.error = f"not all bytes came within {deadline_s:.3f} s"
        return grant

    async def release(
        self, tokens: Sequence[Token], *, epoch: int, deadline_s: float
    ) -> list[bool]:
        """Give leases of one incarnation back; says which were open until now.

        Raises: as `lease`.
        """
        return (await self._released(tokens, epoch, deadline_s)).released

    async def settle(self, grant: Grant, *, epoch: int, deadline_s: float) -> None:
        """Give a lease back, and have told what its blocks are to be checked against.

        Raises: as `lease`.
        """
        answer = await self._released([grant.token], epoch, deadline_s)
        grant.late = not answer.released[0]
        if answer.checksums:
            count = len(grant.landed)
            told = wire.numbers_from_bytes(answer.checksums, "<u8", count)
            grant.told = told.astype(np.uint64)

    async def _released(
        self, tokens: Sequence[Token], epoch: int, deadline_s: float
    ) -> wire.Released:
        answers: list[wire.Released] = []

        async def hear(line: _Line) -> None:
            answer = await self._answer(line, request, wire.Released)
            if len(answer.released) != len(tokens):
                raise wire.ProtocolError(
                    f"{len(answer.released)} answers about {len(tokens)} leases"
                )
            answers.append(answer)

        numbers = [token.number for token in tokens]
        request = wire.Release(0, tokens[0].incarnation, epoch, numbers)
        with anyio.fail_after(deadline_s):
            await self._converse(request, hear)
        return answers[-1]

    def close(self) -> None:
        """Give up the connections that nobody uses, and each other one when it is returned."""
        self._closed = True
        self._forget_idle()

    # --- inside

    async def _converse(
        self, request: wire.Lease | wire.Release, hear: Callable[[_Line], Awaitable[None]]
    ) -> None:
        """Ask over a connection, and hear the answer. One that has lain idle may have ended long
        ago: then ask again, over a new one.
        """
        async with self._places:
            while True:
                line = self._idle.pop() if self._idle else await self._join()
                self._last_request += 1
                request.request = self._last_request
                try:
                    if line.welcome.incarnation != request.incarnation:
                        raise RefusedError(f"{self.address} is another incarnation")
                    await line.link.send(wire.pack(request))
                    await hear(line)
                except (ConnectionError, EOFError):
                    line.link.close()
                    if not line.used:
                        raise
                    self._forget_idle()
                    continue
                except CapacityError:
                    self._put_back(line)
                    raise
                except BaseException:
                    line.link.close()
                    raise
                self._put_back(line)
                return

    def _put_back(self, line: _Line) -> None:
        line.used = True
        if self._closed:
            line.link.close()
        elif not line.link.closed:
            self._idle.append(line)

    def _forget_idle(self) -> None:
        for line in self._idle:
            line.link.close()
        self._idle.clear()

    async def _leased(
        self, line: _Line, request: wire.Lease, room: Room | None, grants: list[Grant]
    ) -> None:
        asked = self._now()
        answer = await self._answer(line, request, wire.Leased)
        grant = _checked(answer, len(request.keys) // wire.KEY_BYTES, line.welcome)
        grant.answered_s = self._now() - asked
        grants.append(grant)
        if room is None or not len(grant.landed):
            return

        grant.arrival = arrival = room(grant.landed)
        try:
            await line.link.receive_blocks(arrival)
        except OSError as error:
            grant.error = repr(error)
        if arrival.whole < len(grant.landed):
            grant.error = grant.error or f"the connection ended after {arrival.moved_bytes} bytes"
            line.link.close()

    async def _answer(self, line: _Line, request: wire.Lease | wire.Release, kind: type[T]) -> T:
        """Receive the answer to a request.

        Raises:
            CapacityError, RefusedError: it was refused.
            ProtocolError: the answer is to something else.
        """
        answer = wire.unpack_for_reader(await line.link.receive())
        if isinstance(answer, (wire.Challenge, wire.Welcome)) or answer.request != request.request:
            raise wire.ProtocolError(f"{type(answer).__name__} answers no question of ours")
        if isinstance(answer, wire.Refusal):
            if answer.why == "busy":
                raise CapacityError(f"{self.address} has no room now")
            raise RefusedError(f"{self.address} has another {answer.why}")
        if not isinstance(answer, kind):
            raise wire.ProtocolError(f"{type(answer).__name__} came, not {kind.__name__}")
        return answer

    async def _join(self) -> _Line:
        """Connect, and prove to each other who we are."""
        link = await tcp.connect_to(self.address, self._threads)
        me = self._me
        try:
            challenge = wire.unpack_for_reader(await link.receive())
            if not isinstance(challenge, wire.Challenge):
                raise wire.ProtocolError("the first word is no challenge")
            ours = me.handshake.nonce()
            facts = (challenge.nonce, ours, me.identity, me.node.encode())
            proof = me.handshake.prove("reader", *facts)
            version = wire.PROTOCOL_VERSION
            hello = wire.Hello(version, me.node, me.identity, me.block_bytes, ours, proof)
            await link.send(wire.pack(hello))
            welcome = wire.unpack_for_reader(await link.receive())
            if not isinstance(welcome, wire.Welcome) or welcome.version != version:
                raise wire.ProtocolError("no welcome of our version came")
            if not me.handshake.holds(welcome.proof, "owner", *facts, welcome.node.encode()):
                raise wire.ProtocolError("the other side does not know our secret")
        except BaseException:
            link.close()
            raise
        return _Line(link, welcome)


def _checked(answer: wire.Leased, count: int, welcome: wire.Welcome) -> Grant:
    """Take an answer apart.

    Raises:
        ProtocolError: its parts do not fit each other, or what was asked.
    """
    statuses = wire.numbers_from_bytes(answer.statuses, "u1", count).astype(np.uint8)
    landed = np.flatnonzero(statuses == LANDED)
    if len(landed) < count:
        known = len(landed) + np.count_nonzero((statuses == MISSING) | (statuses == SKIPPED))
        if known != count:
            raise wire.ProtocolError(f"statuses {statuses} are none of an owner's")
    if len(landed) and not answer.token:
        raise wire.ProtocolError("blocks without a lease")
    return Grant(
        Token(welcome.incarnation, answer.token),
        answer.ttl_ms / 1e3,
        statuses,
        landed,
        wire.numbers_from_bytes(answer.slots, "<u4", len(landed)).astype(np.uint32),
        welcome,
    )
