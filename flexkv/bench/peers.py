"""How fast blocks come from another node's memory, next to plain sockets: `run`.

The owner is a process of its own. The limit is the same bytes sent from one buffer by plain threads
of that process and received into one buffer by as many threads of ours, over as many connections;
with Mooncake as courier it is Mooncake's engine by itself, with the same batches in as many
threads.
"""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from flexkv import FlexKVConfig, KVManager
from flexkv._core import lib
from flexkv.backends.remote.mooncake_process import require
from flexkv.bench.bare_mooncake import bare_engine
from flexkv.bench.report import Progress, Result, interleave, median, ratio_of_pairs
from flexkv.cluster.fetching import PeerSettings
from flexkv.cluster.holdings import HOLDER, MAX_HOLDERS, NOBODY
from flexkv.cluster.lender import Lender
from flexkv.cluster.mooncake_courier import MooncakeCourier
from flexkv.cluster.peers import PeerStore
from flexkv.cluster.server import PeerServer
from flexkv.completion import Completions
from flexkv.errors import ConfigError, StorageError
from flexkv.keys import Keyring
from flexkv.memory import Arena
from flexkv.model import LANDED, Identity, KeyArray, KVSpec, SlotIds
from flexkv.protocols import BlockIO, Services

TOTAL_BYTES, BATCH_BYTES = 64 << 20, 16 << 20  # as an engine reads: in batches of chunk_bytes
HOST_TIMES = 5  # what the owner's host is of that: one reader may hold an eighth of it and more
SINGLES = 16  # blocks that are read one by one
TOKENS = 16
_INCARNATION = 1


def run(
    progress: Progress,
    *,
    sizes_kib: Sequence[int] = (64, 256, 1024, 4096),
    connections: int = 2,
    repeats: int = 7,
    courier: str = "tcp",
) -> list[Result]:
    """Measure GB/s of reads from another process by block size, and the time of one block.

    `ratio` is to the limit, pair by pair; times are of one block among some that are read one by
    one, medians in milliseconds. `courier` is tcp or mooncake.

    Raises:
        ConfigError: there is no such courier, or Mooncake is not installed.
        StorageError: blocks did not come.
    """
    if courier not in ("tcp", "mooncake"):
        raise ConfigError(f"courier must be tcp or mooncake, got {courier!r}")
    if courier == "mooncake":
        require()
    results: list[Result] = []
    for number, size in enumerate(sizes_kib):
        progress(f"blocks of {size} KiB", number, len(sizes_kib))
        with _owner(size << 10, connections, courier) as places:
            results += anyio.run(_Bench(size << 10, connections, *places).measure, repeats)
    return results


