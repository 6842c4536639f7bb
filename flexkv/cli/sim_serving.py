"""`flexkv sim serve`, `sweep-capacity`, `plan`: requests in time, by size of memory and disk."""

from __future__ import annotations

from dataclasses import asdict
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
    from flexkv.sim.serving.sizing import Setup, Trial

TraceFile = Annotated[Path, typer.Option("--trace", help="Trace to serve.")]
Requests = Annotated[int | None, typer.Option(min=1, help="First requests only.")]
Host = Annotated[str, typer.Option(help="Host memory: blocks, or percent of the distinct blocks.")]
Disk = Annotated[str, typer.Option(help="Disk: blocks, or percent of the distinct blocks.")]
Hosts = Annotated[str, typer.Option("--host", help="Sizes of host memory, comma between.")]
Disks = Annotated[str, typer.Option("--disk", help="Sizes of the disk tier, comma between.")]
Hardware = Annotated[
    str, typer.Option(help="h100, h200, b200, mi300x, with +nvme4 and the like, or a file.")
]
Model = Annotated[str, typer.Option(help="Shape of the model, such as llama-3.1-8b.")]
Accelerators = Annotated[int, typer.Option(min=1, help="Accelerators that prefill.")]
Speed = Annotated[float, typer.Option(help="How much faster than recorded the requests arrive.")]
Profile = Annotated[
    Path | None,
    typer.Option(help="What `flexkv calibrate` wrote: copies, disk, codecs, maybe prefill."),
]
PricesOption = Annotated[
    str, typer.Option(help="Other prices, as YAML: {dram_usd_per_gb: 5, years: 4, ...}.")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME=VALUE]...", help="Settings of the cache: spill=on_evict ..."),
]


def serve(
    trace: TraceFile,
    settings: Settings = None,
    host: Host = "5%",
    disk: Disk = "25%",
    requests: Requests = None,
    hardware: Hardware = "h100",
    model: Model = "llama-3.1-8b",
    accelerators: Accelerators = 1,
    speed: Speed = 1.0,
    profile: Profile = None,
    prices: PricesOption = "{}",
    format: Format = None,
    tokens_per_block: TokensPerBlock = None,
    as_json: Json = False,
) -> None:
    """Serve a trace in virtual time: time to first token, hits, what of loading is seen.

    Example: [bold]flexkv sim serve --trace t.jsonl.gz --host 5% --disk 50% --json[/bold]
    """
    with showing():
        setup = _setup(
            trace, requests, hardware, model, accelerators, speed, profile, prices, format,
            tokens_per_block, settings,
        )  # fmt: skip
        with progress_bar("serving") as report:
            trial = setup.run(_blocks(host, setup)[0], _blocks(disk, setup)[0], report)
    if as_json:
        print_json(_json(setup, results=[trial.as_json()]))
    else:
        console = Console(highlight=False)
        console.print(_table([trial]))
        _say_codec(console, setup)
        if declined := sum(trial.as_json()["declined_percent"].values()):
            console.print(
                f"{declined:.1f} % of all blocks were there and computed: that was sooner"
            )


def sweep_capacity(
    trace: TraceFile,
    settings: Settings = None,
    host: Hosts = "1%,5%,10%",
    disk: Disks = "0,25%,50%",
    requests: Requests = None,
    hardware: Hardware = "h100",
    model: Model = "llama-3.1-8b",
    accelerators: Accelerators = 1,
    speed: Speed = 1.0,
    profile: Profile = None,
    prices: PricesOption = "{}",
    format: Format = None,
    tokens_per_block: TokensPerBlock = None,
    as_json: Json = False,
) -> None:
    """Serve a trace with every pair of sizes of host memory and disk.

    Example: [bold]flexkv sim sweep-capacity --trace t.jsonl.gz --host 1%,5% --disk 0,50%[/bold]
    """
    from flexkv.sim.serving.sizing import sweep

    with showing():
        setup = _setup(
            trace, requests, hardware, model, accelerators, speed, profile, prices, format,
            tokens_per_block, settings,
        )  # fmt: skip
        hosts, disks = _blocks(host, setup), _blocks(disk, setup)
        with progress_bar("serving") as report:
            trials = []
            for trial in sweep(setup, hosts, disks, lambda *_: None):
                trials.append(trial)
                report(len(trials), len(hosts) * len(disks))
    if as_json:
        print_json(_json(setup, results=[trial.as_json() for trial in trials]))
    else:
        console = Console(highlight=False)
        console.print(_table(trials))
        _say_codec(console, setup)


