"""`flexkv trace`: what it prints is what there is, and mistakes cost one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexkv.cli.trace import app
from flexkv.traces import read_trace

DATA = Path(__file__).parent / "data" / "traces"


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.stdout, result.stderr


def test_stat_counts_every_trace_that_is_named() -> None:
    code, text, _ = call("stat", "--json", DATA / "mooncake.jsonl", DATA / "azure.csv")
    assert code == 0
    mooncake, azure = json.loads(text)["traces"]
    assert (mooncake["requests"], mooncake["accesses"], mooncake["distinct"]) == (4, 8, 3)
    assert mooncake["ideal_hit_rate"] == pytest.approx(1 - 3 / 8)
    assert (azure["requests"], azure["accesses"], azure["ideal_hit_rate"]) == (3, 0, None)
    code, text, _ = call("stat", DATA / "mooncake.jsonl")
    assert code == 0
    assert "0.6250" in text


def test_malformed_lines_are_named_and_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text((DATA / "mooncake.jsonl").read_text() + "{}\n" * 12)
    code, text, errors = call("stat", "--json", path)
    assert code == 0
    assert json.loads(text)["traces"][0]["malformed"] == 12
    assert f"{path}:5: Object missing required field `timestamp`" in errors
    assert "12 malformed lines were skipped, 2 of them not shown" in errors
    code, text, errors = call("stat", "--strict", path)
    assert (code, text) == (1, "")
    assert f"{path}:5: " in errors


def test_convert_writes_what_reads_the_same(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    code, text, _ = call("convert", DATA / "qwen.jsonl", out, "--coarsen", 2, "--json")
    assert code == 0
    said = json.loads(text)
    assert (said["requests"], said["tokens_per_block"], said["path"]) == (4, 32, str(out))
    trace = read_trace(out)
    assert (trace.name, trace.accesses, trace.distinct) == ("qwen", said["accesses"], 4)


def test_generate_makes_the_trace_that_its_options_say(tmp_path: Path) -> None:
    out = tmp_path / "rag.jsonl.gz"
    words = ("rag", "--requests", 20, "--seed", 3, "--out", out, "--set", "tokens-per-block=32")
    code, text, _ = call("generate", *words)
    assert code == 0
    assert "20 requests" in text
    trace = read_trace(out)
    assert (trace.name, trace.tokens_per_block, len(trace.requests)) == ("rag-3", 32, 20)
    code, text, _ = call("generate", "rag", "--parameters", "--json")
    assert code == 0
    assert json.loads(text)["documents"]["default"] == 1000
    assert "documents" in call("generate", "rag", "--parameters")[1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("stat", "none.jsonl"), "No such file"),
        (("stat", DATA / "qwen.jsonl", "--format", "csv"), "unknown trace format 'csv'"),
        (("convert", DATA / "azure.csv", "out"), "no block ids"),
        (("convert", DATA / "qwen.jsonl", "no/such/out"), "cannot write the trace"),
        (("convert", DATA / "qwen.jsonl", "out", "--to", "qwen"), "not as 'qwen'"),
        (("convert", DATA / "sharegpt.json", "out", "--tokenizer", "none.json"), "none.json"),
        (("generate", "poetry", "--out", "out"), "unknown generator 'poetry'"),
        (("generate", "chat"), "say where to write the trace"),
        (("generate", "chat", "--out", "out", "--set", "turns"), "expected NAME=VALUE"),
        (("generate", "chat", "--out", "out", "--set", "turns=0"), "turns is above 0"),
    ],
)
def test_a_mistake_costs_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, errors = call(*words)
    assert code != 0
    assert text == ""
    assert reason in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()
