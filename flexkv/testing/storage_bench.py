"""An open store with an arena, for the tests of the kit: a block is a number, bytes follow from it.

`StorageKit` (fixtures `harness` and `bench`) - `StorageBench` (what a test is given) - `opened`
(the store, open, checked when it closes) - `OpenStore`: `put`, `get`, `drop`, `batch`,
`recovered_rows` - `pattern`, `keys_of` (a block's bytes and key).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import LANDED, Identity, IOStatus, KeyArray, KVSpec
from flexkv.protocols import BlockIO, Recovered, Services, StorageBackend
from flexkv.testing.guard import ContractError, KitTests, require, tickets_are_back, within
from flexkv.testing.harness import CREW_QUEUE, Bytes, StorageHarness

SENTINEL = 0xEE
# 5,120 bytes in slots of 8,192: what lies between belongs to nobody
SPEC = KVSpec.uniform(layers=2, heads=1, head_size=40, tokens_per_block=16)
IDENTITY = Identity("flexkv-kit", "r1", SPEC)

_noise = np.random.default_rng(0).integers(0, 1 << 63, 1 << 17, np.uint64)


def pattern(number: int, size_bytes: int) -> Bytes:
    """The bytes of block `number`, which differ from those of any other in every 8 of them."""
    words = _noise[: -(-size_bytes // 8)] ^ np.uint64((number + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    return words.view(np.uint8)[:size_bytes]


def keys_of(numbers: Sequence[int]) -> KeyArray:
    """The keys of blocks, shape [blocks, 2]."""
    array = np.asarray(numbers, np.uint64)
    return np.stack([array + np.uint64(1), array * np.uint64(0x9E3779B97F4A7C15)], axis=1)


@dataclass(slots=True)
class OpenStore:
    """A store that is open. Block n is the child of block n - 1, and lies in slot n by default."""

    backend: StorageBackend
    services: Services
    place: Path
    recovered: Recovered | None = None

    @property
    def spec(self) -> KVSpec:
        return self.services.identity.spec

    def batch(
        self, numbers: Sequence[int], slots: Sequence[int] | None = None, first: int = 0
    ) -> BlockIO:
        """A batch of blocks between arena slots from `first` on and store `slots`."""
        count = len(numbers)
        store = np.array(numbers if slots is None else slots, np.uint32)
        parents = keys_of([max(number, 1) - 1 for number in numbers])
        parents[[number == 0 for number in numbers]] = 0
        host = np.arange(first, first + count, dtype=np.uint32)
        return BlockIO(host, store, keys_of(numbers), parents, np.array(numbers, np.uint32))

    async def put(
        self, numbers: Sequence[int], slots: Sequence[int] | None = None, first: int = 0
    ) -> list[int]:
        """Write blocks; their statuses."""
        batch, arena = self.batch(numbers, slots, first), self.services.arena
        for host, number in zip(batch.host_slots, numbers, strict=True):
            arena.view(int(host))[: self.spec.block_bytes] = pattern(number, self.spec.block_bytes)
        answer = checked(await self.backend.write(batch), len(batch), "write")
        for host, number in zip(batch.host_slots, numbers, strict=True):
            now = arena.view(int(host))[: self.spec.block_bytes]
            unchanged = np.array_equal(now, pattern(number, self.spec.block_bytes))
            require(unchanged, "StorageBackend.write", "write changed the bytes in host memory")
        return answer

    async def get(
        self, numbers: Sequence[int], slots: Sequence[int] | None = None, first: int = 0
    ) -> list[int]:
        """Read blocks; their statuses. What is said to have LANDED must be there."""
        batch, arena = self.batch(numbers, slots, first), self.services.arena
        for host in batch.host_slots:
            arena.view(int(host))[:] = SENTINEL
        answer = checked(await self.backend.read(batch), len(batch), "read")
        for host, number, status in zip(batch.host_slots, numbers, answer, strict=True):
            got = arena.view(int(host))[: self.spec.block_bytes]
            if status == LANDED and (found := _describe(got, number)):
                what = f"read said LANDED for block {number}, but host memory holds {found}"
                raise ContractError("StorageBackend.read", what)
        return answer

    async def drop(self, numbers: Sequence[int], slots: Sequence[int] | None = None) -> list[int]:
        """Discard blocks; their statuses."""
        answer = await self.backend.discard(self.batch(numbers, slots))
        return checked(answer, len(numbers), "discard")

    def recovered_rows(self) -> dict[int, tuple[int, list[int], int]]:
        """What opening found, by block number: slot, parent's key, depth."""
        found = self.recovered
        if found is None:
            return {}
        numbers = [int(key) - 1 for key in found.keys[:, 0]]
        columns = found.slots.tolist(), found.parents.tolist(), found.depths.tolist()
        return dict(zip(numbers, zip(*columns, strict=True), strict=True))


