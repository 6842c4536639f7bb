"""Traces that are generated, written and summed up."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.errors import InputError, TraceError
from flexkv.traces import Trace, generate, read_trace, summarize, write_trace
from flexkv.traces.draws import Draws, zipf
from flexkv.traces.generators import GENERATORS, parameters

KINDS = sorted(GENERATORS)


def plain(trace: Trace) -> list[tuple[float, str | None, int, int, list[int]]]:
    return [
        (r.timestamp_ms, r.session, r.input_tokens, r.output_tokens, r.block_ids.tolist())
        for r in trace.requests
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_makes_the_same_trace_in_any_process(tmp_path: Path, kind: str) -> None:
    program = (
        "import sys; from flexkv.traces import generate, write_trace\n"
        "write_trace(generate(sys.argv[1], 60, seed=7), sys.argv[2])\n"
    )
    for name, salt in (("a.jsonl.gz", "1"), ("b.jsonl.gz", "2")):
        subprocess.run(
            [sys.executable, "-c", program, kind, tmp_path / name],
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": salt},
        )
    first, second = (tmp_path / f"{name}.jsonl.gz" for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert plain(read_trace(first)) != plain(generate(kind, 60, seed=8))


@pytest.mark.parametrize("kind", KINDS)
def test_generated_prompts_are_whole_sorted_and_shared(kind: str) -> None:
    trace = generate(kind, 300, seed=3)
    times = [request.timestamp_ms for request in trace.requests]
    assert len(times) == 300
    assert times == sorted(times)
    assert all(len(r.block_ids) == r.input_tokens // 16 for r in trace.requests)
    assert 0 < trace.distinct < trace.accesses
    assert not trace.malformed  # the builder has checked that ids are chained


def test_turns_of_a_chat_hold_all_that_was_said_before() -> None:
    last: dict[str | None, tuple[int, list[int]]] = {}
    follow_ups = 0
    for request in generate("chat", 400, seed=2).requests:
        ids = request.block_ids.tolist()
        tokens, before = last.get(request.session, (0, []))
        assert ids[: len(before)] == before
        assert request.input_tokens > tokens
        follow_ups += bool(before)
        last[request.session] = (request.input_tokens + request.output_tokens, ids)
    assert follow_ups > 100


def test_all_agents_share_the_rules_and_those_of_a_kind_their_tools() -> None:
    chosen = {"kinds": 2, "rules_tokens": 160, "delegates_share": 0.3}
    trace = generate("agents", 200, seed=1, settings=chosen)
    rules = {tuple(r.block_ids[:10].tolist()) for r in trace.requests}
    tools = {int(r.block_ids[20]) for r in trace.requests}
    assert len(rules) == 1
    assert len(tools) == 2
    assert any("/" in (r.session or "") for r in trace.requests)


def test_documents_in_fixed_order_share_more() -> None:
    def ideal(share: float) -> float:
        settings = {"documents": 20, "shuffled_share": share}
        rate = summarize(generate("rag", 300, seed=1, settings=settings)).ideal_hit_rate
        assert rate is not None
        return rate

    assert ideal(0.0) > ideal(1.0) + 0.1


def test_unpopular_parameters_are_refused() -> None:
    with pytest.raises(InputError, match=r"has no parameter 'turn'; it has .*turns"):
        generate("chat", 1, settings={"turn": 3})
    with pytest.raises(InputError, match="turns is of type float, got 'many'"):
        generate("chat", 1, settings={"turns": "many"})
    with pytest.raises(InputError, match="think_s is above 0"):
        generate("chat", 1, settings={"think_s": 0})
    with pytest.raises(InputError, match=r"share from 0 to 1, got 1\.5"):
        generate("rag", 1, settings={"shuffled_share": 1.5})
    with pytest.raises(InputError, match="9 retrieved of 3 documents"):
        generate("rag", 1, settings={"retrieved": 9, "documents": 3})
    with pytest.raises(InputError, match="known: chat, agents, rag, uniform"):
        generate("poetry", 1)
    with pytest.raises(InputError, match="at least 1 request"):
        generate("chat", 0)
    with pytest.raises(InputError, match="seed"):
        generate("chat", 1, seed=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_says_what_it_means(kind: str) -> None:
    assert all(text for _, text in parameters(kind).values())


def test_draws_are_the_raw_stream_of_pcg64() -> None:
    draws, raw = Draws(5), np.random.Generator(np.random.PCG64(5))
    assert [draws.uniform() for _ in range(100)] == raw.random(100).tolist()


def test_draws_have_the_distributions_that_they_name() -> None:
    draws, count = Draws(1), 20_000
    assert np.mean([draws.exponential(3.0) for _ in range(count)]) == pytest.approx(3, rel=0.05)
    assert np.median([draws.lognormal(50, 0.8) for _ in range(count)]) == pytest.approx(
        50, rel=0.05
    )
    assert {draws.integer(2, 4) for _ in range(100)} == {2, 3, 4}
    picks = np.bincount([draws.pick(zipf(3, 1.0)) for _ in range(count)]) / count
    assert picks == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)
    items = list(range(5))
    firsts = np.bincount([draws.shuffled(items)[0] for _ in range(count)]) / count
    assert firsts == pytest.approx([0.2] * 5, abs=0.02)
    assert items == [0, 1, 2, 3, 4]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e9).map(lambda t: round(t, 3)),
            st.none() | st.text(max_size=5),
            st.lists(st.integers(0, 2), max_size=5),
        ),
        max_size=10,
    )
)
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[float, str | None, list[int]]],
) -> None:
    from flexkv.traces.chaining import Chainer
    from flexkv.traces.model import TraceBuilder

    builder, chainer = TraceBuilder("rows"), Chainer()
    for time_ms, session, contents in rows:
        builder.add(1, time_ms, session, 4 * len(contents) + 1, 3, chainer.extend(contents))
    trace = builder.build("rows", 4)
    path = tmp_path_factory.mktemp("traces") / "t.jsonl.gz"
    write_trace(trace, path)
    again = read_trace(path, strict=True)
    assert (again.name, again.tokens_per_block) == ("rows", 4)
    assert (again.accesses, again.distinct) == (trace.accesses, trace.distinct)
    numbers: dict[int, int] = {}
    renamed = [
        (*rest, [numbers.setdefault(i, len(numbers)) for i in ids]) for *rest, ids in plain(trace)
    ]
    assert [tuple(row) for row in renamed] == plain(again)


@pytest.mark.parametrize("kind", ["mooncake", "lengths"])
def test_other_formats_come_back_with_what_they_hold(tmp_path: Path, kind: str) -> None:
    trace = generate("chat", 50, seed=4)
    write_trace(trace, tmp_path / "out", format=kind)
    again = read_trace(tmp_path / "out", tokens_per_block=16, fill="none", strict=True)
    zero_ms = trace.requests[0].timestamp_ms if kind == "lengths" else 0
    assert [r.timestamp_ms + zero_ms for r in again.requests] == pytest.approx(
        [r.timestamp_ms for r in trace.requests]
    )
    assert [r.output_tokens for r in again.requests] == [r.output_tokens for r in trace.requests]
    assert again.distinct == (trace.distinct if kind == "mooncake" else 0)


def test_the_header_is_optional_and_bad_targets_are_named(tmp_path: Path) -> None:
    trace = generate("uniform", 5, seed=1)
    write_trace(trace, tmp_path / "bare.jsonl", header=False)
    assert (tmp_path / "bare.jsonl").read_text().startswith('{"timestamp_ms":')
    with pytest.raises(InputError, match="written as flexkv, mooncake, lengths"):
        write_trace(trace, tmp_path / "x", format="qwen")
    with pytest.raises(TraceError, match=r"cannot write the trace .*: No such file"):
        write_trace(trace, tmp_path / "none" / "x")


def test_figures_of_a_small_trace_are_those_worked_out_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    rows = [
        ["timestamp_ms", "session", "input_tokens", "output_tokens", "block_ids"],
        [0, "a", 17, 1, [0, 1]],
        [1000, "b", 5, 9, []],
        [3000, "a", 24, 4, [0, 1, 2]],
        [9000, None, 8, 2, [0]],
    ]
    lines = [json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]]
    header = '{"flexkv_trace": 1, "tokens_per_block": 8}'
    path.write_text("\n".join([header, *lines, "nothing"]))
    found = summarize(read_trace(path))
    assert (found.requests, found.without_full_block, found.sessions) == (4, 1, 2)
    assert (found.accesses, found.distinct, found.malformed) == (6, 3, 1)
    assert found.ideal_hit_rate == pytest.approx(1 - 3 / 6)
    assert found.span_s == 9
    assert found.reuse_gap_s == {"p50": 3, "p90": 6, "p99": 6, "max": 6}  # 3, 3 and 6 s
    assert found.one_hit_share == pytest.approx(1 / 3)
    assert found.top_tenth_share == pytest.approx(2 / 3)  # one block of three, two of three reuses
    assert found.input_tokens == {"p50": 8, "p90": 24, "p99": 24, "max": 24}


def test_an_empty_trace_has_no_rates(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"flexkv_trace": 1, "tokens_per_block": 8}\n')
    found = summarize(read_trace(path))
    assert (found.requests, found.ideal_hit_rate, found.span_s) == (0, None, 0)


def test_the_streams_of_all_generators_are_kept(tmp_path: Path) -> None:
    """A change of these digests changes what every recorded seed stands for."""
    digests = {}
    for kind in KINDS:
        write_trace(generate(kind, 40, seed=1), tmp_path / kind)
        digests[kind] = hashlib.sha256((tmp_path / kind).read_bytes()).hexdigest()[:16]
    assert digests == {
        "agents": "2da2b5815ec22be1",
        "chat": "fd2d1cc67deeda17",
        "rag": "4904f506c06593f0",
        "uniform": "ffddce00cd7614f1",
    }