def spec_of(size: int) -> KVSpec:
    """What a block of `size` bytes is."""
    return KVSpec.uniform(1, 1, size // 64, parts=2, tokens_per_block=TOKENS)


# --- the owner


@contextmanager
def _owner(size: int, connections: int, courier: str) -> Iterator[tuple[str, int, str]]:
    """Start an owner; its address, the port of the plain sockets beside it, and its engine's
    address, if that is the courier.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_own, args=(there, size, courier), daemon=True)
    child.start()
    there.close()
    try:
        yield here.recv()
    except EOFError as error:
        raise StorageError("the owner's process ended before it was ready") from error
    finally:
        here.close()
        child.join(10)
        child.kill()
        child.join()


def _own(link: Connection, size: int, courier: str) -> None:
    anyio.run(_lend, link, size, courier)


async def _lend(link: Connection, size: int, courier: str) -> None:
    """Hold TOTAL_BYTES of blocks until the other side is gone."""
    spec, count = spec_of(size), TOTAL_BYTES // size
    config = FlexKVConfig(
        model="bench",
        spec=spec,
        host_cache_bytes=HOST_TIMES * count * spec.stride_bytes,
        close_timeout_ms=1000,
    )
    async with KVManager(config) as kv:
        stack = kv._stack
        lib.fx_index_find_any(stack.index.handle)
        noise = np.random.default_rng(0)
        caches = noise.integers(0, 1 << 16, (2, count, TOKENS, 1, size // 64)).astype(np.uint16)
        kv.register({"layer.0": caches}, axes="PBNHD")
        await kv.put_async(np.arange(count * TOKENS), np.arange(count * TOKENS))
        lender = Lender(
            stack.planner,
            stack.completions,
            stack.arena,
            incarnation=_INCARNATION,
            block_bytes=spec.block_bytes,
            promote=None,
            ttl_s=10.0,
            bytes_in_flight=4 * TOTAL_BYTES,
        )
        identity = _identity(spec)
        server = PeerServer(
            lender,
            stack.arena,
            node="owner",
            identity=identity,
            block_bytes=spec.block_bytes,
            epoch=lambda: 1,
        )
        address = server.bind()
        plain = _serve_plainly(caches.reshape(-1).view(np.uint8))
        async with AsyncExitStack() as closer, anyio.create_task_group() as group:
            place = ""
            if courier == "mooncake":
                engine = MooncakeCourier(stack.arena, spec.block_bytes)
                closer.push_async_callback(engine.aclose)
                place = await engine.lend("127.0.0.1")
            group.start_soon(server.run)
            link.send((address, plain, place))
            await anyio.to_thread.run_sync(link.poll, None)
            group.cancel_scope.cancel()
        lender.close()


def _identity(spec: KVSpec) -> Identity:
    return Identity("bench", "", spec)


def _serve_plainly(data: NDArray[np.uint8]) -> int:
    """Answer each 8 bytes, a number, with so many bytes of `data`, one thread a connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listener.setsockopt(socket.SOL_SOCKET, option, 4 << 20)

    def serve(connection: socket.socket) -> None:
        while wanted := connection.recv(8, socket.MSG_WAITALL):
            connection.sendall(data[: int.from_bytes(wanted, "little")].data)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


# --- the reader


class _One:
    """The only other node, which holds everything."""

    epoch = 1

    def __init__(self, address: str, engine: str) -> None:
        self._addresses = {"tcp": address, "mooncake": engine}

    def address(self, number: int, courier: str) -> str | None:
        return self._addresses[courier]

    def incarnation(self, number: int) -> int | None:
        return _INCARNATION

    def holders(self, slots: SlotIds) -> NDArray[Any]:
        rows = np.zeros((len(slots), MAX_HOLDERS), HOLDER)
        rows["node"][:, 1:] = NOBODY
        return rows

    def lost(self, number: int, keys: KeyArray, *, shared: bool = False) -> None:
        raise StorageError(f"{len(keys)} blocks are not there any more")


class _Bench:
    """Reads the same bytes in every way that is compared."""

    def __init__(self, size: int, connections: int, peer: str, plain: int, engine: str) -> None:
        self.size, self.connections, self.peer, self.plain = size, connections, peer, plain
        self.engine = engine
        self.spec, self.count = spec_of(size), TOTAL_BYTES // size
        ring = Keyring(_identity(self.spec), b"")
        self.keys = ring.chain(np.arange(self.count * TOKENS), ring.root(None))

    async def measure(self, repeats: int) -> list[Result]:
        """Read everything, and one block, in turn with plain sockets."""
        async with self._store() as store:
            with self._limit() as (all_plain, one_plain):
                actions = {
                    "all": lambda: anyio.from_thread.run(self._all, store),
                    "all_plain": all_plain,
                    "one": lambda: anyio.from_thread.run(self._singly, store),
                    "one_plain": lambda: sum(one_plain() for _ in range(SINGLES)) / SINGLES,
                }
                await anyio.to_thread.run_sync(interleave, actions, 1)  # connect, touch
                taken = await anyio.to_thread.run_sync(interleave, actions, repeats)
        speed = {
            name: [TOTAL_BYTES / 1e9 / s for s in taken[name]] for name in ("all", "all_plain")
        }
        times = {name: [1e3 * s for s in taken[name]] for name in ("one", "one_plain")}
        params: dict[str, Any] = {"block_kib": self.size >> 10, "connections": self.connections}
        params |= {"courier": "mooncake"} if self.engine else {}
        return [
            _result("peer_read", "GB/s", speed["all"], speed["all_plain"], params),
            _result("peer_one_block", "ms", times["one"], times["one_plain"], params),
        ]

    async def _all(self, store: PeerStore) -> float:
        step = max(1, BATCH_BYTES // self.size)
        parts = iter([slice(at, at + step) for at in range(0, self.count, step)])

        async def work() -> None:
            for part in parts:
                await self._some(store, part)

        began = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(self.connections):
                group.start_soon(work)
        return time.perf_counter() - began

    async def _singly(self, store: PeerStore) -> float:
        """Seconds of one block, of some that are asked for one after the other."""
        return sum([await self._some(store, slice(0, 1)) for _ in range(SINGLES)]) / SINGLES

    async def _some(self, store: PeerStore, part: slice) -> float:
        slots = np.arange(self.count, dtype=np.uint32)[part]
        began = time.perf_counter()
        statuses = await store.read(BlockIO(slots, slots, self.keys[part]))
        took = time.perf_counter() - began
        if not (statuses == LANDED).all():
            raise StorageError(f"of {len(slots)} blocks some did not come: {statuses.tolist()}")
        return took

    @asynccontextmanager
    async def _store(self) -> AsyncIterator[PeerStore]:
        completions = Completions(crew_threads=2)
        arena = Arena(self.count, self.spec.stride_bytes)
        node = _One(self.peer, self.engine)
        settings = PeerSettings(timeout_ms=30_000, connections=self.connections)
        courier = None
        if self.engine:
            options = {"fetches": self.connections, "timeout_ms": 30_000}
            courier = MooncakeCourier(arena, self.spec.block_bytes, options)
        store = PeerStore(node, node, node="bench", settings=settings, courier=courier)
        await store.open(Services(completions, arena, _identity(self.spec)))
        try:
            yield store
        finally:
            await store.aclose()
            await completions.aclose(1000)
            arena.close()

    def _limit(self) -> AbstractContextManager[tuple[Callable[[], float], Callable[[], float]]]:
        if not self.engine:
            return self._sockets()
        batch = max(1, BATCH_BYTES // self.size)
        return bare_engine(self.engine, self.size, self.count, batch, self.connections)

    @contextmanager
    def _sockets(self) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
        """Plain sockets: seconds of everything, and of one block."""
        share = TOTAL_BYTES // self.connections
        room = memoryview(np.ones(TOTAL_BYTES, np.uint8).data)
        links = [
            socket.create_connection(("127.0.0.1", self.plain)) for _ in range(self.connections)
        ]
        for link in links:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        pool = ThreadPoolExecutor(self.connections)

        def fetch(number: int, size: int) -> None:
            links[number].sendall(size.to_bytes(8, "little"))
            at = number * share
            end = at + size
            while at < end:
                at += links[number].recv_into(room[at:end], 0, socket.MSG_WAITALL)

        def everything() -> float:
            began = time.perf_counter()
            for done in [pool.submit(fetch, number, share) for number in range(self.connections)]:
                done.result()
            return time.perf_counter() - began

        def one() -> float:
            began = time.perf_counter()
            fetch(0, self.size)
            return time.perf_counter() - began

        try:
            yield everything, one
        finally:
            pool.shutdown()
            for link in links:
                link.close()


def _result(
    name: str, unit: str, ours: list[float], plain: list[float], params: dict[str, Any]
) -> Result:
    ratio = ratio_of_pairs(ours, plain)
    return Result(
        name, median(ours), unit, median(plain), ratio=ratio, samples=len(ours), params=params
    )
