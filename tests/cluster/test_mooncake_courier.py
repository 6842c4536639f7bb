"""Blocks of another node by Mooncake's Transfer Engine: one-sided, and given up when it is late."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from cluster_rig import knows, member, open_node, until
from peer_rig import Known, Owner, keys_of, open_owner, open_reader
from rig import SPEC, prompt
from structlog.testing import capture_logs

from flexkv.backends.remote.mooncake_process import HINT, installed
from flexkv.cluster.fetching import PeerSettings
from flexkv.cluster.mooncake_courier import MooncakeCourier, parse
from flexkv.cluster.peerlink import Grant
from flexkv.errors import ConfigError
from flexkv.memory import Arena
from flexkv.model import DAMAGED, LANDED, SlotIds, Statuses
from flexkv.protocols import BlockIO
from flexkv.testing.remote import RedisServer

pytestmark = pytest.mark.skipif(not installed(), reason=f"to test the courier: {HINT}")

BLOCKS = 6
ALL = range(BLOCKS)
PATIENT = PeerSettings(timeout_ms=30_000)


@pytest.fixture
def known() -> Known:
    return Known()


@asynccontextmanager
async def lending(known: Known, **settings: Any) -> AsyncIterator[tuple[Owner, MooncakeCourier]]:
    """An owner whose arena is registered, with a prompt in it."""
    async with open_owner(known=known, **settings) as owner:
        courier = MooncakeCourier(owner.rig.kv._stack.arena, SPEC.block_bytes)
        try:
            known.addresses[0, "mooncake"] = await courier.lend("127.0.0.1")
            await owner.rig.put(prompt(1, BLOCKS))
            known.hold(ALL, 0)
            yield owner, courier
        finally:
            await courier.aclose()


def fetching(timeout_ms: int = 30_000) -> Any:
    return lambda arena: MooncakeCourier(arena, SPEC.block_bytes, {"timeout_ms": timeout_ms})


async def test_blocks_come_into_their_slots_without_the_owner(known: Known) -> None:
    async with (
        lending(known) as (owner, _),
        open_reader(known, courier=fetching(), settings=PATIENT) as reader,
    ):
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
        assert (await reader.read(prompt(1, BLOCKS), [4, 1, 3])).tolist() == [LANDED] * 3
        assert owner.server.sent_blocks == 0
        await owner.unpinned()
        assert owner.lender.leases.expired == 0


async def test_several_batches_come_at_the_same_time(known: Known) -> None:
    async with (
        lending(known) as (owner, _),
        open_reader(known, courier=fetching(), settings=PATIENT) as reader,
    ):
        answers: list[list[int]] = []

        async def one(block: int) -> None:
            slot = np.array([block], np.uint32)
            batch = reader.batch(prompt(1, BLOCKS), slot)
            answers.append((await reader.store.read(batch)).tolist())

        async with anyio.create_task_group() as group:
            for block in ALL:
                group.start_soon(one, block)
        assert answers == [[LANDED]] * BLOCKS
        await owner.unpinned()


async def test_an_engine_that_stands_still_is_given_up_and_writes_nothing_later(
    known: Known,
) -> None:
    settings = PeerSettings(timeout_ms=30_000, failures=100)
    async with (
        lending(known) as (owner, lender),
        open_reader(known, courier=fetching(1000), settings=settings) as reader,
    ):
        assert lender.lending_pid is not None
        os.kill(lender.lending_pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(30):
                assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
            assert owner.server.sent_blocks == reader.store.fallback_blocks == BLOCKS
            reader.arena.rows(0, BLOCKS)[:] = 0xEE
            await owner.unpinned()
        finally:
            os.kill(lender.lending_pid, signal.SIGCONT)
        numbers = np.array(ALL, np.uint32)
        elsewhere = BlockIO(numbers + BLOCKS, numbers, keys_of(prompt(1, BLOCKS)))
        statuses: list[int] = []
        with anyio.fail_after(60):
            while statuses != [LANDED] * BLOCKS:
                statuses = (await reader.store.read(elsewhere)).tolist()
        assert (reader.arena.rows(0, BLOCKS) == 0xEE).all()


async def test_a_reader_that_gives_up_leaves_no_byte_to_land(known: Known) -> None:
    async with (
        lending(known) as (owner, lender),
        open_reader(known, courier=fetching(), settings=PATIENT) as reader,
    ):
        assert lender.lending_pid is not None
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
        os.kill(lender.lending_pid, signal.SIGSTOP)
        with anyio.fail_after(20):
            with anyio.move_on_after(0.3):
                await reader.read(prompt(1, BLOCKS))
        reader.arena.rows(0, BLOCKS)[:] = 0xEE
        os.kill(lender.lending_pid, signal.SIGCONT)
        await owner.unpinned()
        assert (reader.arena.rows(0, BLOCKS) == 0xEE).all()
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS


async def test_an_engine_that_was_killed_costs_no_block_and_no_pin_and_is_told_once(
    known: Known,
) -> None:
    """While it is away blocks come over TCP; it is tried again, without a word."""
    settings = PeerSettings(timeout_ms=30_000, retry_ms=1)
    with capture_logs() as logs:
        async with (
            lending(known) as (owner, lender),
            open_reader(known, courier=fetching(5000), settings=settings) as reader,
        ):
            assert lender.lending_pid is not None
            os.kill(lender.lending_pid, signal.SIGKILL)
            with anyio.fail_after(60):
                for _ in range(3):
                    statuses = await reader.read(prompt(1, BLOCKS))
                    assert statuses.tolist() == [LANDED] * BLOCKS
            assert reader.store.fallback_blocks == owner.server.sent_blocks == 3 * BLOCKS
            await owner.unpinned()
    assert [entry["event"] for entry in logs].count("peer.courier_down") == 1
    assert "peer.down" not in [entry["event"] for entry in logs]


async def test_an_engine_that_fetches_is_replaced_when_it_was_killed(known: Known) -> None:
    made: list[MooncakeCourier] = []

    def courier(arena: Arena) -> MooncakeCourier:
        made.append(fetching()(arena))
        return made[0]

    settings = PeerSettings(timeout_ms=30_000, retry_ms=1)
    async with (
        lending(known) as (owner, _),
        open_reader(known, courier=courier, settings=settings) as reader,
    ):
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
        for process in made[0]._fetching:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        with anyio.fail_after(60):
            assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
            sent = -1
            while owner.server.sent_blocks != sent:  # until nothing comes over TCP any more
                sent = owner.server.sent_blocks
                assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
        assert owner.server.sent_blocks <= 3 * BLOCKS


async def test_an_engine_that_others_read_from_comes_back_at_another_place(known: Known) -> None:
    places: list[str] = []

    def moved(place: str) -> None:
        places.append(place)
        known.addresses.pop((0, "mooncake"), None)
        if place:
            known.addresses[0, "mooncake"] = place
            back.set()

    settings = PeerSettings(timeout_ms=30_000, retry_ms=1)
    async with (
        lending(known) as (owner, lender),
        open_reader(known, courier=fetching(), settings=settings) as reader,
        anyio.create_task_group() as group,
    ):
        for life in (1, 2):
            back, before = anyio.Event(), lender.lending_pid
            if life == 1:
                group.start_soon(lender.watch, moved)
            assert before is not None
            os.kill(before, signal.SIGKILL)
            with anyio.fail_after(60):
                await back.wait()
            assert lender.lending_pid != before
            assert lender.restarts == life
            assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
            assert owner.server.sent_blocks == 0
        assert [bool(place) for place in places] == [False, True] * 2
        group.cancel_scope.cancel()


class Spoiled:
    """A courier that comes too late: the owner's slots were given to others meanwhile."""

    name = "mooncake"

    def __init__(self, inner: MooncakeCourier, owner: Owner) -> None:
        self.inner, self.owner = inner, owner

    async def lend(self, host: str) -> str:
        return await self.inner.lend(host)

    async def fetch(self, address: str, grant: Grant, offsets: Any, slots: SlotIds) -> Statuses:
        arena = self.owner.rig.kv._stack.arena
        arena.view(int(grant.slots[2]))[:] = 0x55
        return await self.inner.fetch(address, grant, offsets, slots)

    async def watch(self, moved: Any) -> None:
        await self.inner.watch(moved)

    async def aclose(self) -> None:
        await self.inner.aclose()