def checked(answer: Any, count: int, verb: str) -> list[int]:
    """What a store answered, as a list, if it is one IOStatus per block."""
    good = isinstance(answer, np.ndarray) and answer.shape == (count,)
    known = good and np.isin(answer, [int(status) for status in IOStatus]).all()
    require(
        known,
        f"StorageBackend.{verb}",
        f"{verb} must answer an array of shape ({count},) with one IOStatus per block, not "
        f"{answer!r}",
    )
    return [int(status) for status in answer]


def _describe(got: Bytes, number: int) -> str:
    """What is there instead of block `number`; nothing when it is there."""
    size = len(got)
    other = np.flatnonzero(got != pattern(number, size))
    if not len(other):
        return ""
    if (got == SENTINEL).all():
        return "none of its bytes"
    if (got[other] == SENTINEL).all():
        return f"{size - len(other)} of its {size} bytes"
    for near in range(max(0, number - 64), number + 64):
        if np.array_equal(got, pattern(near, size)):
            return f"block {near}"
    return f"other bytes from byte {other[0]} on"


@dataclass(slots=True)
class StorageBench:
    """What a test is given. `rng` starts anew for each test, from the seed in `--flexkv-seed`.

    `limit_s` is how long one call may take.
    """

    harness: StorageHarness
    place: Path
    rng: random.Random
    limit_s: float

    @property
    def slotted(self) -> bool:
        """Whether the store is addressed by slot."""
        return self.harness.make().addressing == "slot"


@contextlib.asynccontextmanager
async def opened(
    bench: StorageBench,
    *,
    identity: Identity = IDENTITY,
    host_slots: int = 32,
    **settings: Any,
) -> AsyncIterator[OpenStore]:
    """Open the store of the bench (again); require that it closes, and every ticket came back."""
    harness, close = bench.harness, "StorageBackend.aclose"
    completions = Completions(crew_threads=2, crew_queue=CREW_QUEUE)
    arena = Arena(host_slots, identity.spec.stride_bytes, huge_pages=False)
    chosen = harness.settings(bench.place) | settings
    services = Services(completions, arena, identity, chosen, harness.capacity_blocks)
    store = OpenStore(harness.make(), services, bench.place)
    try:
        store.recovered = await store.backend.open(services)
        yield store
        await within(bench.limit_s, store.backend.aclose(), close, "aclose does not end")
        tickets_are_back(completions, close)
    finally:
        with anyio.move_on_after(bench.limit_s):
            await store.backend.aclose()
        if not await completions.aclose(1000):
            arena.close()


class StorageKit(KitTests):
    """Fixtures of the storage tests."""

    @pytest.fixture
    def harness(self) -> StorageHarness:
        """What is tested: override this."""
        raise NotImplementedError("override the fixture `harness`: return a StorageHarness")

    @pytest.fixture
    def bench(self, harness: StorageHarness, tmp_path: Path, flexkv_rng: Any) -> StorageBench:
        """What an open store is made of."""
        return StorageBench(harness, tmp_path, flexkv_rng, self.limit_s / 3)
