"""`flexkv demo` on a tiny model: killed, restarted, identical; honest when something is wrong."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny

pytestmark = pytest.mark.torch
LENGTHS = ("--document-tokens", "512", "--chat-tokens", "128", "--answer-tokens", "6")
LAST_LINE = re.compile(
    r"demo: ok identical=true ttft_cold_ms=[\d.]+ ttft_host_ms=[\d.]+ ttft_ssd_ms=[\d.]+"
)


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    command = [sys.executable, "-m", "flexkv.cli.demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One finished run on a tiny model: where it wrote, and its process."""
    root = tmp_path_factory.mktemp("demo")
    model = save_tiny(root / "model")
    return root / "out", run_demo("--model", str(model), "--out", str(root / "out"), *LENGTHS)


def test_the_demo_ends_with_its_verdict(good: tuple[Path, Any]) -> None:
    _, done = good
    assert done.returncode == 0, done.stdout + done.stderr
    assert LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert "SIGKILL" in done.stdout


def test_the_report_says_where_every_token_came_from(good: tuple[Path, Any]) -> None:
    report = json.loads((good[0] / "demo-report.json").read_text())
    ways = report["ways"]
    assert report["ok"]
    assert report["identical"]
    assert report["problems"] == []
    assert ways["cold"]["restored_tokens"] == 0
    assert ways["host"]["restored_by_tier"]["host"] >= 4 * 512
    assert ways["ssd"]["restored_by_tier"] == {"host": 0, "disk": ways["ssd"]["restored_tokens"]}
    assert [(kill["life"], kill["signal"]) for kill in report["kills"]] == [
        ("first", 9),
        ("second", 9),
    ]
    assert ways["ssd"]["get_bytes"] > 0
    assert len(report["answers"]) == 23


def test_the_demo_leaves_report_chart_and_logs_but_no_cache(good: tuple[Path, Any]) -> None:
    names = sorted(path.name for path in good[0].iterdir())
    assert names == [
        "demo-chart.png",
        "demo-engine-first.log",
        "demo-engine-second.log",
        "demo-report.json",
    ]
    assert (good[0] / "demo-chart.png").read_bytes().startswith(b"\x89PNG")


def answers_of(report: dict[str, Any], way: str, who: str) -> dict[str, Any]:
    return next(a for a in report["answers"] if (a["way"], a["who"]) == (way, who))


def test_a_differing_token_or_a_missing_tier_fails_the_demo(good: tuple[Path, Any]) -> None:
    from flexkv.integration.transformers.demo_report import build_report, verdict

    report = json.loads((good[0] / "demo-report.json").read_text())
    loaded = {"event": "loaded", **{k: report[k] for k in ("model", "settings")}}
    loaded |= {"torch": "", "threads": 1}
    assert build_report([loaded, *report["answers"]])["ok"]

    other = copy.deepcopy(report)
    answers_of(other, "ssd", "chat 2")["tokens"][-1] += 1
    judged = build_report([loaded, *other["answers"]])
    assert (judged["ok"], judged["identical"]) == (False, False)
    assert verdict(judged).startswith("demo: failed chat 2: the answer by killed, SSD hit differs")

    other = copy.deepcopy(report)
    answers_of(other, "ssd", "user 3")["restored_by_tier"] = {"host": 512}
    judged = build_report([loaded, *other["answers"]])
    assert (judged["ok"], judged["identical"]) == (False, True)
    assert "user 3" in verdict(judged)

    other = copy.deepcopy(report)
    other["answers"].remove(answers_of(other, "host", "user 1"))
    assert not build_report([loaded, *other["answers"]])["ok"]


def test_an_engine_that_cannot_start_fails_the_demo_with_its_reason(tmp_path: Path) -> None:
    done = run_demo("--model", str(tmp_path), "--out", str(tmp_path / "out"), *LENGTHS)
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("demo: failed the engine's first life ended")
    assert "config.json" in last


def test_json_goes_to_stdout_and_the_verdict_to_stderr(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "gpt2", n_positions=2048)
    done = run_demo("--model", str(model), "--out", str(tmp_path / "out"), "--json", *LENGTHS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]
    assert LAST_LINE.fullmatch(done.stderr.splitlines()[-1])


def test_the_document_is_the_same_on_every_run_and_fills_any_length() -> None:
    from flexkv import ConfigError
    from flexkv.integration.transformers.demo_text import QUESTIONS, Prompts, document

    assert document() == document()

    class Words:
        chat_template = None

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(word) for word in text.split()]}

    prompts = Prompts(Words(), 1000, 130)
    assert (len(prompts.shared), len(prompts.excerpt)) == (992, 128)
    first, second = (prompts.question(text) for text in QUESTIONS[:2])
    assert first[:992] == second[:992] == prompts.shared
    assert prompts.chat([[7, 7]])[: len(prompts.chat([]))] == prompts.chat([])
    with pytest.raises(ConfigError, match="cannot be made"):
        Prompts(Words(), 100_000, 128)
