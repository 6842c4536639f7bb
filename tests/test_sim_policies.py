"""Replays of traces: every policy against its definition, the bound against every choice there is,
and all of them against a simulator of others.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import policy_models as models
import pytest

from flexkv import plugins
from flexkv.errors import ConfigError, InputError
from flexkv.model import BlockIds, KeyArray
from flexkv.policies.lru import LRU
from flexkv.sim.alone import alone
from flexkv.sim.columns import Columns, columns
from flexkv.sim.compare import Result, compare, parse_capacities, parse_policies
from flexkv.sim.opt import Future, opt
from flexkv.sim.replay import replay
from flexkv.traces import Trace, TraceRequest, read_trace

SAMPLE = Path(__file__).parent / "data/sim/conversation_1500.jsonl.gz"
LEAF_POLICIES = ["lru", "mru", "fifo", "filo", "lfu", "slru", "lfu-da", "gdsf"]


def trace_of(
    paths: Sequence[Sequence[int]], tokens_per_block: int = 512, scale: int = 1
) -> Columns:
    requests = [
        TraceRequest(1e3 * number, None, len(path) * tokens_per_block, 1, ids)
        for number, (path, ids) in enumerate((p, np.array(p, np.int64) * scale) for p in paths)
    ]
    distinct = len({block for path in paths for block in path})
    return columns(
        Trace("made", tokens_per_block, requests, distinct, sum(len(path) for path in paths))
    )


def run_all(
    trace: Columns, policies: str, capacity: str, warmup_percent: float = 0.0
) -> list[Result]:
    return list(
        compare(
            [trace],
            parse_policies(policies),
            parse_capacities(capacity),
            clock=lambda: 0.0,
            progress=lambda done: None,
            warmup_percent=warmup_percent,
        )
    )


@pytest.fixture(scope="module")
def sample() -> Columns:
    return columns(read_trace(SAMPLE))


# --- policies against their definitions


@pytest.mark.parametrize("policy", LEAF_POLICIES)
@pytest.mark.parametrize("capacity", [1, 7, 25])
def test_ranked_policies_match_what_their_definitions_match(policy: str, capacity: int) -> None:
    for seed in range(3):
        paths = models.random_trace(seed, requests=150, branches=4, longest=9)
        found = replay(trace_of(paths), policy, capacity).matched.tolist()
        assert found == models.with_leaf_rule(policy, paths, capacity, 512)


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
def test_a_real_trace_is_matched_as_the_definition_does(policy: str, sample: Columns) -> None:
    paths = np.split(sample.ids, sample.ends[1:-1])
    few = [path.tolist() for path in paths[:250]]
    found = replay(trace_of(few), policy, 150).matched.tolist()
    assert found == models.with_leaf_rule(policy, few, 150, 512)


@pytest.mark.parametrize("policy", ["sieve", "s3fifo", "arc"])
@pytest.mark.parametrize("capacity", [2, 10, 40])
def test_queue_policies_are_the_published_ones_where_prompts_are_one_block(
    policy: str, capacity: int
) -> None:
    for seed in range(2):
        rng = random.Random(seed)
        blocks = [min(int(rng.paretovariate(0.6)), 200) for _ in range(1200)]
        blocks[300:500] = range(1000, 1200)  # a scan
        blocks[400:900:2] = [rng.randrange(300, 330) for _ in blocks[400:900:2]]
        found = replay(trace_of([[block] for block in blocks]), policy, capacity).matched.tolist()
        assert found == getattr(models, policy)(blocks, capacity)


def test_ageing_forgets_what_was_popular_once() -> None:
    old, new = [0], [[block % 3 + 10] for block in range(400)]
    trace = trace_of([old] * 50 + new + [old])
    assert replay(trace, "lfu", 3).matched[-1] == 1, "lfu keeps it for its past"
    assert replay(trace, "lfu-da", 3).matched[-1] == 0


def test_gdsf_keeps_the_deep_block_that_costs_more_to_compute() -> None:
    deep, flat = list(range(40)), [[100 + number // 2] for number in range(60)]
    trace = trace_of([deep, *flat, deep], tokens_per_block=4096)
    assert replay(trace, "lru", 60).matched[-1] < 40
    assert replay(trace, "gdsf", 60).matched[-1] == 40
    indifferent = {"gdsf_crossover_tokens": 1e12}
    assert replay(trace, "gdsf", 60, indifferent).matched[-1] < 40


def test_a_scan_does_not_empty_s3fifo_and_arc() -> None:
    kept = [[block] for block in range(8)]
    trace = trace_of(kept * 4 + [[block] for block in range(100, 400)] + kept)
    for policy in ("s3fifo", "arc"):
        assert replay(trace, policy, 20).matched[-8:].sum() == 8, policy
    assert replay(trace, "lru", 20).matched[-8:].sum() == 0


@pytest.mark.parametrize(
    ("policy", "settings", "what"),
    [
        ("s3fifo", {"s3fifo_small_share": 1.0}, "s3fifo_small_share must be between 0 and 1"),
        ("gdsf", {"gdsf_crossover_tokens": 0}, "gdsf_crossover_tokens must be > 0"),
    ],
)
def test_settings_out_of_range_are_refused(
    policy: str, settings: dict[str, float], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        replay(trace_of([[1]]), policy, 4, settings)


# --- the bound


def test_no_choice_matches_more_than_the_bound() -> None:
    for seed in range(12):
        paths = models.random_trace(seed, requests=9, branches=2, longest=3)[:9]
        for capacity in (1, 2, 3):
            found = int(opt(Future(trace_of(paths)), capacity).sum())
            assert found == models.best_possible(paths, capacity), (seed, capacity)


def test_every_policy_stays_below_the_bound_and_the_bound_below_the_ideal(sample: Columns) -> None:
    results = run_all(sample, "lru,gdsf,lru-alone,opt", "1%,100%")
    for bound in (item for item in results if item.policy == "opt"):
        same = [item for item in results if item.capacity_blocks == bound.capacity_blocks]
        assert all(item.hits <= bound.hits <= sample.accesses - sample.distinct for item in same)
    assert results[-1].hits == sample.accesses - sample.distinct, "everything fits"


# --- replays


def test_a_path_longer_than_the_tier_is_kept_as_far_as_it_fits() -> None:
    path = list(range(9))
    run = replay(trace_of([path, path]), "lru", 4)
    assert run.matched.tolist() == [0, 4]
    assert (run.inserted_blocks, run.evicted_blocks) == (4, 0)


def test_a_block_counts_only_if_all_before_it_are_there() -> None:
    long, others = [0, 1, 2], [[10, 11], [20, 21], [30]]
    trace = trace_of([[0], long, *others, long])
    classic = alone("fifo-alone", trace, 6, lambda done: None)
    assert classic[-1] == 0, "the head came first, so it left first, and strands the rest"
    assert replay(trace, "fifo", 6).matched[-1] > 0


def test_block_numbers_may_be_anything() -> None:
    paths = models.random_trace(1, requests=60, branches=3, longest=6)
    dense, sparse = trace_of(paths), trace_of(paths, scale=10**15)
    assert sparse.ids.max() < sparse.distinct == dense.distinct
    assert replay(dense, "lru", 9).matched.tolist() == replay(sparse, "lru", 9).matched.tolist()
    assert opt(Future(dense), 9).tolist() == opt(Future(sparse), 9).tolist()


class Listener(LRU):
    """LRU that hears of whole prompts and refuses nothing."""

    heard: ClassVar[list[tuple[int, float, int | None]]] = []

    def prompt(
        self, keys: KeyArray, known: BlockIds, now: float, output_tokens: int | None = None
    ) -> int:
        self.heard.append((len(keys), now, output_tokens))
        return len(keys)

    def placed(self, blocks: BlockIds, first: int) -> None:
        pass


def test_policies_that_see_prompts_are_told_time_and_length_of_the_answer() -> None:
    Listener.heard.clear()
    with plugins.register(plugins.POLICIES, "listener", Listener):
        replay(trace_of([[0, 1], [], [0, 1, 2]]), "listener", 5)
    assert Listener.heard == [(2, 0.0, 1), (3, 2.0, 1)]


def test_requests_without_a_full_block_match_nothing() -> None:
    trace = trace_of([[], [1], [], [1]])
    for matched in (replay(trace, "lru", 2).matched, opt(Future(trace), 2)):
        assert matched.tolist() == [0, 0, 0, 1]


def test_percentages_are_of_blocks_tokens_and_flops() -> None:
    trace = trace_of([[0, 1], [0, 2]], tokens_per_block=30_000)
    found = run_all(trace, "lru", "100%")[0]
    assert found.block_hit_percent == found.token_hit_percent == pytest.approx(25.0)
    # a first block costs 1.5 (its middle is at half of the crossover), a second one 2.5
    assert found.flop_saved_percent == pytest.approx(100 * 1.5 / 8.0)
    assert (found.capacity_blocks, found.accesses, found.hits) == (3, 4, 1)
    warm = run_all(trace, "lru", "3", warmup_percent=50)[0]
    assert (warm.requests, warm.accesses, warm.hits) == (1, 2, 1)
    assert warm.capacity_percent == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("policies", "what"),
    [
        ("lru,lfuda", "no policy is called 'lfuda' (did you mean 'lfu-da'?); there are default"),
        ("gdsf:cost", "write a setting of a policy as NAME=VALUE"),
        (" ,", "no policy to compare"),
    ],
)
def test_policies_that_are_none_say_what_there_is(policies: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_policies(policies)
    assert what in str(caught.value)


@pytest.mark.parametrize("capacity", ["", "0%", "-3", "1.5", "half", "nan%", "inf%", "99999999999"])
def test_capacities_that_are_none_are_refused(capacity: str) -> None:
    with pytest.raises(InputError, match="capacity"):
        parse_capacities(capacity)


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(InputError, match="no request has a full block"):
        run_all(trace_of([[], []]), "lru", "1%")
    with pytest.raises(InputError, match="the warm-up leaves no block to count"):
        run_all(trace_of([[1], []]), "lru", "1", warmup_percent=50)
    with pytest.raises(InputError, match="below 100 percent, got 100"):
        run_all(trace_of([[1]]), "lru", "1", warmup_percent=100)


# --- others' simulator


@pytest.mark.skipif(
    find_spec("kvcache_sim") is None, reason="kvcache-simulator 0.1.3 is not installed (extra test)"
)
def test_lru_and_the_bound_agree_with_kvcache_simulator(sample: Columns, tmp_path: Path) -> None:
    """Of the last half of the requests, as it counts."""
    theirs = kvcache_simulator(sample, tmp_path, [40, 150, 600])
    assert set(theirs) == {40, 150, 600}
    for blocks, rates in theirs.items():
        ours = run_all(sample, "lru,opt", str(blocks), warmup_percent=50)
        assert ours[0].block_hit_percent == pytest.approx(100 * rates["lru"], abs=0.01)
        assert ours[1].block_hit_percent == pytest.approx(100 * rates["optimal"], abs=0.01)


def kvcache_simulator(
    trace: Columns, place: Path, capacities: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Hit rates by capacity in blocks and policy, from the command of that package."""
    file = place / "trace.jsonl"
    with file.open("w") as out:
        for path in np.split(trace.ids, trace.ends[1:-1]):
            row = {"block_size": 512, "hash_ids": path.tolist(), "input_length": 512 * len(path)}
            out.write(json.dumps(row) + "\n")

    def ask(budgets: list[float]) -> dict[str, object]:
        words = [
            "--model",
            "deepseek-v3",
            "--estimate-tokens",
            "10000",
            "--policies",
            "lru,optimal",
        ]
        words += ["--budgets-gib", ",".join(map(repr, budgets)), "--backend", "python"]
        command = [sys.executable, "-m", "kvcache_sim", "run", "--trace", str(file), *words]
        command += ["--format", "json", "--no-progress"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        found: dict[str, object] = json.loads(done.stdout)
        return found

    block_bytes = ask([0.01])["metadata"]["bytesPerBlock"]  # type: ignore[index]
    budgets = [(blocks + 0.5) * block_bytes / 2**30 for blocks in capacities]
    points = ask(budgets)["points"]
    return {
        point["cacheBlocks"]: {name: item["hitRate"] for name, item in point["results"].items()}
        for point in points  # type: ignore[attr-defined]
    }


# --- the command


def command(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    program = "import sys; from flexkv.cli import app; app(sys.argv[1:], prog_name='flexkv')"
    done = subprocess.run(
        [sys.executable, "-c", program, "sim", "policy-compare", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={"COLUMNS": "100", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_the_command_prints_one_json_document(sample: Columns) -> None:
    words = ("--policies", "lru,opt,default", "--capacity", "1%,5%", "--json")
    results = json.loads(command("--trace", str(SAMPLE), *words).stdout)["results"]
    assert [(r["policy"], r["capacity_percent"]) for r in results] == [
        (policy, percent) for policy in ("lru", "opt", "default") for percent in (1.0, 5.0)
    ]
    expected = run_all(sample, "lru", "1%,5%")
    for found, ours in zip(results, expected, strict=False):
        assert found["trace"] == "conversation-1500"
        assert found["block_hit_percent"] == pytest.approx(ours.block_hit_percent)
        assert found["flop_saved_percent"] == pytest.approx(ours.flop_saved_percent)


def test_the_command_prints_a_table_for_people() -> None:
    text = command(
        "--trace", str(SAMPLE), "--policies", "lru,s3fifo", "--capacity", "2%,100"
    ).stdout
    assert "conversation-1500" in text
    assert "100 blocks" in text
    assert [line.split()[0] for line in text.splitlines() if "/" in line][-2:] == ["lru", "s3fifo"]


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    absent = command("--trace", str(tmp_path / "absent.jsonl"), code=1)
    assert "absent.jsonl" in absent.stderr
    assert (
        "did you mean 'gdsf'"
        in command("--trace", str(SAMPLE), "--policies", "gdfs", code=1).stderr
    )
