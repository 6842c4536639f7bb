"""`flexkv disk inspect|verify DIR...`: look at the directories of a disk tier; changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flexkv.backends.disk import DiskBackend, survey
from flexkv.errors import FlexKVError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Look at the directories of a disk tier. Nothing is changed.",
)

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Directories of one or more disk tiers.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_ROWS = {
    "state": "state",
    "format_version": "format",
    "model": "model",
    "index": "directory of its store",
    "slots": "slots",
    "block_bytes": "block",
    "committed_blocks": "committed blocks",
    "used_bytes": "used",
    "data_bytes": "data file",
    "records_bytes": "records file",
    "damaged_records": "damaged records",
    "cut_off_blocks": "blocks beyond the data file",
    "filesystem": "file system",
    "direct_io": "O_DIRECT",
    "owner": "owner",
}


@app.command()
def inspect(directories: Directories, as_json: Json = False) -> None:
    """Show what directories hold: whose it is, how full it is, how it can be read.

    Works beside a running owner. Exit code 1 if a directory holds no usable store.

    Example: [bold]flexkv disk inspect /mnt/nvme0 /mnt/nvme1[/bold]
    """
    found, problems = _each(directories, survey.inspect)
    engine = DiskBackend.probe()[0].detail
    if as_json:
        typer.echo(
            json.dumps({"engine": engine, "directories": found, "problems": problems}, indent=2)
        )
    else:
        for item in found:
            Console().print(_inspected(item))
        Console().print(f"engine here: {escape(engine)}", highlight=False)
        _complain(problems)
    raise typer.Exit(1 if problems else 0)


@app.command()
def verify(directories: Directories, as_json: Json = False) -> None:
    """Read every committed block again and compare its checksum.

    The owner must not run. Exit code 1 if anything is damaged or cannot be read.

    Example: [bold]flexkv disk verify /mnt/nvme0 /mnt/nvme1[/bold]
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def one(path: Path) -> survey.Verdict:
            task = bar.add_task(escape(str(path)), total=None)
            return survey.verify(
                path, lambda done, total: bar.update(task, completed=done, total=total)
            )

        verdicts, problems = _each(directories, one)
    whole = not problems and all(verdict.whole for verdict in verdicts)
    if as_json:
        found = [asdict(verdict) | {"whole": verdict.whole} for verdict in verdicts]
        typer.echo(
            json.dumps({"whole": whole, "directories": found, "problems": problems}, indent=2)
        )
    else:
        if verdicts:
            Console().print(_verified(verdicts))
        _complain(problems)
    raise typer.Exit(0 if whole else 1)


def _each(
    directories: list[Path], look: Callable[[Path], Any]
) -> tuple[list[Any], list[dict[str, str]]]:
    """What `look` says of each directory, and why it could not look at others."""
    found, problems = [], []
    for path in directories:
        try:
            found.append(look(path))
        except FlexKVError as error:
            problems.append({"directory": str(path), "problem": str(error)})
    return found, problems


def _complain(problems: list[dict[str, str]]) -> None:
    for item in problems:
        Console(stderr=True).print(f"[red]{escape(item['problem'])}[/red]", highlight=False)


def _inspected(item: dict[str, Any]) -> Table:
    made = Table(title=item["directory"], title_justify="left", show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    shown = dict(item)
    shown["model"] = " ".join(
        str(item["identity"].get(name, "")) for name in ("model", "revision", "rank", "codec")
    )
    shown["index"] = f"{item['index']} of {item['directories']}"
    shown["direct_io"] = "yes" if item["direct_io"] else item["direct_io_problem"]
    shown["owner"] = f"process {item['owner'] or '?'}" if item["locked"] else "none"
    for name, label in _ROWS.items():
        value = shown[name]
        text = _size(value) if name.endswith("_bytes") else str(value)
        made.add_row(label, escape(text))
    return made


def _verified(verdicts: list[survey.Verdict]) -> Table:
    made = Table(title="flexkv disk verify", title_justify="left")
    made.add_column("directory", overflow="fold")
    for name in ("committed", "good", "damaged", "unreadable", "bad records", "cut off"):
        made.add_column(name, justify="right")
    for item in verdicts:
        figures = (
            item.committed,
            item.good,
            len(item.damaged_slots),
            len(item.unreadable_slots),
            item.damaged_records,
            item.cut_off,
        )
        colour = "green" if item.whole else "red"
        made.add_row(
            escape(item.directory), *(f"[{colour}]{figure}[/{colour}]" for figure in figures)
        )
    return made


def _size(size_bytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024  # type: ignore[assignment]
    return f"{size_bytes:.4g} {unit}"
