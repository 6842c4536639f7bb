"""Remote stores against real servers: what they give back, and what they do when servers do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import obstore
import pytest
import redis
from obstore.store import from_url
from remote_rig import BLOCKS, NUMBERS, SPEC, opened

from flexkv.backends.remote.breaker import Breaker
from flexkv.backends.remote.objects import ObjectStore, sweep
from flexkv.backends.remote.redis import RedisStore
from flexkv.errors import ConfigError
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING
from flexkv.testing import StorageBackendTests
from flexkv.testing.harness import StorageHarness, Unsupported
from flexkv.testing.remote import ObjectHarness, RedisHarness, RedisServer, free_port


class TestRedis(StorageBackendTests):
    @pytest.fixture
    def harness(self) -> StorageHarness:
        try:
            return RedisHarness(RedisStore)
        except Unsupported as reason:
            pytest.skip(str(reason))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    try:
        running = RedisServer()
    except Unsupported as reason:
        pytest.skip(str(reason))
    yield running
    running.stop()


async def test_what_one_process_stored_another_reads(server: RedisServer) -> None:
    async with (
        opened(RedisStore, url=server.url) as one,
        opened(RedisStore, url=server.url) as other,
    ):
        assert await one.write(NUMBERS) == [LANDED] * BLOCKS
        assert await other.read(NUMBERS) == [LANDED] * BLOCKS


async def test_another_identity_or_prefix_is_never_found(server: RedisServer) -> None:
    async with (
        opened(RedisStore, url=server.url) as one,
        opened(RedisStore, url=server.url, prefix="elsewhere") as other,
    ):
        await one.write(NUMBERS)
        assert await other.read(NUMBERS) == [MISSING] * BLOCKS


async def test_a_killed_server_fails_at_once_and_is_found_again(server: RedisServer) -> None:
    async with opened(RedisStore, url=server.url, failures=2) as node:
        await node.write(NUMBERS)
        server.kill()
        for _ in range(2):
            assert await node.read(NUMBERS) == [FAILED] * BLOCKS
        assert node.store.is_down
        with anyio.fail_after(0.05):  # not even a connection is tried
            assert await node.read(NUMBERS) == [FAILED] * BLOCKS
        again = RedisServer(port=server.port)
        try:
            statuses: list[int] = []
            with anyio.fail_after(10):
                while statuses != [MISSING] * BLOCKS:  # it came back empty
                    await anyio.sleep(0.05)
                    statuses = await node.read(NUMBERS)
            assert not node.store.is_down
            assert await node.write(NUMBERS) == [LANDED] * BLOCKS
        finally:
            again.stop()


async def test_a_server_that_stands_still_is_given_up_in_time(server: RedisServer) -> None:
    async with opened(RedisStore, url=server.url) as node:
        await node.write(NUMBERS)
        with server.paused(), anyio.fail_after(3):
            assert await node.read(NUMBERS) == [FAILED] * BLOCKS
        assert (
            await node.read(NUMBERS) == [LANDED] * BLOCKS
        )  # late answers went with the connection


async def test_damage_is_dropped_on_the_server(server: RedisServer) -> None:
    async with opened(RedisStore, url=server.url) as node:
        await node.write(NUMBERS)
        with redis.Redis.from_url(server.url) as client:
            names = sorted(client.keys("flexkv:*"))
            client.setrange(names[3], 100, b"x")
            client.set(names[4], b"short")
            client.set(names[5], b"")
        expected = [LANDED] * 3 + [DAMAGED] * 3 + [LANDED] * 2
        assert sorted(await node.read(NUMBERS)) == sorted(expected)
        assert sorted(await node.read(NUMBERS)) == sorted([LANDED] * 5 + [MISSING] * 3)


async def test_values_expire(server: RedisServer) -> None:
    async with opened(RedisStore, url=server.url, ttl_s=100) as node:
        await node.write([1])
        with redis.Redis.from_url(server.url) as client:
            (name,) = client.keys("flexkv:*")
            assert 0 < client.ttl(name) <= 100


async def test_a_full_server_refuses_and_counts_as_failing(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", "100kb")
        client.config_set("maxmemory-policy", "noeviction")
    async with opened(RedisStore, url=server.url) as node:
        assert await node.write(NUMBERS) == [FAILED] * BLOCKS


async def test_passwords_come_from_a_file_and_are_not_shown(tmp_path: Path) -> None:
    try:
        server = RedisServer("--requirepass", "open sesame")
    except Unsupported as reason:
        pytest.skip(str(reason))
    path = tmp_path / "password"
    path.write_text("open sesame\n")
    try:
        async with opened(RedisStore, url=server.url, password_file=str(path)) as node:
            assert await node.write(NUMBERS) == [LANDED] * BLOCKS
            assert "sesame" not in repr(node.store.settings)
        async with opened(RedisStore, url=server.url, password="wrong") as node:
            assert await node.write(NUMBERS) == [FAILED] * BLOCKS
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("url", "http://127.0.0.1"),
        ("url", "redis://127.0.0.1:port"),
        ("url", "sentinel://127.0.0.1:26379"),
        ("prefix", "two words"),
        ("timeout_ms", 0),
        ("connections", "many"),
        ("ttl_s", -1),
        ("password file", "/no/such/file"),
        ("colour", "red"),
    ],
)
async def test_settings_that_cannot_be_used_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        async with opened(
            RedisStore, **{"url": "redis://127.0.0.1:1", name.replace(" ", "_"): value}
        ):
            pass


# --- servers that lie


def liar(answer: Callable[[socket.socket], None]) -> int:
    """Answer connections with `answer`; the port."""
    listener = socket.create_server(("127.0.0.1", free_port()))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(5)
                try:
                    connection.recv(1 << 16)
                    answer(connection)
                    while connection.recv(1 << 16):
                        pass
                except OSError:
                    pass

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


SIZE = SPEC.block_bytes + 64


@pytest.mark.parametrize(
    ("what", "answer"),
    [
        ("garbage", lambda c: c.sendall(b"\x00\xff" * 4000)),
        ("a line without end", lambda c: c.sendall(b"$" + b"1" * 5000)),
        ("a size beyond all limits", lambda c: c.sendall(b"$99999999999\r\n")),
        ("a negative size", lambda c: c.sendall(b"$-7\r\n")),
        ("an error", lambda c: c.sendall(b"-LOADING wait\r\n")),
        ("half a value", lambda c: (c.sendall(b"$%d\r\nabc" % SIZE), c.shutdown(socket.SHUT_WR))),
        ("nothing", lambda c: None),
        ("an end", lambda c: c.close()),
    ],
)
async def test_a_server_that_answers_nonsense_costs_misses(what: str, answer: Any) -> None:
    async with opened(RedisStore, url=f"redis://127.0.0.1:{liar(answer)}") as node:
        with anyio.fail_after(5):
            statuses = await node.read(NUMBERS)
        assert LANDED not in statuses, what
        assert FAILED in statuses


async def test_the_blocks_of_another_question_are_damaged() -> None:
    """Whole values, of the right size, with good heads: of other keys."""

    def answer(connection: socket.socket) -> None:
        connection.sendall((b"$%d\r\n" % SIZE + b"FXRB" + bytes(SIZE - 4) + b"\r\n") * BLOCKS)

    async with opened(RedisStore, url=f"redis://127.0.0.1:{liar(answer)}", connections=1) as node:
        assert DAMAGED in await node.read(NUMBERS)
        assert LANDED not in await node.read(NUMBERS)


# --- the breaker


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3, retry_s=1.0)
    assert not breaker.failed(0.0)
    assert not breaker.failed(0.0)
    breaker.succeeded()
    assert not breaker.failed(0.0)
    assert not breaker.failed(0.0)
    assert breaker.admits(0.0)
    assert breaker.failed(0.0)
    assert breaker.is_open


def test_an_open_breaker_lets_one_attempt_through_for_each_period_which_doubles() -> None:
    breaker = Breaker(1, retry_s=1.0, longest_s=4.0)
    assert breaker.failed(0.0)
    attempts = []
    for tenth in range(1, 200):
        now = tenth / 10
        if breaker.admits(now):
            attempts.append(now)
            breaker.failed(now)
    assert attempts == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]
    assert breaker.succeeded()
    assert breaker.admits(19.1)


# --- objects


class TestObjects(StorageBackendTests):
    @pytest.fixture
    def harness(self) -> StorageHarness:
        return ObjectHarness(ObjectStore)


def test_a_sweep_counts_what_is_there_and_removes_the_oldest(tmp_path: Path) -> None:
    store = from_url(tmp_path.as_uri())
    for number in range(10):
        obstore.put(store, f"flexkv/ours/{number}", bytes(100))
        os.utime(tmp_path / f"flexkv/ours/{number}", (1000 + number, 1000 + number))
    obstore.put(store, "elsewhere/1", bytes(1000))
    assert sweep(store, "flexkv", 550) == 5
    left = sorted(path.name for path in (tmp_path / "flexkv").rglob("*") if path.is_file())
    assert left == ["5", "6", "7", "8", "9"]
    assert (tmp_path / "elsewhere/1").exists()
    assert sweep(store, "flexkv", 550) == 0


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def test_objects_of_all_caches_stay_below_the_cap(tmp_path: Path) -> None:
    cap = 20 * SIZE
    options = {"size_cap_bytes": cap, "connections": 2}
    for cache in range(3):
        async with opened(ObjectStore, url=tmp_path.as_uri(), **options) as node:
            for turn in range(3):
                first = 100 * cache + 8 * turn
                numbers = [number % 255 for number in range(first, first + 8)]
                assert await node.write(numbers) == [LANDED] * BLOCKS
    assert 0 < size_of(tmp_path) <= cap + cap // 10


async def test_a_service_that_is_not_there_costs_misses(tmp_path: Path) -> None:
    options = {"endpoint": f"http://127.0.0.1:{free_port()}", "region": "x"}
    options |= {"access_key_id": "id", "secret_access_key": "open sesame"}
    async with opened(ObjectStore, url="s3://bucket/path", options=options) as node:
        assert "sesame" not in repr(node.store.settings)
        with anyio.fail_after(10):
            assert await node.read(NUMBERS) == [FAILED] * BLOCKS


@pytest.mark.parametrize("url", ["s4://bucket", "redis://127.0.0.1", "not a url"])
async def test_urls_of_other_services_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        async with opened(ObjectStore, url=url):
            pass


async def test_an_option_that_the_service_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="colour"):
        async with opened(ObjectStore, url="s3://bucket", options={"colour": "red"}):
            pass


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, Any]]:
    """A bucket of a local S3 server."""
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                ask = urllib.request.Request(f"{url}/flexkv-test", method="PUT")
                urllib.request.urlopen(ask, timeout=5).close()
                break
            except urllib.error.URLError:
                assert server.poll() is None, "the S3 server ended"
                with suppress(subprocess.TimeoutExpired):
                    server.wait(0.1)
        keys = {"access_key_id": "id", "secret_access_key": "secret", "region": "us-east-1"}
        yield {"endpoint": url, **keys}
    finally:
        server.kill()
        server.wait()


async def test_blocks_in_s3_come_back(bucket: dict[str, Any]) -> None:
    options = {"options": bucket, "timeout_ms": 5000}
    async with opened(ObjectStore, url="s3://flexkv-test/caches", **options) as node:
        assert await node.read([1, 2]) == [MISSING] * 2
        assert await node.write(NUMBERS) == [LANDED] * BLOCKS
        assert await node.read(NUMBERS) == [LANDED] * BLOCKS
        assert (await node.store.discard(node.batch([0, 99]))).tolist() == [LANDED, MISSING]
        assert await node.read([0, 1]) == [MISSING, LANDED]
