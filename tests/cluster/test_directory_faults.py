"""The directory when things fail: servers, other nodes, and what they write."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
import redis
from directory_rig import Node, chain, quick, running, until_killed

from flexkv.cluster.admin import Admin
from flexkv.cluster.beat import GENERATION
from flexkv.cluster.redisclient import LinkError
from flexkv.cluster.settings import ClusterSettings, Names, member_of
from flexkv.cluster.wire import encode_record
from flexkv.errors import ConfigError, InputError
from flexkv.testing.harness import Unsupported
from flexkv.testing.remote import RedisServer, free_port


@pytest.fixture
def start() -> Iterator[Callable[..., RedisServer]]:
    started: list[RedisServer] = []

    def starting(*options: str, **place: Any) -> RedisServer:
        try:
            started.append(RedisServer(*options, **place))
        except Unsupported as reason:
            pytest.skip(str(reason))
        return started[-1]

    yield starting
    for server in started:
        server.stop()


@pytest.fixture
def server(start: Callable[..., RedisServer]) -> RedisServer:
    return start()


def client(server: RedisServer) -> redis.Redis:
    return redis.Redis(port=server.port)


async def eventually(true: Callable[[], Any]) -> None:
    """Wait for something that nobody announces: another process, or a counter."""
    with anyio.fail_after(20):
        while not true():  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_a_server_that_is_killed_and_comes_back_empty_is_filled_again(
    start: Callable[..., RedisServer],
) -> None:
    server = start()
    settings = quick(server.url)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two):
        await two.sees(one)
        server.kill()
        await eventually(lambda: not one.directory.connected and not two.directory.connected)
        assert two.books.of("one") == one.truth(), "what was known of others is still believed"
        one.store(chain(2, 20))
        one.drop(chain(1, 20), keep=5)
        start(port=server.port)
        await two.sees(one)
        await one.sees(two)


async def test_a_flushed_server_is_filled_again(server: RedisServer) -> None:
    settings = quick(server.url)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two):
        await two.sees(one)
        generation = one.directory.record.generation
        with client(server) as other:
            other.flushall()
        await eventually(lambda: one.directory.record.generation > generation)
        one.store(chain(2, 5))
        await two.sees(one)
        late = Node("late", settings)
        async with running(late):
            await late.sees(one, two)


async def test_a_lost_end_of_a_log_is_told_anew(server: RedisServer) -> None:
    """As after a failover to a replica that had not received everything."""
    settings = quick(server.url)
    one, two = Node("one", settings), Node("two", settings)
    async with running(one, two):
        await two.sees(one)
        one.store(chain(1, 20))
        await two.sees(one)
        record = one.directory.record
        name = Names(settings).log("one/0000000000000001", record.generation)
        with client(server) as other:
            (last,) = other.xrevrange(name, count=1)
            other.xdel(name, last[0])
        one.store(chain(2, 20))
        await two.sees(one)
        await eventually(lambda: one.directory.record.generation > record.generation)
        late = Node("late", settings)
        async with running(late):
            await late.sees(one, two)


async def test_a_silent_server_stops_nothing_here_and_is_caught_up_with(
    server: RedisServer,
) -> None:
    settings = quick(server.url, timeout_ms=200)
    one, two = Node("one", settings), Node("two", settings)
    async with running(one, two):
        await two.sees(one)
        with server.paused():
            one.store(chain(1, 20))
            await eventually(lambda: not one.directory.connected)
            one.drop(chain(1, 20), keep=3)
        await two.sees(one)


async def test_a_manager_starts_without_a_server(start: Callable[..., RedisServer]) -> None:
    port = free_port()
    settings = quick(f"redis://127.0.0.1:{port}/0")
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two):
        await anyio.lowlevel.checkpoint()
        start(port=port)
        await two.sees(one)


async def test_a_node_that_died_is_forgotten_after_its_time(server: RedisServer) -> None:
    settings = quick(server.url, node_ttl_ms=300)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    two.store(chain(2, 20))
    async with running(two):
        async with until_killed(one):
            await two.sees(one)
        await two.sees()
        with client(server) as other:
            mine = [key for key in other.scan_iter() if b"one" in key]
        assert mine == [], "its records have expired"
        async with until_killed(one):  # as if it had been stopped meanwhile
            one.store(chain(3, 20))
            await two.sees(one)


@pytest.mark.parametrize("damage", ["record", "log", "snapshot", "member", "foreign entry"])
async def test_what_others_write_is_ignored_when_it_is_no_message(
    server: RedisServer, damage: str
) -> None:
    settings = quick(server.url)
    one, two, bad = Node("one", settings), Node("two", settings), Node("bad", settings)
    one.store(chain(1, 20))
    bad.store(chain(2, 20))
    names, member = Names(settings), "bad/0000000000000001"
    async with until_killed(bad):
        await eventually(lambda: bad.directory.record.chunks == 1)
    record = bad.directory.record
    with client(server) as other:
        other.set(names.record(member), encode_record(record))
        for name in (names.log(member, 1), names.snapshot(member, 1, 1)):
            other.persist(name)
        if damage == "record":
            other.set(names.record(member), b"\xc6\xff\xff\xff\xff")
        elif damage == "log":
            other.xadd(names.log(member, 1), {"d": b"\x98" + b"\x00" * 9}, id="2-0")
        elif damage == "snapshot":
            other.lset(names.snapshot(member, 1, 1), 0, b"\xdd\xff\xff\xff\xff")
        elif damage == "member":
            other.zadd(names.members, {b"\xff../{x}": 1, b"x" * 5000: 2, "a/zz": GENERATION})
        else:
            other.xadd(names.roster, {b"record": b"\xff" * 100, b"what": b"ever"})
            other.xadd(names.log(member, 1), {"other": b""}, id="2-0")
    async with running(two, one):
        await eventually(lambda: two.books.of("one") == one.truth())
        if damage in ("record", "log", "snapshot", "foreign entry"):
            await eventually(lambda: any(_rejected(two)))
        held = two.books.of("bad")
        assert held in (None, set(), bad.truth())
        one.store(chain(3, 20))
        await eventually(lambda: two.books.of("one") == one.truth())


def _rejected(node: Node) -> list[float]:
    return [
        value
        for key, value in node.telemetry.counters.items()
        if key[0] == "directory_rejected" and value
    ]


async def test_a_record_under_anothers_name_is_refused(server: RedisServer) -> None:
    settings = quick(server.url)
    one, two = Node("one", settings), Node("two", settings)
    async with running(one, two):
        await two.sees(one)
        forged = msgspec.structs.replace(one.directory.record, addresses={"tcp": "evil:1"})
        with client(server) as other:
            name = "else/0000000000000007"
            other.set(Names(settings).record(name), encode_record(forged))
            other.zadd(Names(settings).members, {name: GENERATION})
        await eventually(lambda: any(_rejected(two)))
        await two.sees(one)
        assert set(two.directory.nodes()) == {"one"}


async def test_nodes_of_versions_around_ours_are_followed_and_of_another_major_ignored(
    server: RedisServer,
) -> None:
    settings = quick(server.url, node_ttl_ms=60_000)
    changes: dict[str, dict[str, Any]] = {
        "newer": {"colour": "blue", "quota": {"a": 1}},
        "older": {"state": None, "blocks": None},
        "foreign": {"version": 2},
    }
    nodes = {name: Node(name, settings) for name in changes}
    for number, (name, node) in enumerate(nodes.items()):
        node.store(chain(number, 20))
        place = Names(settings).record(member_of(name, 1))
        async with until_killed(node):
            await eventually(lambda node=node: node.directory.record.chunks == 1)
            with client(server) as other:
                await eventually(lambda place=place, other=other: other.exists(place))
        with client(server) as other:
            fields = msgspec.msgpack.decode(other.get(place)) | changes[name]
            kept = {field: value for field, value in fields.items() if value is not None}
            other.set(place, msgspec.msgpack.encode(kept), keepttl=True)
    ours = Node("ours", settings)
    ours.store(chain(9, 20))
    late = Node("late", settings)
    async with running(ours, late):
        await ours.sees(nodes["newer"], nodes["older"], late)
        await late.sees(nodes["newer"], nodes["older"], ours)
        await eventually(lambda: any(_rejected(ours)))
        assert {"newer", "older"} <= set(ours.directory.nodes())
        assert "foreign" not in ours.directory.nodes()


# reset and drain


async def test_a_reset_drops_everything_everywhere_before_anything_new_is_said(
    server: RedisServer,
) -> None:
    settings = quick(server.url)
    nodes = one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    two.store(chain(2, 20))
    async with running(*nodes):
        await two.sees(one)
        await one.sees(two)
        async with Admin(settings) as admin:
            answer = await admin.reset(20_000)
            assert answer == {"epoch": 1, "done": 2, "waiting": []}
            assert [record.epoch for record in await admin.nodes()] == [1, 1]
        assert one.resets == two.resets == [1]
        assert one.directory.epoch == two.directory.epoch == 1
        one.store(chain(3, 4))
        await two.sees(one)
        await one.sees(two)


async def test_a_node_of_an_older_epoch_is_ignored_until_it_has_dropped_all(
    server: RedisServer,
) -> None:
    settings = quick(server.url)
    one, old = Node("one", settings, epoch=5), Node("old", settings, epoch=3)
    one.store(chain(1, 20))
    old.store(chain(2, 20))
    before = old.truth()
    seen: list[set[tuple[bytes, int]]] = []
    apply = one.books.apply

    def watching(number: int, delta: Any, now: float) -> None:
        seen.append({(key.tobytes(), 0) for key in delta.stored_keys})
        apply(number, delta, now)

    one.books.apply = watching  # type: ignore[method-assign]
    async with running(one):
        await eventually(lambda: one.directory.record.chunks == 1)
        async with running(old):
            await old.sees(one)
            assert (old.resets, one.resets) == ([5], [])
            old.store(chain(3, 20))
            await one.sees(old)
    assert seen
    assert not any(keys & before for keys in seen)


async def test_an_emptied_server_learns_the_epoch_from_the_nodes(server: RedisServer) -> None:
    settings = quick(server.url)
    one = Node("one", settings, epoch=7)
    async with running(one), Admin(settings) as admin:
        await eventually(lambda: one.directory.record.snapshot)
        with client(server) as other:
            other.flushall()
            await eventually(lambda: other.zcard(Names(settings).members))
        assert (await admin.reset(20_000))["epoch"] == 8
        assert one.resets == [8]


async def test_a_node_drains_when_it_is_asked_to_and_can_be_kept(server: RedisServer) -> None:
    settings = quick(server.url)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two), Admin(settings) as admin:
        await two.sees(one)
        await admin.drain("one")
        await eventually(lambda: two.directory.nodes()["one"].state == "draining")
        await two.sees(one)
        assert (await admin.status())["draining"] == 1
        await admin.drain("one", undo=True)
        await eventually(lambda: two.directory.nodes()["one"].state == "up")
        with pytest.raises(InputError, match="there are: one, two"):
            await admin.drain("three")


async def test_a_node_that_was_draining_when_it_died_is_none_when_it_is_started_anew(
    server: RedisServer,
) -> None:
    settings = quick(server.url)
    one, two = Node("one", settings), Node("two", settings)

    def state() -> str:
        record = two.directory.nodes().get("one")
        return record.state if record else "gone"

    async with running(two), Admin(settings) as admin:
        async with until_killed(one):
            await eventually(lambda: state() == "up")
            await admin.drain("one")
            await eventually(lambda: state() == "draining")
        await eventually(lambda: state() == "gone")
        async with running(Node("one", settings, incarnation=2)):
            await eventually(lambda: state() != "gone")
            await admin.drain("two")  # so that a whole heartbeat has passed
            await eventually(lambda: two.directory.record.state == "draining")
            assert state() == "up"


# the ways to a server


async def test_users_passwords_and_files(start: Callable[..., RedisServer], tmp_path: Path) -> None:
    user = ["kv", "on", ">sesame", "resetkeys", "~{flexkv:default}:*", "+@all", "-@dangerous"]
    server = start("--user", "default", "off", "--user", *user)
    (tmp_path / "secret").write_text("sesame\n")
    settings = quick(server.url, username="kv", password_file=str(tmp_path / "secret"))
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two), Admin(settings) as admin:
        await two.sees(one)
        await one.sees(two)
        assert (await admin.status())["nodes"] == 2
        assert (await admin.reset(20_000))["waiting"] == []
    async with Admin(quick(server.url, username="kv", password="wrong")) as admin:
        with pytest.raises(LinkError, match="refuses the user or the password") as caught:
            await admin.nodes()
        assert "wrong" not in str(caught.value)
    assert "sesame" not in repr(settings)


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    paths = str(folder / f"{name}.crt"), str(folder / f"{name}.key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=test",
        "-addext",
    ]
    command += ["subjectAltName=IP:127.0.0.1", "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True)
    return paths


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
async def test_tls_with_a_user_and_a_certificate_of_an_unknown_authority(
    start: Callable[..., RedisServer], tmp_path: Path
) -> None:
    (good, key), (bad, _) = certificate(tmp_path, "good"), certificate(tmp_path, "bad")
    user = ["--user", "default", "off", "--user", "kv", "on", ">sesame", "~{flexkv:default}:*"]
    port = str(free_port())
    options = ["--tls-port", port, "--tls-cert-file", good, "--tls-key-file", key]
    try:
        start(*user, "+@all", *options, "--tls-ca-cert-file", good, "--tls-auth-clients", "no")
    except RuntimeError:
        pytest.skip("this redis-server has no TLS")
    (tmp_path / "secret").write_text("sesame\n")
    secret: dict[str, Any] = {"username": "kv", "password_file": str(tmp_path / "secret")}
    settings = quick(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={good}", **secret)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two):
        await two.sees(one)
    stranger = quick(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={bad}", **secret)
    with anyio.fail_after(20):
        async with Admin(stranger) as admin:
            with pytest.raises(LinkError, match=r"(?i)certificate") as caught:
                await admin.nodes()
    assert "sesame" not in str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
@pytest.mark.parametrize("kind", ["clusters", "sentinels"])
async def test_tls_to_every_server_of_several(
    start: Callable[..., RedisServer], tmp_path: Path, kind: str
) -> None:
    good, key = certificate(tmp_path, "good")
    port, watch = free_port(), free_port()
    files = ["--tls-cert-file", good, "--tls-key-file", key, "--tls-ca-cert-file", good]
    files += ["--tls-auth-clients", "no"]
    more = ["--cluster-enabled", "yes", "--cluster-port", str(free_port()), "--tls-cluster", "yes"]
    try:
        server = start("--tls-port", str(port), *files, *(more if kind == "clusters" else []))
    except RuntimeError:
        pytest.skip("this redis-server has no TLS")
    if kind == "clusters":
        with client(server) as other:
            other.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            state = b"cluster_state:ok"
            await eventually(lambda: state in other.execute_command("CLUSTER", "INFO"))
        place = f"clusters://127.0.0.1:{port}"
    else:
        path = tmp_path / "sentinel.conf"
        path.write_text(f"tls-replication yes\nsentinel monitor kv 127.0.0.1 {port} 1\n")
        start("--sentinel", "--tls-port", str(watch), *files, file=path)
        place = f"sentinels://127.0.0.1:{watch}/kv"
    settings = quick(f"{place}?ssl_ca_certs={good}")
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two):
        await two.sees(one)
    async with Admin(quick(place)) as admin:  # an authority that nobody has named
        with pytest.raises(LinkError, match=r"(?i)certificate|no master"):
            await admin.nodes()


async def test_redis_cluster(start: Callable[..., RedisServer]) -> None:
    server = start("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with client(server) as other:
        other.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await eventually(lambda: b"cluster_state:ok" in other.execute_command("CLUSTER", "INFO"))
    settings = quick(f"cluster://127.0.0.1:{server.port}")
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two), Admin(settings) as admin:
        await two.sees(one)
        await one.sees(two)
        one.store(chain(2, 20))
        await two.sees(one)
        assert (await admin.status())["nodes"] == 2


@pytest.mark.slow
async def test_a_failover_by_sentinels(start: Callable[..., RedisServer], tmp_path: Path) -> None:
    master = start()
    replica = start("--replicaof", "127.0.0.1", str(master.port), "--repl-diskless-sync-delay", "0")
    port = free_port()
    path = tmp_path / "sentinel.conf"
    path.write_text(
        f"sentinel monitor kv 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 2000\n"
    )
    start("--sentinel", port=port, file=path)
    with client(replica) as other:
        await eventually(lambda: other.info("replication")["master_link_status"] == "up")
    settings = quick(f"sentinel://127.0.0.1:{port}/kv", node_ttl_ms=20_000)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two):
        await two.sees(one)
        master.kill()
        one.store(chain(2, 20))
        await two.sees(one)
        with client(replica) as other:
            assert other.info("replication")["role"] == "master"


@pytest.mark.parametrize(
    ("setting", "value", "what"),
    [
        ("name", "two words", "must be a word"),
        ("prefix", "a{b}", "must be a word"),
        ("node_ttl_ms", 1500, "at least two heartbeats"),
        ("batch_blocks", 5000, "from 1 to 4096"),
        ("snapshot_share", 0.0, "snapshot_share"),
        ("url", "http://x", "url must be"),
        ("url", "sentinel://host:1", "url must be"),
        ("password_file", "/nowhere/at/all", "cannot read the password file"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting: str, value: object, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        ClusterSettings(**{setting: value})  # type: ignore[arg-type]
