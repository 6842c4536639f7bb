"""The disk tier behind a codec: the kit of stores, and what is the codec's own: sizes, cancelling,
trouble, bounded memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.backends.disk import DiskBackend
from flexkv.codecs.quant import Int8
from flexkv.completion import Completions
from flexkv.encodedstore import EncodedStore
from flexkv.errors import CapacityError, ConfigError
from flexkv.memory import Arena
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING, Identity, KVSpec, Statuses
from flexkv.protocols import API_VERSION, BlockIO, LocatableStorage, Services, StorageBackend
from flexkv.testing import StorageBackendTests, StorageHarness
from flexkv.testing.built_in import DiskHarness
from flexkv.testing.faults import Faults, Gate, inject
from flexkv.testing.harness import Bytes
from flexkv.tiercodec import TierCodec

SPEC = KVSpec.uniform(2, 2, 64, "float16")  # 16 KiB
SLOTS = 24


class Turned:
    """Lossless, of the same size, and not the bytes of the block."""

    flexkv_api: ClassVar[int] = API_VERSION
    lossy: ClassVar[bool] = False

    def encoded_bytes(self, spec: KVSpec) -> int:
        return spec.block_bytes

    def encode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:] = source ^ 0xFF

    def decode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
        target[:] = source ^ 0xFF


class OfAnySize(TierCodec):
    """Does not ask whether the codec gains anything."""

    def stored_bytes(self, spec: KVSpec) -> int:
        return self.codec.encoded_bytes(spec)


class EncodedHarness(DiskHarness):
    """The disk tier behind `Turned`, with little memory for encoded blocks."""

    def make(self) -> StorageBackend:
        return EncodedStore(DiskBackend(), OfAnySize("turned", Turned()), 48 << 10)

    def read_back(self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec) -> Bytes:
        return super().read_back(place, slot, key, spec) ^ 0xFF

    def write_raw(
        self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec, data: Bytes
    ) -> None:
        super().write_raw(place, slot, key, spec, data ^ 0xFF)

    def fail(
        self, backend: StorageBackend, services: Services, verb: str, skip: int, count: int
    ) -> Any:
        assert isinstance(backend, EncodedStore)
        return super().fail(backend.store, services, verb, skip, count)


class TestItKeepsWhatStoresPromise(StorageBackendTests):
    @pytest.fixture
    def harness(self) -> StorageHarness:
        return EncodedHarness(EncodedStore)


class Bench:
    """An open store over int8 blocks of normal numbers in the first half of an arena."""

    def __init__(self, store: EncodedStore, arena: Arena) -> None:
        self.store, self.arena = store, arena
        chance = np.random.default_rng(7)
        self.values = chance.standard_normal((SLOTS, SPEC.block_bytes // 2)).astype(np.float16)
        encoded = np.empty((SLOTS, Int8().encoded_bytes(SPEC)), np.uint8)
        self.expected = np.empty((SLOTS, SPEC.block_bytes), np.uint8)
        Int8().encode(SPEC, self.values.view(np.uint8), encoded)
        Int8().decode(SPEC, encoded, self.expected)
        for slot in range(SLOTS):
            arena.view(slot)[: SPEC.block_bytes] = self.values[slot].view(np.uint8)

    def batch(self, first: int, count: int, host: int = 0) -> BlockIO:
        """Blocks first.. of the store, paired with arena slots first + host.."""
        slots = np.arange(first, first + count, dtype=np.uint32)
        keys = np.stack([slots + np.uint64(1), slots + np.uint64(9)], 1).astype(np.uint64)
        return BlockIO(slots + np.uint32(host), slots, keys)

    def got(self, block: int) -> Bytes:
        """What was read into the second half of the arena."""
        return self.arena.view(SLOTS + block)[: SPEC.block_bytes]

    @property
    def encoding(self) -> Arena:
        """The store's own arena."""
        assert self.store._arena is not None
        return self.store._arena

    def free(self) -> int:
        """Slots of it that nobody holds."""
        return self.store._pool.free


@asynccontextmanager
async def opened(
    path: Path,
    codec: TierCodec | None = None,
    kib: int = 48,
    below: DiskBackend | None = None,
    share_bytes: int = 3 * SPEC.block_bytes,
) -> AsyncIterator[Bench]:
    completions, arena = Completions(), Arena(2 * SLOTS, SPEC.stride_bytes, huge_pages=False)
    codec = codec or TierCodec("int8", Int8())
    store = EncodedStore(below or DiskBackend(), codec, kib << 10, share_bytes)
    identity = Identity("m", spec=SPEC, codec="int8/1")
    settings = {"directories": [path / "a"]}
    try:
        await store.open(Services(completions, arena, identity, settings, SLOTS))
        try:
            yield Bench(store, arena)
        finally:
            await store.aclose()
    finally:
        await completions.aclose()
        arena.close()


def faults_below(bench: Bench) -> Faults:
    assert isinstance(bench.store.store, DiskBackend)
    return inject(bench.store.store, bench.encoding)


