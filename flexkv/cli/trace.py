"""`flexkv trace ...`: look at request traces, convert, make, record and replay them.

`stat` - `convert` - `generate` - `record`, `replay` (in `trace_record.py`, `trace_replay.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexkv.cli.trace_files import (
    CharactersPerToken,
    Coarsen,
    Fill,
    Format,
    Json,
    Seed,
    Strict,
    Tokenizer,
    TokensPerBlock,
    complaints,
    print_json,
    progress_bar,
    read,
    showing,
    stats_tables,
    written,
)

if TYPE_CHECKING:
    from flexkv.traces import Malformed, TraceStats

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Look at request traces, convert, make, record and replay them.",
)


@app.command()
def stat(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces to look at.")],
    format: Format = None,
    tokens_per_block: TokensPerBlock = None,
    coarsen: Coarsen = 1,
    strict: Strict = False,
    fill: Fill = "none",
    tokenizer: Tokenizer = None,
    characters_per_token: CharactersPerToken = 4.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Count requests, blocks, reuse and lengths of traces.

    Exit code 1 if a trace cannot be read. Malformed lines are skipped and summed up at the end.

    Example: [bold]flexkv trace stat conversation.jsonl.gz[/bold]
    """
    from dataclasses import asdict

    from flexkv.traces import summarize

    found: list[TraceStats] = []
    malformed: list[Malformed] = []
    for path in paths:
        trace = read(
            path, format, tokens_per_block, coarsen, strict, fill, tokenizer,
            characters_per_token, seed,
        )  # fmt: skip
        found.append(summarize(trace))
        malformed += trace.malformed
    if as_json:
        print_json({"traces": [asdict(item) for item in found]})
    else:
        for table in stats_tables(found):
            Console().print(table)
    complaints(malformed)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Trace to read.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; .gz packs it.")],
    format: Format = None,
    to: Annotated[str, typer.Option("--to", help="flexkv, mooncake or lengths.")] = "flexkv",
    tokens_per_block: TokensPerBlock = None,
    coarsen: Coarsen = 1,
    strict: Strict = False,
    fill: Fill = None,
    tokenizer: Tokenizer = None,
    characters_per_token: CharactersPerToken = 4.0,
    seed: Seed = 0,
    header: Annotated[
        bool, typer.Option(help="Begin with the line that tells the block size (flexkv only).")
    ] = True,
    as_json: Json = False,
) -> None:
    """Write a trace in another format: ours, chained and full blocks only, unless told otherwise.

    Example: [bold]flexkv trace convert qwen_traceA_blksz_16.jsonl a.jsonl.gz[/bold]
    """
    trace = read(
        source, format, tokens_per_block, coarsen, strict, fill, tokenizer,
        characters_per_token, seed,
    )  # fmt: skip
    written(trace, target, to, header, as_json)
    complaints(trace.malformed)


@app.command()
def generate(
    kind: Annotated[str, typer.Argument(help="chat, agents, rag or uniform.")],
    out: Annotated[Path | None, typer.Option(help="File to write; .gz packs it.")] = None,
    requests: Annotated[int, typer.Option(help="How many requests.")] = 1000,
    seed: Seed = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter; see --parameters."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--parameters", help="List the parameters and their defaults.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a trace from a seed: the same one on every machine.

    Example: [bold]flexkv trace generate chat --requests 1000 --seed 1 --out chat.jsonl.gz[/bold]
    """
    from flexkv.traces.generators import generate as make
    from flexkv.traces.generators import parameters

    with showing():
        if show:
            found = parameters(kind)
            if as_json:
                print_json(
                    {name: {"default": d, "help": text} for name, (d, text) in found.items()}
                )
            else:
                Console().print(_parameters_table(kind, found))
            return
        chosen = dict(_pair(text) for text in settings or ())
        if out is None:
            raise typer.BadParameter("say where to write the trace", param_hint="--out")
        written(make(kind, requests, seed=seed, settings=chosen), out, "flexkv", True, as_json)


@app.command(context_settings={"ignore_unknown_options": True})
def record(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; .gz packs it.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run.")],
    as_json: Json = False,
) -> None:
    """Run a command and record what KV managers are asked for in it: lengths and block numbers.

    It sets FLEXKV_TRACE_PATH; every manager writes its trace when it closes (the second one to
    OUT-2, and so on). Exit code: that of the command.

    Example: [bold]flexkv trace record serving.jsonl.gz -- python serve.py[/bold]
    """
    from flexkv.cli.trace_record import record as run

    with showing():
        code = run(out, command, as_json)
    raise typer.Exit(code)


@app.command()
def replay(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Trace to replay.")],
    host: Annotated[str, typer.Option(help="Host tier: 10% of the distinct blocks, or 2GiB.")] = (
        "10%"
    ),
    disk: Annotated[str, typer.Option(help="Disk tier, likewise; 0% has none.")] = "0%",
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the files of the disk tier are made.")
    ] = None,
    block_bytes: Annotated[int, typer.Option(help="Bytes that stand for one block.")] = 4096,
    policy: Annotated[
        str | None, typer.Option(help="Eviction policy of every tier, if not the default.")
    ] = None,
    speed: Annotated[
        float, typer.Option(help="So many times as fast as it was; 0: as fast as possible.")
    ] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Requests under way at once.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Replay the first so many requests.")] = None,
    format: Format = None,
    tokens_per_block: TokensPerBlock = None,
    coarsen: Coarsen = 1,
    strict: Strict = False,
    fill: Fill = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Replay a trace through a real KV manager: hits, bytes, evictions and latencies.

    Every request is a get and then a put of its prompt. The device is host memory (backend cpu).

    Example: [bold]flexkv trace replay trace.jsonl.gz --host 5% --disk 20% --dir /mnt/nvme[/bold]
    """
    from flexkv.bench.trace_replay import ReplaySetup
    from flexkv.bench.trace_replay import replay as run
    from flexkv.cli.trace_replay import blocks_of, result_table

    trace = read(path, format, tokens_per_block, coarsen, strict, fill, seed=seed)
    if limit is not None:
        trace = trace.first(limit)
    with showing(), progress_bar(f"replaying {trace.name}") as report:
        stride = ReplaySetup(1, block_bytes=block_bytes).spec.stride_bytes
        setup = ReplaySetup(
            blocks_of(host, trace.distinct, stride, "--host"),
            blocks_of(disk, trace.distinct, stride, "--disk"),
            block_bytes,
            directory,
            policy,
            speed,
            concurrency,
        )
        found = run(trace, setup, report)
    if as_json:
        print_json(found)
    else:
        Console().print(result_table(found))
    complaints(trace.malformed)


def _pair(text: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not is_pair:
        raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint="--set")
    return name.strip().replace("-", "_"), value.strip()


def _parameters_table(kind: str, found: dict[str, tuple[object, str]]) -> Table:
    made = Table(title=f"flexkv trace generate {kind}", title_justify="left")
    for column in ("parameter", "default", "meaning"):
        made.add_column(column, justify="right" if column == "default" else "left")
    for name, (default, text) in found.items():
        made.add_row(name, str(default), escape(text))
    return made
