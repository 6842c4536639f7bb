"""`flexkv bench codec`: bytes per second, ratio and real error of codecs.

`run` measures `NAME_encode`, `NAME_decode` (GB/s of decoded bytes and of one core's time),
`NAME_ratio` (against the same KV uncoded, scales included) and `NAME_error`, on the KV of
SmolLM2-135M over real text where the model is installed, else on random numbers. With the model,
also `sink_window_SHARE_error` and `top_blocks_SHARE_error`: cold copies that keep a share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv import plugins
from flexkv.bench import cold
from flexkv.bench.report import Progress, Result, median
from flexkv.errors import ConfigError
from flexkv.model import PAGE_BYTES, KVSpec
from flexkv.protocols import Codec

Blocks = NDArray[np.uint8]
_CHUNK_BLOCKS = 8  # at a time, as the data plane does: what was encoded is still in the cache


def run(
    progress: Progress,
    *,
    codecs: str | Sequence[str] = ("int8", "int4", "lossless"),
    dtype: str = "bfloat16",
    tokens: int = 2048,
    continuation_tokens: int = 512,
    tokens_per_block: int = 16,
    repeats: int = 5,
    model: bool = True,
    shares: Sequence[float] = (0.5, 0.25, 0.125),
) -> list[Result]:
    """Measure codecs on the KV of `tokens` tokens, and cold copies with `shares` of its blocks.

    Args:
        codecs: names, or one text with commas between them.
        dtype: of the KV: what ratios are against.
        continuation_tokens: read behind the restored `tokens`; answers are compared at each (the
            text has some 2,300).
        model: whether to ask the real model; without it errors are of random numbers, and cold
            copies are left out.
    """
    names = codecs.split(",") if isinstance(codecs, str) else list(codecs)
    steps = len(names) + 1
    progress("real KV" if model else "random KV", 0, steps)
    sample = _sample(tokens, continuation_tokens, tokens_per_block, dtype) if model else None
    if sample is None:
        spec = KVSpec.uniform(30, 3, 64, dtype, tokens_per_block=tokens_per_block)
        source = random_blocks(spec, tokens // tokens_per_block)
    else:
        spec, source = sample.spec, sample.blocks()
    facts = {"dtype": dtype, "tokens": tokens, "tokens_per_block": tokens_per_block}
    facts["data"] = "random" if sample is None else "SmolLM2-135M"
    results = []
    for number, name in enumerate(names, 1):
        progress(name, number, steps)
        codec: Codec = plugins.load(plugins.CODECS, name)()
        results += _measure(name, codec, spec, source, repeats, facts)
        back = round_trip(codec, spec, source)
        error = random_error(spec, source, back) if sample is None else sample.compare(back)
        results.append(_error(name, error, sample, facts))
    if sample is not None:
        progress("cold copies", steps, steps)
        results += cold.measure(sample, shares, facts)
    progress("done", steps, steps)
    return results


def _sample(tokens: int, continuation_tokens: int, tokens_per_block: int, dtype: str) -> Any:
    """The real model's KV, or None where there is no model."""
    try:
        from flexkv.integration.transformers.fidelity import Sample

        return Sample(
            prefix_tokens=tokens,
            continuation_tokens=continuation_tokens,
            tokens_per_block=tokens_per_block,
            dtype=dtype,
        )
    except (ImportError, ConfigError):
        return None


def random_blocks(spec: KVSpec, blocks: int, seed: int = 1) -> Blocks:
    """Blocks of normal numbers, keys with a mean of their own per channel."""
    from flexkv.codecs.layout import parts, to_bytes

    chance = np.random.default_rng(seed)
    made = np.empty((blocks, spec.block_bytes), np.uint8)
    for part in parts(spec):
        values = chance.standard_normal((blocks, part.tokens, part.heads, part.size))
        if part.is_key:
            values += 3 * chance.standard_normal((part.heads, part.size))
        size = part.tokens * part.heads * part.size * part.itemsize
        data = to_bytes(values.astype(np.float32), part.dtype)
        made[:, part.offset : part.offset + size] = data.reshape(blocks, size)
    return made


