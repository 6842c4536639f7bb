"""Public trace formats: what each becomes, what is dropped, and what is refused.

The samples in data/traces are small enough for the expected ids to be worked out by hand.
"""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.errors import InputError, TraceError
from flexkv.traces import FORMATS, Trace, read_trace, write_trace
from flexkv.traces.chaining import Chainer, Prompt
from flexkv.traces.reading import detect

DATA = Path(__file__).parent / "data" / "traces"
SAMPLES = {
    "mooncake": DATA / "mooncake.jsonl",
    "qwen": DATA / "qwen.jsonl",
    "weka": DATA / "weka",
    "ragpulse": DATA / "ragpulse",
    "sharegpt": DATA / "sharegpt.json",
    "burstgpt": DATA / "burstgpt.csv",
    "azure": DATA / "azure.csv",
}

LENGTHS = b'"timestamp": 9, "input_length": 512, "output_length": 1'


def shape(trace: Trace) -> list[list[int]]:
    """The ids of all requests, numbered by first appearance."""
    names: dict[int, int] = {}
    return [
        [names.setdefault(i, len(names)) for i in request.block_ids.tolist()]
        for request in trace.requests
    ]


@pytest.mark.parametrize(("kind", "path"), SAMPLES.items())
def test_the_format_is_told_by_the_content(tmp_path: Path, kind: str, path: Path) -> None:
    assert detect(path) == kind
    if path.is_file():
        packed = tmp_path / "anything"
        packed.write_bytes(gzip.compress(b"\n" + path.read_bytes()))
        assert detect(packed) == kind


def test_every_format_has_a_sample() -> None:
    assert set(FORMATS) - set(SAMPLES) == {"flexkv", "lengths"}


def test_mooncake_partial_last_blocks_are_dropped() -> None:
    trace = read_trace(SAMPLES["mooncake"], strict=True)
    assert shape(trace) == [[0, 1], [0, 1, 2], [], [0, 1, 2]]
    assert [r.timestamp_ms for r in trace.requests] == [0, 3000, 3000, 6000]
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests][:2] == [
        (1300, 20),
        (1536, 7),
    ]
    assert (trace.tokens_per_block, trace.distinct, trace.accesses) == (512, 3, 8)


def test_qwen_ids_are_chained_and_sessions_follow_the_parents() -> None:
    trace = read_trace(SAMPLES["qwen"], strict=True)
    # 11 behind 13 is another prefix than 11 behind 10; the last 10 is not the first one
    assert shape(trace) == [[0, 1], [2, 3, 4], [0, 1, 5, 6], [0, 1, 5, 7]]
    assert [r.session for r in trace.requests] == ["159", "160", "159", "159"]
    assert [r.timestamp_ms for r in trace.requests] == [250, 1500, 61114, 99000]
    assert trace.tokens_per_block == 16


def test_weka_sessions_share_nothing_and_subagents_start_at_their_call() -> None:
    trace = read_trace(SAMPLES["weka"], strict=True)
    first = [r for r in trace.requests if r.session and r.session.startswith("trace_0001")]
    second = [r for r in trace.requests if r.session and r.session.startswith("trace_0002")]
    zero_ms = first[0].timestamp_ms
    assert [(r.session, round(r.timestamp_ms - zero_ms), len(r.block_ids)) for r in first] == [
        ("trace_0001", 0, 3),
        ("trace_0001/agent_001", 15500, 2),
        ("trace_0001/agent_001", 17500, 3),
        ("trace_0001", 30000, 4),
    ]
    # this file counts all times from the start of the session
    assert [r.timestamp_ms - second[0].timestamp_ms for r in second] == pytest.approx([0, 10250])
    assert second[1].session == "trace_0002/agent_001"
    ids = [set(r.block_ids.tolist()) for r in first]
    assert ids[0] & ids[1] == {first[0].block_ids[0]}  # the sub-agent begins like its caller
    assert not set.union(*ids) & {i for r in second for i in r.block_ids.tolist()}
    assert (trace.tokens_per_block, trace.distinct, trace.accesses) == (64, 9, 15)


