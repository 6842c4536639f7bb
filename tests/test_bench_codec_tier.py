"""`flexkv bench codec --tier`: both tiers are filled and read, the simulator serves the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexkv.cli.bench import app
from flexkv.model import DEVICE, DISK, HOST
from flexkv.sim.profiles import HardwareProfile, hardware
from flexkv.sim.serving.measured import Calibration, Sample

RATES = {"encode_bytes_per_s": 1e9, "decode_bytes_per_s": 2e9}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A disk of 1 GB/s and copies of 10 GB/s, no latency."""
    path = tmp_path / "profile.json"
    rates = {(HOST, DEVICE): 1e10, (DEVICE, HOST): 1e10, (DISK, HOST): 1e9, (HOST, DISK): 1e9}
    batches = {edge: [Sample(4096, n, n * 4096 / rates[edge]) for n in (1, 64)] for edge in rates}
    machine = HardwareProfile("made", hardware("h100").tiers, hardware("h100").links)
    facts = {"cores": 2, "device": "cpu", "codecs": {"int8": RATES}}
    Calibration(machine, batches, rates, {}, facts).write(path)
    return path


def test_a_codec_holds_more_and_what_it_brings_is_predicted(tmp_path: Path, profile: Path) -> None:
    """Slots of SmolLM2 blocks: 90 pages, 47 with int8; 16 plain blocks fit, 30 encoded ones."""
    words = ["codec", "--tier", "--dir", str(tmp_path), "model=smollm2-135m", "repeats=1"]
    sizes = [f"disk_bytes={16 * 90 * 4096}", f"profile={profile}", "--json"]
    answer = CliRunner().invoke(app, [*words, *sizes])
    assert answer.exit_code == 0, answer.output
    results = {item["name"]: item for item in json.loads(answer.stdout)["results"]}
    held = results["tier_held"]
    assert (held["value"], held["peer"]) == (30, 16)
    assert (held["params"]["predicted"], held["params"]["predicted_peer"]) == (30, 16)
    assert results["tier_get_plain"]["value"] > 0
    # 1 GB/s of encoded bytes: never faster than the ratio
    assert 0.5 < results["tier_get_plain"]["params"]["predicted"] <= 1
    assert 0.5 < results["tier_get_int8"]["params"]["predicted"] <= 90 / 47
    border = results["tier_speedup"]["params"]["break_even_gb_per_s"]
    assert border == pytest.approx(2 * (1 - 47 / 90)), "one share: a core, and what is saved"
    assert {item.name for item in tmp_path.iterdir()} == {"profile.json"}


def test_a_disk_of_too_few_blocks_is_refused(tmp_path: Path, profile: Path) -> None:
    words = ["codec", "--tier", "--dir", str(tmp_path), "disk_bytes=4096", f"profile={profile}"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 1
    assert "at least 8 are needed" in " ".join(answer.stderr.split())
