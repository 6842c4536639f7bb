"""`flexkv sim check`: the simulator against the real data plane, on the same trace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from flexkv.cli.trace_files import (
    Format,
    Json,
    TokensPerBlock,
    print_json,
    progress_bar,
    read,
    showing,
)

if TYPE_CHECKING:
    from flexkv.config import FlexKVConfig
    from flexkv.sim.serving.compare import Errors
    from flexkv.sim.serving.replay import Costs, Served
    from flexkv.traces import TraceRequest

# of each group's absolute errors, over requests
MEDIAN_TOLERANCE, P99_TOLERANCE = 0.15, 0.30

TraceFile = Annotated[Path, typer.Option("--trace", help="Trace to replay.")]
Requests = Annotated[int | None, typer.Option(min=1, help="First requests only.")]
HostBlocks = Annotated[int, typer.Option(min=1, help="Blocks of host memory.")]
DiskBlocks = Annotated[int, typer.Option(min=0, help="Blocks on disk; 0: no disk tier.")]
BlockBytes = Annotated[int, typer.Option(help="Bytes of a block, a multiple of 4096.")]
Device = Annotated[str, typer.Option(help="Device plug-in: cpu, simulated, ...")]
DeviceOptions = Annotated[str, typer.Option(help="Its options, as YAML or JSON.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="Where the disk tier is made.")]
Profile = Annotated[
    Path | None, typer.Option(help="What `flexkv calibrate` wrote; without it no times.")
]
Repeats = Annotated[
    int, typer.Option(min=1, help="Replays of the data plane; the median time of each request.")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=VALUE]...", help="Settings of the cache, such as spill=on_evict."
    ),
]


def check(
    trace: TraceFile,
    settings: Settings = None,
    requests: Requests = None,
    host_blocks: HostBlocks = 1024,
    disk_blocks: DiskBlocks = 8192,
    block_bytes: BlockBytes = 4096,
    device: Device = "cpu",
    device_options: DeviceOptions = "{}",
    directory: Dir = None,
    profile: Profile = None,
    repeats: Repeats = 1,
    format: Format = None,
    tokens_per_block: TokensPerBlock = None,
    as_json: Json = False,
) -> None:
    """Replay a trace through the real data plane and through the simulator, and compare.

    Hits, evictions and bytes must be equal to the last block: exit code 1 if they are not. With a
    profile the times are compared too; they are reported, not judged by the exit code. With
    repeats, also how far a single replay is off the median of them all: the machine's own noise.

    Example: [bold]flexkv sim check --trace t.jsonl.gz --host-blocks 500 --disk-blocks 2000[/bold]
    """
    from flexkv.sim.serving.compare import first_difference, latency_errors, middle, totals
    from flexkv.sim.serving.measured import Calibration
    from flexkv.sim.serving.replay import check_config

    with showing():
        whole = read(trace, format, tokens_per_block, fill="none")
        chosen = list(whole.requests[:requests])
        costs = Calibration.read(profile).costs(block_bytes) if profile else None
        with tempfile.TemporaryDirectory(prefix="flexkv-check-", dir=directory) as name:
            configs = [
                check_config(
                    block_bytes=block_bytes,
                    host_blocks=host_blocks,
                    disk_blocks=disk_blocks,
                    directory=Path(name) / f"tier{number}",
                    device=device,
                    device_options=yaml.safe_load(device_options) or {},
                    **pairs(settings or []),
                )
                for number in range(repeats)
            ]
            replays, simulated = _both(configs, chosen, costs)
    found = [first_difference(measured, simulated) for measured in replays]
    difference = next((one for one in found if one is not None), None)
    measured = middle(replays)
    errors = latency_errors(measured, simulated) if profile else []
    noise = latency_errors(measured, replays[0]) if repeats > 1 else []
    result = {
        "trace": trace.name,
        "block_bytes": block_bytes,
        "device": device,
        "equal": difference is None,
        "difference": None if difference is None else str(difference),
        "totals": totals(measured),
        "tolerance": {"median": MEDIAN_TOLERANCE, "p99": P99_TOLERANCE},
        "repeats": repeats,
        "latency": [one.as_json() | {"within": _within(one)} for one in errors],
        "noise": [one.as_json() for one in noise],
    }
    if as_json:
        print_json(result)
    else:
        _show(result, errors, noise)
    if difference is not None:
        raise typer.Exit(1)


def _both(
    configs: list[FlexKVConfig], requests: list[TraceRequest], costs: Costs | None
) -> tuple[list[list[Served]], list[Served]]:
    from flexkv.bench import replay as plane
    from flexkv.sim.serving.replay import replay

    replays = []
    for config in configs:
        with progress_bar("data plane") as report:
            replays.append(plane.replay(config, requests, report))
    simulated = []
    with progress_bar("simulator") as report:
        for served in replay(configs[0], requests, costs):
            simulated.append(served)
            report(len(simulated), len(requests))
    return replays, simulated


def pairs(words: list[str]) -> dict[str, Any]:
    """Turn NAME=VALUE words into settings; values are read as YAML."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"{word!r}: write NAME=VALUE")
        found[name] = yaml.safe_load(value)
    return found


def _within(errors: Errors) -> bool:
    return errors.p50 <= MEDIAN_TOLERANCE and errors.p99 <= P99_TOLERANCE


def _show(result: dict[str, Any], errors: list[Errors], noise: list[Errors]) -> None:
    console = Console(highlight=False)
    sums = result["totals"]
    verdict = "[green]equal to the last block[/green]" if result["equal"] else "[red]differ[/red]"
    counted = f"{sums['requests']} requests, {sums['blocks']} blocks"
    console.print(f"{counted}: hits, evictions and bytes {verdict}")
    if result["difference"]:
        console.print(result["difference"], markup=False)
    table = Table(title="what both did" if result["equal"] else "what the data plane did")
    table.add_column("")
    table.add_column("", justify="right")
    for name in ("hit_blocks", "evicted_blocks", "moved_bytes"):
        for key, value in sums[name].items():
            table.add_row(f"{name.replace('_', ' ')}, {key}", f"{value:,}")
    console.print(table)
    if errors:
        title = f"median {MEDIAN_TOLERANCE:.0%}, p99 {P99_TOLERANCE:.0%}"
        title = f"predicted against measured times; tolerance of absolute errors: {title}"
        console.print(_latency_table(errors, title))
    if noise:
        title = f"one replay against the median of {result['repeats']}: the machine's own noise"
        console.print(_latency_table(noise, title))


def _latency_table(errors: list[Errors], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("", "requests", "p50 ms", "p99 ms", "MAPE", "MPE", "median", "p99"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name in ("of p50", "of p99", "within"):
        table.add_column(name, justify="right")
    for one in errors:
        shares = (one.mape, one.mpe, one.p50, one.p99, one.of_p50, one.of_p99)
        table.add_row(
            one.name,
            str(one.requests),
            f"{one.measured_p50_ms:.3f}",
            f"{one.measured_p99_ms:.3f}",
            *(f"{share:+.1%}" if share < 0 else f"{share:.1%}" for share in shares),
            "yes" if _within(one) else "no",
        )
    return table