async def test_blocks_come_back_as_the_codec_leaves_them(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        assert not (await bench.store.write(bench.batch(0, SLOTS))).any()
        assert not (await bench.store.read(bench.batch(0, SLOTS, SLOTS))).any()
        for block in range(SLOTS):
            assert np.array_equal(bench.got(block), bench.expected[block])


async def test_files_are_as_small_as_encoded_blocks(tmp_path: Path) -> None:
    """int8 of 16 KiB: 8 KiB of codes and their scales, three pages instead of four."""
    async with opened(tmp_path):
        assert (tmp_path / "a" / "flexkv.data").stat().st_size == SLOTS * 3 * 4096


async def test_memory_for_encoded_blocks_is_bounded_and_long_batches_go_in_pieces(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, kib=24) as bench:
        assert bench.encoding.size_bytes <= 24 << 10
        assert not (await bench.store.write(bench.batch(0, SLOTS))).any()
        async with anyio.create_task_group() as group:
            for first in range(0, SLOTS, 8):
                group.start_soon(bench.store.read, bench.batch(first, 8, SLOTS))
        assert all(
            np.array_equal(bench.got(block), bench.expected[block]) for block in range(SLOTS)
        )
        assert bench.free() == bench.encoding.slots


async def test_damage_failure_and_absence_are_told_block_by_block(tmp_path: Path) -> None:
    async with opened(tmp_path, kib=1024) as bench:
        await bench.store.write(bench.batch(0, 6))
        faults = faults_below(bench)
        faults.add("read", "flip", skip=1, times=1)
        faults.add("read", "EIO", skip=3, times=1)
        before = bench.got(3).copy()
        statuses = await bench.store.read(bench.batch(0, 7, SLOTS))
        assert statuses.tolist() == [LANDED, DAMAGED, LANDED, FAILED, LANDED, LANDED, MISSING]
        assert np.array_equal(bench.got(2), bench.expected[2])
        assert np.array_equal(bench.got(3), before), "a block that failed was written to"


async def test_a_read_that_is_cancelled_gives_its_memory_back_when_nothing_can_land(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as bench:
        await bench.store.write(bench.batch(0, 4))
        all_free = bench.free()
        gate = faults_below(bench).hold("read")
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()

            async def read() -> None:
                with scope:
                    await bench.store.read(bench.batch(0, 1, SLOTS))

            group.start_soon(read)
            await gate.reached.wait()
            scope.cancel()
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            assert bench.free() == all_free - 1, "slots were given back with a read in flight"
            gate.open()
        assert bench.free() == all_free


async def test_a_codec_that_fails_gives_its_memory_back(tmp_path: Path) -> None:
    class Broken(Int8):
        def decode(self, spec: KVSpec, source: Bytes, target: Bytes) -> None:
            raise ValueError("cannot")

    async with opened(tmp_path, TierCodec("int8", Broken())) as bench:
        await bench.store.write(bench.batch(0, 2))
        with pytest.raises(ValueError, match="cannot"):
            await bench.store.read(bench.batch(0, 1, SLOTS))
        assert bench.free() == bench.encoding.slots


class Stumbling(DiskBackend):
    """Refuses to read slot 0; whoever reads slot 1 waits at the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    async def read(self, batch: BlockIO) -> Statuses:
        if 0 in batch.store_slots:
            raise CapacityError("no room for slot 0")
        if 1 in batch.store_slots:
            await self.gate.wait()
        return await super().read(batch)


async def test_a_share_that_is_refused_does_not_tear_the_others_away(tmp_path: Path) -> None:
    """Their memory stays taken until they have landed; then the batch says what was refused."""
    below, refused = Stumbling(), []
    async with opened(tmp_path, kib=1024, below=below, share_bytes=1) as bench:
        await bench.store.write(bench.batch(0, 3))
        all_free = bench.free()

        async def read() -> None:
            with pytest.raises(CapacityError, match="slot 0"):
                await bench.store.read(bench.batch(0, 3, SLOTS))
            refused.append(True)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await below.gate.reached.wait()
            await anyio.wait_all_tasks_blocked()
            assert bench.free() == all_free - 3
            assert not refused
            below.gate.open()
        assert bench.free() == all_free
        assert np.array_equal(bench.got(1), bench.expected[1])
        assert np.array_equal(bench.got(2), bench.expected[2])


def test_devices_that_read_files_are_not_told_where_blocks_lie() -> None:
    store = EncodedStore(DiskBackend(), TierCodec("int8", Int8()), 1 << 20)
    assert isinstance(store, StorageBackend)
    assert not isinstance(store, LocatableStorage)


def test_a_store_of_blocks_of_one_size_is_refused() -> None:
    class Shelf(DiskBackend):
        any_block_bytes: ClassVar[bool] = False

    with pytest.raises(ConfigError, match="Shelf stores blocks of the spec's size only"):
        EncodedStore(Shelf(), TierCodec("int8", Int8()), 1 << 20)
