"""The directory on a real server: what one node holds, the others know."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from directory_rig import Node, chain, quick, running

from flexkv.cluster.snapshot import Snapshot
from flexkv.cluster.wire import unpack
from flexkv.testing.harness import Unsupported
from flexkv.testing.remote import RedisServer


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    try:
        server = RedisServer()
    except Unsupported as reason:
        pytest.skip(str(reason))
    yield server
    server.stop()


@pytest.fixture
def url(shared: RedisServer, request: pytest.FixtureRequest) -> str:
    return shared.url


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A cluster of the test's own."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]


async def test_what_was_there_before_and_what_comes_and_goes_is_known(url: str, name: str) -> None:
    settings = quick(url, name=name)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 30))
    one.store(chain(1, 30), "disk", count=20)
    async with running(one, two):
        await two.sees(one)
        two.store(chain(2, 10))
        await one.sees(two)
        one.store(chain(3, 5))
        one.drop(chain(1, 30), keep=7)
        await two.sees(one)
        held = two.books.of("one")
        assert held is not None
        assert len(held) == 7 + 20 + 5
        for keys in (chain(1, 20), chain(3, 5)):
            before = np.zeros(2, np.uint64)
            for key in keys:
                assert two.books.parents[key.tobytes()] == before.tobytes()
                before = key
        assert two.directory.nodes()["one"].addresses == {"tcp": "one:1"}
        number = next(iter(two.books.numbers))
        assert two.directory.address(number, "tcp") == "one:1"
        assert two.directory.address(number, "rdma") is None


async def test_a_new_snapshot_replaces_the_log_and_newcomers_see_the_same(
    url: str, name: str
) -> None:
    """Enough changes for several snapshots; who joins then, and who was there, agree."""
    settings = quick(url, name=name, snapshot_share=0.05)
    one, two, late = (Node(word, settings) for word in ("one", "two", "late"))
    for seed in range(40):
        one.store(chain(seed, 100))
    async with running(one, two):
        await two.sees(one)
        for turn in range(24):
            for seed in range(20):
                one.drop(chain(seed, 100), keep=turn)
                one.store(chain(seed, 60 + turn))
            await two.sees(one)
        assert one.telemetry.value("directory_snapshots") >= 3
        assert two.telemetry.value("directory_rebuilds") == 1
        async with running(late):
            await late.sees(one, two)
    assert two.telemetry.value("directory_gaps") == 0


async def test_nothing_is_said_of_blocks_that_come_and_go_at_once(url: str, name: str) -> None:
    settings = quick(url, name=name, linger_ms=20)
    one, two = Node("one", settings), Node("two", settings)
    async with running(one, two):
        await two.sees(one)
        one.store(chain(1, 3))
        await two.sees(one)
        booked = two.telemetry.value("directory_applied_blocks")
        assert booked == 3
        one.store(chain(2, 100))
        one.drop(chain(2, 100))
        one.store(chain(3, 4))
        await two.sees(one)
        assert two.telemetry.value("directory_applied_blocks") == booked + 4


async def test_a_node_that_leaves_is_forgotten_at_once(url: str, name: str) -> None:
    settings = quick(url, name=name, node_ttl_ms=600_000)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 10))
    async with running(two):
        async with running(one):
            await two.sees(one)
        await two.sees()
        assert two.directory.nodes() == {}
        assert two.directory.address(0, "tcp") is None


async def test_clusters_of_other_names_and_prefixes_never_meet(url: str, name: str) -> None:
    here = quick(url, name=name)
    one, two = Node("one", here), Node("two", here)
    apart = Node("one", quick(url, name=name + "-b"))
    elsewhere = Node("one", quick(url, name=name, prefix="other"))
    one.store(chain(1, 10))
    apart.store(chain(2, 10))
    elsewhere.store(chain(3, 10))
    async with running(one, apart, elsewhere, two):
        await two.sees(one)
        two.store(chain(4, 10))
        await one.sees(two)
        assert apart.books.numbers == elsewhere.books.numbers == {}


async def test_nodes_of_another_model_are_ignored(url: str, name: str) -> None:
    settings = quick(url, name=name)
    one, two = Node("one", settings), Node("two", settings)
    other = Node("other", settings, identity=b"another")
    other.store(chain(2, 10))
    async with running(other, one, two):
        one.store(chain(1, 10))
        await two.sees(one)
        assert other.books.numbers == {}


async def test_a_second_life_of_a_node_is_another_node(url: str, name: str) -> None:
    settings = quick(url, name=name)
    old, new = Node("one", settings), Node("one", settings, incarnation=2)
    two = Node("two", settings)
    old.store(chain(1, 10))
    new.store(chain(2, 10))
    async with running(two, new):
        async with running(old):
            await two.books.until(lambda: len(two.books.numbers) == 2)
        await two.sees(new)


async def test_a_slow_listener_tells_everything_anew(url: str, name: str) -> None:
    settings = quick(url, name=name)
    one, two = Node("one", settings, queue_blocks=64), Node("two", settings)
    async with running(one, two):
        one.store(chain(1, 10))
        await two.sees(one)
        for seed in range(2, 12):
            one.store(chain(seed, 50))
        await two.sees(one)


async def test_a_local_reset_is_told_and_the_books_are_filled_again(url: str, name: str) -> None:
    settings = quick(url, name=name)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 10))
    two.store(chain(2, 10))
    async with running(one, two):
        await one.sees(two)
        await two.sees(one)
        one.index.clear()
        one.books.numbers.clear()
        one.books.held.clear()
        one.directory.start_over()
        one.store(chain(3, 10))
        await two.sees(one)
        await one.sees(two)


async def test_entries_that_hold_other_blocks_by_now_are_written_in_an_order_that_can_be_read() -> (
    None
):
    """Blocks leave and others take their entries between two pieces of a snapshot."""
    node = Node("one", quick("redis://127.0.0.1:1/0"), max_blocks=64)
    node.store(chain(1, 40))
    node.store(chain(3, 24))  # there is no other entry
    snapshot = Snapshot(node.log.listen(), 0, 1, "snapshot")
    await snapshot.begin()
    node.drop(chain(1, 40), keep=20)
    node.store(chain(2, 25), count=20)  # in the entries of the last ones
    node.drop(chain(1, 40))
    node.store(chain(2, 25))  # and of the first ones: children before their parents
    (message,) = await snapshot.pieces(4)
    delta = unpack(message, 0)
    keys = [key.tobytes() for key in delta.stored_keys]
    assert len(keys) == 25 + 24
    assert {(key, 0) for key in keys} <= node.truth()
    for at, parent in enumerate(delta.stored_parents):
        assert parent.tobytes() not in keys[at:], "a parent behind its child"
