"""Nodes for tests of the directory: an index with events, no bytes; and books that can be read."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np

from flexkv.cluster.delta import Delta
from flexkv.cluster.directory import Directory
from flexkv.cluster.settings import ClusterSettings
from flexkv.cluster.wire import NodeRecord
from flexkv.events import EventLog
from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, KeyArray
from flexkv.telemetry import Telemetry
from flexkv.waiting import Signal

TIERS = ("host", "disk", "peer")
SOON_S = 20.0  # how long a busy machine may take
Held = set[tuple[bytes, int]]


class Books:
    """Holdings as sets of (key, medium); refuses what Holdings refuses."""

    def __init__(self) -> None:
        self.numbers: dict[int, str] = {}
        self.held: dict[int, Held] = {}
        self.parents: dict[bytes, bytes] = {}
        self.changed = Signal()
        self.sweeps = 0

    def join(self, node: str) -> int:
        for number, name in self.numbers.items():
            if name == node:
                return number
        number = max(self.numbers, default=-1) + 1
        self.numbers[number], self.held[number] = node, set()
        self.changed.raise_()
        return number

    def name(self, number: int) -> str | None:
        return self.numbers.get(number)

    def leave(self, number: int) -> None:
        del self.numbers[number], self.held[number]
        self.changed.raise_()

    def apply(self, number: int, delta: Delta, now: float) -> None:
        assert len(delta) <= 4096
        held = self.held[number]
        if delta.cleared:
            held.clear()
        for key, medium in zip(delta.removed_keys, delta.removed_media, strict=True):
            held.discard((key.tobytes(), int(medium)))
        stored = zip(delta.stored_keys, delta.stored_parents, delta.stored_media, strict=True)
        for key, parent, medium in stored:
            held.add((key.tobytes(), int(medium)))
            self.parents[key.tobytes()] = parent.tobytes()
        self.changed.raise_()

    def sweep(self) -> bool:
        self.sweeps += 1
        return False

    def of(self, node: str) -> Held | None:
        """What a node of this name holds; None when nobody of it is there."""
        for number, member in self.numbers.items():
            if member.rpartition("/")[0] == node:
                return set(self.held[number])
        return None

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds that depends on these books."""
        with anyio.fail_after(SOON_S):
            while not true():
                await self.changed.wait()


def chain(seed: int, count: int) -> KeyArray:
    """The keys of one prompt."""
    return np.random.default_rng(seed).integers(1, 2**64, (count, 2), np.uint64)


class Node:
    """An index without bytes, and its directory."""

    def __init__(
        self,
        name: str,
        settings: ClusterSettings,
        *,
        identity: bytes = b"model",
        epoch: int = 0,
        incarnation: int = 1,
        queue_blocks: int = 1 << 16,
        max_blocks: int = 1 << 14,
    ) -> None:
        self.name, self.books, self.telemetry = name, Books(), Telemetry()
        self.index = PrefixIndex(max_blocks, TIERS)
        self.log = EventLog(self.index, queue_blocks, lambda blocks: None)
        self.slots = 0
        self.resets: list[int] = []
        record = NodeRecord(
            node=name,
            incarnation=incarnation,
            epoch=epoch,
            identity=identity,
            addresses={"tcp": f"{name}:1"},
        )
        self.directory = Directory(
            settings,
            record,
            self.log.listen(),
            self.books,
            time.monotonic,
            self.telemetry,
            on_reset=self.reset,
        )

    async def reset(self, epoch: int) -> None:
        """Drop all, as a manager does."""
        self.index.clear()
        self.resets.append(epoch)

    def store(self, keys: KeyArray, tier: str = "host", count: int | None = None) -> None:
        """Have the first `count` blocks of a prompt readable in a tier."""
        keys, number = keys[:count], TIERS.index(tier)
        known = self.index.find(keys)
        parent = int(known[-1]) if len(known) else NO_BLOCK
        blocks = np.concatenate([known, self.index.insert(keys[len(known) :], parent)])
        absent = blocks[self.index.states(number, blocks) == 0]
        self.index.land(number, absent, np.arange(len(absent), dtype=np.uint32))
        self.index.ready(number, absent, 0.0)

    def drop(self, keys: KeyArray, tier: str = "host", keep: int = 0) -> None:
        """Remove the blocks of a prompt behind the first `keep` from a tier."""
        self.index.drop(TIERS.index(tier), self.index.find(keys)[keep:][::-1])

    def truth(self) -> Held:
        """What this node's own index says that others may read."""
        return {
            (key.tobytes(), medium)
            for medium in (0, 1)
            for key in self.index.keys(self.index.readable(medium))
        }

    async def sees(self, *others: Node) -> None:
        """Wait until this node has all that the others hold, and nothing else."""
        wanted = {other.name for other in others}

        def same() -> bool:
            names = {member.rpartition("/")[0] for member in self.books.numbers.values()}
            return names == wanted and all(
                self.books.of(other.name) == other.truth() for other in others
            )

        await self.books.until(same)


@asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[None]:
    """Run the directories of nodes; they leave at the end."""
    async with anyio.create_task_group() as group:
        for node in nodes:
            group.start_soon(node.directory.run)
        yield
        group.cancel_scope.cancel()


@asynccontextmanager
async def until_killed(node: Node) -> AsyncIterator[None]:
    """Let a node publish; at the end it says nothing any more, not even that it leaves."""
    publisher = node.directory._publisher
    async with anyio.create_task_group() as group:
        group.start_soon(publisher.run)
        yield
        group.cancel_scope.cancel()
    await publisher.link.aclose()


def quick(url: str, **changes: Any) -> ClusterSettings:
    """Settings with which little time passes."""
    return ClusterSettings(
        **{"url": url, "heartbeat_ms": 50, "node_ttl_ms": 1000, "linger_ms": 1} | changes
    )


def all_see_all(nodes: Iterable[Node]) -> list[Callable[[], Any]]:
    """The waits in which every node has everything of the others."""
    everybody = list(nodes)
    return [
        lambda node=node: node.sees(*(other for other in everybody if other is not node))
        for node in everybody
    ]