def test_starts_of_weka_sessions_follow_from_the_seed() -> None:
    times = [
        [r.timestamp_ms for r in read_trace(SAMPLES["weka"], seed=seed).requests]
        for seed in (0, 0, 1)
    ]
    assert times[0] == times[1] != times[2]
    assert all(0 <= t < 86_400_000 + 30_000 for t in times[0])


def test_weka_sessions_may_be_json_lines(tmp_path: Path) -> None:
    lines = [path.read_text().replace("\n", "") for path in sorted(SAMPLES["weka"].glob("*.json"))]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join([*lines, '{"id": 3}']) + "\n")
    trace = read_trace(path)
    whole = read_trace(SAMPLES["weka"])
    assert shape(trace) == shape(whole)
    assert [str(problem) for problem in trace.malformed] == [
        f"{path}:3: Expected `str`, got `int` - at `$.id`"
    ]


def test_a_bad_request_costs_a_weka_session_only_that(tmp_path: Path) -> None:
    text = (SAMPLES["weka"] / "trace_0001.json").read_text()
    path = tmp_path / "trace.json"
    path.write_text(text.replace('"in":130', '"in":"many"').replace('"in":260', '"on":260'))
    trace = read_trace(path)
    assert len(trace.requests) == 2
    assert [problem.reason.partition(":")[0] for problem in trace.malformed] == [
        "requests[1].requests[0]",
        "requests[2]",
    ]


def test_ragpulse_prompts_are_cut_into_blocks_and_chained() -> None:
    trace = read_trace(SAMPLES["ragpulse"], strict=True)
    # block 0 of the first and the third: system prompt (40), first 24 tokens of passage 11; block 1
    # goes on with the rest of it (36), then passage 12, or the web search. The second request has
    # the passages the other way round.
    assert shape(trace) == [[0, 1, 2], [3, 4, 5], [0, 6]]
    assert [r.timestamp_ms for r in trace.requests] == [0, 27000, 30000]
    assert [r.session for r in trace.requests] == ["s-1", "s-2", "s-1"]


def test_ragpulse_needs_the_lengths_of_its_components(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="whole folder"):
        read_trace(shutil.copy(SAMPLES["ragpulse"] / "0_trace.jsonl", tmp_path))
    shutil.copy(SAMPLES["ragpulse"] / "1_sys_prompt.jsonl", tmp_path)
    trace = read_trace(tmp_path)
    assert (len(trace.requests), len(trace.malformed)) == (0, 3)
    assert "component 11 has no length" in trace.malformed[0].reason


def test_sharegpt_answers_are_requests_behind_all_that_came_before() -> None:
    trace = read_trace(SAMPLES["sharegpt"], strict=True, characters_per_token=1)
    by_session: dict[str | None, list[list[int]]] = {}
    for request, ids in zip(trace.requests, shape(trace), strict=True):
        by_session.setdefault(request.session, []).append(ids)
        assert len(ids) == request.input_tokens // 16  # one character a token
    assert list(by_session) == ["first_0", "second_0"]
    first, second = by_session["first_0"], by_session["second_0"][0]
    assert first[1][: len(first[0])] == first[0]
    # both ask "What is a prefix cache ", then differ in the block that holds characters 96 to 111
    texts = [
        "system\nYou answer in one short sentence and never in more than that."
        f"human\nWhat is a prefix cache {what} for?"
        for what in ("good", "bad")
    ]
    shared = next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b) // 16
    assert first[0][:shared] == second[:shared]
    assert not set(first[0][shared:]) & set(second[shared:])


def test_sharegpt_tokens_may_come_from_a_tokenizer() -> None:
    trace = read_trace(SAMPLES["sharegpt"], tokens_per_block=2, tokenize=lambda t: t.encode()[::4])
    estimate = read_trace(SAMPLES["sharegpt"], tokens_per_block=2)
    for request in trace.requests:
        assert len(request.block_ids) == request.input_tokens // 2
    assert [r.input_tokens for r in trace.requests] == pytest.approx(
        [r.input_tokens for r in estimate.requests], rel=0.1
    )


def test_sharegpt_json_lines_read_the_same(tmp_path: Path) -> None:
    import json

    items = json.loads(SAMPLES["sharegpt"].read_text())
    items[1]["conversations"] = [
        {"role": message["from"], "content": message["value"]}
        for message in items[1]["conversations"]
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in [*items, {"conversations": [{}]}]))
    trace = read_trace(path)
    assert shape(trace) == shape(read_trace(SAMPLES["sharegpt"]))
    assert [problem.line for problem in trace.malformed] == [4]


