"""A manager with a remote tier, on a real Redis: blocks that left the host come back from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import redis
from rig import STRIDE, TOKENS_PER_BLOCK, open_rig, prompt

from flexkv import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.testing.remote import RedisServer

BLOCKS = 6
TOKENS = BLOCKS * TOKENS_PER_BLOCK


def remote(server: RedisServer, blocks: int = 32) -> dict[str, Any]:
    options = {"url": server.url, "timeout_ms": 300, "retry_ms": 50, "failures": 2}
    return {
        "remote_backend": "redis",
        "remote_cache_bytes": blocks * STRIDE,
        "remote_options": options,
    }


async def test_what_left_the_host_comes_back_from_the_remote_tier(
    redis_server: RedisServer,
) -> None:
    async with open_rig(**remote(redis_server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded == TOKENS
        assert result.by_tier["remote"] > 0
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.dbsize() > BLOCKS


async def test_the_nearest_tier_is_read(redis_server: RedisServer, tmp_path: Path) -> None:
    async with open_rig(tmp_path, **remote(redis_server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded == TOKENS
        assert result.by_tier["disk"] > 0
        assert not result.by_tier.get("remote")


async def test_a_prefix_is_put_together_from_all_tiers(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """The disk has room for a few blocks only; leaves go first, so that it keeps the beginning."""
    async with open_rig(tmp_path, disk=10, **remote(redis_server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.put(prompt(2, 8))
        result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded == TOKENS
        assert sum(result.by_tier.values()) >= BLOCKS
        assert result.by_tier.get("remote")


async def test_the_share_of_this_cache_stays_within_its_size(redis_server: RedisServer) -> None:
    async with open_rig(**remote(redis_server, blocks=16)) as rig:
        for name in range(1, 9):
            await rig.put(prompt(name, BLOCKS))
            await rig.kv.flush()
            with redis.Redis.from_url(redis_server.url) as client:
                assert client.dbsize() <= 16
        assert rig.kv.usage()["remote"]["evicted"] > 0


async def test_a_dead_server_costs_misses_and_never_the_manager(redis_server: RedisServer) -> None:
    async with open_rig(**remote(redis_server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        redis_server.kill()
        with anyio.fail_after(10):
            result = await rig.get(prompt(1, BLOCKS))
        assert result.loaded < TOKENS
        with anyio.fail_after(10):  # local hits stay
            await rig.put(prompt(2, BLOCKS), durable=False)
            assert (await rig.get(prompt(2, BLOCKS))).loaded == TOKENS
            await rig.kv.flush()


async def test_a_manager_starts_without_its_server(redis_server: RedisServer) -> None:
    redis_server.kill()
    async with open_rig(**remote(redis_server)) as rig:
        with anyio.fail_after(10):
            await rig.put(prompt(1, BLOCKS), durable=False)
            assert (await rig.get(prompt(1, BLOCKS))).loaded == TOKENS
            await rig.kv.flush()


async def test_a_reset_forgets_the_remote_blocks(redis_server: RedisServer) -> None:
    async with open_rig(**remote(redis_server)) as rig:
        await rig.put(prompt(1, BLOCKS))
        with redis.Redis.from_url(redis_server.url) as client:
            assert client.dbsize() == BLOCKS
            await rig.kv.reset()
            assert client.dbsize() == 0
        assert (await rig.get(prompt(1, BLOCKS))).loaded == 0
        await rig.put(prompt(1, BLOCKS))
        await rig.push_out()
        assert (await rig.get(prompt(1, BLOCKS))).loaded == TOKENS


@pytest.mark.parametrize(
    "settings", [{"remote_backend": "redis"}, {"remote_cache_bytes": 4096 * 100}]
)
def test_half_a_remote_tier_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="remote_cache_bytes"):
        FlexKVConfig(**settings)
