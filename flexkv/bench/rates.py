"""Rates that `flexkv calibrate` adds to its profile: `codec_rates`, `prefill_rates`,
`prefill_flops_per_s` (what they come to for a model of any shape).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from flexkv import plugins
from flexkv.bench.codec import random_blocks
from flexkv.bench.report import median
from flexkv.errors import ConfigError
from flexkv.model import KVSpec
from flexkv.sim.compute import ModelShape

_SPEC = KVSpec.uniform(16, 8, 64, "bfloat16")  # a block of 512 KiB
_BLOCKS = 16


def codec_rates(repeats: int) -> dict[str, Any]:
    """Return, by installed codec, bytes per second of encoding and decoding (of the plain bytes,
    on one core) and the ratio.
    """
    source = random_blocks(_SPEC, _BLOCKS)
    found: dict[str, Any] = {}
    for name in sorted(plugins.available(plugins.CODECS)):
        try:
            codec = plugins.load(plugins.CODECS, name)()
        except ConfigError as error:  # it needs a package that is not installed
            found[name] = {"missing": str(error)}
            continue
        encoded = np.empty((_BLOCKS, codec.encoded_bytes(_SPEC)), np.uint8)
        decoded = np.empty_like(source)
        seconds: dict[str, list[float]] = {"encode": [], "decode": []}
        for _ in range(repeats):
            begun_s = time.perf_counter()
            codec.encode(_SPEC, source, encoded)
            seconds["encode"].append(time.perf_counter() - begun_s)
            begun_s = time.perf_counter()
            codec.decode(_SPEC, encoded, decoded)
            seconds["decode"].append(time.perf_counter() - begun_s)
        found[name] = {
            "ratio": source.nbytes / encoded.nbytes,
            **{f"{verb}_bytes_per_s": source.nbytes / median(s) for verb, s in seconds.items()},
        }
    return found


def prefill_rates(model: Path, lengths: tuple[int, ...] = (128, 512, 1024)) -> dict[str, float]:
    """Return prefilled tokens per second of a causal LM on this machine's CPU, by prompt length.

    Raises:
        ConfigError: torch or transformers is missing, or the directory holds no model.
    """
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(model)).eval()
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"no prefill rate of {model}: {error}") from error
    rates = {}
    with torch.inference_mode():
        for length in lengths:
            prompt = torch.arange(length).remainder(1000)[None]
            seconds = []
            for _ in range(3):
                begun_s = time.perf_counter()
                loaded(prompt)
                seconds.append(time.perf_counter() - begun_s)
            rates[str(length)] = length / median(seconds[1:])
    return rates


def prefill_flops_per_s(model: Path, rates: Mapping[str, float]) -> float | None:
    """Return the FLOPs per second of the longest prompt in `rates`; None: the model's config.json
    does not say what a decoder with gated feed-forward layers has.
    """
    config = json.loads((model / "config.json").read_text())
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        shape = ModelShape(
            str(model),
            config["num_hidden_layers"],
            hidden,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["intermediate_size"],
            config["vocab_size"],
        )
    except KeyError:
        return None
    tokens = max(int(length) for length in rates)
    return shape.prefill_flops(tokens) * rates[str(tokens)] / tokens
