"""How fast blocks come from remote stores, next to the protocol and to plain clients: `run`.

Redis: the limit is a client that sends the same GETs and receives all answers into one buffer,
peer is redis-py's pipeline. Objects: limit and peer is obstore alone, with as many threads.
Mooncake: limit and peer is Mooncake's own client, which gets the same objects in as many threads.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np

from flexkv import plugins
from flexkv.backends.remote.heads import HEAD
from flexkv.backends.remote.store import RemoteStore
from flexkv.bench.report import Progress, Result, interleave, median, ratio_of_pairs
from flexkv.completion import Completions
from flexkv.errors import ConfigError, StorageError
from flexkv.memory import Arena
from flexkv.model import LANDED, Identity, KVSpec
from flexkv.protocols import BlockIO, Services
from flexkv.testing.harness import Unsupported
from flexkv.testing.mooncake import MooncakeServer
from flexkv.testing.remote import RedisServer

BATCH_BYTES = 64 << 20


def run(
    progress: Progress,
    *,
    store: str = "redis",
    url: str = "",
    options: dict[str, Any] | None = None,
    sizes_mib: Sequence[int] = (1, 4),
    connections: int = 2,
    repeats: int = 7,
) -> list[Result]:
    """Measure GB/s of reads and writes of blocks.

    `store` is "redis" or "mooncake" (`url` "": a server of our own; Mooncake's is master's
    host:port) or "objects" (`url` "": a temporary folder; `options` are obstore's). `ratio` is to
    the limit, pair by pair.

    Raises:
        ConfigError: the store is unknown, or there is no server.
        StorageError: blocks did not come back.
    """
    kinds: dict[str, type[Bench]] = {
        "redis": RedisBench,
        "objects": ObjectBench,
        "mooncake": MooncakeBench,
    }
    if store not in kinds:
        raise ConfigError(f"store must be one of {', '.join(kinds)}, got {store!r}")
    results: list[Result] = []
    with ExitStack() as stack:
        try:
            url = url or kinds[store].place(stack)
        except Unsupported as reason:
            raise ConfigError(str(reason)) from reason
        for number, size in enumerate(sizes_mib):
            progress(f"{store}, blocks of {size} MiB", number, len(sizes_mib))
            bench = kinds[store](url, options or {}, size << 20, connections)
            results += anyio.run(bench.measure, repeats)
    return results


class Bench:
    """Moves one batch in every way that is compared."""

    plugin: str
    peer: str
    write_once = False  # the store does not write what it has

    def __init__(self, url: str, options: dict[str, Any], size: int, connections: int) -> None:
        self.url, self.options, self.size, self.connections = url, options, size, connections
        self.count = max(1, BATCH_BYTES // size)
        self.spec = KVSpec.uniform(1, 1, size // 64, parts=2, tokens_per_block=16)
        self.names: list[bytes] = []
        self.open = ExitStack()  # what the others' ways keep open

    @staticmethod
    def place(stack: ExitStack) -> str:
        """Make a place for blocks that lasts as long as `stack`; its `url`.

        Raises:
            Unsupported: the server is not installed.
        """
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What the store is opened with."""
        return {"url": self.url, "prefix": "flexkv-bench", "connections": self.connections}

    def ways(self) -> dict[str, Callable[[], float]]:
        """The ways of others: name -> seconds of one batch; "limit" among them."""
        raise NotImplementedError

    async def measure(self, repeats: int) -> list[Result]:
        """Write and read the batch, in turn with the others."""
        async with self._opened() as (store, batch):
            await self._land(store.write, batch)
            self.names = store.names(batch.keys)

            def ours(verb: Any) -> Callable[[], float]:
                def once() -> float:
                    if self.write_once and verb == store.write:
                        anyio.from_thread.run(store.discard, batch)
                    return anyio.from_thread.run(self._land, verb, batch)

                return once

            with self.open:
                actions = {"write": ours(store.write), "read": ours(store.read)} | self.ways()
                taken = await anyio.to_thread.run_sync(interleave, actions, repeats)
            await store.discard(batch)
        speed = {
            name: [self.count * self.size / 1e9 / seconds for seconds in times]
            for name, times in taken.items()
        }
        params = {"block_mib": self.size >> 20, "connections": self.connections, "peer": self.peer}
        limit, peer = median(speed["limit"]), median(speed.get(self.peer, []))
        ratio = ratio_of_pairs(speed["read"], speed["limit"])
        known = peer if peer == peer else None
        return [
            Result(
                f"{self.plugin}_read",
                median(speed["read"]),
                "GB/s",
                limit,
                known,
                ratio,
                repeats,
                params,
            ),
            Result(
                f"{self.plugin}_write",
                median(speed["write"]),
                "GB/s",
                samples=repeats,
                params=params,
            ),
        ]

    async def _land(self, verb: Any, batch: BlockIO) -> float:
        began = time.perf_counter()
        statuses = await verb(batch)
        took = time.perf_counter() - began
        if not (statuses == LANDED).all():
            raise StorageError(f"of {len(batch)} blocks some did not land: {statuses.tolist()}")
        return took

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[RemoteStore, BlockIO]]:
        completions = Completions(crew_threads=1)
        arena = Arena(self.count, self.spec.stride_bytes, huge_pages=False)
        store: RemoteStore = plugins.load(plugins.BACKENDS, self.plugin)()
        await store.open(
            Services(completions, arena, Identity("bench", "", self.spec), self.settings())
        )
        slots = np.arange(self.count, dtype=np.uint32)
        random = np.random.default_rng(0)
        keys = random.integers(1, 1 << 60, (self.count, 2)).astype(np.uint64)
        for slot in slots:
            arena.view(int(slot))[:] = random.integers(0, 256, self.spec.stride_bytes, np.uint8)
        try:
            yield store, BlockIO(slots, slots, keys, np.zeros_like(keys), slots)
        finally:
            await store.aclose()
            await completions.aclose(1000)
            arena.close()


