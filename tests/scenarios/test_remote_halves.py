"""What D02, D05, D10 and D11 ask of a remote tier, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import redis
from fakes import FaultyDevice, plugged
from rig import STRIDE, TOKENS_PER_BLOCK, Rig, open_rig, pattern, prompt, slots_of

from flexkv.testing.remote import RedisServer

TARGETS = [7, 2, 9, 4]
TOKENS = prompt(1, len(TARGETS))


def remote(server: RedisServer, **options: Any) -> dict[str, Any]:
    """Settings of a rig whose third tier is on `server`; one failure must not close the door."""
    given = {"url": server.url, "timeout_ms": 2000, "failures": 1000} | options
    return {
        "remote_backend": "redis",
        "remote_cache_bytes": 32 * STRIDE,
        "remote_options": given,
    }


def name_of(rig: Rig, block: int) -> bytes:
    """What the server calls a block of TOKENS."""
    plan = rig.kv.get_match(TOKENS)
    plan.cancel()
    (name,) = rig.kv._stack.engine.stores["remote"].names(plan.keys[block : block + 1])
    assert isinstance(name, bytes)
    return name


@contextmanager
def unreadable(server: RedisServer, name: bytes) -> Iterator[None]:
    """Have the server answer with an error where it had a value."""
    with redis.Redis.from_url(server.url) as client:
        value = client.get(name)
        assert value is not None
        client.delete(name)
        client.lpush(name, b"no string")
        try:
            yield
        finally:
            client.set(name, value)


async def only_remote(rig: Rig) -> None:
    """Store TOKENS and push them out of the host."""
    await rig.put(TOKENS)
    await rig.push_out()


async def test_d02_a_read_that_fails_for_a_moment(redis_server: RedisServer) -> None:
    async with open_rig(**remote(redis_server)) as rig:
        await only_remote(rig)
        with unreadable(redis_server, name_of(rig, 2)):
            result = await rig.get(TOKENS, blocks=TARGETS)
        assert (result.matched, result.loaded) == (16, 8)
        assert result.failed_device_blocks.tolist() == [TARGETS[2]]
        assert rig.device.holds_sentinel(TARGETS[2])
        assert rig.count("failed_blocks", source="remote", target="host") == 1
        again = await rig.get(TOKENS, blocks=TARGETS)
        assert again.loaded == 16, "the stored block was still good"


@pytest.mark.parametrize("how", ["damaged", "missing"])
async def test_d02_a_block_that_is_not_what_was_stored(redis_server: RedisServer, how: str) -> None:
    async with open_rig(**remote(redis_server)) as rig:
        await only_remote(rig)
        with redis.Redis.from_url(redis_server.url) as client:
            if how == "damaged":
                client.setrange(name_of(rig, 2), 200, b"other bytes")
            else:
                client.delete(name_of(rig, 2))
        result = await rig.get(TOKENS, blocks=TARGETS)
        assert result.loaded == 8
        assert result.failed_device_blocks.tolist() == [TARGETS[2]]
        assert rig.device.holds_sentinel(TARGETS[2])
        await rig.put(TOKENS)
        await rig.push_out(901)
        assert (await rig.get(TOKENS, blocks=TARGETS)).loaded == 16


async def test_d02_a_device_copy_that_fails(redis_server: RedisServer) -> None:
    """The second of two copies; over one connection the blocks come in their order."""
    with plugged(FaultyDevice) as device:
        settings = remote(redis_server, connections=1)
        async with open_rig(device_backend=device, **settings) as rig:
            await only_remote(rig)
            rig.kv._stack.device.failures = 1
            rig.kv._stack.device.skip = 1
            result = await rig.get(TOKENS, blocks=TARGETS)
            assert result.loaded == 8
            assert result.failed_device_blocks.tolist() == TARGETS[2:]
            assert all(rig.device.holds_sentinel(block) for block in TARGETS[2:])
            assert (await rig.get(TOKENS, blocks=TARGETS)).loaded == 16, "not the store's fault"


async def test_d05_only_the_same_namespace_hits(redis_server: RedisServer) -> None:
    distinct = [("a:b", "c"), ("a", "b:c"), ("a:b:c",), ("a", "b", "c"), ("",), ()]
    tokens = prompt(1, 2)
    for number, stored in enumerate(distinct):
        async with open_rig(**remote(redis_server, prefix=f"only{number}")) as rig:
            await rig.put(tokens, stored)
            await rig.push_out()
            for asked in [*distinct, None]:
                plan = rig.kv.get_match(tokens, namespace=asked)
                assert plan.matched == (8 if (asked or ()) == stored else 0), (stored, asked)
                plan.cancel()
            result = await rig.get(tokens, stored)
            assert (result.loaded, result.by_tier) == (8, {"host": 0, "remote": 2})


async def test_d05_all_namespaces_side_by_side(redis_server: RedisServer) -> None:
    distinct = [("a:b", "c"), ("a", "b:c"), ("a:b:c",), ("a", "b", "c"), ("",), ()]
    tokens = prompt(1, 2)
    async with open_rig(**remote(redis_server)) as rig:
        for namespace in distinct:
            await rig.put(tokens, namespace)
        await rig.push_out()
        for namespace in distinct:
            assert (await rig.get(tokens, namespace)).loaded == 8
        with redis.Redis.from_url(redis_server.url) as client:
            assert client.dbsize() == 2 * len(distinct) + 8


@pytest.mark.parametrize("cached", [0, 1, 3, 5])
async def test_d10_blocks_the_store_lacked_come_back_in_order(
    redis_server: RedisServer, cached: int
) -> None:
    """The server is full when the first blocks are put, and has room when all of them are."""
    tokens, targets = prompt(1, 5), [3, 0, 8, 5, 6]
    async with open_rig(host=16, **remote(redis_server)) as rig:
        with redis.Redis.from_url(redis_server.url) as client:
            client.config_set("maxmemory", "1")
            await rig.put(tokens[: cached * TOKENS_PER_BLOCK], durable=False)
            await rig.kv.flush()
            assert rig.kv.usage()["remote"]["resident"] == client.dbsize() == 0
            client.config_set("maxmemory", "0")
        await rig.put(tokens)
        assert rig.kv.usage()["remote"]["resident"] == 5
        await rig.push_out()
        result = await rig.get(tokens, blocks=targets)
        assert (result.loaded, result.by_tier) == (20, {"host": 0, "remote": 5})
        for i, block in enumerate(targets):
            assert np.array_equal(rig.device.read(block), pattern(tokens, i))


async def test_d11_a_server_that_never_answers(redis_server: RedisServer) -> None:
    """Six times the same request, each over within its limit; late answers land nowhere."""
    settings = remote(redis_server) | {"transfer_timeout_ms": 100}
    async with open_rig(**settings) as rig:
        await only_remote(rig)
        rig.device.wipe()
        transfers = []
        with redis_server.paused():
            for _ in range(6):
                ticks = await _ticks_while(rig, transfers)
                assert ticks, "the loop stalled until the deadline"
        for transfer in transfers:
            await transfer.quiesced()
        assert all(rig.device.holds_sentinel(block) for block in TARGETS), "a late answer landed"
        await rig.check_idle()
    async with open_rig(**remote(redis_server)) as rig:  # the same request again, as if it were new
        await only_remote(rig)
        result = await rig.get(TOKENS, blocks=TARGETS)
        assert (result.loaded, result.timed_out) == (16, False)


async def _ticks_while(rig: Rig, transfers: list[Any]) -> int:
    """Get TOKENS from a server that stands still; count what else the loop did meanwhile."""
    loop, ticks = asyncio.get_running_loop(), 0

    def tick() -> None:
        nonlocal ticks, timer
        ticks += 1
        timer = loop.call_later(0.01, tick)

    timer = loop.call_later(0.01, tick)
    transfers.append(rig.kv.get_async(TOKENS, slots_of(TARGETS)))
    result = await transfers[-1]
    timer.cancel()
    assert (result.loaded, result.timed_out) == (0, True)
    assert result.failed_device_blocks.tolist() == TARGETS
    return ticks
