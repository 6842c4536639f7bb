"""`flexkv demo`: one document, several users, three ways; the work is in
flexkv.integration.transformers.demo.

`demo` (the command) - `table` (a report for people).
"""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexkv.errors import FlexKVError

_LABELS = {
    "cold": "1/3 no cache",
    "fill": "2/3 first user fills the cache",
    "host": "2/3 host hits",
    "ssd": "3/3 killed, started again: SSD hits",
}
_WAYS = {
    "fill": "fills it",
    "cold": "no cache",
    "host": "host hit",
    "ssd": "killed, SSD hit",
}
_COLUMNS = (
    "TTFT ms",
    "speed-up",
    "tokens restored",
    "MB moved\nget / put",
    "get ms, each\nexposed / hidden",
    "put ms, sum\nexposed / hidden",
)
_ANSWERS = 23  # 4 questions and 3 turns in three ways, and 2 that fill the cache


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def demo(
    model: Path | None = typer.Option(
        None, help="Directory of a local causal LM; SmolLM2-135M-Instruct if left out."
    ),
    out: Path = typer.Option(
        Path("demo-out"), help="Where report, chart, logs and (meanwhile) the disk tier go."
    ),
    json_output: bool = typer.Option(
        False, "--json", help="Print the report as JSON; the last line goes to stderr."
    ),
    document_tokens: int = typer.Option(7168, min=64, help="Length of the shared document."),
    chat_tokens: int = typer.Option(1024, min=64, help="Length of the chat's system prompt."),
    answer_tokens: int = typer.Option(16, min=1, help="Length of an answer."),
    cache_home: Path = typer.Option(
        Path.home() / ".cache",
        envvar="XDG_CACHE_HOME",
        help="Converted weights are kept in its folder 'flexkv'.",
    ),
) -> None:
    """Answer questions over one long document: without a cache, from host memory, and from SSD
    after a SIGKILL.

    Example: flexkv demo --out /tmp/demo
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        hint = "pip install 'flexkv[transformers,plots]'"
        _end(f"demo: failed {' and '.join(missing)} not installed; {hint}", json_output, 1)
    work = importlib.import_module("flexkv.integration.transformers.demo")
    judge = importlib.import_module("flexkv.integration.transformers.demo_report")
    options = work.Options(
        out_dir=out,
        model=model,
        cache_dir=cache_home / "flexkv",
        document_tokens=document_tokens,
        chat_tokens=chat_tokens,
        answer_tokens=answer_tokens,
    )
    console = Console(stderr=json_output)
    if not console.is_terminal:
        console = Console(stderr=json_output, width=120)
    try:
        with _Watcher(console) as watcher:
            report = anyio.run(work.run_demo, options, watcher.hear)
    except FlexKVError as error:
        _end(f"demo: failed {error}", json_output, 1)
    chart = out / "demo-chart.png"
    report["chart"] = str(chart) if judge.draw(report, chart) else None
    target = out / "demo-report.json"
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if json_output:
        print(json.dumps(report))
    else:
        console.print(table(report))
        fetched = report["ways"]["ssd"]["disk_read_bytes"] / 1e6
        console.print(f"fetched from storage devices for the users' SSD hits: {fetched:,.0f} MB")
        console.print(f"report: {target}   chart: {report['chart'] or 'needs matplotlib'}")
    _end(judge.verdict(report), json_output, 0 if report["ok"] else 1)


def _end(line: str, to_stderr: bool, code: int) -> None:
    typer.echo(line, err=to_stderr)
    raise typer.Exit(code)


class _Watcher:
    """Turns the engine's events into a progress bar and a few lines."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("loading the model", total=_ANSWERS)

    def __enter__(self) -> _Watcher:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def hear(self, event: dict[str, Any]) -> None:
        """Show one event of the engine."""
        kind = event["event"]
        if kind == "answer":
            self.progress.update(self.task, advance=1, description=_LABELS[event["way"]])
            text = " ".join(event["text"].split())
            self.progress.console.print(
                f"[dim]{event['way']:>4}  {event['who']:<7}[/dim] {event['ttft_ms']:8.0f} ms  "
                f"{event.get('restored_tokens', 0):>5} tokens restored  "
                f"[dim]{escape(text[:40])}[/dim]",
                highlight=False,
                soft_wrap=True,
            )
        elif kind == "killed" and event["life"] == "first":
            self.progress.console.print(
                "[bold]SIGKILL[/bold] in the middle of a write; starting again"
            )


def table(report: dict[str, Any]) -> Table:
    """One row per way: the users' questions first, then the chat."""
    shown = Table(title=f"{Path(report['model']).name}, medians", title_justify="left", box=SIMPLE)
    shown.add_column("")
    for name in _COLUMNS:
        shown.add_column(name, justify="right")
    rows = {"fill": report["fill"]} | report["ways"]
    for title, part in (("users", rows), ("chat", report["chat"])):
        for way, row in part.items():
            tiers = " + ".join(f"{n:,} {tier}" for tier, n in row["restored_by_tier"].items() if n)
            shown.add_row(
                f"{title} ({row['requests']}): {_WAYS[way]}",
                f"{row['ttft_ms']:,.1f}",
                f"{row['speedup']:.1f}x" if "speedup" in row else "",
                tiers or "0",
                f"{row['get_bytes'] / 1e6:,.0f} / {row['put_bytes'] / 1e6:,.0f}",
                f"{row['exposed_ms']:.1f} / {row['hidden_ms']:.1f}",
                f"{row['put_exposed_ms']:.1f} / {row['put_hidden_ms']:.1f}",
                end_section=way == "ssd",
            )
    return shown


if __name__ == "__main__":
    app()
