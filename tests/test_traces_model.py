"""Traces: our own format, what is refused in it, and the keys of block ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.errors import InputError, TraceError
from flexkv.traces import block_keys, read_trace


def line(timestamp_ms: float, ids: list[int], tokens: int | None = None, **more: Any) -> str:
    tokens = 16 * len(ids) + 3 if tokens is None else tokens
    row = {"timestamp_ms": timestamp_ms, "session": None, "input_tokens": tokens}
    return json.dumps(row | {"output_tokens": 5, "block_ids": ids} | more)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "some.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def test_requests_come_sorted_with_all_that_the_file_says(tmp_path: Path) -> None:
    path = written(tmp_path, line(7, [0, 1], session="b"), line(2.5, [0, 2, 3], 63), line(7, []))
    trace = read_trace(path, tokens_per_block=16)
    found = [
        (r.timestamp_ms, r.session, r.input_tokens, r.output_tokens, r.block_ids.tolist())
        for r in trace.requests
    ]
    assert found == [
        (2.5, None, 63, 5, [0, 2, 3]),
        (7, "b", 35, 5, [0, 1]),
        (7, None, 3, 5, []),
    ]
    assert (trace.name, trace.accesses, trace.distinct) == ("some", 5, 4)
    assert trace.requests[0].block_ids.dtype == np.int64


def test_packed_and_plain_files_read_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, line(0, [0, 1]), line(1, [0, 2]))
    packed = tmp_path / "some.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain, unpacked = (read_trace(p, tokens_per_block=16) for p in (path, packed))
    assert [r.block_ids.tolist() for r in unpacked.requests] == [[0, 1], [0, 2]]
    assert (plain.name, plain.distinct) == (unpacked.name, unpacked.distinct) == ("some", 3)


def test_a_header_names_the_trace_and_its_block_size(tmp_path: Path) -> None:
    header = '{"flexkv_trace": 1, "tokens_per_block": 16, "name": "chat"}'
    trace = read_trace(written(tmp_path, header, line(0, [4])))
    assert (trace.name, trace.tokens_per_block, len(trace.requests)) == ("chat", 16, 1)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"version 2 .* reads version 1"):
        read_trace(written(tmp_path, '{"flexkv_trace": 2, "tokens_per_block": 16}'))


def test_the_block_size_is_inferred_where_the_lengths_leave_one(tmp_path: Path) -> None:
    path = written(tmp_path, line(0, [0, 1, 2], 60), line(1, [0, 1], 33), line(2, [0], 30))
    assert read_trace(path).tokens_per_block == 16


def test_a_block_size_that_stays_open_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="--tokens-per-block"):
        read_trace(written(tmp_path, line(0, [0], 1000)))


def test_a_trace_without_blocks_needs_no_block_size(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, line(0, [], 9)))
    assert (trace.tokens_per_block, trace.distinct, trace.accesses) == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ('{"timestamp_ms": 1, "block_ids": []}', "input_tokens"),
        (line(1, [], -4), "input_tokens"),
        (line(1, [3, "x"]), r"Expected `int`, got `str` - at `\$.block_ids"),  # type: ignore[list-item]
        (line(1, [1 << 70]), "64 bits|out of range|Number"),
        (line(1, [7, 8], 31), "2 full blocks of 16 tokens do not fit into 31"),
        (line(1, [9, 1]), "not prefix-chained: block 1 behind another"),
        (line(1, [0, 1, 0]), "not prefix-chained"),
    ],
)
def test_a_malformed_line_is_skipped_and_named(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path, line(0, [0, 1]), "", text, line(5, [0, 1, 2]))
    trace = read_trace(path, tokens_per_block=16)
    assert [r.block_ids.tolist() for r in trace.requests] == [[0, 1], [0, 1, 2]]
    assert (trace.distinct, trace.accesses) == (3, 5)
    (problem,) = trace.malformed
    assert str(problem).startswith(f"{path}:3: ")
    with pytest.raises(TraceError, match=reason):
        read_trace(path, tokens_per_block=16, strict=True)


def test_bytes_that_are_no_text_are_malformed(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'{"timestamp_ms": "\xff\xfe"}\n' + line(0, [0]).encode())
    trace = read_trace(path, tokens_per_block=16)
    assert (len(trace.requests), len(trace.malformed)) == (1, 1)


def test_a_damaged_or_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(line(0, [0]).encode() * 1000)[:-9])
    with pytest.raises(TraceError, match=r"cut\.jsonl\.gz"):
        read_trace(path)
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="at least 1"):
        read_trace(path, tokens_per_block=0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), unique=True, max_size=50),
    st.sampled_from([0, 1]),
)
def test_keys_differ_where_ids_differ(ids: list[int], half: int) -> None:
    keys = block_keys(np.array(ids, np.int64))
    assert keys.shape == (len(ids), 2)
    assert len(set(keys[:, half].tolist())) == len(ids)
    assert np.array_equal(block_keys(np.array(ids[::-1], np.int64)), keys[::-1])


def test_keys_are_the_published_sequence() -> None:
    # SplitMix64 seeded with 0 gives these first (the generator's reference output)
    step = 0x9E3779B97F4A7C15
    ids = np.array([0, step - (1 << 64)], np.int64)
    assert block_keys(ids)[:, 0].tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
