"""`flexkv sim ...`: what a cache would do, decided by the code that serves.

Every command lies in a module `flexkv/cli/sim_*.py` as a plain function and is entered here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexkv.cli import sim_decode, sim_plot
from flexkv.cli.sim_check import check
from flexkv.cli.sim_policies import policy_compare
from flexkv.cli.sim_serving import plan, serve, sweep_capacity

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    trace: Annotated[
        Path | None, typer.Option("--check", help="The same as `check --trace`, by its defaults.")
    ] = None,
) -> None:
    """Simulate a cache over a request trace, with the index, planner and policies that serve."""
    if trace is None:
        return
    if context.invoked_subcommand is not None:
        raise typer.BadParameter("--check stands alone; `flexkv sim check` has all its options")
    check(trace)


app.command("policy-compare")(policy_compare)
app.command("baseline")(sim_decode.baseline)
app.command("orchestrated")(sim_decode.orchestrated)
app.command("compare")(sim_decode.compare)
app.command("sweep")(sim_decode.sweep)
app.command("check")(check)
app.command("serve")(serve)
app.command("sweep-capacity")(sweep_capacity)
app.command("plan")(plan)
app.command("plot")(sim_plot.plot)
