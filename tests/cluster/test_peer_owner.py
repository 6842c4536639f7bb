"""What an owner lends stays where it is while leased, and no longer; strangers get nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import numpy as np
import pytest
from peer_rig import INCARNATION, SECRET, Known, Owner, identity, keys_of, open_owner, open_reader
from rig import SPEC, STRIDE, pattern, prompt
from structlog.testing import capture_logs

from flexkv.cluster import peerwire as wire
from flexkv.cluster import server, tcp
from flexkv.cluster.fetching import PeerSettings
from flexkv.cluster.leases import Token
from flexkv.cluster.peerlink import Grant, Me, PeerLink
from flexkv.errors import CapacityError, ClosedError, ConfigError
from flexkv.model import DAMAGED, LANDED, MISSING, SKIPPED, SlotIds, Statuses

BLOCKS = 6
TOKENS = prompt(1, BLOCKS)


@asynccontextmanager
async def linked(owner: Owner) -> AsyncIterator[PeerLink]:
    """A reader's connections, without a store."""
    me = Me("reader", identity().digest(), SPEC.block_bytes, wire.Handshake(SECRET))
    link = PeerLink(owner.address, me, anyio.CapacityLimiter(1), 2, anyio.current_time)
    try:
        yield link
    finally:
        link.close()


async def lease(link: PeerLink, tokens: Any = TOKENS) -> Grant:
    keys = keys_of(tokens)
    return await link.lease(keys, incarnation=INCARNATION, epoch=1, deadline_s=60)


async def test_leased_blocks_stay_where_they_are_until_they_are_released() -> None:
    async with open_owner(host=24) as owner, linked(owner) as link:
        await owner.rig.put(TOKENS)
        grant = await lease(link)
        assert owner.pinned == BLOCKS
        with pytest.raises(CapacityError):
            await owner.rig.put(prompt(2, 20))
        arena = owner.rig.kv._stack.arena
        for i, slot in enumerate(grant.slots.tolist()):
            assert np.array_equal(arena.view(slot)[: SPEC.block_bytes], pattern(TOKENS, i))
        assert await link.release([grant.token, grant.token], epoch=1, deadline_s=60) == [
            True,
            False,
        ]
        assert owner.pinned == 0
        await owner.rig.put(prompt(2, 20))


async def test_a_lease_that_nobody_returns_ends_by_itself_and_its_token_is_refused() -> None:
    async with open_owner(ttl_s=0.05) as owner, linked(owner) as link:
        await owner.rig.put(TOKENS)
        grant = await lease(link)
        await owner.unpinned()
        assert owner.lender.leases.expired == 1
        assert await link.release([grant.token], epoch=1, deadline_s=60) == [False]


async def test_tokens_of_another_life_are_refused() -> None:
    async with open_owner() as owner, linked(owner) as link:
        await owner.rig.put(TOKENS)
        grant = await lease(link)
        old = Token(INCARNATION, grant.token.number + 1)
        assert await link.release([old], epoch=1, deadline_s=60) == [False]
        assert owner.pinned == BLOCKS
        assert await link.release([grant.token], epoch=1, deadline_s=60) == [True]


async def test_revoked_leases_are_given_back_and_nothing_more_is_lent() -> None:
    async with open_owner() as owner, linked(owner) as link:
        await owner.rig.put(TOKENS)
        await lease(link)
        owner.lender.close()
        await owner.unpinned()
        with pytest.raises(CapacityError):
            await lease(link)


async def test_what_readers_hold_at_once_is_limited_and_waited_for_until_the_deadline() -> None:
    async with open_owner(bytes_in_flight=8 * STRIDE) as owner:
        await owner.rig.put(TOKENS)
        keys = keys_of(TOKENS)
        first = await owner.lender.lend("a", keys, 20)
        second = await owner.lender.lend("b", keys, 20)
        assert [(x.statuses == LANDED).sum() for x in (first, second)] == [4, 4]
        with pytest.raises(CapacityError):
            await owner.lender.lend("c", keys, 0.01)
        async with anyio.create_task_group() as group:
            loans: list[Any] = []

            async def third() -> None:
                loans.append(await owner.lender.lend("c", keys, 20))

            group.start_soon(third)
            await anyio.wait_all_tasks_blocked()
            assert not loans
            assert first.lease is not None
            owner.lender.release([first.lease.token])
        assert (loans[0].statuses == LANDED).sum() == 4
        owner.lender.revoke()


