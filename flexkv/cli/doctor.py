"""`flexkv doctor`: says what this machine offers, what is missing, and what to type."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexkv.cli import checks
from flexkv.cli.checks import Finding

app = typer.Typer(add_completion=False, rich_markup_mode="rich")
_COLOURS = {"ok": "green", "note": "cyan", "missing": "yellow", "unusable": "red"}


@app.command()
def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Option("--dir", help="A directory for the disk tier; may be given several times."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A configuration file to check.")
    ] = None,
    torch: Annotated[bool, typer.Option("--torch", help="Import torch and ask it.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Load plug-ins and ask them for devices.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine offers, what is missing, and what to type.

    Exit code 1 if something that was asked for (--dir, --config) cannot be used.

    Example: [bold]flexkv doctor --dir /mnt/nvme0 --dir /mnt/nvme1[/bold]
    """
    offered = [
        *checks.check_host(),
        *checks.check_memory(),
        *checks.check_io_uring(),
        *checks.check_torch(load=torch),
        *checks.check_plugins(probe=probe),
    ]
    asked: list[Finding] = []
    for directory in directories or []:
        asked += checks.check_directory(directory)
    if config is not None:
        asked += checks.check_config(config)
    usable = all(item.state != "unusable" for item in asked)
    if as_json:
        findings = [asdict(item) for item in (*offered, *asked)]
        typer.echo(json.dumps({"usable": usable, "findings": findings}, indent=2))
    else:
        Console().print(_table([*offered, *asked]))
    raise typer.Exit(0 if usable else 1)


def _table(findings: list[Finding]) -> Table:
    made = Table(title="flexkv doctor", title_justify="left")
    made.add_column("subject", overflow="fold")
    made.add_column("state", no_wrap=True)
    made.add_column("what there is; what to type", overflow="fold")
    for item in findings:
        colour = _COLOURS[item.state]
        advice = f"\n[dim]-> {escape(item.advice)}[/dim]" if item.advice else ""
        made.add_row(
            escape(item.subject), f"[{colour}]{item.state}[/{colour}]", escape(item.detail) + advice
        )
    return made
