"""Two managers of one cluster: what one has computed, the other one loads."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from cluster_rig import knows, matched, member, open_node, until
from rig import TOKENS_PER_BLOCK, Rig, prompt

from flexkv.cluster.admin import Admin
from flexkv.testing.remote import RedisServer


async def test_b_loads_from_the_memory_of_a_what_a_has_put(redis_server: RedisServer) -> None:
    tokens = prompt(1, 6)
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await a.put(tokens)
        await knows(b, tokens, 6)
        got = await b.get(tokens)
        assert got.loaded == 6 * TOKENS_PER_BLOCK
        assert got.by_tier == {"host": 0, "peer": 6}
        again = await b.get(tokens)  # what came over stays here: hot prefixes spread by use
        assert again.by_tier == {"host": 6}


async def test_b_loads_from_the_disk_of_a_what_left_its_memory(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    tokens = prompt(1, 6)
    node_a = open_node(redis_server, "a", tmp_path, host=8)
    async with node_a as a, open_node(redis_server, "b", host=16) as b:
        await a.put(tokens)
        await a.push_out()
        await knows(b, tokens, 6)
        got = await b.get(tokens)
        assert got.loaded == 6 * TOKENS_PER_BLOCK
        assert a.count("transfer_blocks", source="disk", target="host") == 6


async def test_own_blocks_and_those_of_others_make_one_prefix(redis_server: RedisServer) -> None:
    tokens = prompt(1, 6)
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await b.put(tokens[: 2 * TOKENS_PER_BLOCK])
        await a.put(tokens)
        await knows(b, tokens, 6)
        got = await b.get(tokens)
        assert got.loaded == 6 * TOKENS_PER_BLOCK
        assert got.by_tier == {"host": 2, "peer": 4}


async def test_a_match_asks_nobody(redis_server: RedisServer) -> None:
    tokens = prompt(1, 6)
    async with (
        open_node(redis_server, "a") as a,
        open_node(redis_server, "b", heartbeat_ms=60_000, node_ttl_ms=120_000) as b,
    ):
        await a.put(tokens)
        await knows(b, tokens, 6)
        asked = member(b).store.requests
        sent = b.count("directory_commands", link="publish")
        sent += b.count("directory_commands", link="follow")
        for _ in range(100):  # the loop does not run meanwhile: nothing could be sent or come
            assert matched(b, tokens) == 6
        after = b.count("directory_commands", link="publish")
        after += b.count("directory_commands", link="follow")
        assert (member(b).store.requests, after) == (asked, sent)
        await b.get(tokens)
        assert member(b).store.requests > asked


async def test_what_a_forgets_b_does_not_match(redis_server: RedisServer) -> None:
    tokens = prompt(1, 4)
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await a.put(tokens)
        await knows(b, tokens, 4)
        a.kv.remove(tokens)
        await knows(b, tokens, 0)


async def test_a_prefix_that_a_lost_meanwhile_is_a_miss_and_is_forgotten(
    redis_server: RedisServer,
) -> None:
    tokens = prompt(1, 4)
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await a.put(tokens)
        await knows(b, tokens, 4)
        with redis_server.paused():  # the news do not arrive
            a.kv.remove(tokens)
            got = await b.get(tokens)
            assert got.loaded == 0
            assert matched(b, tokens) == 0
        await b.check_idle()


async def test_when_a_leaves_its_blocks_are_not_matched_any_more(
    redis_server: RedisServer,
) -> None:
    tokens = prompt(1, 4)
    async with open_node(redis_server, "b") as b:
        async with open_node(redis_server, "a") as a:
            await a.put(tokens)
            await knows(b, tokens, 4)
        await knows(b, tokens, 0)
        peer = b.kv._stack.ledger.tiers["peer"]
        await until(lambda: peer.free == peer.capacity)


async def test_two_clusters_on_one_server_do_not_meet(redis_server: RedisServer) -> None:
    tokens = prompt(1, 4)
    async with (
        open_node(redis_server, "a", cluster_name="one") as a,
        open_node(redis_server, "b", cluster_name="two") as b,
        open_node(redis_server, "c", cluster_name="one") as c,
    ):
        await a.put(tokens)
        await knows(c, tokens, 4)
        assert matched(b, tokens) == 0


async def test_nodes_of_another_model_do_not_share(redis_server: RedisServer) -> None:
    tokens = prompt(1, 4)
    async with (
        open_node(redis_server, "a") as a,
        open_node(redis_server, "b", model="another") as b,
        open_node(redis_server, "c") as c,
    ):
        await a.put(tokens)
        await knows(c, tokens, 4)
        assert matched(b, tokens) == 0


async def test_without_its_redis_a_node_serves_itself(redis_server: RedisServer) -> None:
    tokens = prompt(1, 4)
    redis_server.kill()
    async with open_node(redis_server, "a") as a:
        await a.put(tokens)
        assert (await a.get(tokens)).loaded == 4 * TOKENS_PER_BLOCK


async def test_a_node_meets_the_others_when_its_redis_comes_up(redis_server: RedisServer) -> None:
    tokens = prompt(1, 4)
    redis_server.kill()
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await a.put(tokens)
        fresh = RedisServer(port=redis_server.port)
        try:
            await knows(b, tokens, 4)
            assert (await b.get(tokens)).loaded == 4 * TOKENS_PER_BLOCK
        finally:
            fresh.stop()


async def test_a_reset_forgets_what_others_hold(redis_server: RedisServer) -> None:
    tokens = prompt(1, 4)
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await a.put(tokens)
        await knows(b, tokens, 4)
        await b.kv.reset()
        assert matched(b, tokens) == 0
        other = prompt(2, 4)
        await a.put(other)
        await knows(b, other, 4)


async def test_a_reset_of_the_cluster_under_load_leaves_nothing_of_before(
    redis_server: RedisServer,
) -> None:
    old = [prompt(seed, 4) for seed in (1, 2)]
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        for rig, tokens in zip((a, b), old, strict=True):
            await rig.put(tokens)
        await knows(a, old[1], 4)
        await knows(b, old[0], 4)
        rounds = [0, 0]

        async def load(number: int, rig: Rig) -> None:
            while True:
                for tokens in old:
                    await rig.get(tokens)  # checks the bytes of what came
                rounds[number] += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(load, 0, a)
            group.start_soon(load, 1, b)
            await until(lambda: min(rounds) > 2)
            async with Admin(member(a)._settings) as admin:
                assert (await admin.reset(20_000))["waiting"] == []
            before = list(rounds)
            await until(lambda: all(n > m + 5 for n, m in zip(rounds, before, strict=True)))
            assert [matched(rig, tokens) for rig in (a, b) for tokens in old] == [0] * 4
            group.cancel_scope.cancel()
        assert member(a).epoch == member(b).epoch == 1
        fresh = prompt(3, 4)
        await a.put(fresh)
        await knows(b, fresh, 4)


async def test_a_prefetch_brings_blocks_of_others_into_our_memory(
    redis_server: RedisServer,
) -> None:
    tokens = prompt(1, 4)
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await a.put(tokens)
        await knows(b, tokens, 4)
        await b.kv.prefetch_async(tokens)
        assert (await b.get(tokens)).by_tier == {"host": 4}


@pytest.mark.parametrize("spill", ["through", "on_evict"])
async def test_blocks_of_others_are_stored_like_our_own(
    redis_server: RedisServer, tmp_path: Path, spill: str
) -> None:
    tokens = prompt(1, 4)
    node_b = open_node(redis_server, "b", tmp_path, spill=spill)
    async with open_node(redis_server, "a") as a, node_b as b:
        await a.put(tokens)
        await knows(b, tokens, 4)
        await b.get(tokens)
        await b.put(tokens)
        assert b.kv.usage()["disk"]["resident"] == 4


async def test_after_a_reset_of_its_own_a_node_knows_again_what_others_hold(
    redis_server: RedisServer,
) -> None:
    tokens = prompt(1, 4)
    async with open_node(redis_server, "a") as a, open_node(redis_server, "b") as b:
        await a.put(tokens)
        await knows(b, tokens, 4)
        await b.kv.reset()
        await knows(b, tokens, 4)
