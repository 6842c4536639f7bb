"""The event loop is never held up: nothing blocks it, and big transfers do not stall it.

Speed is a benchmark's business; the bounds here only catch what is plainly wrong.
"""

from __future__ import annotations

import types
from pathlib import Path

import numpy as np
import pytest
from blockbuster import BlockingError, blockbuster_ctx

import flexkv
from flexkv import FlexKVConfig, KVManager, KVSpec
from flexkv.testing.guard import ticking

# where our code is: an editable install has another folder in front of it
OURS = types.ModuleType("ours")
OURS.__path__ = [str(Path(flexkv.__file__).parent)]

BLOCKS = 256
SPEC = KVSpec.uniform(layers=8, heads=8, head_size=64, dtype="float16", tokens_per_block=16)
assert SPEC.block_bytes == 256 << 10
STALL_LIMIT_MS = 100


def config(path: Path, **more: object) -> FlexKVConfig:
    settings: dict[str, object] = {
        "model": "test-model",
        "spec": SPEC,
        "host_cache_bytes": 2 * BLOCKS * SPEC.stride_bytes,
        "disk_cache_bytes": 4 * BLOCKS * SPEC.stride_bytes,
        "disk_dirs": [path / "d0"],
        "huge_pages": False,
        "chunk_bytes": 4 << 20,
    }
    return FlexKVConfig.load(**(settings | more))


async def test_transfers_of_64_mib_do_not_stall_the_loop(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    caches = [np.zeros((2, BLOCKS, 16, 8, 64), np.uint16) for _ in range(8)]
    noise = np.random.default_rng(1).integers(0, 1 << 16, caches[0].shape, np.uint16)
    for cache in caches:
        cache[:] = noise
    tokens, slots = list(range(BLOCKS * 16)), np.arange(BLOCKS * 16)
    stalls = {}
    async with KVManager(config(tmp_path)) as kv:
        kv.register(caches, axes="PBNHD")
        with ticking() as ticker:
            put = kv.put_async(tokens, slots)
            await put
            stalls["put"] = ticker.worst_ms
            await put.durable()
        stalls["put and spill"] = ticker.worst_ms
        with ticking() as ticker:
            assert (await kv.get_async(tokens, slots)).by_tier == {"host": BLOCKS}
        stalls["get from host"] = ticker.worst_ms
    async with KVManager(config(tmp_path)) as kv:
        kv.register(caches, axes="PBNHD")
        for cache in caches:
            cache[:] = 0
        with ticking() as ticker:
            assert (await kv.get_async(tokens, slots)).loaded == BLOCKS * 16
        stalls["get from disk"] = ticker.worst_ms
        assert (caches[3] == noise).all()
    for name, worst_ms in stalls.items():
        record_property(f"stall of {name} (ms)", round(worst_ms, 2))
    assert max(stalls.values()) < STALL_LIMIT_MS, stalls


@pytest.mark.parametrize("engine", ["auto", "threads"])
async def test_nothing_blocking_is_called_on_the_loop(tmp_path: Path, engine: str) -> None:
    caches = [np.zeros((2, BLOCKS, 16, 8, 64), np.uint16) for _ in range(8)]
    tokens, slots = list(range(64 * 16)), np.arange(64 * 16)
    for _ in range(2):
        kv = KVManager(config(tmp_path, disk_engine=engine))
        await kv.__aenter__()  # opening resolves directories and looks for plug-ins
        kv.register(caches, axes="PBNHD")
        with blockbuster_ctx(OURS) as guard:
            for name in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
                guard.functions[name].deactivate()  # the log
            await kv.put_async(tokens, slots).durable()
            await kv.get_async(tokens, slots)
            kv.remove(tokens)
            await kv.flush()
            await kv.put_async(tokens, slots)
            await kv.reset()
            await kv.put_async(tokens, slots)
            await kv.aclose()


async def test_the_guard_against_blocking_calls_works(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("model: m")
    with blockbuster_ctx(OURS), pytest.raises(BlockingError):
        FlexKVConfig.load(tmp_path / "settings.yaml")
