"""The mooncake store, against a real master and a real lender of memory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from remote_rig import BLOCKS, NUMBERS, opened

from flexkv.backends.remote.mooncake import MooncakeStore
from flexkv.backends.remote.mooncake_process import HINT, MooncakeProcess, installed
from flexkv.errors import ConfigError
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING
from flexkv.testing import StorageBackendTests
from flexkv.testing.harness import StorageHarness, Unsupported
from flexkv.testing.mooncake import MooncakeHarness, MooncakeServer

PATIENT_MS = 20_000  # for tests in which nobody is late


class TestMooncake(StorageBackendTests):
    @pytest.fixture
    def harness(self) -> StorageHarness:
        try:
            return MooncakeHarness(MooncakeStore)
        except Unsupported as reason:
            pytest.skip(str(reason))


@pytest.fixture
def server() -> Iterator[MooncakeServer]:
    try:
        running = MooncakeServer(segment_bytes=64 << 20)
    except Unsupported as reason:
        pytest.skip(str(reason))
    yield running
    running.stop()


async def until(verb: Callable[[list[int]], Awaitable[list[int]]], expected: list[int]) -> None:
    """Ask until the answer is `expected`: processes start and come back when they do."""
    answer: list[int] = []
    with anyio.fail_after(30):
        while answer != expected:
            answer = await verb(NUMBERS)
            await anyio.sleep(0.02)


async def test_what_one_process_stored_another_reads(server: MooncakeServer) -> None:
    options = {"master": server.address, "timeout_ms": PATIENT_MS}
    async with opened(MooncakeStore, **options) as one, opened(MooncakeStore, **options) as other:
        assert await other.read(NUMBERS) == [MISSING] * BLOCKS
        assert await one.write(NUMBERS) == [LANDED] * BLOCKS
        assert await other.read(NUMBERS) == [LANDED] * BLOCKS
        async with opened(MooncakeStore, prefix="elsewhere", **options) as stranger:
            assert await stranger.read(NUMBERS) == [MISSING] * BLOCKS


async def test_the_same_block_twice_in_a_batch_comes_twice(server: MooncakeServer) -> None:
    async with opened(MooncakeStore, master=server.address, timeout_ms=PATIENT_MS) as node:
        await node.write(NUMBERS)
        assert await node.read([1, 2, 1, 1, 99, 2, 99, 3]) == [LANDED] * 4 + [
            MISSING,
            LANDED,
            MISSING,
            LANDED,
        ]


async def test_memory_that_a_cache_lends_leaves_with_it(server: MooncakeServer) -> None:
    server.lender.kill()
    server.lender.wait()
    options = {"master": server.address, "timeout_ms": PATIENT_MS}
    async with opened(MooncakeStore, **options) as other:
        async with opened(MooncakeStore, segment_bytes=32 << 20, **options) as lender:
            await until(lender.write, [LANDED] * BLOCKS)  # the dead one's memory is offered a while
            await until(other.read, [LANDED] * BLOCKS)
        await until(other.read, [MISSING] * BLOCKS)


async def test_a_killed_master_fails_at_once_and_is_found_again(server: MooncakeServer) -> None:
    options = {"master": server.address, "timeout_ms": 1000, "failures": 2}
    async with opened(MooncakeStore, **options) as node:
        await until(node.write, [LANDED] * BLOCKS)
        server.kill()
        with anyio.fail_after(20):
            for _ in range(2):
                assert await node.read(NUMBERS) == [FAILED] * BLOCKS
        assert node.store.is_down
        with anyio.fail_after(0.5):  # nothing is tried
            assert await node.read(NUMBERS) == [FAILED] * BLOCKS
        server.start_master()
        server.start_lender()
        await until(node.read, [MISSING] * BLOCKS)  # it came back empty
        assert not node.store.is_down
        await until(node.write, [LANDED] * BLOCKS)
        await until(node.read, [LANDED] * BLOCKS)


async def test_who_stands_still_is_given_up_and_writes_nothing_later(
    server: MooncakeServer,
) -> None:
    async with opened(MooncakeStore, master=server.address, timeout_ms=1000) as node:
        await until(node.write, [LANDED] * BLOCKS)
        with server.paused():
            with anyio.fail_after(20):
                assert await node.read(NUMBERS) == [FAILED] * BLOCKS
            for slot in range(BLOCKS):
                node.arena.view(slot)[:] = 170
        await until(lambda _: node.ask([BLOCKS]), [MISSING])  # whatever was late has come by now
        assert all((node.arena.view(slot) == 170).all() for slot in range(BLOCKS))
        await until(node.read, [LANDED] * BLOCKS)


async def test_a_lender_that_died_costs_misses_and_never_wrong_bytes(
    server: MooncakeServer,
) -> None:
    async with opened(MooncakeStore, master=server.address, timeout_ms=1000) as node:
        await until(node.write, [LANDED] * BLOCKS)
        server.lender.kill()
        server.lender.wait()
        with anyio.fail_after(20):
            assert set(await node.read(NUMBERS)) <= {FAILED, MISSING}
        await until(node.read, [MISSING] * BLOCKS)


async def test_objects_of_another_size_are_damaged_and_leave(server: MooncakeServer) -> None:
    async with opened(MooncakeStore, master=server.address, timeout_ms=PATIENT_MS) as node:
        await node.write(NUMBERS)
        names = [name.decode() for name in node.store.names(node.batch(NUMBERS).keys)]
        assert sorted(server.names()) == sorted(names)
        assert server.ask("set", names[3], "00" * 100) == "0"
        assert server.ask("set", names[5], "00" * 100_000) == "0"
        statuses = await node.read(NUMBERS)
        assert [statuses[3], statuses[5]] == [DAMAGED] * 2
        assert statuses.count(LANDED) == BLOCKS - 2
        statuses = await node.read(NUMBERS)
        assert [statuses[3], statuses[5]] == [MISSING] * 2


async def test_a_store_without_room_fails_and_says_so(server: MooncakeServer) -> None:
    server.lender.kill()
    server.lender.wait()
    async with opened(MooncakeStore, master=server.address, timeout_ms=1000, failures=1) as node:
        assert await node.write(NUMBERS) == [FAILED] * BLOCKS
        assert node.store.is_down


async def test_a_store_opens_before_its_master(server: MooncakeServer) -> None:
    server.kill()
    async with opened(MooncakeStore, master=server.address, timeout_ms=500) as node:
        with anyio.fail_after(20):
            assert await node.read(NUMBERS) == [FAILED] * BLOCKS
        server.start_master()
        server.start_lender()
        await until(node.write, [LANDED] * BLOCKS)


async def test_when_its_process_is_killed_the_next_call_has_another(
    server: MooncakeServer,
) -> None:
    async with opened(MooncakeStore, master=server.address, timeout_ms=PATIENT_MS) as node:
        await node.write(NUMBERS)
        assert isinstance(node.store, MooncakeStore)
        first = node.store.child_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(node.read, [LANDED] * BLOCKS)
        assert node.store.child_pid not in (first, None)


OWNER = """
import anyio, sys
from remote_rig import opened, NUMBERS
from flexkv.backends.remote.mooncake import MooncakeStore
async def main():
    async with opened(MooncakeStore, master=sys.argv[1], timeout_ms=20_000) as node:
        await node.write(NUMBERS)
        print(f"child {node.store.child_pid} of ours\\n", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def test_its_process_ends_with_the_one_that_started_it(server: MooncakeServer) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, server.address],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline().split()[1])
    life = os.pidfd_open(child)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    ended, _, _ = select.select([life], [], [], 30)
    os.close(life)
    assert ended


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("master", "127.0.0.1"),
        ("master", "127.0.0.1:port"),
        ("segment_bytes", -1),
        ("replicas", 0),
        ("environment", {"MC_TCP_BIND_ADDRESS": 1}),
        ("colour", "red"),
    ],
)
async def test_settings_that_cannot_be_used_are_named(name: str, value: Any) -> None:
    if not installed():
        pytest.skip(f"without Mooncake nothing is read: {HINT}")
    with pytest.raises(ConfigError, match=name):
        async with opened(MooncakeStore, **{name: value}):
            pass


async def test_where_mooncake_is_missing_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    assert MooncakeStore.probe() == []
    with pytest.raises(ConfigError, match=r"flexkv\[mooncake\]"):
        async with opened(MooncakeStore):
            pass


def test_a_process_that_cannot_start_says_why() -> None:
    setup = {"kind": "cassette", "environment": {}, "verbose": False}
    process = MooncakeProcess(setup, [], lanes=1)
    with pytest.raises(ConnectionError, match="cassette"):
        process.call(0, 30.0, "read")
    process.close()
