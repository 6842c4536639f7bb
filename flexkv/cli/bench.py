"""`flexkv bench index|copy|disk|e2e|overlap|cuda|remote|peers|faults|directory|codec`: run it with
a progress bar, print a table or JSON.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flexkv.bench.report import Result, report
from flexkv.errors import FlexKVError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Measure flexkv against the limits of this machine and against peers, in the same run.",
)
_DIRECTORY_NAMES = ("dir", "directory", "directories", "dirs")

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=VALUE]...", help="Options of this benchmark, such as repeats=3."),
]
LMCache = Annotated[
    Path | None,
    typer.Option("--lmcache-python", help="Interpreter that has lmcache; default: this one."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="Directory whose file system is measured.")]


@app.command()
def index(settings: Settings = None, as_json: Json = False) -> None:
    """Hash, match, plan and evict on an index of a million blocks.

    Under another policy than lru (policy=hazard) the steady cost is also compared with lru's.

    Example: [bold]flexkv bench index --json[/bold]
    """
    _run("index", settings, None, as_json)


@app.command()
def copy(settings: Settings = None, as_json: Json = False) -> None:
    """Gather and scatter between device layout and host blocks.

    Example: [bold]flexkv bench copy repeats=5[/bold]
    """
    _run("copy", settings, None, as_json)


@app.command()
def disk(settings: Settings = None, directory: Dir = None, as_json: Json = False) -> None:
    """Read and write blocks, next to fio on the same file system.

    Example: [bold]flexkv bench disk --dir /mnt/nvme --json[/bold]
    """
    _run("disk", settings, directory, as_json)


@app.command()
def e2e(
    settings: Settings = None,
    directory: Dir = None,
    as_json: Json = False,
    lmcache_python: LMCache = None,
) -> None:
    """Put and get through a whole manager, one request and many at once, next to LMCache.

    Example: [bold]flexkv bench e2e --dir /mnt/nvme requests=1,64 tokens=8192 --json[/bold]
    """
    words = [] if lmcache_python is None else [f"lmcache_python={lmcache_python}"]
    _run("e2e", [*(settings or []), *words], directory, as_json)


@app.command()
def overlap(settings: Settings = None, directory: Dir = None, as_json: Json = False) -> None:
    """How much of a get hides behind other work, on the simulated device.

    Example: [bold]flexkv bench overlap --dir /mnt/nvme --json[/bold]
    """
    _run("overlap", settings, directory, as_json)


@app.command()
def cuda(settings: Settings = None, as_json: Json = False) -> None:
    """What a restore to an NVIDIA GPU costs the event loop, its speed, and whom it slows down.

    Example: [bold]flexkv bench cuda segments_bytes=32768,262144 --json[/bold]
    """
    _run("cuda", settings, None, as_json)


@app.command()
def remote(settings: Settings = None, as_json: Json = False) -> None:
    """Blocks in Redis, in Mooncake or in an object store, next to plain clients.

    Example: [bold]flexkv bench remote store=redis url=redis://10.0.0.7:6379 --json[/bold]
    """
    _run("remote", settings, None, as_json)


@app.command()
def peers(settings: Settings = None, as_json: Json = False) -> None:
    """Blocks from another node's memory, next to plain sockets or Mooncake's engine by itself.

    Example: [bold]flexkv bench peers sizes_kib=64,1024 --json[/bold]
    """
    _run("peers", settings, None, as_json)


@app.command()
def faults(
    settings: Settings = None,
    pause_s: Annotated[
        float, typer.Option("--pause-s", help="How long the owner of blocks is stopped.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Local hits of a node while its cluster suffers: nodes, network, Redis or Mooncake fail.

    Example: [bold]flexkv bench faults faults=owner_stopped,peer_slow --pause-s 10 --json[/bold]
    """
    _run("faults", [*(settings or []), f"pause_s={pause_s}"], None, as_json)


@app.command()
def directory(
    settings: Settings = None,
    as_json: Json = False,
    only_model: Annotated[
        bool, typer.Option("--model", help="Measure nothing; show the model of larger clusters.")
    ] = False,
) -> None:
    """What the directory of a cluster costs: real nodes on a Redis, and a model of larger clusters.

    Example: [bold]flexkv bench directory nodes=8 blocks=200000 --json[/bold]
    """
    _run("directory", [*(settings or []), f"only_model={only_model}"], None, as_json)


@app.command()
def codec(
    settings: Settings = None,
    tier: Annotated[bool, typer.Option("--tier", help="Measure a disk tier behind one.")] = False,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Speed, ratio and real error of codecs, on the KV of SmolLM2-135M where it is installed; and
    what it says behind cold copies, of which only a share stays.

    With --tier: a disk tier with a codec against one without, blocks held and gets, measured and
    predicted by the simulator.

    Example: [bold]flexkv bench codec codecs=int8,int4 tokens=2048 --json[/bold]

    Example: [bold]flexkv bench codec --tier --dir /mnt/nvme codec=int8 --json[/bold]
    """
    _run("codec_tier" if tier else "codec", settings, directory, as_json)


def _run(name: str, settings: list[str] | None, directory: Path | None, as_json: bool) -> None:
    run: Callable[..., list[Result]] = import_module(f"flexkv.bench.{name}").run
    options = parse_options(run, settings or [], directory)
    errors = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=errors, transient=True) as bar:
            task = bar.add_task(name, total=None)

            def progress(step: str, done: int, total: int) -> None:
                bar.update(task, description=step, completed=done, total=total)

            results = run(progress, **options)
    except (FlexKVError, OSError) as error:
        errors.print(f"[red]flexkv bench {name}:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(report(name, results), indent=2, allow_nan=False))
    else:
        Console().print(table(name, results))


def parse_options(
    run: Callable[..., Any], settings: list[str], directory: Path | None
) -> dict[str, Any]:
    """Turn NAME=VALUE words into keyword arguments of `run`; values are read as YAML, and where
    the default is several, several are taken: sizes_kib=64,256, or one.

    Raises:
        typer.BadParameter: not of that form, or the benchmark has no such option.
    """
    known = {
        name: item.default
        for name, item in inspect.signature(run).parameters.items()
        if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD) and name != "progress"
    }
    options: dict[str, Any] = {}
    for word in settings:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise typer.BadParameter(f"{word!r}: write NAME=VALUE; names: {', '.join(known)}")
        several = isinstance(known[name], tuple) and not value.startswith("[")
        options[name] = yaml.safe_load(f"[{value}]" if several else value)
    if directory is not None:
        name = next((item for item in _DIRECTORY_NAMES if item in known), "")
        if not name:
            raise typer.BadParameter("this benchmark uses no directory")
        options[name] = directory
    return options


def table(name: str, results: list[Result]) -> Table:
    """Lay results out for people."""
    made = Table(title=f"flexkv bench {name}", title_justify="left")
    made.add_column("name", no_wrap=True)
    made.add_column("value", justify="right", no_wrap=True)
    for column in ("limit", "peer", "ratio", "samples"):
        made.add_column(column, justify="right")
    made.add_column("params", overflow="fold")
    for item in results:
        params = " ".join(f"{key}={value}" for key, value in item.params.items())
        made.add_row(
            item.name,
            f"{_figure(item.value)} {item.unit}",
            _figure(item.limit),
            _figure(item.peer),
            _figure(item.ratio),
            str(item.samples),
            params,
        )
    return made


def _figure(value: float | None) -> str:
    """Three or four significant digits, without exponents."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, min(digits, 9))}f}"
