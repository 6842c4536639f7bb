"""Recording a live manager: every request, block numbers and lengths, nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rig import SPEC, open_rig, prompt
from typer.testing import CliRunner

from flexkv.cli.trace import app
from flexkv.errors import InputError
from flexkv.traces import Recorder, read_trace
from flexkv.traces.recording import unused


async def test_gets_become_requests_and_puts_their_answers(tmp_path: Path) -> None:
    async with open_rig() as rig:
        recorder = Recorder(rig.kv.telemetry, rig.kv.tokens_per_block)
        first, second = prompt(1, 2), prompt(2, 3, shared=prompt(1, 1))
        rig.kv.get_match([*first, 5]).cancel()
        await rig.put([*first, 5, 6, 7, 8, 9])  # the answer has 4 tokens
        rig.kv.get_match(second, leave_tokens=1).cancel()
        await rig.kv.prefetch_async(first)
        rig.kv.get_match([*first, 5, 6, 7, 8]).cancel()
        recorder.stop()
        rig.kv.get_match(first).cancel()
        trace = recorder.trace()
    assert trace.tokens_per_block == SPEC.tokens_per_block
    assert [r.block_ids.tolist() for r in trace.requests] == [[0, 1], [0, 2], [0, 1, 3]]
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == [(9, 4), (12, 0), (12, 0)]
    times = [r.timestamp_ms for r in trace.requests]
    assert times[0] == 0
    assert times == sorted(times)
    recorder.save(tmp_path / "t.jsonl.gz")
    assert read_trace(tmp_path / "t.jsonl.gz").distinct == 4


async def test_a_put_without_a_get_is_a_request() -> None:
    async with open_rig() as rig:
        recorder = Recorder(rig.kv.telemetry, rig.kv.tokens_per_block)
        await rig.put(prompt(1, 2))
        await rig.put(prompt(1, 3))
        (request,) = recorder.trace().requests
    assert request.block_ids.tolist() == [0, 1]
    assert (request.input_tokens, request.output_tokens) == (8, 4)


async def test_namespaces_do_not_share_blocks() -> None:
    async with open_rig() as rig:
        recorder = Recorder(rig.kv.telemetry, rig.kv.tokens_per_block)
        for namespace in (("a",), ("b",), ("a",)):
            rig.kv.get_match(prompt(1, 2), namespace=namespace).cancel()
        ids = [r.block_ids.tolist() for r in recorder.trace().requests]
    assert ids == [[0, 1], [2, 3], [0, 1]]


async def test_a_request_that_is_asked_for_again_while_it_waits_is_one() -> None:
    async with open_rig() as rig:
        recorder = Recorder(rig.kv.telemetry, rig.kv.tokens_per_block, repeats_s=3600)
        for name in (1, 1, 2, 1):
            rig.kv.get_match(prompt(name, 2)).cancel()
        assert len(recorder) == 2
        rig.kv.get_match([*prompt(1, 2), 3]).cancel()  # a longer prompt
        await rig.put(prompt(2, 2))
        rig.kv.get_match(prompt(2, 2)).cancel()  # its answer is there
        assert len(recorder) == 4


async def test_what_is_kept_is_limited_and_one_records_at_a_time() -> None:
    async with open_rig() as rig:
        recorder = Recorder(rig.kv.telemetry, rig.kv.tokens_per_block, max_blocks=3)
        rig.kv.get_match(prompt(1, 2)).cancel()
        rig.kv.get_match(prompt(2, 2)).cancel()
        assert (len(recorder), recorder.lost) == (1, 1)
        with pytest.raises(InputError, match="recorded already"):
            Recorder(rig.kv.telemetry, rig.kv.tokens_per_block)
        recorder.stop()
        Recorder(rig.kv.telemetry, rig.kv.tokens_per_block)


async def test_a_manager_records_itself_where_its_configuration_says(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl.gz"
    for count in (1, 2):
        async with open_rig(trace_path=path) as rig:
            for name in range(count):
                rig.kv.get_match(prompt(name, 1)).cancel()
    assert len(read_trace(path).requests) == 1
    assert len(read_trace(tmp_path / "kv-2.jsonl.gz").requests) == 2
    assert unused(path) == tmp_path / "kv-3.jsonl.gz"


async def test_a_trace_that_cannot_be_written_does_not_keep_a_manager_from_closing(
    tmp_path: Path,
) -> None:
    async with open_rig(trace_path=tmp_path / "none" / "kv.jsonl") as rig:
        rig.kv.get_match(prompt(1, 1)).cancel()
    assert not (tmp_path / "none").exists()


PROGRAM = """
import sys
from flexkv import BlockingKVManager, KVSpec
spec = KVSpec.uniform(1, 1, 64, tokens_per_block=4)
with BlockingKVManager(spec=spec, host_cache_bytes="1MiB") as kv:
    kv.get_match(list(range(20))).cancel()
print("program's own output")
sys.exit(3)
"""


def test_record_runs_a_command_and_keeps_its_exit_code(tmp_path: Path) -> None:
    out = tmp_path / "own.jsonl"
    words = ["record", "--json", str(out), "--", sys.executable, "-c", PROGRAM]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 3
    said = json.loads(result.stdout)
    assert said["exit_code"] == 3
    assert said["traces"] == [
        {
            "path": str(out), "requests": 1, "accesses": 5, "distinct": 5, "tokens_per_block": 4,
        }
    ]  # fmt: skip
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "exists already" in result.stderr


def test_record_says_when_there_was_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["record", str(tmp_path / "x"), "--", sys.executable, "-V"])
    assert result.exit_code == 0
    assert "nothing was recorded" in result.stderr
    result = CliRunner().invoke(app, ["record", str(tmp_path / "x"), "--", "no-such-command"])
    assert result.exit_code == 2
    assert "No such file" in result.stderr
