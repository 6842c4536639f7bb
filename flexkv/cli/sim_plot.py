"""`flexkv sim plot`: charts of what the other commands print as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Result = Annotated[Path, typer.Argument(metavar="RESULT.json", help="What --json printed.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the PNGs.")]


def plot(result: Result, out: Out = Path(".")) -> None:
    """Draw the charts that a result can fill, as small PNGs.

    Example: [bold]flexkv sim plot compare.json --out charts[/bold]
    """
    from flexkv.errors import FlexKVError
    from flexkv.sim.plots import draw

    try:
        for path in draw(json.loads(result.read_text()), out):
            typer.echo(path)
    except OSError as error:
        _stop(f"{error.filename or result}: {error.strerror}")
    except ValueError as error:  # InputError and ConfigError are ValueErrors, too
        _stop(str(error) if isinstance(error, FlexKVError) else f"{result} is not JSON: {error}")


def _stop(reason: str) -> None:
    typer.echo(f"flexkv sim plot: {reason}", err=True)
    raise typer.Exit(2)
