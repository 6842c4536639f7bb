"""What the trace commands share: options of reading, `read`, `written`, `complaints`, tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from flexkv.errors import FlexKVError

if TYPE_CHECKING:
    from flexkv.traces import Malformed, Trace, TraceStats

_SHOWN = 10  # malformed lines that are named
Report = Callable[[int, int], None]

Format = Annotated[
    str | None,
    typer.Option(
        help="flexkv, mooncake, qwen, weka, ragpulse, sharegpt, burstgpt, azure or lengths; "
        "without it, told by the content."
    ),
]
TokensPerBlock = Annotated[
    int | None, typer.Option(help="Tokens of one block, where the file does not say.")
]
Coarsen = Annotated[int, typer.Option(help="Make one block of so many.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first malformed line.")]
Fill = Annotated[
    str | None,
    typer.Option(help="Invent block ids where there are none (CSV): chat, unique or none."),
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="tokenizer.json that turns ShareGPT text into tokens.")
]
CharactersPerToken = Annotated[
    float, typer.Option(help="Estimate for ShareGPT text without a tokenizer.")
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@contextmanager
def showing() -> Iterator[None]:
    """Say what went wrong in one line and exit with 1."""
    try:
        yield
    except FlexKVError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[red]{escape(str(error))}[/red]")
        raise typer.Exit(1) from error


@contextmanager
def progress_bar(text: str) -> Iterator[Report]:
    """Show a bar on stderr while work goes on, if that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(escape(text), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def read(
    path: Path,
    format: str | None,
    tokens_per_block: int | None,
    coarsen: int = 1,
    strict: bool = False,
    fill: str | None = None,
    tokenizer: Path | None = None,
    characters_per_token: float = 4.0,
    seed: int = 0,
) -> Trace:
    """Read a trace, with a bar; exit with 1 if it cannot be read."""
    from flexkv.traces import read_trace

    with showing(), progress_bar(path.name) as report:
        return read_trace(
            path,
            format=format,
            tokens_per_block=tokens_per_block,
            coarsen=coarsen,
            strict=strict,
            progress=report,
            seed=seed,
            fill=fill,
            tokenize=None if tokenizer is None else _tokenize(tokenizer),
            characters_per_token=characters_per_token,
        )


def _tokenize(path: Path) -> Callable[[str], Sequence[int]]:
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        raise typer.BadParameter(
            "needs the package tokenizers: `pip install tokenizers`", param_hint="--tokenizer"
        ) from error
    try:
        loaded = Loaded.from_file(str(path))
    except Exception as error:  # the package raises nothing more precise
        raise typer.BadParameter(f"{path}: {error}", param_hint="--tokenizer") from error
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def written(trace: Trace, target: Path, format: str, header: bool, as_json: bool) -> None:
    """Write a trace and say what was written."""
    from flexkv.traces import write_trace

    with showing(), progress_bar(f"writing {target.name}") as report:
        write_trace(trace, target, format=format, header=header, progress=report)
    facts = {
        "path": str(target),
        "format": format,
        "tokens_per_block": trace.tokens_per_block,
        "requests": len(trace.requests),
        "accesses": trace.accesses,
        "distinct": trace.distinct,
        "malformed": len(trace.malformed),
        "size_bytes": target.stat().st_size,
    }
    if as_json:
        print_json(facts)
    else:
        text = (
            f"{target}: {len(trace.requests):,} requests, {trace.accesses:,} blocks of "
            f"{trace.tokens_per_block} tokens, {trace.distinct:,} distinct, "
            f"{facts['size_bytes']:,} bytes"
        )
        Console().print(escape(text), highlight=False, soft_wrap=True)


def complaints(malformed: Sequence[Malformed]) -> None:
    """Say on stderr which lines were skipped, and how many."""
    if not malformed:
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for problem in malformed[:_SHOWN]:
        console.print(f"[yellow]{escape(str(problem))}[/yellow]")
    more = f", {len(malformed) - _SHOWN} of them not shown" if len(malformed) > _SHOWN else ""
    console.print(f"[yellow]{len(malformed)} malformed lines were skipped{more}[/yellow]")


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=2))


def stats_tables(found: Sequence[TraceStats]) -> Iterator[Table]:
    """Make two tables of a row per trace: what there is; how it is reused and how long it is."""
    three = "p50 / p90 / p99"
    columns: list[dict[str, Callable[[TraceStats], str]]] = [
        {
            "block\ntokens": lambda s: str(s.tokens_per_block or "-"),
            "requests": lambda s: f"{s.requests:,}",
            "without\nfull block": lambda s: f"{s.without_full_block:,}",
            "block\naccesses": lambda s: f"{s.accesses:,}" if s.accesses else "-",
            "distinct\nblocks": lambda s: f"{s.distinct:,}" if s.accesses else "-",
            "span s": lambda s: f"{s.span_s:,.3f}",
            "ideal\nhit rate": lambda s: _share(s.ideal_hit_rate, 4),
        },
        {
            "sessions": lambda s: f"{s.sessions:,}" if s.sessions else "-",
            f"reuse gap s\n{three}": lambda s: _line(s.reuse_gap_s, 1),
            "asked\nonce %": lambda s: _percent(s.one_hit_share),
            "reuses of\ntop tenth %": lambda s: _percent(s.top_tenth_share),
            f"input tokens\n{three}": lambda s: _line(s.input_tokens, 0),
            f"output tokens\n{three}": lambda s: _line(s.output_tokens, 0),
        },
    ]
    for cells in columns:
        made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        made.add_column("trace", overflow="fold")
        for name in cells:
            made.add_column(name, justify="right", overflow="fold")
        for item in found:
            made.add_row(escape(item.name), *(cell(item) for cell in cells.values()))
        yield made


def _share(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def _line(values: Any, digits: int) -> str:
    names = ("p50", "p90", "p99")
    return " / ".join(f"{values[name]:,.{digits}f}" for name in names) if values else "-"
