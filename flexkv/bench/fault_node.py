"""One node of `flexkv bench faults`, a process of its own: `Node` (`ask`, `tell`, `hear`, `kill`).

It serves what it is told over a pipe: put, phase (local hits and remote gets at the same time),
recover (remote gets until one is whole again), idle. Every block says which one it is, and every
byte that was loaded is looked at.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from flexkv import FlexKVConfig, KVManager, KVSpec
from flexkv.errors import StorageError

TOKENS, BLOCK_BYTES = 16, 64 << 10
REMOTE, REMOTE_BLOCKS, LOCAL_BLOCKS = 64, 8, 16
HOST_BLOCKS = {"a": REMOTE * REMOTE_BLOCKS + 64, "b": 160}  # b has to ask a again and again
LOCAL = REMOTE  # the prompt that b has itself
HANG_S = 20.0  # a get that takes longer hangs
_LOCAL_PAUSE_S, _REMOTE_PAUSE_S = 0.005, 0.02
_SENTINEL = 0xFFFF


def spec() -> KVSpec:
    """What a block is."""
    return KVSpec.uniform(1, 1, BLOCK_BYTES // 64, parts=2, tokens_per_block=TOKENS)


class Node:
    """The process as its parent sees it."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, there = context.Pipe()
        self.process = context.Process(target=_main, args=(there, name, settings), daemon=True)
        self.process.start()
        there.close()
        self.hear()

    def tell(self, verb: str, *words: Any) -> None:
        """Have it begin something."""
        self._link.send((verb, *words))

    def hear(self, limit_s: float = 180.0) -> Any:
        """What came of it.

        Raises:
            StorageError: the process has ended, or says nothing.
        """
        try:
            if self._link.poll(limit_s):
                return self._link.recv()
        except EOFError as error:
            raise StorageError("a node of the benchmark has ended") from error
        raise StorageError(f"a node of the benchmark has said nothing for {limit_s:.0f} s")

    def ask(self, verb: str, *words: Any) -> Any:
        """Tell and hear."""
        self.tell(verb, *words)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()
        self._link.close()


def _main(link: Connection, name: str, settings: dict[str, Any]) -> None:
    anyio.run(_serve, link, name, settings)


async def _serve(link: Connection, name: str, settings: dict[str, Any]) -> None:
    config = FlexKVConfig(
        model="bench",
        spec=spec(),
        host_cache_bytes=HOST_BLOCKS[name] * spec().stride_bytes,
        node_name=name,
        close_timeout_ms=1000,
        **settings,
    )
    async with KVManager(config) as kv:
        work = _Work(kv)
        link.send("ready")
        while True:
            try:
                verb, *words = await anyio.to_thread.run_sync(link.recv)
            except EOFError:
                return
            link.send(await getattr(work, verb)(*words))


class _Work:
    """What a node is told to do."""

    def __init__(self, kv: KVManager) -> None:
        self.kv, self._next = kv, 0
        shape = (2, LOCAL_BLOCKS + REMOTE_BLOCKS, TOKENS, 1, BLOCK_BYTES // 64)
        self._cache = np.zeros(shape, np.uint16)
        kv.register({"layer.0": self._cache}, axes="PBNHD")

    async def put(self, number: int) -> None:
        """Store a prompt."""
        first, blocks = _place(number)
        self._cache[:, first : first + blocks] = _marks(number)
        await self.kv.put_async(_tokens(number), _slots(number))

    async def phase(self, seconds: float) -> dict[str, Any]:
        """Load what is here, and what lies elsewhere, at the same time."""
        found: dict[str, Any] = {"local_ms": [], "served": 0, "missed": 0, "wrong": 0, "hangs": 0}
        found |= {"local_missed": 0, "remote_ms": []}
        until = time.monotonic() + seconds
        async with anyio.create_task_group() as group:
            group.start_soon(self._local, until, found)
            group.start_soon(self._remote, until, found)
        return found

    async def recover(self, limit_s: float) -> dict[str, Any]:
        """Load from elsewhere until a prompt comes whole; the seconds until then."""
        began = time.monotonic()
        found = {"served": 0, "missed": 0, "wrong": 0, "hangs": 0, "remote_ms": []}
        while time.monotonic() < began + limit_s:
            await self._once(found)
            if found["served"]:
                break
            await anyio.sleep(_REMOTE_PAUSE_S)
        return found | {"recovery_s": time.monotonic() - began if found["served"] else None}

    async def idle(self, limit_s: float) -> int:
        """Wait until nothing is pinned, planned or lent; what is left after `limit_s`."""
        until = time.monotonic() + limit_s
        while True:
            usage = self.kv.usage()["manager"]
            leases = int(self.kv.telemetry.value("peer_leases"))
            left = int(usage["plans"] + usage["transfers"] + usage["pinned"] + leases)
            if not left or time.monotonic() > until:
                return left
            await anyio.sleep(0.05)

    async def _local(self, until: float, found: dict[str, Any]) -> None:
        while time.monotonic() < until:
            loaded, took_ms, _ = await self._get(LOCAL, found)
            found["local_ms"].append(took_ms)
            found["local_missed"] += loaded < LOCAL_BLOCKS * TOKENS
            await anyio.sleep(_LOCAL_PAUSE_S)

    async def _remote(self, until: float, found: dict[str, Any]) -> None:
        while time.monotonic() < until:
            await self._once(found)
            await anyio.sleep(_REMOTE_PAUSE_S)

    async def _once(self, found: dict[str, Any]) -> None:
        number, self._next = self._next, (self._next + 1) % REMOTE
        loaded, took_ms, elsewhere = await self._get(number, found)
        whole = loaded == REMOTE_BLOCKS * TOKENS
        if whole and not elsewhere:  # in b's own memory, from before
            return
        found["served" if whole else "missed"] += 1
        found["remote_ms"].append(took_ms)

    async def _get(self, number: int, found: dict[str, Any]) -> tuple[int, float, int]:
        """Load a prompt and look at every byte; tokens, milliseconds, blocks from elsewhere."""
        first, blocks = _place(number)
        room = self._cache[:, first : first + blocks]
        room[:] = _SENTINEL
        began, loaded, elsewhere = time.perf_counter(), 0, 0
        with anyio.move_on_after(HANG_S) as scope:
            got = await self.kv.get_async(_tokens(number), _slots(number))
            loaded = got.loaded
            elsewhere = got.by_tier.get("peer", 0) + got.by_tier.get("remote", 0)
        took_ms = 1e3 * (time.perf_counter() - began)
        found["hangs"] += scope.cancelled_caught
        whole = loaded // TOKENS
        good = (room[:, :whole] == _marks(number)[:, :whole]).all(axis=(0, 2, 3, 4))
        found["wrong"] += int(whole - good.sum())
        return loaded, took_ms, elsewhere


def _place(number: int) -> tuple[int, int]:
    """First block in the device's memory, and how many."""
    return (0, LOCAL_BLOCKS) if number == LOCAL else (LOCAL_BLOCKS, REMOTE_BLOCKS)


def _marks(number: int) -> Any:
    """What the blocks of a prompt are full of."""
    _, blocks = _place(number)
    marks = np.arange(blocks, dtype=np.uint16) + np.uint16(1 + number * LOCAL_BLOCKS)
    return marks.reshape(1, blocks, 1, 1, 1)


def _tokens(number: int) -> Any:
    _, blocks = _place(number)
    return np.arange(blocks * TOKENS) + (1 + number) * 10_000


def _slots(number: int) -> Any:
    first, blocks = _place(number)
    return np.arange(first * TOKENS, (first + blocks) * TOKENS)
