"""The `flexkv` command: every command helps with an example, JSON is JSON, exit codes speak."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from rich.console import Console

from flexkv import plugins
from flexkv.bench.report import (
    Result,
    interleave,
    machine,
    median,
    percentile,
    ratio_of_pairs,
    report,
)
from flexkv.cli import bench, checks
from flexkv.errors import ConfigError


def run(*words: str, code: int = 0) -> str:
    """Run `flexkv ...` in a process of its own; return what it printed."""
    program = "import sys; from flexkv.cli import app; app(sys.argv[1:], prog_name='flexkv')"
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["doctor"],
        ["bench", "index"],
        ["bench", "copy"],
        ["bench", "disk"],
        ["bench", "e2e"],
        ["demo"],
        ["sim", "policy-compare"],
        ["disk", "inspect"],
        ["disk", "verify"],
    ],
)
def test_every_command_has_help_with_an_example(words: list[str]) -> None:
    text = run(*words, "--help")
    assert f"Usage: {' '.join(['flexkv', *words])}" in text
    assert "Example: flexkv" in text


def test_version() -> None:
    assert run("--version").startswith("flexkv ")


def test_unknown_command_is_an_error() -> None:
    run("benhc", code=2)


def test_doctor_tells_as_json_what_there_is(tmp_path: Path) -> None:
    told = json.loads(run("doctor", "--json", "--dir", str(tmp_path)))
    assert told["usable"] is True
    by_subject = {item["subject"]: item for item in told["findings"]}
    assert by_subject[f"directory {tmp_path}"]["state"] in {"ok", "note"}
    assert {"python", "cpu", "memory", "io_uring", "huge pages", "backends: cpu"} <= set(by_subject)
    for item in told["findings"]:
        assert item["state"] in {"ok", "note"} or item["advice"], item
    assert list(tmp_path.iterdir()) == []


def test_doctor_fails_when_what_was_asked_for_is_unusable(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("")
    assert "unusable" in run("doctor", "--no-probe", "--dir", str(file / "below"), code=1)


def test_doctor_checks_a_configuration(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(f"host_cache_bytes: 1MiB\nssd_cache_gb: 1\nssd_cache_dir: {tmp_path}/new\n")
    bad.write_text("host_cache_byte: 1\n")
    assert f"directory {tmp_path}/new" in run("doctor", "--no-probe", "--config", str(good))
    assert "did you mean" in run("doctor", "--no-probe", "--config", str(bad), code=1)
    greedy = tmp_path / "greedy.yaml"
    greedy.write_text("host_cache_bytes: 900TiB\n")
    assert "available" in run("doctor", "--no-probe", "--config", str(greedy), code=1)


def test_a_broken_plugin_is_a_finding_and_no_crash() -> None:
    class Old:
        flexkv_api = 0

    with plugins.register(plugins.POLICIES, "old", Old):
        found = {item.subject: item for item in checks.check_plugins()}
    assert found["policies: old"].state == "unusable"
    assert "API 0" in found["policies: old"].detail
    assert found["policies: lru"].state == "ok"


def test_a_directory_without_direct_io_is_usable_with_a_note() -> None:
    shared = Path("/dev/shm")
    if not shared.exists():
        pytest.skip("no /dev/shm here")
    (found,) = checks.check_directory(shared)
    assert found.state in {"ok", "note"}
    assert "tmpfs" in found.detail


# benchmarks


def fake_run(
    progress: Callable[[str, int, int], None], *, repeats: int = 3, dir: Any = None
) -> list[Result]:
    """Stand where a benchmark stands: two steps, two figures."""
    if repeats < 1:
        raise ConfigError("repeats must be at least 1")
    for step in range(2):
        progress("step", step + 1, 2)
    return [
        Result("read", 1234.5, "MB/s", limit=2000.0, ratio=0.617, samples=repeats),
        Result("nothing", float("nan"), "us", params={"dir": str(dir), "sizes": (1, 2)}),
    ]


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flexkv.bench.disk")
    module.run = fake_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flexkv.bench.disk", module)


@pytest.mark.usefixtures("_fake")
def test_bench_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    bench.app(["disk", "repeats=5", "--dir", "d", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"bench", "machine", "results"}
    assert told["bench"] == "disk"
    assert told["results"][0] == {
        "name": "read",
        "value": 1234.5,
        "unit": "MB/s",
        "limit": 2000.0,
        "peer": None,
        "ratio": 0.617,
        "samples": 5,
        "params": {},
    }
    assert told["results"][1]["value"] is None
    assert told["results"][1]["params"] == {"dir": "d", "sizes": [1, 2]}


@pytest.mark.usefixtures("_fake")
def test_bench_prints_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    bench.app(["disk"], standalone_mode=False)
    text = capsys.readouterr().out
    assert "flexkv bench disk" in text
    assert "1,234 MB/s" in text or "1,235 MB/s" in text
    assert "0.617" in text


@pytest.mark.usefixtures("_fake")
def test_bench_says_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        bench._run("disk", ["repeats=0"], None, False)
    assert "repeats must be at least 1" in capsys.readouterr().err


def test_bench_options_are_those_of_the_benchmark() -> None:
    assert bench.parse_options(fake_run, ["repeats=7"], Path("x")) == {
        "repeats": 7,
        "dir": Path("x"),
    }
    for word in ("repeat=7", "repeats", "progress=1"):
        with pytest.raises(typer.BadParameter, match="names: repeats, dir"):
            bench.parse_options(fake_run, [word], None)
    with pytest.raises(typer.BadParameter, match="uses no directory"):
        bench.parse_options(lambda progress: [], [], Path("x"))


@pytest.mark.parametrize(
    ("word", "taken"), [("sizes=64", [64]), ("sizes=64,256", [64, 256]), ("sizes=[1, 2]", [1, 2])]
)
def test_an_option_of_several_values_takes_one_or_several(word: str, taken: list[int]) -> None:
    def run(progress: Any, *, sizes: Sequence[int] = (1, 2)) -> list[Result]:
        return []

    assert bench.parse_options(run, [word], None) == {"sizes": taken}


def test_figures_keep_their_meaning() -> None:
    shown = [bench._figure(value) for value in (None, float("nan"), 0, 0.00123, 1.5, 42.0, 1234.6)]
    assert shown == ["-", "-", "0", "0.00123", "1.50", "42.0", "1,235"]
    page = io.StringIO()
    Console(file=page, width=120).print(bench.table("x", [Result("a", 1, "s")]))
    assert "1.00 s" in page.getvalue()


def test_interleaving_takes_turns() -> None:
    order: list[str] = []

    def action(name: str) -> Callable[[], float]:
        def act() -> float:
            order.append(name)
            return float(len(order))

        return act

    taken = interleave({"a": action("a"), "b": action("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert taken == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_medians_percentiles_and_ratios() -> None:
    assert median([3, 1, 2]) == 2
    assert median([]) != median([])  # nan
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99), percentile([5.0], 99)) == (50, 99, 5)
    assert ratio_of_pairs([2, 4, 9], [1, 2, 3]) == 2
    with pytest.raises(ValueError, match="no pairs"):
        ratio_of_pairs([1], [1, 2])


def test_the_machine_is_described() -> None:
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 0
    assert json.dumps(report("x", [])["machine"])
    assert "torch" not in facts
