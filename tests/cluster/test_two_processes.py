"""A node in another process: its memory, its disk, and its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from cluster_rig import SOON_S, knows, open_node
from rig import TOKENS_PER_BLOCK, prompt

from flexkv.testing.remote import RedisServer

CHILD = Path(__file__).parent / "node_child.py"
BLOCKS = 6


class Child:
    """The other process."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self.process, self._said = process, BufferedByteReceiveStream(process.stdout)

    async def says(self) -> str:
        with anyio.fail_after(2 * SOON_S):
            return (await self._said.receive_until(b"\n", 1000)).decode()

    async def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        await self.process.stdin.send(f"{word}\n".encode())
        return await self.says()

    async def tell(self, word: str) -> None:
        assert await self.ask(word) == word


@asynccontextmanager
async def child(server: RedisServer, folder: Path | None = None) -> AsyncIterator[Child]:
    command = [sys.executable, str(CHILD), server.url, "a", str(folder or ""), str(BLOCKS)]
    async with await anyio.open_process(command, stderr=subprocess.DEVNULL) as process:
        found = Child(process)
        try:
            assert await found.says() == "stored"
            yield found
        finally:
            if process.returncode is None:
                process.kill()


async def test_blocks_come_from_the_memory_and_then_from_the_disk_of_another_process(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    tokens = prompt(1, BLOCKS)
    async with child(redis_server, tmp_path) as a:
        for _ in ("memory", "disk"):
            async with open_node(redis_server, "b") as b:
                await knows(b, tokens, BLOCKS)
                got = await b.get(tokens)
                assert got.loaded == BLOCKS * TOKENS_PER_BLOCK
                assert got.by_tier["peer"] == BLOCKS
            await a.tell("gone")


async def test_a_process_that_was_killed_costs_a_miss_and_is_forgotten(
    redis_server: RedisServer,
) -> None:
    tokens = prompt(1, BLOCKS)
    times = {"heartbeat_ms": 100, "node_ttl_ms": 500}
    async with child(redis_server) as a, open_node(redis_server, "b", **times) as b:
        await knows(b, tokens, BLOCKS)
        a.process.kill()
        await a.process.wait()
        got = await b.get(tokens)
        assert (got.loaded, got.timed_out) == (0, False)
        await knows(b, tokens, 0)
