"""Workers of several processes: joining, copying shares, dying, stalling, rejoining."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from flexkv import FlexKVConfig, KVManager
from flexkv.errors import ConfigError, LayoutError, TransferError
from flexkv.model import KVSpec
from flexkv.ranks import RankAgent, RankServer, wire

LAYERS, HEADS, HEAD_SIZE, TOKENS, BLOCKS = 2, 2, 64, 16, 32
SHARE = KVSpec.uniform(LAYERS, HEADS, HEAD_SIZE, "float32", tokens_per_block=TOKENS, axes="HNPD")


def whole(ranks: int) -> KVSpec:
    """The shares of all ranks side by side."""
    return KVSpec.uniform(
        LAYERS * ranks, HEADS, HEAD_SIZE, "float32", tokens_per_block=TOKENS, axes="HNPD"
    )


def memory() -> list[np.ndarray[Any, Any]]:
    shape = (BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE)
    return [np.zeros(shape, np.float32) for _ in range(LAYERS)]


def fill(caches: list[np.ndarray[Any, Any]], seed: int) -> None:
    random = np.random.default_rng(seed)
    for cache in caches:
        cache[:] = random.random(cache.shape, np.float32)


@contextmanager
def agent(
    path: Path, rank: int, ranks: int, caches: Any, backend: Any = None, **options: Any
) -> Iterator[RankAgent]:
    made = RankAgent(
        path,
        rank=rank,
        ranks=ranks,
        kv_caches=caches,
        spec=SHARE,
        axes="BHNC",
        retry_ms=10,
        **options,
    )
    if backend is not None:
        made._backend_class = backend
    made.start()
    try:
        yield made
    finally:
        made.close()


@asynccontextmanager
async def manager(
    path: Path, ranks: int, *, timeout_ms: int = 1000, **settings: Any
) -> AsyncIterator[tuple[KVManager, RankServer]]:
    server = RankServer(
        path, shares=(SHARE.block_bytes,) * ranks, blocks=BLOCKS, timeout_ms=timeout_ms
    )
    config = FlexKVConfig.load(
        model="m",
        spec=whole(ranks),
        device="ranks",
        device_options={"server": server},
        host_cache_bytes=64 * whole(ranks).stride_bytes,
        huge_pages=False,
        **settings,
    )
    async with KVManager(config) as kv:
        kv.register(None)
        yield kv, server


async def joined(server: RankServer) -> None:
    assert await anyio.to_thread.run_sync(server.wait_ready, 10.0)


def slots(*blocks: int) -> list[int]:
    return [block * TOKENS + i for block in blocks for i in range(TOKENS)]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_every_rank_gets_its_own_share_back(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "s"
    memories = [memory() for _ in range(ranks)]
    for rank, caches in enumerate(memories):
        fill(caches, rank)
    tokens = list(range(4 * TOKENS))
    async with manager(path, ranks) as (kv, server):
        with agent(path, 0, ranks, memories[0]), agent(path, ranks - 1, ranks, memories[-1]):
            await joined(server)
            await kv.put_async(tokens, slots(0, 1, 2, 3))
            got = await kv.get_async(tokens, slots(10, 11, 12, 13))
            assert got.loaded == len(tokens)
            for caches in memories:
                for cache in caches:
                    assert np.array_equal(cache[10:14], cache[0:4])
            assert not np.array_equal(memories[0][0][0], memories[0][1][0])


async def test_without_its_workers_a_put_fails_and_a_get_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = list(range(2 * TOKENS))
    async with manager(path, 2) as (kv, server):
        with agent(path, 0, 2, memory()):
            while not server.joined:
                await anyio.to_thread.run_sync(server.wait_ready, 0.01)
            assert not server.ready
            with pytest.raises(TransferError):
                await kv.put_async(tokens, slots(0, 1))
        assert (await kv.get_async(tokens, slots(0, 1))).loaded == 0
        await kv.flush()
        assert kv.usage()["manager"]["pinned"] == 0


async def test_a_copy_waits_until_the_engine_has_begun_its_step(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = list(range(TOKENS))
    async with manager(path, 1) as (kv, server):
        with agent(path, 0, 1, memory()) as worker:
            await joined(server)
            plan = kv.put_match(tokens)
            plan.tag = 5, 0
            transfer = kv.launch(plan, slots(0))
            worker.begin_step(4)
            with anyio.move_on_after(0.05):
                await transfer
            assert not transfer.done
            worker.begin_step(5)
            assert (await transfer).stored == TOKENS


async def test_a_worker_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with manager(path, 1) as (_, server):
        caches = [cache[: BLOCKS // 2] for cache in memory()]
        with agent(path, 0, 1, caches) as worker:
            await anyio.to_thread.run_sync(worker.wait_over, 10.0)
            assert "blocks is 16 there and 32 at the manager" in worker.refused
            assert not server.ready
    with pytest.raises(LayoutError):
        RankAgent(path, rank=0, ranks=1, kv_caches=memory()[:1], spec=SHARE, axes="BHNC")


async def test_a_worker_whose_device_does_not_open_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with manager(path, 1) as (_, server):
        before = set(os.listdir("/proc/self/fd"))
        with agent(path, 0, 1, memory(), settings={"engins": 2}) as worker:
            assert await anyio.to_thread.run_sync(worker.wait_over, 10.0)
        with anyio.fail_after(10):
            while server.ready or set(os.listdir("/proc/self/fd")) != before:
                await anyio.to_thread.run_sync(server.wait_ready, 0.01)


async def test_nonsense_on_the_socket_ends_that_connection_only(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = list(range(TOKENS))
    async with manager(path, 1) as (kv, server):
        with agent(path, 0, 1, memory()):
            await joined(server)
            with wire.packet_socket() as stranger:
                stranger.connect(str(path))
                stranger.send(b"\x93\x01\x02\x03")
                with anyio.fail_after(5):
                    await anyio.wait_readable(stranger)
                assert stranger.recv(100) == b""
            assert (await kv.put_async(tokens, slots(0))).stored == TOKENS


def test_a_socket_lets_only_its_user_in_and_is_not_taken_from_a_living_owner(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with wire.listen_at(path):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="another process listens"):
            wire.listen_at(path)
    with wire.listen_at(path) as again:  # a leftover of a dead owner
        assert again.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    other = tmp_path / "file"
    other.write_text("")
    with pytest.raises(ConfigError, match="not a socket"):
        wire.listen_at(other)


def test_the_private_directory_must_be_private(tmp_path: Path) -> None:
    path = wire.private_path("engine", str(tmp_path))
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path != wire.private_path("other", str(tmp_path))
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        wire.private_path("engine", str(tmp_path))


CHILD = Path(__file__).parent / "ranks_child.py"


@contextmanager
def worker_process(path: Path, rank: int, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(CHILD), str(path), str(rank), str(ranks)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_a_killed_worker_is_a_miss_and_its_successor_serves_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    caches = memory()
    fill(caches, 3)
    tokens = list(range(2 * TOKENS))
    async with manager(path, 2) as (kv, server):
        with agent(path, 0, 2, caches) as first:
            with worker_process(path, 1, 2) as other:
                await joined(server)
                assert (await kv.put_async(tokens, slots(0, 1))).stored == 2 * TOKENS
                plan = kv.get_match(tokens)
                plan.tag = 1, 0  # a step that has not begun: workers hold its copies back
                transfer = kv.launch(plan, slots(4, 5))
                with anyio.move_on_after(0.05):
                    await transfer
                os.kill(other.pid, signal.SIGKILL)
                first.begin_step(1)
                await transfer.quiesced()
                assert (await transfer).loaded == 0
            assert not server.ready
            with worker_process(path, 1, 2):
                await joined(server)
                assert (await kv.get_async(tokens, slots(4, 5))).loaded == 2 * TOKENS


def stop(pid: int) -> None:
    """SIGSTOP; return when all threads of the child stand still."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