async def test_a_reader_waits_for_what_it_holds_itself() -> None:
    async with open_owner(bytes_in_flight=12 * STRIDE) as owner:
        await owner.rig.put(TOKENS)
        keys = keys_of(TOKENS)
        first = await owner.lender.lend("a", keys, 60)
        with pytest.raises(CapacityError):
            await owner.lender.lend("a", keys[:1], 0.01)
        async with anyio.create_task_group() as group:
            loans: list[Any] = []

            async def second() -> None:
                loans.append(await owner.lender.lend("a", keys[:1], 60))

            group.start_soon(second)
            await anyio.wait_all_tasks_blocked()
            assert not loans
            assert first.lease is not None
            owner.lender.release([first.lease.token])
        assert loans[0].statuses.tolist() == [LANDED]
        owner.lender.revoke()


async def test_readers_hold_no_more_than_half_of_the_host() -> None:
    async with open_owner(host=12, bytes_in_flight=1000 * STRIDE) as owner:
        await owner.rig.put(TOKENS)
        for reader in ("a", "b"):
            await owner.lender.lend(reader, keys_of(TOKENS), 60)
        assert owner.pinned == 6
        with pytest.raises(CapacityError):
            await owner.lender.lend("c", keys_of(TOKENS), 0.01)
        owner.lender.revoke()


