"""A manager with a remote tier, on a real Redis and on a real Mooncake: blocks that left the host
come back from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import redis
from rig import STRIDE, TOKENS_PER_BLOCK, open_rig, prompt

from flexkv import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.testing.harness import Unsupported
from flexkv.testing.mooncake import MooncakeServer
from flexkv.testing.remote import RedisServer

BLOCKS = 6
TOKENS = BLOCKS * TOKENS_PER_BLOCK


class Redis:
    plugin = "redis"

    def __init__(self) -> None:
        self.server = RedisServer()
        self.options = {"url": self.server.url, "timeout_ms": 300, "failures": 2}
        self.kill, self.stop = self.server.kill, self.server.stop

    def count(self) -> int:
        """How many blocks there are."""
        with redis.Redis.from_url(self.server.url) as client:
            return int(client.dbsize())


class Mooncake:
    plugin = "mooncake"

    def __init__(self) -> None:
        self.server = MooncakeServer(segment_bytes=64 << 20)
        self.options = {"master": self.server.address, "timeout_ms": 2000, "failures": 1}
        self.kill, self.stop = self.server.kill, self.server.stop

    def count(self) -> int:
        """How many blocks there are."""
        return len(self.server.names())


@pytest.fixture(params=[Redis, Mooncake])
def server(request: pytest.FixtureRequest) -> Iterator[Redis | Mooncake]:
    try:
        running = request.param()
    except Unsupported as reason:
        pytest.skip(str(reason))
    yield running
    running.stop()


def remote(server: Redis | Mooncake, blocks: int = 32) -> dict[str, Any]:
    return {
        "remote_backend": server.plugin,
        "remote_cache_bytes": blocks * STRIDE,
        "remote_options": server.options | {"retry_ms": 50},
    }


async def test_what_left_the_host_comes_back_from_the_remote_tier(server: Redis | Mooncake) -> None:
    async with open_rig(**remote(server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded == TOKENS
        assert result.by_tier["remote"] > 0
    assert server.count() > BLOCKS


async def test_the_nearest_tier_is_read(server: Redis | Mooncake, tmp_path: Path) -> None:
    async with open_rig(tmp_path, **remote(server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded == TOKENS
        assert result.by_tier["disk"] > 0
        assert not result.by_tier.get("remote")


async def test_a_prefix_is_put_together_from_all_tiers(
    server: Redis | Mooncake, tmp_path: Path
) -> None:
    """The disk has room for a few blocks only; leaves go first, so that it keeps the beginning."""
    async with open_rig(tmp_path, disk=10, **remote(server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.put(prompt(2, 8))
        result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded == TOKENS
        assert sum(result.by_tier.values()) >= BLOCKS
        assert result.by_tier.get("remote")


async def test_the_share_of_this_cache_stays_within_its_size(server: Redis | Mooncake) -> None:
    async with open_rig(**remote(server, blocks=16)) as rig:
        for name in range(1, 9):
            await rig.put(prompt(name, BLOCKS))
            await rig.kv.flush()
            assert server.count() <= 16
        assert rig.kv.usage()["remote"]["evicted"] > 0


async def test_a_dead_server_costs_misses_and_never_the_manager(server: Redis | Mooncake) -> None:
    async with open_rig(**remote(server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        server.kill()
        with anyio.fail_after(10):
            result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded < TOKENS
        with anyio.fail_after(10):  # local hits stay
            await rig.put(prompt(2, BLOCKS), durable=False)
            assert (await rig.get(prompt(2, BLOCKS))).loaded == TOKENS
            await rig.kv.flush()


async def test_a_manager_starts_without_its_server(server: Redis | Mooncake) -> None:
    server.kill()
    async with open_rig(**remote(server)) as rig:
        with anyio.fail_after(10):
            await rig.put(prompt(1, BLOCKS), durable=False)
            assert (await rig.get(prompt(1, BLOCKS))).loaded == TOKENS
            await rig.kv.flush()


async def test_a_reset_forgets_the_remote_blocks(server: Redis | Mooncake) -> None:
    async with open_rig(**remote(server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        assert server.count() == BLOCKS
        await rig.kv.reset()
        assert server.count() == 0
        assert (await rig.get(prompt(1, BLOCKS))).loaded == 0
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        assert (await rig.get(prompt(1, BLOCKS))).loaded == TOKENS


# --- the remote halves of D05, D10 and D11, on real servers

NAMESPACES: list[tuple[str, ...] | None] = [
    ("a:b", "c"),
    ("a", "b:c"),
    ("a:b:c",),
    ("a", "b", "c"),
    ("",),
    None,
]


async def test_namespaces_are_apart_in_the_remote_tier(server: Redis | Mooncake) -> None:
    tokens = prompt(1, 2)
    async with open_rig(**remote(server)) as rig:
        await rig.put(tokens, NAMESPACES[1])
        await rig.push_out()
        for namespace in NAMESPACES:
            loaded = (await rig.get(tokens, namespace)).loaded
            assert loaded == (len(tokens) if namespace == NAMESPACES[1] else 0), namespace


@pytest.mark.parametrize("before", [0, 1, 3, 5])
async def test_blocks_that_went_there_in_parts_come_back_in_order(
    server: Redis | Mooncake, before: int
) -> None:
    tokens = prompt(1, 5)
    async with open_rig(**remote(server)) as rig:
        if before:
            await rig.put(tokens[: before * TOKENS_PER_BLOCK], durable=False)
        await rig.put(tokens)
        await rig.push_out()
        result = await rig.get(tokens, blocks=[3, 0, 8, 5, 6])
        assert result.loaded == len(tokens)
        assert result.by_tier["remote"] > 0


async def test_a_server_that_never_answers_costs_its_time_limit_and_recompute(
    server: Redis | Mooncake,
) -> None:
    async with open_rig(**remote(server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        with server.server.paused(), anyio.fail_after(20):
            for _ in range(6):
                assert (await rig.get(prompt(1, BLOCKS))).loaded < TOKENS
        await rig.check_idle()
        await rig.put(prompt(1, BLOCKS), durable=False)  # computed again
        assert (await rig.get(prompt(1, BLOCKS))).loaded == TOKENS


async def test_what_is_put_again_survives_its_late_deletion(
    server: Redis | Mooncake, tmp_path: Path
) -> None:
    """The deletion waits behind the disk's, which stands still until the new bytes have landed."""
    blocks = 4  # two batches of a spill: more are not written at once
    tokens = prompt(1, blocks)
    async with open_rig(tmp_path, **remote(server)) as rig:
        await rig.put(tokens)
        gate = rig.faults().hold("record")
        assert rig.kv.remove(tokens) == blocks * TOKENS_PER_BLOCK
        await rig.put(tokens, durable=False)
        with anyio.fail_after(30):
            while rig.count("transfer_blocks", source="host", target="remote") < 2 * blocks:
                await anyio.to_thread.run_sync(server.count)
        gate.open()
        await rig.kv.flush()
        assert server.count() == blocks


@pytest.mark.parametrize(
    "settings", [{"remote_backend": "redis"}, {"remote_cache_bytes": 4096 * 100}]
)
def test_half_a_remote_tier_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="remote_cache_bytes"):
        FlexKVConfig(**settings)
