"""What the demo's events add up to: the report, its one-line verdict, and the chart.

`build_report` (events -> plain data) - `verdict` (the last line) - `draw` (PNG).
"""

from __future__ import annotations

import importlib
import os
import platform
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Event = dict[str, Any]
WAYS = ("cold", "host", "ssd")
TITLES = {"cold": "no cache", "host": "host hit", "ssd": "killed, SSD hit"}


def build_report(events: Sequence[Event]) -> dict[str, Any]:
    """Sum up a run.

    Times are medians over the users' questions, in milliseconds; the chat's turns are summed up
    apart, because their prompts are shorter. `problems` lists what keeps the run from being good.
    """
    answers = [event for event in events if event["event"] == "answer"]
    questions: dict[str, list[Event]] = defaultdict(list)
    chat: dict[str, list[Event]] = defaultdict(list)
    for answer in answers:
        (questions if answer["who"].startswith("user") else chat)[answer["way"]].append(answer)
    problems = _problems(answers, questions)
    loaded = next(event for event in events if event["event"] == "loaded")
    return {
        "ok": not problems,
        "problems": problems,
        "identical": not any("differs" in problem for problem in problems),
        "model": loaded["model"],
        "settings": loaded["settings"],
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "torch": loaded["torch"],
            "threads": loaded["threads"],
        },
        "ways": _rows(questions),
        "chat": _rows(chat),
        "fill": _summary(questions["fill"]),
        "kills": [event for event in events if event["event"] == "killed"],
        "after_restart": next((e for e in events if e["event"] == "reopened"), None),
        "answers": answers,
    }


def _rows(answers: Mapping[str, Sequence[Event]]) -> dict[str, dict[str, Any]]:
    """The summaries of all ways, with their speed-up over having no cache."""
    rows = {way: _summary(answers[way]) for way in WAYS}
    for row in rows.values():
        row["speedup"] = rows["cold"]["ttft_ms"] / max(row["ttft_ms"], 1e-9)
    return rows


def _summary(answers: Sequence[Event]) -> dict[str, Any]:
    """One row of the table: medians of times, sums of what moved."""

    def middle(name: str) -> float:
        return float(median(answer.get(name, 0.0) for answer in answers)) if answers else 0.0

    def total(name: str) -> int:
        return sum(answer.get(name, 0) for answer in answers)

    tiers: dict[str, int] = defaultdict(int)
    for answer in answers:
        for tier, tokens in answer.get("restored_by_tier", {}).items():
            tiers[tier] += tokens
    return {
        "requests": len(answers),
        "ttft_ms": middle("ttft_ms"),
        "ttft_ms_each": [answer["ttft_ms"] for answer in answers],
        "prompt_tokens": total("prompt_tokens"),
        "restored_tokens": total("restored_tokens"),
        "restored_by_tier": dict(tiers),
        "get_bytes": total("get_bytes"),
        "get_ms": middle("get_ms"),
        "exposed_ms": middle("get_exposed_ms"),
        "hidden_ms": middle("get_hidden_ms"),
        "put_bytes": total("put_bytes"),
        "put_exposed_ms": sum(answer.get("put_exposed_ms", 0.0) for answer in answers),
        "put_hidden_ms": sum(answer.get("put_hidden_ms", 0.0) for answer in answers),
        "disk_read_bytes": total("disk_read_bytes"),
    }


def _problems(answers: Sequence[Event], questions: dict[str, list[Event]]) -> list[str]:
    """What did not hold: same tokens in all ways, each way restored from where it says."""
    problems = []
    expected = {answer["who"]: answer["tokens"] for answer in answers if answer["way"] == "cold"}
    for way in WAYS[1:]:
        given = {answer["who"]: answer["tokens"] for answer in answers if answer["way"] == way}
        problems += [
            f"{who}: the answer by {TITLES[way]} differs from the one without cache"
            for who, tokens in expected.items()
            if given.get(who) != tokens
        ]
    for way, tier in (("host", "host"), ("ssd", "disk")):
        for answer in questions[way]:
            restored = answer["restored_by_tier"].get(tier, 0)
            if restored != answer["restored_tokens"] or restored * 10 < answer["prompt_tokens"] * 9:
                problems.append(
                    f"{answer['who']}: only {restored} of {answer['prompt_tokens']} tokens "
                    f"came from {tier}"
                )
    return problems


def verdict(report: dict[str, Any]) -> str:
    """The demo's last line."""
    if not report["ok"]:
        return "demo: failed " + "; ".join(report["problems"])
    times = " ".join(f"ttft_{way}_ms={report['ways'][way]['ttft_ms']:.1f}" for way in WAYS)
    return f"demo: ok identical={str(report['identical']).lower()} {times}"


def draw(report: dict[str, Any], path: Path) -> bool:
    """Draw the times as a PNG; False if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError:
        return False
    figure, (left, right) = importlib.import_module("matplotlib.pyplot").subplots(
        1, 2, figsize=(10, 4.2), width_ratios=(3, 2)
    )
    colours = {"cold": "#9aa5b1", "host": "#2b7a78", "ssd": "#d08c2e"}
    for place, way in enumerate(WAYS):
        row = report["ways"][way]
        left.bar(place, row["ttft_ms"], color=colours[way], width=0.6)
        left.scatter([place] * row["requests"], row["ttft_ms_each"], color="black", s=12, zorder=3)
        gain = "" if way == "cold" else f"\n{row['speedup']:.0f}x faster"
        left.annotate(
            f"{row['ttft_ms']:,.0f} ms{gain}", (place, max(row["ttft_ms_each"])),
            xytext=(0, 6), textcoords="offset points", ha="center",
        )  # fmt: skip
    left.set_yscale("log")
    left.set_ylim(10, max(report["ways"]["cold"]["ttft_ms_each"]) * 4)
    left.set_xticks(range(3), [TITLES[way] for way in WAYS])
    left.set_ylabel("time to first token, ms (log)")
    tokens = report["settings"]["document_tokens"]
    left.set_title(
        f"{len(report['ways']['cold']['ttft_ms_each'])} users, one document of {tokens:,} tokens"
    )
    for place, way in enumerate(WAYS[1:]):
        row = report["ways"][way]
        moved, whole = row["exposed_ms"], row["ttft_ms"]
        right.barh(place, moved, color=colours[way], label="restoring KV" if place == 0 else None)
        right.barh(
            place,
            whole - moved,
            left=moved,
            color="#dfe5ea",
            label="computing the rest" if place == 0 else None,
        )
        right.annotate(f"{moved:.0f}", (moved / 2, place), ha="center", va="center", color="white")
        right.annotate(
            f"{whole - moved:.0f}", ((whole + moved) / 2, place), ha="center", va="center"
        )
    right.set_yticks(range(2), [TITLES[way] for way in WAYS[1:]])
    right.set_xlabel("ms")
    right.set_title("where the time to first token goes")
    right.legend(loc="upper left", bbox_to_anchor=(0, -0.18), ncols=2, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"flexkv demo: {Path(report['model']).name}", x=0.01, ha="left", weight="bold")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    importlib.import_module("matplotlib.pyplot").close(figure)
    return True
