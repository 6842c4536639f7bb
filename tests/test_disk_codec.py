"""`disk_codec`: a manager whose disk holds encoded blocks: what comes back, restarts, identities,
trouble, cancelling.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv import FlexKVConfig, FormatError, KVManager, KVSpec, plugins, tiercodec
from flexkv.backends.disk import DiskBackend
from flexkv.codecs.quant import Int8
from flexkv.encodedstore import EncodedStore
from flexkv.errors import ConfigError, PluginError
from flexkv.protocols import API_VERSION
from flexkv.testing.faults import Faults, inject

SPEC = KVSpec.uniform(2, 2, 64, "float16", tokens_per_block=16)  # 16 KiB, int8: 12 KiB on disk
BLOCKS = 32


def content(name: int, block: int) -> NDArray[np.float16]:
    """KV of one block, in host order: layer, part, token, head, element."""
    chance = np.random.default_rng([name, block])
    return chance.standard_normal((2, 2, 16, 2, 64)).astype(np.float16)


def coded(values: NDArray[np.float16]) -> NDArray[np.float16]:
    """What int8 makes of it."""
    block = values.view(np.uint8).reshape(1, -1)
    encoded = np.empty((1, Int8().encoded_bytes(SPEC)), np.uint8)
    back = np.empty_like(block)
    Int8().encode(SPEC, block, encoded)
    Int8().decode(SPEC, encoded, back)
    return back.view(np.float16).reshape(values.shape)


class Cache:
    """A manager, and device memory of 32 blocks."""

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        shape = (2, BLOCKS, 16, 2, 64)
        self.layers = {f"layer.{i}": np.zeros(shape, np.float16) for i in range(2)}
        kv.register(self.layers, axes="PBNHD")

    def tokens(self, name: int, blocks: int) -> list[int]:
        return [name * 10_000 + i for i in range(blocks * 16)]

    async def put(self, name: int, blocks: int, *, durable: bool = True) -> None:
        for block in range(blocks):
            for layer, cache in enumerate(self.layers.values()):
                cache[:, block] = content(name, block)[layer]
        transfer = self.kv.put_async(self.tokens(name, blocks), range(blocks * 16))
        await transfer
        if durable:
            await transfer.durable()

    async def get(self, name: int, blocks: int) -> int:
        """Blocks that were loaded, into a wiped device."""
        for cache in self.layers.values():
            cache[:] = -7
        result = await self.kv.get_async(self.tokens(name, blocks), range(blocks * 16))
        return int(result.loaded) // 16

    def block(self, number: int) -> NDArray[np.float16]:
        return np.stack([cache[:, number] for cache in self.layers.values()])

    def faults(self) -> Faults:
        store: Any = self.kv._stack.engine.stores["disk"]
        assert isinstance(store.store, DiskBackend)
        return inject(store.store, store._arena)

    def resident(self, tier: str) -> int:
        return self.kv.usage()[tier]["resident"]


def settings(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "spec": SPEC,
        "host_cache_bytes": 4 * SPEC.stride_bytes,
        "disk_cache_bytes": 12 * 12288,
        "disk_dirs": [path],
        "disk_codec": "int8",
        "disk_codec_bytes": 4 * 12288,
        "staging_bytes": 2 * SPEC.stride_bytes,
        "chunk_bytes": 2 * SPEC.stride_bytes,
        "huge_pages": False,
    } | more


@asynccontextmanager
async def opened(path: Path, **more: Any) -> AsyncIterator[Cache]:
    async with KVManager(FlexKVConfig.load(**settings(path, **more))) as kv:
        yield Cache(kv)
        await kv.flush()
        usage = kv.usage()
        assert usage["manager"]["pinned"] == usage["manager"]["tickets"] == 0
        for tier in ("host", "disk"):
            assert usage[tier]["resident"] + usage[tier]["free"] == usage[tier]["capacity"]


def expect(cache: Cache, name: int, blocks: Sequence[int]) -> None:
    """These blocks of the device are what int8 makes of them."""
    for block in blocks:
        assert np.array_equal(cache.block(block), coded(content(name, block))), block


@pytest.mark.parametrize("spill", ["through", "on_evict"])
async def test_blocks_come_back_from_the_disk_as_the_codec_leaves_them(
    tmp_path: Path, spill: str
) -> None:
    async with opened(tmp_path, spill=spill) as cache:
        await cache.put(1, 4)
        assert await cache.get(1, 4) == 4  # from the host: exact
        assert all(np.array_equal(cache.block(i), content(1, i)) for i in range(4))
        await cache.put(2, 4)  # pushes them out of the host
        assert await cache.get(1, 4) == 4
        expect(cache, 1, range(4))


async def test_a_block_that_came_back_is_in_the_host_as_it_came(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put(1, 4)
        await cache.put(2, 4)
        await cache.kv.prefetch_async(cache.tokens(1, 4))
        read = int(cache.kv.telemetry.value("transfer_blocks", source="disk", target="host"))
        assert await cache.get(1, 4) == 4
        expect(cache, 1, range(4))
        again = int(cache.kv.telemetry.value("transfer_blocks", source="disk", target="host"))
        assert (read, again) == (4, 4)


async def test_a_prompt_larger_than_the_host_passes_through_staging_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, host_cache_bytes=8 * SPEC.stride_bytes) as cache:
        await cache.put(1, 8)
    async with opened(tmp_path) as cache:  # half as much host memory
        assert await cache.get(1, 8) == 8
        expect(cache, 1, range(8))


async def test_a_restart_finds_encoded_blocks(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put(1, 4)
    async with opened(tmp_path) as cache:
        assert cache.resident("disk") == 4
        assert await cache.get(1, 4) == 4
        expect(cache, 1, range(4))


@pytest.mark.parametrize("other", ["int4", None])
async def test_another_codec_on_the_same_directory_is_refused_or_starts_empty(
    tmp_path: Path, other: str | None
) -> None:
    async with opened(tmp_path) as cache:
        await cache.put(1, 4)
    there = "codec is 'int8/1' on disk"
    with pytest.raises(FormatError, match=there):
        async with opened(tmp_path, disk_codec=other):
            pass
    more = {"disk_cache_bytes": 12 * SPEC.stride_bytes}
    async with opened(tmp_path, disk_codec=other, on_mismatch="clear", **more) as cache:
        assert await cache.get(1, 4) == 0


async def test_damage_is_a_miss_and_leaves_the_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put(1, 4)
        await cache.put(2, 4)
        cache.faults().add("read", "flip", skip=2, times=1)
        assert await cache.get(1, 4) == 2
        expect(cache, 1, range(2))
        await cache.kv.flush()
        assert int(cache.kv.telemetry.value("damaged_blocks", tier="disk")) == 1


async def test_a_read_that_fails_is_a_miss_and_may_succeed_the_next_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put(1, 4)
        await cache.put(2, 4)
        cache.faults().add("read", "EIO", times=4)
        assert await cache.get(1, 4) == 0
        assert await cache.get(1, 4) == 4
        expect(cache, 1, range(4))


async def test_a_write_that_fails_leaves_nothing_on_disk(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        cache.faults().add("write", "ENOSPC", times=100)
        await cache.put(1, 4, durable=False)
        await cache.kv.flush()
        assert cache.resident("disk") == 0
        assert await cache.get(1, 4) == 4


class Broken(Int8):
    """Encodes, and cannot decode."""

    def decode(self, spec: KVSpec, source: Any, target: Any) -> None:
        raise ValueError("cannot")


async def test_a_codec_that_fails_is_a_miss(tmp_path: Path) -> None:
    with plugins.register(plugins.CODECS, "broken", Broken):
        async with opened(tmp_path, disk_codec="broken") as cache:
            await cache.put(1, 4)
            await cache.put(2, 4)
            assert await cache.get(1, 4) == 0


async def test_a_get_that_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put(1, 4)
        await cache.put(2, 4)
        faults = cache.faults()
        gate = faults.hold("read")
        transfer = cache.kv.get_async(cache.tokens(1, 4), range(64))
        await gate.reached.wait()
        transfer.cancel()
        faults.clear()
        await transfer.quiesced()
        store = cache.kv._stack.engine.stores["disk"]
        assert isinstance(store, EncodedStore)
        assert store._pool.used == 0
        assert await cache.get(1, 4) == 4
        expect(cache, 1, range(4))


def test_int8_holds_as_many_more_blocks_of_smollm2_as_promised() -> None:
    spec = KVSpec.uniform(30, 3, 64, "bfloat16")
    sized = {"model": "m", "spec": spec, "disk_cache_bytes": 2**30, "disk_dirs": ["/unused"]}
    plain = tiercodec.store_slots(FlexKVConfig(**sized), spec)["disk"]
    int8 = tiercodec.store_slots(FlexKVConfig(disk_codec="int8", **sized), spec)["disk"]
    int4 = tiercodec.store_slots(FlexKVConfig(disk_codec="int4", **sized), spec)["disk"]
    assert int8 / plain >= 1.85
    assert int4 / plain >= 3.3


def test_a_lossy_codec_is_part_of_every_key_and_a_lossless_one_of_the_disk_alone() -> None:
    class Half(Int8):
        lossy = False

    config = {"model": "m", "spec": SPEC, "disk_cache_bytes": 2**20, "disk_dirs": ["/unused"]}
    plain = tiercodec.identities(FlexKVConfig(**config), SPEC)
    assert plain.keys == plain.disk == plain.remote
    lossy = tiercodec.identities(FlexKVConfig(disk_codec="int8", **config), SPEC)
    assert lossy.keys == lossy.disk == lossy.remote != plain.keys
    with plugins.register(plugins.CODECS, "half", Half):
        exact = tiercodec.identities(FlexKVConfig(disk_codec="half", **config), SPEC)
    assert exact.keys == exact.remote == plain.keys
    assert exact.disk.codec == "half/1"


def test_a_new_revision_of_a_codec_is_another_codec() -> None:
    class Newer(Int8):
        revision = 2

    assert tiercodec.TierCodec("int8", Newer()).tag == "int8/2"


class Padded:
    """Gains nothing."""

    flexkv_api = API_VERSION
    lossy = False

    def encoded_bytes(self, spec: KVSpec) -> int:
        return spec.block_bytes + 4

    def encode(self, spec: KVSpec, source: Any, target: Any) -> None:
        raise AssertionError

    decode = encode


@pytest.mark.parametrize(
    ("codec", "error", "why"),
    [
        (Padded, ConfigError, "slots of one size gain nothing"),
        (None, PluginError, "no flexkv.codecs plug-in is called 'mine'"),
    ],
)
async def test_codecs_that_do_not_fit_a_tier_are_refused(
    tmp_path: Path, codec: Any, error: type[Exception], why: str
) -> None:
    if codec is None:
        with pytest.raises(error, match=why):
            async with opened(tmp_path, disk_codec="mine"):
                pass
        return
    with plugins.register(plugins.CODECS, "mine", codec), pytest.raises(error, match=why):
        async with opened(tmp_path, disk_codec="mine"):
            pass