def round_trip(codec: Codec, spec: KVSpec, source: Blocks) -> Blocks:
    """Encode and decode blocks."""
    encoded = np.empty((len(source), codec.encoded_bytes(spec)), np.uint8)
    codec.encode(spec, source, encoded)
    back = np.empty_like(source)
    codec.decode(spec, encoded, back)
    return back


def random_error(spec: KVSpec, before: Blocks, after: Blocks) -> dict[str, float]:
    """Largest, mean and relative error of all values."""
    from flexkv.codecs.layout import as_values, parts

    pairs = [(as_values(before, part), as_values(after, part)) for part in parts(spec)]
    errors = [np.abs(new - old) for old, new in pairs]
    power = sum(float((old.astype(np.float64) ** 2).sum()) for old, _ in pairs)
    wrong = sum(float((error.astype(np.float64) ** 2).sum()) for error in errors)
    return {
        "max_error": max(float(error.max()) for error in errors),
        "mean_abs_error": float(np.mean([error.mean() for error in errors])),
        "relative_rms": (wrong / power) ** 0.5,
    }


def _measure(
    name: str, codec: Codec, spec: KVSpec, source: Blocks, repeats: int, facts: dict[str, Any]
) -> list[Result]:
    encoded = np.empty((len(source), codec.encoded_bytes(spec)), np.uint8)
    back = np.empty_like(source)
    verbs: dict[str, tuple[Callable[..., None], Blocks, Blocks]] = {
        "encode": (codec.encode, source, encoded),
        "decode": (codec.decode, encoded, back),
    }
    results = []
    for verb, (call, origin, target) in verbs.items():
        rates, walls = [], []
        for _ in range(repeats + 1):  # the first one touches memory for the first time
            wall, used = time.perf_counter(), time.thread_time()
            for first in range(0, len(source), _CHUNK_BLOCKS):
                part = slice(first, first + _CHUNK_BLOCKS)
                call(spec, origin[part], target[part])
            rates.append(source.nbytes / (time.thread_time() - used) / 1e9)
            walls.append(source.nbytes / (time.perf_counter() - wall) / 1e9)
        params = facts | {"wall_gb_per_s": round(median(walls[1:]), 3), "threads": 1}
        results.append(
            Result(f"{name}_{verb}", median(rates[1:]), "GB/s", samples=repeats, params=params)
        )
    results.append(_ratio(name, codec, spec, encoded, facts))
    return results


def _ratio(name: str, codec: Codec, spec: KVSpec, encoded: Blocks, facts: dict[str, Any]) -> Result:
    """Blocks to bytes that must be kept of them; and in slots of whole pages, as on disk."""
    size = codec.encoded_bytes(spec)
    sizes = getattr(codec, "sizes", None)
    mean = float(sizes(encoded).mean()) if sizes else float(size)
    slot = -(-size // PAGE_BYTES) * PAGE_BYTES
    params = facts | {
        "block_bytes": spec.block_bytes,
        "encoded_bytes": round(mean),
        "encoded_bytes_at_most": size,
        "slot_ratio": round(spec.stride_bytes / slot, 3),
    }
    return Result(f"{name}_ratio", spec.block_bytes / mean, "x", samples=1, params=params)


def _error(name: str, error: dict[str, float], sample: Any, facts: dict[str, Any]) -> Result:
    params = facts | {key: float(f"{value:.5g}") for key, value in error.items()}
    if sample is None:
        return Result(f"{name}_error", error["relative_rms"], "of rms", samples=1, params=params)
    same = float((sample.exact.tokens == sample.reference.tokens).mean())
    params["continuation_tokens"] = sample.continuation_tokens
    params["next_token_agreement_of_the_dtype"] = round(same, 5)
    value = error["attention_relative_rms"]
    return Result(f"{name}_error", value, "of rms", samples=1, params=params)
