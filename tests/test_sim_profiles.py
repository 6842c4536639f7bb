"""Hardware profiles carry sources, survive a file, and models cost what published formulas say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexkv.errors import ConfigError
from flexkv.sim import profiles
from flexkv.sim.compute import ComputeModel, shape
from flexkv.sim.profiles import HardwareProfile, TierProfile, hardware


@pytest.mark.parametrize("name", profiles.names())
def test_every_figure_has_a_source_and_survives_a_file(name: str, tmp_path: Path) -> None:
    profile = hardware(name)
    for tier in (*profile.tiers.values(), *profile.links.values()):
        assert tier.source not in ("", "not stated")
    path = tmp_path / "machine.json"
    profiles.write_profile(profile, path)
    assert hardware(str(path)) == profile


@pytest.mark.parametrize(
    ("name", "tier", "bytes_per_s"),
    [  # of the makers' data sheets: terabytes, not terabits
        ("h100", "hbm", 3.35e12),
        ("h200", "hbm", 4.8e12),
        ("mi300x", "hbm", 5.3e12),
        ("prototype", "hbm", 3e12),
        ("h100+net100", "network", 12.5e9),
        ("h100", "network", 50e9),
    ],
)
def test_rates_are_bytes_per_second(name: str, tier: str, bytes_per_s: float) -> None:
    assert hardware(name).tiers[tier].read_bytes_per_s == bytes_per_s


def test_a_file_may_change_one_tier_of_a_known_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "h100"\n[tiers.ssd]\ncapacity_bytes = 1e12\nlatency_s = 1e-4\n'
        "read_bytes_per_s = 3e9\nwrite_bytes_per_s = 1e9\n"
    )
    mine = hardware(str(path))
    assert mine.name == "mine"
    assert mine.tiers["ssd"].read_bytes_per_s == 3e9
    assert mine.tiers["hbm"] == hardware("h100").tiers["hbm"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[tiers.ssd]\nspeed = 3\n", r"unknown field \['speed'\]"),
        ("[tiers.ssd]\nlatency_s = 1.0\n", r"tiers\.ssd: .*missing"),
        ("tiers = 5\n", "must be a table"),
        ("nonsense", "neither TOML nor JSON"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        hardware(str(path))


def test_wrong_names_and_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="no hardware 'h999'"):
        hardware("h999")
    with pytest.raises(ConfigError, match="no variant 'floppy'"):
        hardware("h100+floppy")
    with pytest.raises(ConfigError, match="cannot read"):
        hardware("/nowhere/machine.json")
    with pytest.raises(ConfigError, match="read_bytes_per_s of 'x' must be > 0"):
        TierProfile("x", 1, 0, 0, 1)
    with pytest.raises(ConfigError, match="queue_depth of 'x'"):
        TierProfile("x", 1, 0, 1, 1, queue_depth=0)
    with pytest.raises(ConfigError, match="is behind 'pcie'"):
        HardwareProfile("m", {"x": TierProfile("x", 1, 0, 1, 1, behind="pcie")})
    with pytest.raises(ConfigError, match="no tier or link 'tape'"):
        hardware("h100").scaled("tape", 2)
    with pytest.raises(ConfigError, match="no model shape"):
        shape("gpt-0")


def test_scaling_a_link_leaves_the_rest() -> None:
    half = hardware("h100").scaled("pcie", 0.5)
    assert half.links["pcie"].read_bytes_per_s == 31.5e9
    assert half.tiers == hardware("h100").tiers


def test_model_sizes_are_those_of_the_model_cards() -> None:
    llama = shape("llama-3.1-8b")
    # 8.03e9 weights in all, of which two embeddings of 128,256 x 4,096
    assert llama.linear_weights() == pytest.approx(8.03e9 - 2 * 128256 * 4096, rel=0.001)
    assert llama.kv_bytes_per_token() == 128 * 1024
    assert shape("llama-2-7b").kv_bytes_per_token() == 512 * 1024


def test_prefill_flops_do_not_depend_on_how_a_prompt_is_cut() -> None:
    llama = shape("llama-3.1-8b")
    head = 2.0 * llama.hidden * llama.vocabulary
    cut = llama.prefill_flops(300) + llama.prefill_flops(700, 300) - head
    assert cut == pytest.approx(llama.prefill_flops(1000), rel=1e-12)


def test_prefill_is_bound_by_flops_and_decode_by_bytes() -> None:
    llama = shape("llama-3.1-8b")
    model = ComputeModel(llama, 989.4e12, 3.35e12, flops_share=0.5, bandwidth_share=0.8)
    assert model.prefill_seconds(8192) == pytest.approx(llama.prefill_flops(8192) / 494.7e12)
    read = llama.weight_bytes() + 8192 * 131072
    assert model.decode_seconds([8192]) == pytest.approx(read / 2.68e12)
    assert model.prefill_seconds(0) == model.decode_seconds([]) == 0.0
    with pytest.raises(ConfigError, match="flops_share"):
        ComputeModel(llama, 1.0, 1.0, flops_share=0.0)
