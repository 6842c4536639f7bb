"""`flexkv trace record OUT -- COMMAND`: run a command, record what its managers are asked for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from flexkv.cli.trace_files import print_json

STDERR = 2


def record(out: Path, command: list[str], as_json: bool) -> int:
    """Run a command with FLEXKV_TRACE_PATH set; say what was recorded; return its exit code."""
    from flexkv.traces import read_trace

    out = out.absolute()
    if out.exists():
        raise typer.BadParameter(f"{out} exists already; choose another name", param_hint="OUT")
    stem, dot, rest = out.name.partition(".")
    others = f"{stem}-*{dot}{rest}"
    before = set(out.parent.glob(others))
    try:
        code = subprocess.run(
            command,
            env={**os.environ, "FLEXKV_TRACE_PATH": str(out)},
            stdout=STDERR if as_json else None,  # ours is for the JSON object
            check=False,
        ).returncode
    except OSError as error:
        raise typer.BadParameter(f"{command[0]}: {error.strerror}", param_hint="COMMAND") from error
    files = [out] if out.exists() else []
    found = [
        (path, read_trace(path)) for path in files + sorted({*out.parent.glob(others)} - before)
    ]
    if as_json:
        facts = [
            {
                "path": str(path),
                "requests": len(trace.requests),
                "accesses": trace.accesses,
                "distinct": trace.distinct,
                "tokens_per_block": trace.tokens_per_block,
            }
            for path, trace in found
        ]
        print_json({"exit_code": code, "traces": facts})
        return code
    console = Console(highlight=False, soft_wrap=True, stderr=True)
    for path, trace in found:
        console.print(
            escape(f"{path}: {len(trace.requests):,} requests, {trace.accesses:,} blocks")
        )
    if not found:
        console.print(
            "[yellow]nothing was recorded: no KVManager was opened, asked and closed by the command"
            "[/yellow]"
        )
    return code
