"""Charts are drawn from what the commands print, are small, and wrong documents are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexkv.errors import InputError
from flexkv.sim.decode.compare import Question, compare, sweep
from flexkv.sim.plots import draw

pytest.importorskip("matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"


def decode_rows() -> list[dict[str, Any]]:
    results = compare(Question(contexts=(1024,), steps=32))
    return [{**result.as_json(steps=True), "varied": {}} for result in results]


def sweep_rows(name: str, values: list[Any]) -> list[dict[str, Any]]:
    question = Question("sparse", (512,), steps=4)
    return [
        {**result.as_json(), "varied": {name: getattr(one, name)}}
        for one, result in sweep(question, {name: values})
    ]


def policy_rows() -> list[dict[str, Any]]:
    return [
        {"trace": t, "policy": p, "capacity_percent": c, "block_hit_percent": 10.0 * c + len(p)}
        for t in ("one", "two")
        for p in ("lru", "opt")
        for c in (1.0, 5.0)
    ]


def cost_rows() -> list[dict[str, Any]]:
    return [
        {
            "usd_per_mtoken": usd,
            "ttft_ms": {"p95": ms},
            "host_bytes": 10**9 * i,
            "disk_bytes": 10**10,
        }
        for i, (usd, ms) in enumerate([(1.0, 900.0), (2.0, 400.0), (3.0, 500.0)])
    ]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (decode_rows, {"exposed_hidden", "staging_over_steps"}),
        (lambda: sweep_rows("contexts", [(512,), (1024,)]), {"bytes_by_context"}),
        (lambda: sweep_rows("policy", ["lru", "lfu"]), {"placement_policies"}),
        (policy_rows, {"policies", "miss_ratio"}),
        (cost_rows, {"cost_ttft"}),
    ],
    ids=["compare", "contexts", "placement", "policies", "cost"],
)
def test_each_kind_of_result_has_its_charts(rows: Any, names: set[str], tmp_path: Path) -> None:
    paths = draw({"results": rows()}, tmp_path / "charts")
    assert {path.stem for path in paths} == names
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(PNG)
        assert len(content) < 60_000


@pytest.mark.parametrize(
    ("document", "match"),
    [({}, "nothing to draw"), ({"results": []}, "nothing to draw"), ({"results": [{"x": 1}]}, "x")],
)
def test_what_cannot_be_drawn_is_refused(document: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=match):
        draw(document, tmp_path)


def test_the_command_says_where_charts_are_and_what_is_wrong(tmp_path: Path) -> None:
    from flexkv.cli.sim import app

    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"results": cost_rows()}))
    bad.write_text("no")
    answer = CliRunner().invoke(app, ["plot", str(good), "--out", str(tmp_path)])
    assert (tmp_path / "cost_ttft.png").exists()
    assert "cost_ttft.png" in answer.output
    answer = CliRunner().invoke(app, ["plot", str(bad)])
    assert answer.exit_code == 2
    assert "is not JSON" in answer.output
