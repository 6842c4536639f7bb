"""What a request costs beyond its bytes: `one_block`."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv.bench.cache import DeviceMemory, OpenCache, prompts
from flexkv.bench.report import Result, median, percentile
from flexkv.bench.yardsticks import copy_block_seconds
from flexkv.model import KVSpec

# 4 KiB a block: what is left is the manager's own time
SMALL = KVSpec.uniform(layers=2, heads=2, head_size=16, dtype="bfloat16", tokens_per_block=16)
_PLAN_TOKENS = 2048 * 16


def one_block(spec: KVSpec, device: DeviceMemory, hits: int) -> Result:
    """Measure what a get of one block costs beyond its copy, and what planning a long one costs."""
    copy_us = median(copy_block_seconds(spec, device, hits)) * 1e6
    large = _hits(spec, device, hits)
    blocks = _PLAN_TOKENS // SMALL.tokens_per_block
    small_device = DeviceMemory(SMALL, blocks)
    small = _hits(SMALL, small_device, hits)
    params: dict[str, Any] = {"p99_us": percentile(small, 99) * 1e6, "block_bytes": 4096}
    params |= {
        f"p{percent}_{spec.block_bytes}_byte_block_us": percentile(large, percent) * 1e6
        for percent in (50, 99)
    }
    params["its_bare_copy_us"] = copy_us
    params["it_without_copy_p50_us"] = percentile(large, 50) * 1e6 - copy_us
    try:
        fast = _hits(SMALL, small_device, hits, uvloop=True)
        params |= {f"uvloop_p{percent}_us": percentile(fast, percent) * 1e6 for percent in (50, 99)}
    except ImportError:
        params["uvloop_p50_us"] = None
    memory = blocks * SMALL.stride_bytes
    with OpenCache.open(SMALL, small_device, host_cache_bytes=memory) as cache:
        (text,) = prompts(1, _PLAN_TOKENS)
        cache.put([text], blocks=np.arange(blocks))
        for verb, times in cache.time_plans(text, max(1, hits // 10)).items():
            params[f"plan_2048_blocks_{verb}_p50_us"] = percentile(times, 50) * 1e6
    return Result(
        "host_hit_one_block", percentile(small, 50) * 1e6, "us", samples=hits, params=params
    )


def _hits(spec: KVSpec, device: DeviceMemory, hits: int, *, uvloop: bool = False) -> list[float]:
    """Return the seconds of gets of one block each, from a host tier of 64 blocks."""
    count = min(64, device.blocks)
    texts, blocks = prompts(count, spec.tokens_per_block), np.arange(count)
    memory = count * spec.stride_bytes
    with OpenCache.open(spec, device, uvloop=uvloop, host_cache_bytes=memory) as cache:
        device.fill()
        cache.put(texts, blocks=blocks)
        device.wipe()
        cache.get(texts, blocks=blocks[::-1])
        device.check(blocks, blocks[::-1])
        cache.latencies(texts, max(1, hits // 10))
        return cache.latencies(texts, hits)