class RedisBench(Bench):
    """Values in Redis."""

    plugin = "redis"
    peer = "redis-py"

    @staticmethod
    def place(stack: ExitStack) -> str:
        """See Bench.place."""
        server = RedisServer()
        stack.callback(server.stop)
        return server.url

    def ways(self) -> dict[str, Callable[[], float]]:
        """A client that knows the sizes of all answers, and redis-py."""
        from flexkv.backends.remote.redis import command

        where, size = urlsplit(self.url), self.size + HEAD.itemsize
        place = (where.hostname, where.port or 6379)
        connection = self.open.enter_context(socket.create_connection(place))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        ask = b"".join(command(b"GET", name) for name in self.names)
        total = self.count * (len(b"$%d\r\n" % size) + size + 2)
        room = memoryview(bytearray(total))
        client = self.open.enter_context(import_module("redis").Redis.from_url(self.url))

        def plain() -> float:
            began = time.perf_counter()
            connection.sendall(ask)
            at = 0
            while at < total:
                at += connection.recv_into(room[at:], 0, socket.MSG_WAITALL)
            return time.perf_counter() - began

        def library() -> float:
            began = time.perf_counter()
            pipeline = client.pipeline(transaction=False)
            for name in self.names:
                pipeline.get(name)
            pipeline.execute()
            return time.perf_counter() - began

        return {"limit": plain, "redis-py": library}


class ObjectBench(Bench):
    """Objects, or files."""

    plugin = "objects"
    peer = "obstore"

    @staticmethod
    def place(stack: ExitStack) -> str:
        """See Bench.place."""
        return Path(stack.enter_context(tempfile.TemporaryDirectory())).as_uri()

    def settings(self) -> dict[str, Any]:
        """See Bench.settings."""
        return Bench.settings(self) | {"options": self.options, "timeout_ms": 30_000}

    def ways(self) -> dict[str, Callable[[], float]]:
        """The library alone, in as many threads."""
        from flexkv.backends.remote.objects import ObjectSettings, path_of

        obstore = import_module("obstore")
        store = ObjectSettings.read(self.settings()).connect()
        pool = self.open.enter_context(ThreadPoolExecutor(self.connections))

        def library() -> float:
            began = time.perf_counter()
            for content in pool.map(
                lambda name: obstore.get(store, path_of(name)).bytes(), self.names
            ):
                len(content)
            return time.perf_counter() - began

        return {"limit": library}


class MooncakeBench(Bench):
    """Objects in Mooncake Store, on a lender of memory that is another process."""

    plugin = "mooncake"
    peer = "mooncake"
    write_once = True

    @staticmethod
    def place(stack: ExitStack) -> str:
        """See Bench.place."""
        server = MooncakeServer(segment_bytes=4 * BATCH_BYTES)
        stack.callback(server.stop)
        return server.address

    def settings(self) -> dict[str, Any]:
        """See Bench.settings."""
        common = {name: value for name, value in Bench.settings(self).items() if name != "url"}
        return common | {"master": self.url, "timeout_ms": 30_000} | self.options

    def ways(self) -> dict[str, Callable[[], float]]:
        """Mooncake's own client, in this process."""
        client = import_module("mooncake.store").MooncakeDistributedStore()
        size, names = self.size + HEAD.itemsize, [name.decode() for name in self.names]
        room = np.zeros((self.count, size), np.uint8)
        host = self.url.rpartition(":")[0]
        code = client.setup(host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", self.url)
        base = room.__array_interface__["data"][0]
        self.open.callback(room.fill, 0)  # keeps it until the client is closed
        if code or client.register_buffer(base, room.nbytes):
            raise StorageError(f"Mooncake's own client cannot be set up: {code}")
        self.open.callback(client.close)
        pool = self.open.enter_context(ThreadPoolExecutor(self.connections))
        step = -(-self.count // self.connections)

        def part(at: int) -> bool:
            mine = names[at : at + step]
            places = [base + number * size for number in range(at, at + len(mine))]
            answers = client.batch_get_into(mine, places, [size] * len(mine))
            return bool(answers == [size] * len(mine))

        def library() -> float:
            began = time.perf_counter()
            if not all(pool.map(part, range(0, self.count, step))):
                raise StorageError("Mooncake's own client did not get all objects")
            return time.perf_counter() - began

        return {"limit": library}
