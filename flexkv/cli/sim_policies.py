"""`flexkv sim policy-compare`: hit rates of policies over traces, by capacity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from flexkv.cli.trace_files import (
    Format,
    Json,
    Strict,
    TokensPerBlock,
    complaints,
    print_json,
    progress_bar,
    read,
    showing,
)

if TYPE_CHECKING:
    from flexkv.sim.columns import Columns
    from flexkv.sim.compare import Result
    from flexkv.traces import Malformed

Traces = Annotated[
    list[Path], typer.Option("--trace", metavar="FILE...", help="Trace to replay; may be repeated.")
]
More = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More traces.")]
Policies = Annotated[
    str,
    typer.Option(
        help="Names, comma between, settings after a colon (gdsf:gdsf_crossover_tokens=20000). "
        "Besides installed ones: default, the bound opt, and lru-alone, fifo-alone, slru-alone."
    ),
]
Capacities = Annotated[
    str, typer.Option(help="Sizes: percent of a trace's distinct blocks, or blocks.")
]
Warmup = Annotated[
    float, typer.Option(help="Share of the requests that fill the cache and are not counted.")
]


def policy_compare(
    trace: Traces,
    more: More = None,
    policies: Policies = "lru,default,opt",
    capacity: Capacities = "1%,5%,10%,25%,50%",
    format: Format = None,
    tokens_per_block: TokensPerBlock = None,
    warmup_percent: Warmup = 0.0,
    strict: Strict = False,
    as_json: Json = False,
) -> None:
    """Replay traces under several policies and sizes of the cache; print what each would hit.

    Requests are served one at a time by the index and planner that serve. A block counts as hit
    only if all before it are there.

    Example: [bold]flexkv sim policy-compare --trace a.jsonl.gz --policies lru,opt[/bold]
    """
    from dataclasses import asdict
    from time import perf_counter

    from flexkv.sim.columns import columns
    from flexkv.sim.compare import compare, parse_capacities, parse_policies

    with showing():
        chosen, sizes = parse_policies(policies), parse_capacities(capacity)
    loaded: list[Columns] = []
    malformed: list[Malformed] = []
    for path in [*trace, *(more or [])]:
        one = read(path, format, tokens_per_block, strict=strict)
        loaded.append(columns(one))
        malformed += one.malformed
    total = sum(item.accesses for item in loaded) * len(chosen) * len(sizes)
    results: list[Result] = []
    with showing(), progress_bar("replaying") as report:
        done = 0

        def advance(accesses: int) -> None:
            nonlocal done
            done += accesses
            report(done, total)

        for result in compare(
            loaded,
            chosen,
            sizes,
            clock=perf_counter,
            progress=advance,
            warmup_percent=warmup_percent,
        ):
            results.append(result)  # noqa: PERF402 - kept one by one, as they come
    if as_json:
        print_json({"results": [asdict(result) for result in results]})
    else:
        for item in loaded:
            mine = [result for result in results if result.trace == item.name]
            Console().print(_table(item, mine))
    complaints(malformed)


def _table(trace: Columns, results: list[Result]) -> Table:
    """Policies down, capacities across: block hits and FLOPs saved in percent."""
    made = Table(
        title=f"{trace.name}: {trace.accesses:,} blocks of {trace.tokens_per_block} tokens, "
        f"{trace.distinct:,} distinct; block hits / FLOPs saved in %",
        title_justify="left",
        box=None,
    )
    made.add_column("policy", no_wrap=True)
    sizes = dict.fromkeys((result.capacity_percent, result.capacity_blocks) for result in results)
    for percent, blocks in sizes:
        made.add_column(f"{percent:g}%\n{blocks:,} blocks", justify="right", no_wrap=True)
    cells = {(r.policy, r.capacity_percent, r.capacity_blocks): r for r in results}
    for policy in dict.fromkeys(result.policy for result in results):
        row = [cells[policy, *size] for size in sizes]
        made.add_row(
            policy, *(f"{r.block_hit_percent:.2f}/{r.flop_saved_percent:.2f}" for r in row)
        )
    return made
