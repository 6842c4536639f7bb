"""`flexkv sim ...`: what a cache would do, decided by the code that serves.

Every command lies in a module `flexkv/cli/sim_*.py` as a plain function and is entered here.
"""

from __future__ import annotations

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


@app.callback()
def main() -> None:
    """Simulate a cache over a request trace, with the index, planner and policies that serve."""


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
