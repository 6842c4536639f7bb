"""What is measured is written, read again, and used as it is; errors of times are as defined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_traces import made_requests
from typer.testing import CliRunner

from flexkv.bench.calibrate import run
from flexkv.bench.rates import prefill_flops_per_s
from flexkv.cli.calibrate import app as calibrate_app
from flexkv.cli.sim import app as sim_app
from flexkv.errors import ConfigError
from flexkv.model import DEVICE, DISK, HOST
from flexkv.sim.profiles import HardwareProfile, hardware, read_profile
from flexkv.sim.serving.compare import latency_errors, middle
from flexkv.sim.serving.measured import KINDS, Calibration, Sample, Software
from flexkv.sim.serving.replay import EDGES, Served, check_config, replay
from flexkv.traces import Trace, write_trace


@pytest.fixture
def made() -> Calibration:
    samples = [
        *(Sample(4096, n, 0.001 + n * 0.0001) for n in (1, 4, 16)),
        *(Sample(16384, n, 0.001 + n * 0.0004) for n in (1, 4, 16)),
    ]
    return Calibration(
        HardwareProfile("made", hardware("h100").tiers, hardware("h100").links),
        dict.fromkeys(EDGES, samples),
        dict.fromkeys(EDGES, 8192 / 0.0002),
        {
            "get": Software(0.01, 0.001),
            "put": Software(0.02, 0.0, ((1, 0.02),)),
            "put_more": Software(0.03),
        },
        {"cpu": "made"},
    )


def test_a_profile_is_read_as_it_was_written(made: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    made.write(path)
    again = Calibration.read(path)
    assert again.batches == made.batches
    assert again.bytes_per_s == made.bytes_per_s
    assert again.software == made.software
    # other parts of the simulator read the same file
    assert read_profile(path).tiers["dram"] == made.hardware.tiers["dram"]


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"name": "other"}')
    with pytest.raises(ConfigError, match="was not written by `flexkv calibrate`"):
        Calibration.read(path)


@pytest.mark.parametrize(
    ("block_bytes", "blocks", "total_s"),
    [
        (4096, 4, 0.0014),  # as measured
        (4096, 10, 0.0020),  # between two batches
        (8192, 4, 0.0014 + (0.0026 - 0.0014) / 3),  # a third of the way to the larger block
        (4096, 64, 0.0026 + 48 * 0.0001),  # beyond the largest batch, at its slope
        (16384, 64, 0.0074 + 48 * 0.0004),
    ],
)
def test_costs_follow_the_samples(
    made: Calibration, block_bytes: int, blocks: int, total_s: float
) -> None:
    cost = made.cost_of((HOST, DEVICE), block_bytes)(blocks)
    assert cost.total_s == pytest.approx(total_s)
    assert cost.occupied_s == pytest.approx(blocks * block_bytes / (8192 / 0.0002))


def test_a_models_prefill_rate_is_that_of_its_flops(tmp_path: Path) -> None:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    sizes = (2, 64, 4, 2)
    config = dict(zip(names, sizes, strict=True)) | {"intermediate_size": 128, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    linear = 2 * (64 * 16 * 2 * (4 + 2) + 3 * 64 * 128)  # weights: head size 16
    flops = 2 * 10 * linear + 2 * 64 * 100 + 4 * 2 * 64 * 55  # 55 pairs of 10 tokens
    assert prefill_flops_per_s(tmp_path, {"5": 7.0, "10": 20.0}) == pytest.approx(flops * 2)
    (tmp_path / "config.json").write_text("{}")
    assert prefill_flops_per_s(tmp_path, {"10": 20.0}) is None


def test_serving_takes_prefill_from_the_profile(made: Calibration, tmp_path: Path) -> None:
    trace, profile = tmp_path / "t.jsonl", tmp_path / "p.json"
    write_trace(Trace("made", 16, made_requests(1, 4), 1, 1), trace)
    common = ["serve", "--trace", str(trace), "--model", "smollm2-135m", "--json"]
    prefills = []
    for flops_per_s in (1e12, 2e12):
        replace(made, facts={"prefill_flops_per_s": flops_per_s}).write(profile)
        found = CliRunner().invoke(sim_app, [*common, "--profile", str(profile)])
        assert found.exit_code == 0, found.output
        (result,) = json.loads(found.stdout)["results"]
        prefills.append(result["ttft_mean_ms"]["prefill"])
    assert prefills[0] == pytest.approx(2 * prefills[1], rel=0.01)


def test_a_check_may_be_spelt_as_an_option(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(Trace("made", 16, made_requests(1, 4), 1, 1), trace)
    found = CliRunner().invoke(sim_app, ["--check", str(trace)])
    assert found.exit_code == 0, found.output
    assert "equal to the last block" in found.output
    both = CliRunner().invoke(sim_app, ["--check", str(trace), "check", "--trace", str(trace)])
    assert both.exit_code == 2


def test_a_replay_takes_what_batches_and_software_take(made: Calibration) -> None:
    config = check_config(block_bytes=4096, host_blocks=64, disk_blocks=64)
    requests = made_requests(1, 2)
    requests[1] = requests[0]
    blocks = len(requests[0].block_ids)
    first, second = replay(config, requests, made.costs(4096))
    batch_s = 0.001 + blocks * 0.0001
    assert first.put_s == pytest.approx(batch_s + 0.02)
    assert second.get_s == pytest.approx(batch_s + 0.01 + blocks * 0.001)
    assert first.settle_s == pytest.approx(max(0.0, batch_s - 0.02))  # the spill, beside the end


def test_a_put_of_what_is_there_takes_its_own_share(made: Calibration) -> None:
    shares = {"put": Software(0.02), "put_more": Software(0.03), "put_known": Software(0.004)}
    put_s = replace(made, software=shares).costs(4096).put_s
    assert [put_s(8, new) for new in (8, 3, 0)] == [0.02, 0.03, 0.004]


def test_the_share_of_software_lies_between_what_was_measured() -> None:
    share = Software(0.5, 0.25, ((1, 2.0), (4, 5.0), (8, 4.0)))
    assert [share.seconds(n) for n in (1, 2, 4, 6, 8, 12)] == [2.0, 3.0, 5.0, 4.5, 4.0, 5.0]
    assert Software(-1.0, 0.25).seconds(2) == 0.0


def test_the_middle_of_replays_has_no_single_moment_of_noise() -> None:
    replays = [[Served(0, 4, matched=4, get_s=get_s, put_s=2 * get_s)] for get_s in (1.0, 9.0, 1.5)]
    (one,) = middle(replays)
    assert (one.matched, one.get_s, one.put_s) == (4, 1.5, 3.0)


def test_errors_of_times_are_as_defined() -> None:
    def served(number: int, get_s: float) -> Served:
        return Served(number, 4, matched=4, by_tier={HOST: 4}, get_s=get_s)

    measured = [served(i, 0.010) for i in range(4)]
    said = [served(i, get_s) for i, get_s in enumerate((0.011, 0.009, 0.010, 0.012))]
    get = next(one for one in latency_errors(measured, said) if one.name == "get, all from host")
    assert get.requests == 4
    assert get.mape == pytest.approx((0.1 + 0.1 + 0.0 + 0.2) / 4)
    assert get.mpe == pytest.approx((0.1 - 0.1 + 0.0 + 0.2) / 4)
    assert get.p50 == pytest.approx(0.1)
    assert get.of_p50 == pytest.approx(float(np.median([0.011, 0.009, 0.010, 0.012])) / 0.010 - 1)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_machine_is_measured(tmp_path: Path, device: str) -> None:
    options = {"host_tensors": True} if device == "simulated" else {}
    found = run(
        lambda *_: None,
        directory=tmp_path,
        device=device,
        device_options=options,
        block_bytes=[4096],
        batches=[1, 8],
        repeats=1,
    )
    assert set(found.batches) == set(EDGES)
    assert all(sample.seconds > 0 for edge in EDGES for sample in found.batches[edge])
    assert found.bytes_per_s[DISK, HOST] > 0
    assert set(found.software) == set(KINDS)
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_are_no_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 4096, got"):
        run(lambda *_: None, block_bytes=[1000])


def test_the_commands_measure_check_and_plan(tmp_path: Path) -> None:
    runner, profile, path = CliRunner(), tmp_path / "profile.json", tmp_path / "trace.jsonl.gz"
    requests = made_requests(5, 60)
    blocks = sum(len(one.block_ids) for one in requests)
    write_trace(Trace("made", 16, requests, 100, blocks), path)
    measure = ["--out", str(profile), "--dir", str(tmp_path), "--block-kib", "4", "--repeats", "1"]
    assert runner.invoke(calibrate_app, measure).exit_code == 0
    where = ["--trace", str(path), "--json"]
    sizes = ["--host-blocks", "16", "--disk-blocks", "40", "--dir", str(tmp_path)]
    times = ["--profile", str(profile), "--repeats", "2"]
    checked = runner.invoke(sim_app, ["check", *where, *sizes, *times])
    assert checked.exit_code == 0, checked.output
    answer = json.loads(checked.stdout)
    assert answer["equal"] is True
    assert {one["name"] for one in answer["latency"]} >= {"put", "end to end"}
    assert len(answer["noise"]) == len(answer["latency"])
    served = runner.invoke(sim_app, ["serve", *where, "--host", "20", "--disk", "50%"])
    assert served.exit_code == 0, served.output
    assert json.loads(served.stdout)["results"][0]["ttft_ms"]["p95"] > 0
    impossible = ["plan", *where, "--ttft-ms", "0.001", "--host", "20", "--steps", "1"]
    assert runner.invoke(sim_app, impossible).exit_code == 1