def plan(
    trace: TraceFile,
    settings: Settings = None,
    ttft_ms: Annotated[float, typer.Option(help="What TTFT must not exceed.")] = 1000.0,
    percentile: Annotated[float, typer.Option(min=1, max=100, help="In so many percent.")] = 95.0,
    host: Hosts = "1%,2%,5%,10%,20%",
    most_disk: Annotated[str, typer.Option(help="Largest disk tier.")] = "100%",
    steps: Annotated[int, typer.Option(min=1, max=20, help="Bisections per host size.")] = 4,
    requests: Requests = None,
    hardware: Hardware = "h100",
    model: Model = "llama-3.1-8b",
    accelerators: Accelerators = 1,
    speed: Speed = 1.0,
    profile: Profile = None,
    prices: PricesOption = "{}",
    format: Format = None,
    tokens_per_block: TokensPerBlock = None,
    as_json: Json = False,
) -> None:
    """Find the cheapest memory and disk that keep TTFT within a limit; exit code 1: none does.

    Example: [bold]flexkv sim plan --trace t.jsonl.gz --ttft-ms 2000 --host 1%,5%[/bold]
    """
    from flexkv.sim.serving.sizing import plan as find

    with showing():
        setup = _setup(
            trace, requests, hardware, model, accelerators, speed, profile, prices, format,
            tokens_per_block, settings,
        )  # fmt: skip
        with progress_bar("planning") as report:
            found = find(
                setup,
                ttft_ms / 1e3,
                percent=percentile,
                host_blocks=_blocks(host, setup),
                most_disk_blocks=_blocks(most_disk, setup)[0],
                steps=steps,
                progress=lambda _, done, of: report(done, of),
            )
    best = found.best
    if as_json:
        print_json(
            _json(
                setup,
                limit_ms=ttft_ms,
                percentile=percentile,
                best=None if best is None else best.as_json(),
                pareto=[trial.as_json() for trial in found.pareto()],
                results=[trial.as_json() for trial in found.trials],
            )
        )
    else:
        console = Console(highlight=False)
        console.print(_table(found.pareto(), "nothing tried is both cheaper and faster than these"))
        _say_codec(console, setup)
        limit = f"p{percentile:g} of TTFT within {ttft_ms:g} ms"
        if best is None:
            console.print(f"no size tried keeps {limit}")
        else:
            memory, space = (size / 1e9 for size in (best.host_bytes, best.disk_bytes))
            console.print(
                f"cheapest with {limit}: {memory:.1f} GB of memory, {space:.1f} GB of disk, "
                f"${best.usd_per_hour:.2f} an hour"
            )
    if best is None:
        raise typer.Exit(1)


