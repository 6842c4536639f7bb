"""`flexkv cluster` against a real server with nodes on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest
from directory_rig import Node, chain, quick, running

from flexkv.testing.harness import Unsupported
from flexkv.testing.remote import RedisServer, free_port


@pytest.fixture
def server() -> Iterator[RedisServer]:
    try:
        running = RedisServer()
    except Unsupported as reason:
        pytest.skip(str(reason))
    yield running
    running.stop()


async def command(*words: str, code: int = 0) -> str:
    """What a command prints, in a process of its own, as the nodes go on meanwhile."""
    program = [sys.executable, "-c", "from flexkv.cli import app; app()", "cluster", *words]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(program, capture_output=True, text=True, timeout=90, check=False)

    done = await anyio.to_thread.run_sync(run)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 or done.stdout else done.stderr


async def test_a_cluster_is_looked_at_drained_and_reset(server: RedisServer) -> None:
    settings = quick(server.url, node_ttl_ms=60_000)
    one, two = Node("one", settings), Node("two", settings)
    one.store(chain(1, 20))
    async with running(one, two):
        await two.sees(one)
        await one.sees(two)
        status = json.loads(await command("status", "--url", server.url, "--json"))
        assert (status["nodes"], status["epoch"], status["blocks"]) == (2, 0, 20)
        found = json.loads(await command("nodes", "--url", server.url, "--json"))["nodes"]
        assert [node["node"] for node in found] == ["one", "two"]
        assert found[0]["addresses"] == {"tcp": "one:1"}
        assert "tcp=two:1" in await command("nodes", "--url", server.url)
        await command("drain", "one", "--url", server.url)
        with anyio.fail_after(20):
            while two.directory.nodes()["one"].state != "draining":  # noqa: ASYNC110
                await anyio.sleep(0.01)
        answer = json.loads(await command("reset", "--url", server.url, "--json"))
        assert answer == {"epoch": 1, "done": 2, "waiting": []}
        assert one.resets == two.resets == [1]
        assert one.truth() == set()


async def test_what_goes_wrong_is_one_line(server: RedisServer) -> None:
    missing = await command("drain", "nobody", "--url", server.url, code=1)
    assert "no node 'nobody' is alive" in " ".join(missing.split())
    gone = f"redis://:secret@127.0.0.1:{free_port()}/0"
    down = await command("status", "--url", gone, code=1)
    assert "does not answer" in " ".join(down.split())
    assert "secret" not in down
