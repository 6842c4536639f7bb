"""Hit rates on whole traces against published anchors; needs TRACES_FOLDER, a folder with the
traces as docs/policies.md says and their anchors.csv. Takes about half an hour on one core.
"""

from __future__ import annotations

import csv
import functools
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_sim_policies import kvcache_simulator, run_all

from flexkv.sim.columns import Columns, columns
from flexkv.traces import read_trace

FOLDER = os.environ.get("TRACES_FOLDER")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="TRACES_FOLDER names no folder with whole traces"),
]
TRACES = {  # tokens per block
    "agents": 256,
    "ragpulse": 64,
    "synthetic": 512,
    "conversation": 512,
    "claude_code": 512,
}
# anchors count LRU, FIFO and SLRU without the prefix rule, the others with it
SAME = {
    "LRU": "lru-alone",
    "FIFO": "fifo-alone",
    "SLRU50": "slru-alone",
    "LFU": "lfu",
    "GDSF-prefix": "gdsf",
    "OPT": "opt",
}
PERCENTS = (1, 5, 10, 25, 50)


@functools.cache
def whole(trace: str) -> Columns:
    path = Path(FOLDER or "") / f"{trace}.jsonl.gz"
    return columns(read_trace(path, tokens_per_block=TRACES[trace]))


@functools.cache
def anchors() -> dict[tuple[str, str, int], tuple[float, float]]:
    with (Path(FOLDER or "") / "anchors.csv").open() as file:
        return {
            (row["trace"], row["policy"], int(row["capacity_percent"])): (
                float(row["block_hit_percent"]),
                float(row["flop_weighted_percent"]),
            )
            for row in csv.DictReader(file)
        }


@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize("anchor", SAME)
@pytest.mark.parametrize("trace", TRACES)
def test_anchors_are_reproduced(trace: str, anchor: str, percent: int) -> None:
    found = run_all(whole(trace), SAME[anchor], f"{percent}%")[0]
    hits, flops = anchors()[trace, anchor, percent]
    assert found.block_hit_percent == pytest.approx(hits, abs=0.1)
    assert found.flop_saved_percent == pytest.approx(flops, abs=0.1)


@pytest.mark.parametrize("percent", PERCENTS)
@pytest.mark.parametrize("trace", TRACES)
def test_the_prefix_rule_costs_lru_nothing(trace: str, percent: int) -> None:
    found = run_all(whole(trace), "lru", f"{percent}%")[0]
    assert found.block_hit_percent >= anchors()[trace, "LRU", percent][0] - 0.01


@pytest.mark.skipif(
    find_spec("kvcache_sim") is None, reason="kvcache-simulator 0.1.3 is not installed (extra test)"
)
def test_the_whole_conversation_agrees_with_kvcache_simulator(tmp_path: Path) -> None:
    trace = whole("conversation")
    sizes = [trace.distinct * percent // 100 for percent in PERCENTS]
    theirs = kvcache_simulator(trace, tmp_path, sizes)
    assert len(theirs) >= 3, "it leaves out sizes that the first half of the trace does not fill"
    for blocks, rates in theirs.items():
        lru, bound = run_all(trace, "lru,opt", str(blocks), warmup_percent=50)
        assert lru.block_hit_percent == pytest.approx(100 * rates["lru"], abs=0.01)
        assert bound.block_hit_percent == pytest.approx(100 * rates["optimal"], abs=0.01)