@pytest.mark.parametrize("kind", ["burstgpt", "azure"])
def test_lengths_alone_are_refused_unless_ids_are_invented(kind: str) -> None:
    with pytest.raises(TraceError, match=r"no block ids.*--fill"):
        read_trace(SAMPLES[kind])
    plain = read_trace(SAMPLES[kind], fill="none")
    assert (plain.accesses, plain.tokens_per_block) == (0, 0)
    unique = read_trace(SAMPLES[kind], fill="unique")
    blocks = sum(request.input_tokens // 16 for request in plain.requests)
    assert (unique.accesses, unique.distinct) == (blocks, blocks)
    chat = read_trace(SAMPLES[kind], fill="chat")
    assert chat.accesses == blocks > chat.distinct
    assert shape(chat) == shape(read_trace(SAMPLES[kind], fill="chat"))
    with pytest.raises(InputError, match="fill is one of none, unique, chat"):
        read_trace(SAMPLES[kind], fill="zipf")


def test_times_of_lengths_begin_at_zero() -> None:
    azure = read_trace(SAMPLES["azure"], fill="none")
    assert [r.timestamp_ms for r in azure.requests] == pytest.approx([0, 4314.579, 60000], abs=0.01)
    burst = read_trace(SAMPLES["burstgpt"], fill="none")
    assert [(r.timestamp_ms, r.input_tokens, r.output_tokens) for r in burst.requests] == [
        (0, 472, 18),
        (40000, 1087, 230),
        (113000, 417, 276),
        (115000, 300, 0),
    ]


def test_a_named_session_goes_on_with_itself(tmp_path: Path) -> None:
    path = tmp_path / "v3.csv"
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
        "Log Type\n"
        "0,a,1,m,1024,10,1034,log\n1,b,1,m,1024,10,1034,log\n2,a,1,m,2048,10,2058,log\n"
        "3,a,1,m,1024,10,1034,log\n"
    )
    trace = read_trace(path, fill="chat")
    a, b, more, less = [request.block_ids.tolist() for request in trace.requests]
    assert more[:64] == a
    assert a[:32] == b[:32] == less[:32]  # the system prompt
    assert not set(a[32:]) & {*b[32:], *less[32:]}


@pytest.mark.parametrize(
    ("kind", "line", "reason"),
    [
        ("mooncake", b'{"timestamp": 1}', "input_length"),
        ("mooncake", b"{%s, %s}" % (LENGTHS, b'"hash_ids": [3]'), "not prefix-chained"),
        ("mooncake", b"{%s, %s}" % (LENGTHS, b'"hash_ids": ["3"]'), "Expected `int`"),
        ("qwen", b"{%s, %s}" % (LENGTHS, b'"hash_ids": [3]'), "chat_id"),
        ("burstgpt", b"7,ChatGPT,x,1,2,log", "could not convert"),
        ("burstgpt", b"inf,ChatGPT,1,1,2,log", "cannot be"),
        ("burstgpt", b"7,ChatGPT", "2 cells instead of 6"),
        ("azure", b"yesterday,1,2", "Invalid isoformat"),
        ("azure", b"2023-11-16 18:15:46.68,-5,2", "cannot be"),
    ],
)
def test_a_malformed_line_is_counted_or_refused(
    tmp_path: Path, kind: str, line: bytes, reason: str
) -> None:
    sample = SAMPLES[kind].read_bytes()
    path = tmp_path / "sample"
    path.write_bytes(sample + line + b"\n")
    trace = read_trace(path, fill="none")
    assert len(trace.requests) == len(read_trace(SAMPLES[kind], fill="none").requests)
    (problem,) = trace.malformed
    assert (problem.path, problem.line) == (str(path), sample.count(b"\n") + 1)
    with pytest.raises(TraceError, match=reason):
        read_trace(path, fill="none", strict=True)


