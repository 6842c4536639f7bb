"""`flexkv bench codec` without a model: figures of every codec, and errors of random numbers."""

from __future__ import annotations

import json

import numpy as np
from typer.testing import CliRunner

from flexkv.bench.codec import random_blocks, random_error, run
from flexkv.cli.bench import app
from flexkv.model import KVSpec


def test_it_reports_speed_ratio_and_error_of_each_codec() -> None:
    results = {
        item.name: item
        for item in run(_quiet, codecs="int8,int4", tokens=64, repeats=1, model=False)
    }
    for name in ("int8", "int4"):
        assert results[f"{name}_encode"].value > 0
        assert results[f"{name}_decode"].value > 0
    assert results["int8_ratio"].value >= 1.85
    assert results["int4_ratio"].value >= 3.4
    assert results["int8_ratio"].params["slot_ratio"] >= 1.85
    assert 0 < results["int8_error"].value < results["int4_error"].value < 0.15


def test_errors_are_those_of_the_values() -> None:
    spec = KVSpec.uniform(1, 1, 4, "float32", tokens_per_block=1)
    before = np.ones((1, 8), np.float32)
    after = before.copy()
    after[0, 3] = 3.0
    error = random_error(spec, before.view(np.uint8), after.view(np.uint8))
    assert error == {"max_error": 2.0, "mean_abs_error": 0.25, "relative_rms": 0.5**0.5}


def test_random_keys_have_a_mean_of_their_own_per_channel() -> None:
    spec = KVSpec.uniform(1, 2, 8, "float32", tokens_per_block=64)
    keys, values = (
        random_blocks(spec, 4).view(np.float32).reshape(4, 2, 64, 16).transpose(1, 0, 2, 3)
    )
    assert np.abs(keys.mean((0, 1))).mean() > 5 * np.abs(values.mean((0, 1))).mean()


def test_the_command_prints_one_json_document() -> None:
    words = ["codec", "codecs=int8", "tokens=32", "repeats=1", "model=false", "--json"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    names = {item["name"] for item in json.loads(answer.stdout)["results"]}
    assert names == {"int8_encode", "int8_decode", "int8_ratio", "int8_error"}


def _quiet(step: str, done: int, total: int) -> None:
    """No progress bar."""