async def test_what_was_overwritten_before_it_was_read_is_not_taken(known: Known) -> None:
    async with lending(known) as (owner, _):

        def spoiled(arena: Arena) -> Spoiled:
            return Spoiled(MooncakeCourier(arena, SPEC.block_bytes, {"timeout_ms": 30_000}), owner)

        async with open_reader(known, courier=spoiled, settings=PATIENT) as reader:
            statuses = (await reader.read(prompt(1, BLOCKS))).tolist()
        assert statuses == [LANDED, LANDED, DAMAGED, LANDED, LANDED, LANDED]
        await owner.unpinned()


async def test_whole_nodes_read_each_other_through_it(redis_server: RedisServer) -> None:
    tokens, courier = prompt(1, BLOCKS), {"timeout_ms": 20_000}
    cluster = {
        "cluster_courier": "mooncake",
        "cluster_options": {"courier": courier},
        "peer_timeout_ms": 20_000,
    }
    async with (
        open_node(redis_server, "a", **cluster) as a,
        open_node(redis_server, "b", **cluster) as b,
    ):
        await a.put(tokens)
        await knows(b, tokens, BLOCKS)
        got = await b.get(tokens)
        assert got.loaded == len(tokens)
        assert got.by_tier == {"host": 0, "peer": BLOCKS}
        assert member(a).server.sent_blocks == 0

        def place() -> str | None:
            found = [name for name in member(b).holdings.nodes() if name.startswith("a/")]
            numbers = [member(b).holdings.join(name) for name in found]
            places = [member(b).address(number, "mooncake") for number in numbers]
            return next(filter(None, places), None)

        await until(lambda: place() is not None)  # a node that beats late is gone for a while
        before = place()
        engine = member(a)._courier
        assert isinstance(engine, MooncakeCourier)
        assert engine.lending_pid is not None
        os.kill(engine.lending_pid, signal.SIGKILL)
        with anyio.fail_after(60):
            while (after := place()) in (before, None):
                await anyio.lowlevel.checkpoint()
        parse(after or "")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"colour": "red"}, "colour"),
        ({"fetches": 0}, "fetches"),
        ({"timeout_ms": "soon"}, "timeout_ms"),
        ({"environment": {"MC_TCP": 1}}, "environment"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: dict[str, Any], what: str) -> None:
    arena = Arena(1, 4096, huge_pages=False)
    with pytest.raises(ConfigError, match=what):
        MooncakeCourier(arena, 4096, options)
    arena.close()


@pytest.mark.parametrize("address", ["", "10.0.0.1:12345", "10.0.0.1:12345/xyz", "/7f00"])
def test_addresses_of_another_form_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port/base"):
        parse(address)
    assert parse("10.0.0.1:12345/7f00") == ("10.0.0.1:12345", 0x7F00)
