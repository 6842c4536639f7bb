"""The measuring scripts under examples/vllm run, and report what they say they do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples" / "vllm"
SMALL = ["--layers", "1", "--hidden", "128", "--shared", "512", "--own", "64"]


def report_of(tmp_path: Path, script: str, *options: str) -> dict[str, Any]:
    """The line of JSON with which a script ends."""
    command = [sys.executable, str(EXAMPLES / script), "--dir", str(tmp_path), *SMALL, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_load_compares_both_sides_and_times_the_scheduler(tmp_path: Path) -> None:
    options = ["--requests", "6", "--prefixes", "2", "--answer", "4", "--host", "64MiB"]
    # room for one prompt: what comes back is flexkv's doing
    options += ["--concurrency", "1", "--device-tokens", "640", "--calls"]
    report = report_of(tmp_path, "load.py", *options, "--rounds", "2")
    with_it, without = report["sides"]["with flexkv"], report["sides"]["without"]
    assert with_it["requests"] == without["requests"] == 12
    assert with_it["external_hit_share"] > 0.2
    assert without["external_hit_share"] == 0
    assert with_it["hit_share"] > without["hit_share"]
    assert 0 < with_it["ttft_ms_p50"] <= with_it["ttft_ms_p99"]
    assert report["throughput_ratio_of_pairs"] > 0
    assert report["calls_us"]["get_num_new_matched_tokens"][0] >= 12


def test_ttft_knows_where_each_answer_came_from(tmp_path: Path) -> None:
    report = report_of(tmp_path, "ttft.py", "--prompts", "2")
    assert {way: len(times) for way, times in report["all_s"].items()} == {
        "cold": 2,
        "local again": 6,
        "local new": 2,
        "host again": 6,
        "host new": 2,
        "ssd again": 1,
        "ssd new": 1,
    }
