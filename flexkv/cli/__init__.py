"""The `flexkv` command: `demo`, `doctor`, `bench`, `calibrate`, `sim`, `trace`, `disk`,
`cluster`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

app = typer.Typer(
    name="flexkv",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,  # a secret may be among them
)
_PASS_ON: dict[str, Any] = {
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
    "add_help_option": False,  # the command behind it answers
}


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"flexkv {version('flexkv')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """KV-cache manager for LLM serving: prefix reuse through host memory and SSD.

    Example: [bold]flexkv doctor --dir /mnt/nvme[/bold]
    """


@app.command("demo", **_PASS_ON)
def _demo(context: typer.Context) -> None:
    """Answer questions over a long document with a real model: no cache, host hit, SSD hit.

    Example: [bold]flexkv demo --model path/to/model[/bold]
    """
    from flexkv.cli.demo import app as command

    command(context.args, prog_name="flexkv demo")


@app.command("doctor", **_PASS_ON)
def _doctor(context: typer.Context) -> None:
    """Say what this machine offers, what is missing, and what to type.

    Example: [bold]flexkv doctor --dir /mnt/nvme0 --dir /mnt/nvme1[/bold]
    """
    from flexkv.cli.doctor import app as command

    command(context.args, prog_name="flexkv doctor")


@app.command("bench", **_PASS_ON)
def _bench(context: typer.Context) -> None:
    """Measure the index, the copy engine, the disk tier, or all together, against limits and peers.

    Example: [bold]flexkv bench disk --dir /mnt/nvme --json[/bold]
    """
    from flexkv.cli.bench import app as command

    command(context.args, prog_name="flexkv bench")


@app.command("calibrate", **_PASS_ON)
def _calibrate(context: typer.Context) -> None:
    """Measure this machine's backends; write a profile that the simulator reads.

    Example: [bold]flexkv calibrate --dir /mnt/nvme --out profile.json[/bold]
    """
    from flexkv.cli.calibrate import app as command

    command(context.args, prog_name="flexkv calibrate")


@app.command("sim", **_PASS_ON)
def _sim(context: typer.Context) -> None:
    """Say what a cache would do for a trace: hit rates by policy and capacity, and more.

    Example: [bold]flexkv sim policy-compare --trace trace.jsonl.gz --policies lru,opt[/bold]
    """
    from flexkv.cli.sim import app as command

    command(context.args, prog_name="flexkv sim")


@app.command("disk", **_PASS_ON)
def _disk(context: typer.Context) -> None:
    """Inspect or verify the directories of a disk tier.

    Example: [bold]flexkv disk verify /mnt/nvme0[/bold]
    """
    from flexkv.cli.disk import app as command

    command(context.args, prog_name="flexkv disk")


@app.command("cluster", **_PASS_ON)
def _cluster(context: typer.Context) -> None:
    """Look after a cluster: who is there, who leaves, and a new beginning for all.

    Example: [bold]flexkv cluster status --url redis://10.0.0.7:6379[/bold]
    """
    from flexkv.cli.cluster import app as command

    command(context.args, prog_name="flexkv cluster")


@app.command("trace", **_PASS_ON)
def _trace(context: typer.Context) -> None:
    """Look at request traces, convert, make, record and replay them.

    Example: [bold]flexkv trace stat conversation.jsonl.gz[/bold]
    """
    from flexkv.cli.trace import app as command

    command(context.args, prog_name="flexkv trace")
