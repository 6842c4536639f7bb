"""The decode simulator: traffic in closed form, books, and what it is there to show."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.errors import CapacityError, ConfigError
from flexkv.sim.clock import VirtualClock
from flexkv.sim.compute import ComputeModel, shape
from flexkv.sim.decode.compare import Question, compare, run_baseline, run_orchestrated, sweep
from flexkv.sim.decode.dma import Dma
from flexkv.sim.decode.prefetch import predictor
from flexkv.sim.decode.result import DecodeResult
from flexkv.sim.decode.run import simulate
from flexkv.sim.decode.settings import OVERLAPPED, SERIAL, Codec, Placement, Settings
from flexkv.sim.decode.workload import Workload, attention, prototype, sparse
from flexkv.sim.profiles import hardware

H100 = hardware("h100")
LLAMA = ComputeModel(shape("llama-3.1-8b"), H100.flops_per_s, H100.tiers["hbm"].read_bytes_per_s)
TINY = ComputeModel(shape("smollm2-135m"), 1e14, 3.35e12)


def small(**changes: object) -> Question:
    return replace(Question(contexts=(8192,) * 2, steps=64), **changes)  # type: ignore[arg-type]


# -- workloads


def test_the_prototypes_workload_reads_what_its_author_published() -> None:
    workload = prototype()
    reads = sum(len(workload.access(step).blocks) for step in range(workload.steps))
    assert reads * workload.block_bytes == 1_329_594_368


def test_real_attention_reads_every_block_of_every_layer_and_head_and_the_weights() -> None:
    context, steps = 1000, 3
    result = simulate(
        attention([context], LLAMA, steps=steps, batch=1),
        Settings(H100, orchestrated=False, staging=False),
    )
    blocks = [(context + step) // 16 + 1 for step in range(steps)]
    assert result.accesses == sum(blocks) * 32 * 8
    assert result.kv_read_bytes["hbm"] == sum(blocks) * 16 * 131072
    assert result.weight_read_bytes == pytest.approx(steps * LLAMA.model.weight_bytes())
    assert result.kv_written_bytes["hbm"] == steps * 131072  # the new tokens, not forgotten


def test_decode_of_real_attention_is_bound_by_hbm() -> None:
    result = simulate(
        attention([32768] * 4, LLAMA, steps=2, batch=4),
        Settings(H100, orchestrated=False, staging=False),
    )
    read_s = (result.kv_read_bytes["hbm"] + result.weight_read_bytes) / 3.35e12
    assert result.elapsed_s == pytest.approx(read_s, rel=0.02)


def test_sequences_have_blocks_of_their_own() -> None:
    workload = sparse([500, 900], steps=4, batch=2)
    access = workload.access(1)
    assert len(access.blocks) == 2 * 32 * 5
    assert set(workload.sequence[access.blocks]) == {0, 1}


# -- the books


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, Settings]:
    contexts = draw(st.lists(st.integers(1, 700), min_size=1, max_size=3))
    steps, batch = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["sparse", "prototype", "attention"]))
    if kind == "sparse":
        workload = sparse(contexts, steps=steps, layers=3, batch=batch)
    elif kind == "prototype":
        workload = prototype(
            requests=len(contexts), steps=steps, context_tokens=contexts[0], layers=3
        )
    else:
        workload = attention(contexts, TINY, steps=steps, batch=batch)
    tight = workload.weight_bytes + draw(st.floats(2, 60)) * workload.block_bytes
    return workload, Settings(
        H100,
        draw(st.sampled_from([SERIAL, OVERLAPPED])),
        draw(st.booleans()),
        Placement(policy=draw(st.sampled_from(["lru", "lfu", "hot-warm-cold"]))),
        codec=draw(st.sampled_from(["none", "int8", "int4"])),
        predictor=draw(
            st.sampled_from(["none", "next-window", "markov", "session", "steps", "oracle"])
        ),
        capacity_bytes={
            "hbm": draw(st.sampled_from([tight, 80e9])),
            "sram": draw(st.floats(0, 80)) * workload.block_bytes,
        },
        waves=draw(st.integers(1, 4)),
        staging=draw(st.booleans()),
    )


@given(runs())
@settings(max_examples=50, deadline=None)
def test_the_books_of_any_run_balance(run: tuple[Workload, Settings]) -> None:
    """`simulate` raises if not; here the laws are held once more, from the result alone."""
    result = simulate(*run)
    assert result.exposed_s + result.hidden_s == pytest.approx(result.busy_s, rel=1e-6, abs=1e-12)
    assert result.exposed_s + result.compute_s == pytest.approx(result.elapsed_s, rel=1e-6)
    books = (result.read_bytes_by_cause, result.written_bytes_by_cause)
    booked = sum(size for book in books for by in book.values() for size in by.values())
    assert booked == pytest.approx(result.moved_bytes, rel=1e-6)
    assert 0 <= result.staging_hits <= result.accesses
    score = result.prefetch
    parts = (score["in_time_blocks"], score["late_blocks"], score["wasted_blocks"])
    assert sum(parts) == score["issued_blocks"]


def test_the_same_question_has_the_same_answer() -> None:
    question = small(capacity_bytes={"hbm": 60e6})
    assert run_orchestrated(question).as_json(steps=True) == run_orchestrated(question).as_json(
        steps=True
    )


def test_blocks_that_fit_nowhere_are_refused() -> None:
    tiny = {"hbm": 1e6, "cxl": 1e6, "dram": 1e6}
    with pytest.raises(CapacityError, match="fit in none of"):
        run_baseline(small(capacity_bytes=tiny))


# -- what it is there to show


@pytest.fixture(scope="module")
def published() -> list[DecodeResult]:
    return compare(Question(contexts=(8192,) * 2))  # of its eight equal requests


def test_the_published_result_comes_back_in_shape_when_everything_queues(
    published: list[DecodeResult],
) -> None:
    """Published: 1.33 -> 0.71 GB from HBM, 0 -> 14.4 % staged, 5.9 -> 12.9 ms exposed."""
    plain, serial = published[:2]
    assert plain.kv_read_bytes["hbm"] == 1_329_594_368 / 4
    assert plain.staging_hits == 0
    assert serial.hbm_read_bytes < 0.6 * plain.hbm_read_bytes
    assert 0.10 < serial.staging_hit_share < 0.20
    assert serial.exposed_s > 2 * plain.exposed_s


def test_overlap_turns_it_around(published: list[DecodeResult]) -> None:
    plain_serial, _, plain, staged, ours = published
    assert ours.predictor == "markov"  # learnt on the way, no oracle
    for opponent in (plain_serial, plain, staged):
        assert ours.exposed_s <= opponent.exposed_s
        assert ours.hbm_read_bytes <= 0.6 * opponent.hbm_read_bytes


def test_at_real_context_lengths_too() -> None:
    """Input lengths of the first requests of a public chat trace (Mooncake, Apache-2.0)."""
    contexts = (6758, 7322, 7236, 2290)
    question = Question("sparse", contexts, steps=32)
    plain, ours = run_baseline(question), run_orchestrated(question)
    assert ours.exposed_s <= plain.exposed_s
    assert ours.hbm_read_bytes <= 0.6 * plain.hbm_read_bytes
    dense = replace(question, workload="attention", steps=2)
    plain, ours = run_baseline(dense), run_orchestrated(dense)
    assert ours.exposed_s <= plain.exposed_s
    assert ours.hbm_read_bytes <= 0.6 * plain.hbm_read_bytes
    assert ours.lossy_accesses > 0  # int8 is not free: the result says how often it was read


# -- parts


def test_an_oracle_wastes_nothing_and_markov_learns_jumps() -> None:
    oracle = run_orchestrated(small(predictor="oracle")).prefetch
    assert oracle["precision"] == 1.0
    assert oracle["wasted_bytes"] == 0
    assert run_orchestrated(small(predictor="markov")).prefetch["recall"] > 0.9
    assert run_orchestrated(small(predictor="none")).prefetch["issued_blocks"] == 0


def test_hints_name_the_sequences_that_run_next() -> None:
    workload = sparse([400, 400], steps=3, batch=1)
    plain, hinted = predictor("session", workload), predictor("steps", workload)
    for step in range(3):
        for one in (plain, hinted):
            one.learn(step, workload.access(step))
    last = workload.access(2)
    assert np.array_equal(plain.predict(2, 1), last.blocks)  # more of the same
    assert len(hinted.predict(2, 1)) == 0  # the other one is next, and has read nothing yet


def test_codecs_cost_by_the_byte() -> None:
    def exposed(rate: float, block_scale: int) -> float:
        slow = {
            "none": Codec("none", 1.0, 1e18, 1e18, False, "test"),
            "int8": Codec("int8", 0.53, rate, rate, True, "test"),
        }
        workload = attention([4096 * block_scale], LLAMA, steps=2, batch=1)
        return simulate(
            workload, Settings(H100, codecs=slow, codec="int8", predictor="none", staging=False)
        ).exposed_s

    assert exposed(1e9, 2) / exposed(1e9, 1) == pytest.approx(2, rel=0.1)
    assert exposed(1e12, 1) < exposed(1e9, 1) / 10


def test_measured_codecs_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    slow = {"ratio": 2.0, "encode_bytes_per_s": 1e9, "decode_bytes_per_s": 1e9}
    path.write_text(json.dumps({"serving": {"facts": {"codecs": {"int8": slow, "x": {}}}}}))
    question = Question("attention", (4096,), steps=2, batch=1, codecs=path)
    measured, assumed = run_orchestrated(question), run_orchestrated(replace(question, codecs=None))
    assert measured.exposed_s > assumed.exposed_s  # one CPU core is no accelerator
    for text in ("no", "[]", '{"int8": {"ratio": 2}}', '{"int8": {"ratio": 0}}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="does not hold codec figures"):
            run_orchestrated(question)
    with pytest.raises(ConfigError, match="no codec 'zip'"):
        run_orchestrated(replace(question, codecs=None, codec="zip"))


def test_prefetches_of_neighbours_merge_where_the_tier_lets_them() -> None:
    blocks = np.arange(64)[::-1].copy()
    for limit, expected in ((0, 64), (8192, 64), (65536, 8)):
        tier = replace(H100.tiers["dram"], coalesce_bytes=limit)
        dma = Dma(VirtualClock(), Settings(H100.with_tiers(tier)))
        assert dma.requests("dram", blocks, 8192.0, 1) == expected


def test_encoding_in_place_waits_until_it_pays() -> None:
    """A raw warm block is read three times first; reads that are too few never pay for it."""
    short = simulate(sparse([4096], steps=3), Settings(H100, predictor="none"))
    assert short.encoded_blocks == 0

    def encoded(after_reads: int) -> int:
        rule = Placement(hot_age_tokens=0, encode_after_reads=after_reads)
        workload = attention([30], LLAMA, steps=8, batch=1)
        return simulate(workload, Settings(H100, placement=rule, staging=False)).encoded_blocks

    assert encoded(3) > 0
    assert encoded(1000) == 0


def test_all_policies_share_their_windows_and_only_rank_differently() -> None:
    question = small(capacity_bytes={"hbm": 8e6}, predictor="none")
    found = {
        policy: run_orchestrated(replace(question, policy=policy))
        for policy in ("lru", "lfu", "hot-warm-cold")
    }
    assert len({result.accesses for result in found.values()}) == 1
    assert all(result.evicted_blocks > 0 for result in found.values())
    assert all(result.peak_resident_bytes["hbm"] <= 8e6 for result in found.values())


def test_a_sweep_takes_every_combination() -> None:
    axes = {"codec": ["int8", "int4"], "bandwidth": [{"hbm": 0.5}, {"hbm": 2.0}]}
    answers = sweep(small(steps=8), axes)
    assert len(answers) == 8
    assert answers[0][1].exposed_s > answers[2][1].exposed_s  # half of HBM, then twice
    with pytest.raises(ConfigError, match="something to vary"):
        sweep(small(), {})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"workload": "chess"}, "no workload 'chess'"),
        ({"pipeline": "magic"}, "no pipeline 'magic'"),
        ({"codec": "zip"}, "no codec 'zip'"),
        ({"predictor": "psychic"}, "no predictor 'psychic'"),
        ({"policy": "fifo"}, "no placement policy 'fifo'"),
        ({"hardware": "abacus"}, "no hardware 'abacus'"),
        ({"capacity_bytes": {"tape": 1.0}}, "capacity tape="),
        ({"bandwidth": {"tape": 1.0}}, "no tier or link 'tape'"),
        ({"contexts": ()}, "no context length"),
        ({"workload": "attention", "hardware": "prototype"}, "needs flops_per_s"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(
    changes: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        run_orchestrated(small(**changes))


def test_the_command_prints_one_document_and_names_wrong_input() -> None:
    def flexkv(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from flexkv.cli import app; app()", "sim", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )

    good = flexkv("sweep", "--requests", "1", "--steps", "8", "--codec", "int8,int4", "--json")
    rows = json.loads(good.stdout)["results"]
    assert [row["varied"]["codec"] for row in rows] == ["int8", "int8", "int4", "int4"]
    bad = flexkv("baseline", "--capacity", "hbm:4GiB")
    assert bad.returncode == 2
    assert "--capacity takes TIER=VALUE" in bad.stderr
