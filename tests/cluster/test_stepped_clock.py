"""Wall clocks of hosts may step by an hour: of a node's, and of the directory server's."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from cluster_rig import knows, open_node
from redis.asyncio import Redis
from rig import TOKENS_PER_BLOCK, Rig, prompt
from test_two_processes import BLOCKS, Child, child

from flexkv.testing.remote import RedisServer

HOUR_S = 3600
TIMES = {"heartbeat_ms": 100, "node_ttl_ms": 1000}
TOKENS = prompt(1, BLOCKS)


class Clock:
    """The wall clock of processes that are begun with `environment`."""

    def __init__(self, folder: Path) -> None:
        library, self._file = folder / "stepped_clock.so", folder / "ahead"
        source = Path(__file__).with_name("stepped_clock.c")
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler, "a C compiler is part of the set-up"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "STEPPED_CLOCK": str(self._file)}

    def step(self, ahead_s: int) -> None:
        with self._file.open("r+b") as file:
            file.write(ahead_s.to_bytes(8, "little", signed=True))


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


@pytest.fixture
def begun_on_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is begun now has that clock."""
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)


async def ahead_s(a: Child) -> float:
    """By how much a node's clock is ahead of ours."""
    return float(await a.ask("time")) - time.time()


async def gets(b: Rig) -> None:
    """Load the prompt from the other node, and forget it here."""
    got = await b.get(TOKENS)
    assert got.loaded == BLOCKS * TOKENS_PER_BLOCK
    assert got.by_tier["peer"] == BLOCKS
    await b.push_out()


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_node_serves_and_is_heard_whatever_its_wall_clock_says(
    redis_server: RedisServer, clock: Clock, begun_on_it: None, step_s: int
) -> None:
    async with child(redis_server) as a, open_node(redis_server, "b", **TIMES) as b:
        await knows(b, TOKENS, BLOCKS)
        await gets(b)
        clock.step(step_s)
        assert abs(await ahead_s(a) - step_s) < 60
        await gets(b)
        await a.tell("gone")  # it pushes its prompt out: we hear of that
        await knows(b, TOKENS, 0)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_step_of_the_servers_clock_costs_misses_at_most_and_the_dead_are_forgotten(
    clock: Clock, begun_on_it: None, monkeypatch: pytest.MonkeyPatch, step_s: int
) -> None:
    server = RedisServer()
    for name in clock.environment:
        monkeypatch.delenv(name)
    try:
        async with child(server) as a, open_node(server, "b", **TIMES) as b:
            await knows(b, TOKENS, BLOCKS)
            clock.step(step_s)
            async with Redis.from_url(server.url) as link:
                assert abs((await link.time())[0] - time.time() - step_s) < 60
            await a.tell("more")
            await knows(b, prompt(2, BLOCKS), BLOCKS)
            await knows(b, TOKENS, BLOCKS)
            await gets(b)
            a.process.kill()
            await a.process.wait()
            await knows(b, TOKENS, 0)
    finally:
        server.stop()
