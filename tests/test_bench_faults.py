"""`flexkv bench faults`: what it breaks is broken, and what it counts is counted."""

from __future__ import annotations

import shutil

import pytest

from flexkv.backends.remote.mooncake_process import HINT, installed
from flexkv.bench import faults
from flexkv.errors import ConfigError

CLEAN = dict.fromkeys(("local_missed", "wrong_blocks", "hangs", "pins_left"), 0)


@pytest.mark.skipif(
    not (shutil.which("redis-server") or shutil.which("valkey-server")),
    reason="NOT TESTED: install redis-server (or valkey-server)",
)
def test_a_killed_owner_is_missed_and_comes_back_and_nothing_is_wrong() -> None:
    (found,) = faults.run(lambda step, done, total: None, faults=("owner_killed",), phase_s=1.0)
    facts = found.params
    assert found.samples > 0
    assert facts["healthy_served"] > 0
    assert facts["missed"] > 0
    assert facts["recovery_s"] is not None
    assert {name: facts[name] for name in CLEAN} == CLEAN


@pytest.mark.skipif(not installed(), reason=f"NOT TESTED: {HINT}")
def test_a_store_whose_master_dies_while_it_is_read_costs_misses_and_comes_back() -> None:
    (found,) = faults.run(lambda step, done, total: None, faults=("mooncake_killed",), phase_s=0.5)
    facts = found.params
    assert facts["healthy_served"] > 0
    assert facts["served"] == 0 < facts["missed"]
    assert facts["recovery_s"] is not None
    assert {name: facts[name] for name in CLEAN} == CLEAN


def test_unknown_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match="owner_bored"):
        faults.run(lambda step, done, total: None, faults=("owner_bored",))