@pytest.mark.parametrize("kind", ["sharegpt", "weka", "mooncake", "qwen", "azure"])
def test_rubbish_is_reported_and_never_a_crash(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rubbish"
    path.write_bytes(b'{"requests": [\xff\xfe' + bytes(range(256)) + b"\n[\n1,2\n")
    if kind == "azure":
        with pytest.raises(TraceError, match="rubbish has no column"):
            read_trace(path, format=kind, fill="none")
        return
    trace = read_trace(path, format=kind)
    assert trace.malformed
    assert not trace.requests


Changes = st.lists(
    st.tuples(
        st.integers(0, 1 << 20),
        st.integers(0, 12),
        st.binary(max_size=3)
        | st.sampled_from([b"-", b"9" * 25, b"null", b"NaN", b"1e400", b"inf", b"}", b"\n", b'"']),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(p for p in DATA.rglob("*.*") if p.suffix != ".md")), Changes)
def test_damaged_files_are_read_or_refused_and_can_be_written(
    tmp_path_factory: pytest.TempPathFactory,
    sample: Path,
    changes: list[tuple[int, int, bytes]],
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    content = bytearray(sample.read_bytes())
    for place, removed, new in changes:
        place %= len(content) + 1
        content[place : place + removed] = new
    target = folder / sample.name
    if sample.parent.name == "ragpulse":
        shutil.copytree(sample.parent, folder, dirs_exist_ok=True)
    target.write_bytes(content)
    kinds = [kind for kind, path in SAMPLES.items() if path in (sample, sample.parent)]
    for kind in [*kinds, None]:
        try:
            trace = read_trace(
                folder if kind in ("ragpulse", "weka") else target, format=kind, fill="chat"
            )
        except TraceError as error:
            told = str(error)
        else:
            told = trace.name
            write_trace(trace, folder / "again")
            again = read_trace(folder / "again", strict=True)
            assert again.accesses == trace.accesses
        assert told


def test_unknown_content_and_formats_are_named(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match="looks like no known trace"):
        read_trace(path)
    with pytest.raises(TraceError, match="no column"):
        read_trace(path, format="azure", fill="none")
    with pytest.raises(InputError, match="known: flexkv, mooncake"):
        read_trace(path, format="parquet")
    with pytest.raises(TraceError, match="holds neither"):
        read_trace(tmp_path)


def test_blocks_can_be_merged() -> None:
    trace = read_trace(SAMPLES["qwen"], coarsen=2)
    assert shape(trace) == [[0], [1], [0, 2], [0, 3]]
    assert trace.tokens_per_block == 32
    with pytest.raises(InputError, match="coarsen"):
        read_trace(SAMPLES["qwen"], coarsen=0)
    with pytest.raises(TraceError, match="blocks of 64 tokens, not 32"):
        read_trace(SAMPLES["weka"], tokens_per_block=32)


Contents = st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=12)


@settings(max_examples=200, deadline=None)
@given(Contents)
def test_chained_ids_are_equal_where_the_whole_prefixes_are(prompts: list[list[int]]) -> None:
    chainer = Chainer()
    prefixes: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        for end, number in enumerate(chainer.extend(prompt), 1):
            assert prefixes.setdefault(number, tuple(prompt[:end])) == tuple(prompt[:end])
    assert len(set(prefixes.values())) == len(prefixes) == len(chainer)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=6), max_size=8),
    st.integers(1, 5),
)
def test_prompts_share_the_blocks_whose_tokens_are_the_same(
    prompts: list[list[tuple[int, int]]], size: int
) -> None:
    chainer, known = Chainer(), {}
    for parts in prompts:
        prompt, tokens = Prompt(chainer, size), []
        for content, count in parts:
            prompt.add(content, count)
            # the tokens that a content of this length stands for
            tokens += [(content, place) for place in range(count)]
        assert prompt.tokens == len(tokens)
        assert len(prompt.ids) == len(tokens) // size
        for end, number in enumerate(prompt.ids, 1):
            prefix = tuple(tokens[: end * size])
            assert known.setdefault(prefix, number) == number
    assert len(set(known.values())) == len(known)


def test_a_fork_goes_its_own_way() -> None:
    prompt = Prompt(Chainer(), 4)
    prompt.add("shared", 6)
    fork = prompt.fork()
    prompt.add("left", 6)
    fork.add("right", 6)
    assert prompt.ids[0] == fork.ids[0]
    assert not set(prompt.ids[1:]) & set(fork.ids[1:])