def _setup(
    path: Path,
    requests: int | None,
    hardware_name: str,
    model: str,
    accelerators: int,
    speed: float,
    profile: Path | None,
    prices: str,
    format: str | None,
    tokens_per_block: int | None,
    settings: list[str] | None,
) -> Setup:
    from dataclasses import replace

    from flexkv.cli.sim_check import pairs
    from flexkv.errors import ConfigError
    from flexkv.sim.compute import ComputeModel, shape
    from flexkv.sim.profiles import hardware
    from flexkv.sim.serving.coded import coding_by
    from flexkv.sim.serving.measured import Calibration
    from flexkv.sim.serving.prices import Prices
    from flexkv.sim.serving.sizing import Setup, hardware_costs, kv_spec

    trace = read(path, format, tokens_per_block, fill="none")
    trace = replace(trace, requests=trace.requests[:requests])
    machine = hardware(hardware_name)
    compute = ComputeModel(shape(model), machine.flops_per_s, machine.tiers["hbm"].read_bytes_per_s)
    options = pairs(settings or [])
    spec, codec = kv_spec(compute.model, trace.tokens_per_block), options.get("disk_codec")
    if profile:
        measured = Calibration.read(profile)
        costs = measured.costs(spec.block_bytes, measured.coding(codec, spec) if codec else None)
        if reached := measured.prefill_flops_per_s:
            compute = replace(compute, flops_per_s=reached, flops_share=1.0)
    else:
        coding = coding_by(codec, spec) if codec else None
        costs = hardware_costs(machine, spec.block_bytes, coding)
    try:
        chosen = Prices(**(yaml.safe_load(prices) or {}))
    except TypeError as error:
        raise ConfigError(f"--prices: {error}; names: {', '.join(asdict(Prices()))}") from error
    return Setup(trace, compute, costs, accelerators, speed, chosen, options)


def _blocks(text: str, setup: Setup) -> list[int]:
    """Turn "100,5%" into numbers of blocks."""
    sizes = []
    for word in text.split(","):
        number, percent, _ = word.strip().partition("%")
        try:
            size = float(number) * (setup.trace.distinct / 100 if percent else 1)
        except ValueError as error:
            raise typer.BadParameter(f"{word!r} is neither blocks nor percent") from error
        sizes.append(max(0, int(size)))
    return sizes


def _json(setup: Setup, **more: Any) -> dict[str, Any]:
    from flexkv.sim.serving.prices import SOURCES

    rule = setup.codec_rule()
    return {
        "codec": None if rule is None else asdict(rule) | {"pays": rule.pays},
        "trace": setup.trace.name,
        "model": setup.compute.model.name,
        "block_bytes": setup.block_bytes,
        "accelerators": setup.accelerators,
        "prices": asdict(setup.prices),
        "price_sources": SOURCES,
        **more,
    }


def _say_codec(console: Console, setup: Setup) -> None:
    """Print when the disk's codec pays, if there is one."""
    if rule := setup.codec_rule():
        verdict = "pays" if rule.pays else "does not pay"
        console.print(
            f"{rule.codec} {verdict}: it saves time where gets of {rule.blocks} blocks read less "
            f"than {rule.break_even_bytes_per_s / 1e9:.1f} GB/s; this disk reads "
            f"{rule.disk_bytes_per_s / 1e9:.1f}, with {rule.codec} {rule.speedup:.2f} x as fast"
        )


def _table(trials: list[Trial], title: str = "") -> Table:
    table = Table(title=title or None, title_justify="left")
    names = (
        "host GB", "disk GB", "host hit", "disk hit", "TTFT p50", "p95", "p99 ms", "exposed",
        "hidden", "queue ms", "$/h", "$/Mtoken",
    )  # fmt: skip
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for trial in trials:
        figures = trial.as_json()
        hits, times, means = (figures[key] for key in ("hit_percent", "ttft_ms", "ttft_mean_ms"))
        table.add_row(
            f"{trial.host_bytes / 1e9:.1f}",
            f"{trial.disk_bytes / 1e9:.1f}",
            f"{hits['host']:.1f} %",
            f"{hits.get('disk', 0.0):.1f} %",
            *(f"{times[key]:.0f}" for key in ("p50", "p95", "p99")),
            *(f"{means[key]:.1f}" for key in ("exposed", "hidden", "queue")),
            f"{trial.usd_per_hour:.2f}",
            f"{trial.usd_per_mtoken:.4f}",
        )
    return table
