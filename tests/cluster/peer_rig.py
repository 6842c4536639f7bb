"""The rig of tests about peers: owners (managers that lend), and a reader with an arena of its own.

`open_owner` (a manager with lender and server) - `open_reader` (a PeerStore) - `Known` (stands in
for the directory: nodes and holdings that a test fills by hand) - `Reader.read`, `check`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray
from rig import SPEC, STRIDE, Rig, open_rig, pattern

from flexkv import tiercodec
from flexkv._core import lib
from flexkv.cluster.fetching import Courier
from flexkv.cluster.holdings import HOLDER, HOST_MEDIUM, NOBODY
from flexkv.cluster.lender import Lender
from flexkv.cluster.peers import PeerStore
from flexkv.cluster.server import PeerServer
from flexkv.completion import Completions
from flexkv.config import FlexKVConfig
from flexkv.keys import Keyring
from flexkv.memory import Arena
from flexkv.model import LANDED, Identity, KeyArray, Statuses
from flexkv.protocols import BlockIO, Services

HOLDERS = 4
SECRET = b"a secret of these tests"
INCARNATION = 77


def identity() -> Identity:
    """What the blocks of all rigs are."""
    return tiercodec.identities(FlexKVConfig(model="test-model", spec=SPEC), SPEC).keys


def keys_of(tokens: Sequence[int]) -> KeyArray:
    """The keys of a prompt's blocks."""
    ring = Keyring(identity(), b"")
    return ring.chain(np.asarray(tokens, np.int64), ring.root(None))


@dataclass
class Known:
    """Nodes and holdings, as a directory would tell them."""

    epoch: int = 1
    addresses: dict[tuple[int, str], str] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    rows: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    losses: list[tuple[int, int, bool]] = field(default_factory=list)  # node, blocks, shared

    def add(self, node: int, address: str, incarnation: int = INCARNATION) -> None:
        """A node joins, or joins again."""
        self.addresses[node, "tcp"] = address
        self.incarnations[node] = incarnation

    def hold(self, slots: Sequence[int], node: int, medium: int = HOST_MEDIUM) -> None:
        """A node says that it holds the blocks in these slots."""
        for slot in slots:
            self.rows.setdefault(slot, []).append((node, medium))

    def address(self, number: int, courier: str) -> str | None:
        return self.addresses.get((number, courier))

    def incarnation(self, number: int) -> int | None:
        return self.incarnations.get(number)

    def holders(self, slots: NDArray[np.uint32]) -> NDArray[Any]:
        rows = np.zeros((len(slots), HOLDERS), HOLDER)
        rows["node"] = NOBODY
        for row, slot in zip(rows, slots.tolist(), strict=True):
            held = sorted(self.rows.get(slot, []), key=lambda holder: holder[1])
            for i, (node, medium) in enumerate(held):
                row[i] = (node, medium, 0)
        return rows

    def lost(self, number: int, keys: KeyArray, *, shared: bool = False) -> None:
        self.losses.append((number, len(keys), shared))


@dataclass
class Owner:
    """A manager that lends."""

    rig: Rig
    lender: Lender
    server: PeerServer
    address: str

    @property
    def pinned(self) -> int:
        return self.rig.kv.usage()["manager"]["pinned"]

    async def unpinned(self) -> None:
        """Wait until nothing is pinned."""
        with anyio.fail_after(90):
            await self.lender.drained()
        assert self.pinned == 0


@asynccontextmanager
async def open_owner(
    path: Any = None,
    *,
    known: Known | None = None,
    node: int = 0,
    ttl_s: float = 10.0,
    bytes_in_flight: int = 64 * STRIDE,
    incarnation: int = INCARNATION,
    secret: bytes = SECRET,
    **settings: Any,
) -> AsyncIterator[Owner]:
    """Open a manager whose blocks other nodes may read, and tell `known` of it."""
    book = known or Known()
    async with open_rig(path, **({"host": 48} | settings)) as rig:
        stack = rig.kv._stack
        lib.fx_index_find_any(stack.index.handle)  # as in a cluster
        lender = Lender(
            stack.planner,
            stack.completions,
            stack.arena,
            incarnation=incarnation,
            block_bytes=SPEC.block_bytes,
            promote=rig.kv._bring,
            ttl_s=ttl_s,
            bytes_in_flight=bytes_in_flight,
        )
        server = PeerServer(
            lender,
            stack.arena,
            node=f"node-{node}",
            identity=identity(),
            block_bytes=SPEC.block_bytes,
            epoch=lambda: book.epoch,
            secret=secret,
        )
        address = server.bind()
        book.add(node, address, incarnation)
        async with anyio.create_task_group() as group:
            group.start_soon(server.run)
            try:
                yield Owner(rig, lender, server, address)
            finally:
                group.cancel_scope.cancel()
        lender.close()


@dataclass
class Reader:
    """A PeerStore, with slots to read into. Slot i of the tier goes to arena slot i."""

    store: PeerStore
    arena: Arena
    known: Known

    def batch(self, tokens: Sequence[int], slots: NDArray[np.uint32]) -> BlockIO:
        """Blocks of a prompt, by their numbers."""
        return BlockIO(slots, slots, keys_of(tokens)[slots])

    async def read(self, tokens: Sequence[int], blocks: Sequence[int] | None = None) -> Statuses:
        """Read blocks of a prompt; every one that landed must hold the right bytes."""
        keys = keys_of(tokens)
        numbers = np.arange(len(keys)) if blocks is None else np.asarray(blocks)
        slots = numbers.astype(np.uint32)
        self.arena.rows(0, self.arena.slots)[:] = 0xEE
        statuses = await self.store.read(BlockIO(slots, slots, keys[numbers]))
        assert len(statuses) == len(numbers)
        for number, status in zip(numbers.tolist(), statuses.tolist(), strict=True):
            if status == LANDED:
                found = self.arena.view(number)[: SPEC.block_bytes]
                assert np.array_equal(found, pattern(tokens, number)), f"block {number} is wrong"
        return statuses


@asynccontextmanager
async def open_reader(
    known: Known,
    *,
    slots: int = 64,
    secret: bytes = SECRET,
    name: str = "reader",
    courier: Callable[[Arena], Courier] | None = None,
    **more: Any,
) -> AsyncIterator[Reader]:
    """Open a store that reads from those whom `known` knows."""
    arena = Arena(slots, STRIDE, huge_pages=False)
    completions = Completions(tickets=64, crew_threads=1)
    more["courier"] = courier and courier(arena)
    store = PeerStore(known, known, node=name, secret=secret, **more)
    try:
        await store.open(Services(completions, arena, identity()))
        yield Reader(store, arena, known)
    finally:
        await store.aclose()
        assert await completions.aclose(5000) == 0
        arena.close()
