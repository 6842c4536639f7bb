"""Many requests at once on little memory: preemptions, aborts, loads that fail, disks that fail.

Whatever happens to the loads, every answer is that of an engine without flexkv.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import BUILT_IN, MODULE, Engine, check_idle, connector, prompt

pytestmark = [pytest.mark.timeout(900)]
REQUESTS, ANSWER = 64, 48
SMALL = {"max_num_seqs": 16, "max_model_len": 1024}
BLOCKS = 100  # sixteen requests need twice as many


@pytest.fixture(scope="module")
def asked(tiny: Path) -> tuple[list[list[int]], list[list[int]]]:
    """64 prompts over 8 shared beginnings, and their answers without flexkv.

    Prompts whose best and second best tokens are so close that rounding decides are left out: how
    many tokens a step computes together changes the last bits.
    """
    shared = [prompt(256, 10 + group) for group in range(8)]
    prompts = [shared[i % 8] + prompt(40, 100 + i) for i in range(80)]
    with Engine(tiny, **SMALL) as plain:
        clear = plain.clearest(prompts=prompts, tokens=ANSWER)[:REQUESTS]
        assert len(clear) == REQUESTS
        prompts = [prompts[number] for number in clear]
        return prompts, plain.generate(prompts=prompts, tokens=ANSWER)["tokens"]


def churn(engine: Any, asked: Any, seed: int) -> None:
    """All requests together, three of them aborted at random steps."""
    prompts, expected = asked
    aborted = [(seed * 5 + i * 23) % REQUESTS for i in range(3)]
    ran = engine.churn(prompts=prompts, tokens=ANSWER, aborted=aborted, seed=seed)
    for number, tokens in ran["finished"].items():
        assert tokens == expected[int(number)], f"seed {seed}, request {number}"
    assert len(ran["finished"]) >= REQUESTS - len(aborted)
    check_idle(engine)


@pytest.mark.parametrize(
    ("how", "load"),
    [
        pytest.param(MODULE, "async", marks=pytest.mark.offline),
        (MODULE, "sync"),
        (BUILT_IN, "async"),
    ],
    ids=["module-async", "module-sync", "built-in"],
)
def test_failing_loads_aborts_and_preemptions_change_no_answer(
    tiny: Path, asked: Any, how: dict[str, str], load: str
) -> None:
    with Engine(tiny, connector(how, load=load), num_gpu_blocks_override=BLOCKS, **SMALL) as engine:
        churn(engine, asked, 0)
        engine.fail_loads(share=0.1)
        for seed in (1, 2, 3):
            churn(engine, asked, seed)
        metrics = engine.metrics()
        assert metrics["vllm:num_preemptions"] > 0
        assert metrics["vllm:external_prefix_cache_hits"] > 0
        assert sum(engine.counters()["failed_blocks"].values()) > 0
        # without a manager it is slower, and nothing else
        engine.break_manager()
        prompts, expected = asked
        assert engine.generate(prompts=prompts[:8], tokens=ANSWER)["tokens"] == expected[:8]
        assert engine.settle()
        assert engine.reset_local()


def test_a_failing_disk_changes_no_answer(tiny: Path, asked: Any, tmp_path: Path) -> None:
    tiers = {
        "host_cache_bytes": "6MiB",
        "disk_cache_bytes": "64MiB",
        "disk_dirs": [str(tmp_path / "ssd")],
    }
    with Engine(tiny, connector(**tiers), num_gpu_blocks_override=BLOCKS, **SMALL) as engine:
        churn(engine, asked, 10)
        engine.fail_disk_reads(share=0.1)
        for seed in (11, 12, 13):
            churn(engine, asked, seed)
        shutil.rmtree(tmp_path / "ssd")  # somebody cleans up
        churn(engine, asked, 14)
        assert engine.metrics()["vllm:num_preemptions"] > 0
        counters = engine.counters()
        assert sum(counters["damaged_blocks"].values()) > 0
        assert sum(counters["failed_blocks"].values()) > 0