async def test_a_reader_that_does_not_read_holds_blocks_no_longer_than_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its socket takes a few KiB of 48; then the owner waits, until the lease is over."""
    monkeypatch.setattr(tcp, "_SOCKET_BYTES", 4096)
    tokens = prompt(1, 12)
    async with open_owner(ttl_s=0.3) as owner, linked(owner) as link:
        await owner.rig.put(tokens)
        line = await link._join()
        data = wire.keys_to_bytes(keys_of(tokens))
        await line.link.send(wire.pack(wire.Lease(1, INCARNATION, 1, data, 20_000, True)))
        with anyio.fail_after(90):
            while not len(owner.lender.leases):
                await anyio.lowlevel.checkpoint()
            await owner.unpinned()
        assert owner.server.sent_blocks == 0
        line.link.close()


async def test_what_is_on_disk_is_lent_also_where_the_host_has_no_room(tmp_path: Path) -> None:
    """As far as it has: the rest is not missing."""
    async with open_owner(tmp_path, host=24) as owner, linked(owner) as link:
        await owner.rig.put(TOKENS)
        await owner.rig.push_out(900)
        plan = owner.rig.kv.get_match(prompt(900, 22))  # of 24 blocks that the host holds
        grant = await lease(link)
        assert (grant.statuses == LANDED).sum() == 2
        assert (grant.statuses == SKIPPED).sum() == 4
        plan.cancel()
        await link.release([grant.token], epoch=1, deadline_s=60)
        await owner.unpinned()


async def test_what_cannot_be_brought_is_refused_and_not_left_pinned(tmp_path: Path) -> None:
    def closed(blocks: Any, keys: Any) -> Any:
        raise ClosedError("the manager is closing")

    async with open_owner(tmp_path, host=24) as owner, linked(owner) as link:
        await owner.rig.put(TOKENS)
        await owner.rig.push_out(900)
        owner.lender._promote = closed
        with pytest.raises(CapacityError):
            await lease(link)
        assert owner.pinned == 0


class Late:
    """A courier that moves bytes within one process, after the lease is over and the slot used."""

    name = "late"

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.reader: Any = None

    async def fetch(self, address: str, grant: Grant, offsets: Any, slots: SlotIds) -> Statuses:
        if address == "late":
            await self.owner.unpinned()
            await self.owner.rig.push_out(901)
        arena = self.owner.rig.kv._stack.arena
        for offset, slot in zip(offsets.tolist(), slots.tolist(), strict=True):
            self.reader.arena.view(slot)[:] = arena.view(offset // STRIDE)
        return np.zeros(len(slots), np.uint8)

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("place", ["in time", "late"])
async def test_another_engine_pulls_what_is_on_lease_and_nothing_of_what_is_not(
    place: str,
) -> None:
    """What it brought too late is not taken; TCP may bring it, as long as the owner has it."""
    known = Known()
    ttl_s = 0.2 if place == "late" else 20.0
    settings = PeerSettings(timeout_ms=20_000)
    async with open_owner(known=known, ttl_s=ttl_s) as owner:
        await owner.rig.put(TOKENS)
        known.hold(range(BLOCKS), 0)
        known.addresses[0, "late"] = place
        courier = Late(owner)
        async with open_reader(known, courier=lambda arena: courier, settings=settings) as reader:
            courier.reader = reader
            statuses = (await reader.read(TOKENS)).tolist()
        await owner.unpinned()
        assert DAMAGED not in statuses
        if place == "late":
            assert statuses.count(LANDED) == owner.server.sent_blocks
        else:
            assert statuses == [LANDED] * BLOCKS
            assert owner.server.sent_blocks == 0


async def test_clock_steps_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([3600.0, -3600.0] * 10_000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(steps))
    known = Known()
    async with open_owner(known=known, ttl_s=20) as owner, open_reader(known) as reader:
        await owner.rig.put(TOKENS)
        known.hold(range(BLOCKS), 0)
        async with linked(owner) as link:
            grant = await lease(link)
            assert (await reader.read(TOKENS)).tolist() == [LANDED] * BLOCKS
            assert owner.pinned == BLOCKS
            assert await link.release([grant.token], epoch=1, deadline_s=60) == [True]


# strangers


async def connected(owner: Owner) -> anyio.abc.SocketStream:
    host, port = tcp.parse(owner.address)
    return await anyio.connect_tcp(host, port)


async def ends(stream: anyio.abc.SocketStream) -> bytes:
    """Everything that comes until the owner ends the connection."""
    heard = b""
    with anyio.fail_after(90):
        try:
            while True:
                heard += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return heard


FRAME = b"FXP1"


@pytest.mark.parametrize(
    "said",
    [
        bytes(range(256)) * 16,
        FRAME + b"\xff\xff\xff\xff",
        FRAME + b"\0\0\0\0",
        FRAME + b"\x04\0\0\0" + b"\xc1\xc1\xc1\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["noise", "gigabytes", "nothing", "no message", "a browser"],
)
async def test_who_says_what_no_node_says_gets_a_challenge_and_nothing_else(said: bytes) -> None:
    async with open_owner() as owner:
        await owner.rig.put(TOKENS)
        stream = await connected(owner)
        await stream.send(said)
        heard = await ends(stream)
        await stream.aclose()
        assert len(heard) in (0, 8 + len(wire.pack(wire.Challenge(1, bytes(32)))))
        assert owner.pinned == 0
        async with linked(owner) as link:  # the others are served as before
            grant = await lease(link)
            assert len(grant.landed) == BLOCKS
            await link.release([grant.token], epoch=1, deadline_s=60)


async def test_who_is_silent_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_JOIN_S", 0.05)
    async with open_owner() as owner:
        stream = await connected(owner)
        assert len(await ends(stream)) > 0
        await stream.aclose()


async def test_there_are_only_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)
    async with open_owner() as owner:
        streams = [await connected(owner) for _ in range(2)]
        for stream in streams:
            await stream.receive()
        third = await connected(owner)
        assert await ends(third) == b""
        for stream in (*streams, third):
            await stream.aclose()


async def test_a_request_before_the_introduction_is_refused() -> None:
    async with open_owner() as owner:
        await owner.rig.put(TOKENS)
        stream = await connected(owner)
        packet = wire.pack(wire.Lease(1, INCARNATION, 1, bytes(16), 1000, True))
        await stream.send(FRAME + len(packet).to_bytes(4, "little") + packet)
        assert len(await ends(stream)) < 64
        await stream.aclose()


async def test_the_secret_is_never_logged() -> None:
    known = Known()
    with capture_logs() as logs:
        async with open_owner(known=known) as owner, open_reader(known, secret=b"wrong") as reader:
            await owner.rig.put(TOKENS)
            known.hold(range(BLOCKS), 0)
            await reader.read(TOKENS)
    assert [entry for entry in logs if entry["event"] == "peer.refused"]
    assert SECRET.decode() not in repr(logs)


@pytest.mark.parametrize("address", ["nowhere", "host:", ":7", "host:port", "host:99999"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        tcp.parse(address)


def test_an_address_in_use_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match="cannot listen"),
    ):
        tcp.listen_at("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("address", ["10.0.0.1:7411", "[::1]:80"])
def test_addresses_are_written_as_they_are_read(address: str) -> None:
    assert tcp.written(*tcp.parse(address)) == address


async def test_blocks_that_are_gone_are_missing() -> None:
    async with open_owner() as owner, linked(owner) as link:
        grant = await lease(link)
        assert grant.statuses.tolist() == [MISSING] * BLOCKS
        assert grant.token.number == 0
