"""A node in another process: its memory, its disk, and its end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from cluster_rig import SOON_S, knows, matched, member, open_node, until
from rig import TOKENS_PER_BLOCK, prompt

from flexkv.cluster.admin import Admin
from flexkv.cluster.epochs import NAME, EpochFile
from flexkv.testing.remote import RedisServer

CHILD = Path(__file__).parent / "node_child.py"
BLOCKS = 6
TIMES = {"heartbeat_ms": 100, "node_ttl_ms": 500}


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
async def child(
    server: RedisServer, folder: Path | None = None, blocks: int = BLOCKS
) -> AsyncIterator[Child]:
    command = [sys.executable, str(CHILD), server.url, "a", str(folder or ""), str(blocks)]
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
    async with child(redis_server) as a, open_node(redis_server, "b", **TIMES) as b:
        await knows(b, tokens, BLOCKS)
        a.process.kill()
        await a.process.wait()
        got = await b.get(tokens)
        assert (got.loaded, got.timed_out) == (0, False)
        await knows(b, tokens, 0)


async def test_a_killed_node_of_a_cluster_that_was_reset_keeps_what_it_stored_since(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    async with open_node(redis_server, "b", **TIMES) as b:
        async with child(redis_server, tmp_path / "now") as a:
            await knows(b, prompt(1, BLOCKS), BLOCKS)
            shutil.copytree(tmp_path / "now", tmp_path / "before")
            async with Admin(member(b)._settings) as admin:
                assert (await admin.reset(20_000))["waiting"] == []
            await a.tell("more")
            await knows(b, prompt(2, BLOCKS), BLOCKS)
            held = member(b).holdings.nodes
            before = set(held())
            a.process.kill()
            await a.process.wait()
        async with child(redis_server, tmp_path / "now", blocks=0) as a:
            await until(lambda: BLOCKS in [held()[life] for life in set(held()) - before])
            assert (await b.get(prompt(2, BLOCKS))).loaded == BLOCKS * TOKENS_PER_BLOCK
            assert matched(b, prompt(1, BLOCKS)) == 0
            a.process.kill()
            await a.process.wait()
    async with open_node(redis_server, "a", tmp_path / "before") as a:  # what it was then
        await until(lambda: member(a).epoch == 1)
        assert matched(a, prompt(1, BLOCKS)) == 0


async def test_an_epoch_is_of_its_cluster_and_its_file_may_be_damaged(tmp_path: Path) -> None:
    assert await EpochFile(None, "one").read() == 0
    await EpochFile(None, "one").write(3)
    one = EpochFile(tmp_path, "one")
    assert await one.read() == 0
    await one.write(3)
    assert (await one.read(), await EpochFile(tmp_path, "two").read()) == (3, 0)
    (tmp_path / NAME).write_bytes(b"{")
    assert await one.read() == 0
    gone = EpochFile(tmp_path / "gone", "one")
    await gone.write(4)  # the next start drops the disk, and is right
    assert await gone.read() == 0
