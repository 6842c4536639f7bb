"""Simulator and data plane serve a trace alike, to the last block; a difference is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_traces import made_requests

from flexkv.bench import replay as plane
from flexkv.errors import ConfigError
from flexkv.sim.serving.compare import first_difference, totals
from flexkv.sim.serving.replay import Served, check_config, replay

BLOCK = 4096
CASES: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "spill": "on_evict"},
    {"seed": 3, "spill": "never"},
    {"seed": 4, "chunk_bytes": 3 * BLOCK},
    {"seed": 5, "chunk_bytes": 3 * BLOCK, "spill": "on_evict"},
    {"seed": 6, "host_policy": "lfu", "disk_policy": "slru"},
    {"seed": 7, "host_policy": "mru", "disk_policy": "filo", "chunk_bytes": 2 * BLOCK},
    {"seed": 8, "evict_ratio": 0.2, "evict_start_threshold": 0.8},
    {"seed": 9, "staging_bytes": 2 * BLOCK, "host_blocks": 12},
    {"seed": 10, "disk_blocks": 0},
]


def both(
    path: Path, *, seed: int, device: str = "cpu", count: int = 80, **settings: Any
) -> tuple[list[Served], list[Served]]:
    options = {"host_tensors": True} if device == "simulated" else {}
    sizes = {"block_bytes": BLOCK, "host_blocks": 16, "disk_blocks": 40} | settings
    config = check_config(
        directory=path / "disk", device=device, device_options=options, prefault=False, **sizes
    )
    requests = made_requests(seed, count)
    return plane.replay(config, requests), list(replay(config, requests))


@pytest.mark.parametrize(
    "case",
    [*CASES, *({**CASES[i], "device": "simulated"} for i in (0, 3, 4))],
    ids=lambda case: f"seed {case['seed']} {case.get('device', 'cpu')}",
)
def test_hits_evictions_and_bytes_are_equal(tmp_path: Path, case: dict[str, Any]) -> None:
    measured, simulated = both(tmp_path, **case)
    assert first_difference(measured, simulated) is None
    # and the run was one worth comparing
    sums = totals(simulated)
    assert sums["evicted_blocks"]["host"] > 10
    assert sums["hit_blocks"]["host"] > 10
    if case.get("disk_blocks") != 0 and case.get("spill") != "never":
        assert sums["evicted_blocks"]["disk"] > 10
        assert sums["hit_blocks"]["disk"] > 10


def test_a_planted_difference_is_found(tmp_path: Path) -> None:
    settings = {"block_bytes": BLOCK, "host_blocks": 16, "disk_blocks": 40}
    config = check_config(directory=tmp_path / "disk", prefault=False, **settings)
    other = check_config(directory=tmp_path / "disk", host_policy="fifo", **settings)
    requests = made_requests(1, 80)
    measured, simulated = plane.replay(config, requests), list(replay(other, requests))
    found = first_difference(measured, simulated)
    assert found is not None
    # a policy makes no difference before somebody must leave
    assert any(one.evicted.get("host") for one in measured[: found.number + 1])
    assert all(
        one.facts() == two.facts()
        for one, two in zip(measured[: found.number], simulated[: found.number], strict=True)
    )
    assert f"request {found.number}: " in str(found)


def test_a_replay_repeats_itself() -> None:
    config = check_config(block_bytes=BLOCK, host_blocks=16, disk_blocks=40)
    requests = made_requests(11, 200)
    runs = [[one.facts() for one in replay(config, requests)] for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_block_that_is_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 4096, got 5000"):
        check_config(block_bytes=5000, host_blocks=4)