async def test_a_stalled_worker_is_turned_out_within_its_time(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tokens = list(range(2 * TOKENS))
    async with manager(path, 1, timeout_ms=800) as (kv, server):
        with worker_process(path, 0, 1) as worker:
            await joined(server)
            assert (await kv.put_async(tokens, slots(0, 1))).stored == 2 * TOKENS
            stop(worker.pid)
            before = anyio.current_time()
            transfer = kv.get_async(tokens, slots(4, 5))
            assert (await transfer).loaded == 0
            assert set((await transfer).failed_device_blocks) == {4, 5}
            assert anyio.current_time() - before < 1.5
            assert not server.ready
            os.kill(worker.pid, signal.SIGCONT)
            await joined(server)  # it sees that it was turned out, and joins again
            assert (await kv.get_async(tokens, slots(4, 5))).loaded == 2 * TOKENS


async def test_bytes_of_a_stalled_save_are_held_until_the_worker_can_write_no_more(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    tokens = list(range(2 * TOKENS))
    async with manager(path, 1, timeout_ms=400) as (kv, server):
        with worker_process(path, 0, 1) as worker:
            await joined(server)
            stop(worker.pid)
            transfer = kv.put_async(tokens, slots(0, 1))
            while server.ready:
                await anyio.to_thread.run_sync(server.wait_ready, 0.01)
                await anyio.sleep(0.01)
            assert not transfer.done  # the arena's slots may still be written to
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(TransferError):
                await transfer
        await kv.flush()
        assert kv.usage()["host"]["free"] == kv.usage()["host"]["capacity"]


def test_a_worker_that_nobody_answers_may_be_closed(tmp_path: Path) -> None:
    """It leaves no socket behind: that would be an error of this test."""
    path = tmp_path / "s"
    with wire.packet_socket() as server:
        server.settimeout(30)
        server.bind(str(path))
        server.listen()
        with agent(path, 0, 1, memory()):
            connection, _ = server.accept()
            with connection:
                connection.recv(wire.MAX_PACKET_BYTES)  # it has introduced itself, and waits
    gc.collect()
