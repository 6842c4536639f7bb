"""Replaying a trace through a real manager: what it counts is what an LRU of leaves gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexkv.bench.trace_replay import ReplaySetup, replay
from flexkv.cli.trace import app
from flexkv.cli.trace_replay import blocks_of
from flexkv.errors import InputError
from flexkv.traces import Trace, generate, write_trace

SMALL = {"system_tokens": 100, "question_tokens": 30, "answer_tokens": 60, "think_s": 20.0}


def chat(requests: int = 150) -> Trace:
    return generate("chat", requests, seed=5, settings=SMALL)


def lru_hits(trace: Trace, capacity: int) -> int:
    """Hits of an LRU that evicts leaves only: every block of a prompt is touched, tail first, so
    that the head is the youngest; a prompt's own blocks stay; a block counts if its ancestors hit.
    """
    touched: dict[int, int] = {}
    children: dict[int, set[int]] = {}
    parents: dict[int, int] = {}
    hits = now = 0
    for request in trace.requests:
        ids = request.block_ids.tolist()
        hits += next((i for i, block in enumerate(ids) if block not in touched), len(ids))
        for block in reversed([block for block in ids if block in touched]):
            touched[block] = now = now + 1
        ids = ids[:capacity]
        parents |= dict(zip(ids, [-1, *ids], strict=False))
        missing = [block for block in ids if block not in touched]
        for _ in range(len(touched) + len(missing) - capacity):
            leaves = [b for b in touched if b not in ids and not children.get(b)]
            victim = min(leaves, key=touched.__getitem__)
            del touched[victim]
            children[parents[victim]].discard(victim)
        for block in missing:
            children.setdefault(parents[block], set()).add(block)
        for block in reversed(ids):
            touched[block] = now = now + 1
    return hits


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_hits_are_those_of_an_lru_of_leaves(share: float) -> None:
    trace = chat()
    capacity = int(trace.distinct * share)
    found = replay(trace, ReplaySetup(capacity))
    assert found["hits"] == lru_hits(trace, capacity)
    assert found["hits_by_tier"] == {"host": found["hits"]}
    new = found["bytes_by_route"]["device->host"] // 4096
    assert found["bytes_by_route"]["host->device"] == found["hits"] * 4096
    assert found["evicted_by_tier"]["host"] == max(0, new - capacity)
    if share == 1.0:
        assert found["hits"] == trace.accesses - trace.distinct
        assert new == trace.distinct
    assert found["refused_puts"] == 0


def test_a_disk_tier_gives_what_the_host_has_lost(tmp_path: Path) -> None:
    trace = chat(60)
    small = int(trace.distinct * 0.1)
    alone = replay(trace, ReplaySetup(small))
    found = replay(trace, ReplaySetup(small, trace.distinct, directory=tmp_path))
    assert found["hits"] > alone["hits"]
    assert found["hits"] == sum(found["hits_by_tier"].values())
    assert found["bytes_by_route"]["disk->host"] > 0
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_many_requests_at_once_bring_the_right_bytes() -> None:
    trace = chat(80)
    found = replay(trace, ReplaySetup(trace.distinct // 2, concurrency=8, block_bytes=64))
    assert 0 < found["hits"] <= trace.accesses - trace.distinct
    assert set(found["get_ms"]) == {"p50", "p90", "p99"}


def test_speed_keeps_to_the_times_of_the_trace() -> None:
    trace = chat(20)
    span_s = (trace.requests[-1].timestamp_ms - trace.requests[0].timestamp_ms) / 1e3
    found = replay(trace, ReplaySetup(trace.distinct, speed=span_s / 0.25))
    assert found["elapsed_s"] >= 0.25
    assert len(found["late_ms"]) == 3


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ({"host_blocks": 0}, "needs room"),
        ({"host_blocks": 1, "block_bytes": 48}, "multiple of 32, got 48"),
        ({"host_blocks": 1, "speed": -1.0}, "speed is 0 or above"),
    ],
)
def test_setups_that_cannot_be_are_refused(setup: dict[str, float], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        ReplaySetup(**setup)  # type: ignore[arg-type]


def test_sizes_are_shares_or_bytes() -> None:
    assert blocks_of("10%", 1000, 4096, "--host") == 100
    assert blocks_of("1MiB", 1000, 4096, "--host") == 256


def test_the_command_prints_what_was_counted(tmp_path: Path) -> None:
    trace = chat(40)
    write_trace(trace, tmp_path / "chat.jsonl.gz")
    words = ["replay", str(tmp_path / "chat.jsonl.gz"), "--host", "50%", "--limit", "30"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    part = trace.first(30)
    assert (said["requests"], said["accesses"]) == (30, part.accesses)
    assert said["hits"] == lru_hits(part, part.distinct // 2)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert f"{said['hits']:,}" in result.stdout
    result = CliRunner().invoke(app, [*words, "--disk", "much"])
    assert result.exit_code == 2
    assert "10% or a size" in result.stderr
    result = CliRunner().invoke(app, [*words, "--policy", "none-such"])
    assert result.exit_code == 1
    assert "none-such" in result.stderr
