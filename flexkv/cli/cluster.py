"""`flexkv cluster status|nodes|drain|reset`: look after a cluster through its directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from flexkv.errors import FlexKVError

if TYPE_CHECKING:
    from flexkv.cluster.admin import Admin

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Look after a cluster: who is there, who leaves, and a new beginning for all.",
)

Url = Annotated[
    str, typer.Option("--url", envvar="FLEXKV_CLUSTER_REDIS_URL", help="Redis of the directory.")
]
Name = Annotated[
    str, typer.Option("--name", envvar="FLEXKV_CLUSTER_NAME", help="Name of the cluster.")
]
Prefix = Annotated[
    str, typer.Option("--prefix", envvar="FLEXKV_CLUSTER_PREFIX", help="Prefix of its keys.")
]
User = Annotated[str, typer.Option("--username", envvar="FLEXKV_CLUSTER_USERNAME")]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        envvar="FLEXKV_CLUSTER_PASSWORD_FILE",
        help="File with the password; or put it into the URL.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_URL, _NAME, _PREFIX = "redis://127.0.0.1:6379/0", "default", "flexkv"


@app.command()
def status(
    url: Url = _URL,
    name: Name = _NAME,
    prefix: Prefix = _PREFIX,
    username: User = "",
    password_file: PasswordFile = None,
    as_json: Json = False,
) -> None:
    """Say how a cluster stands: epoch, nodes, blocks, and what the directory takes on the server.

    Example: [bold]flexkv cluster status --url redis://10.0.0.7:6379 --json[/bold]
    """
    found = _ask((url, name, prefix, username, password_file), lambda admin: admin.status())
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table(title=f"cluster {name}", title_justify="left", show_header=False)
    for what, value in found.items():
        table.add_row(what.replace("_", " "), escape(str(value)))
    Console().print(table)


@app.command()
def nodes(
    url: Url = _URL,
    name: Name = _NAME,
    prefix: Prefix = _PREFIX,
    username: User = "",
    password_file: PasswordFile = None,
    as_json: Json = False,
) -> None:
    """List the nodes that are alive.

    Example: [bold]flexkv cluster nodes --url redis://10.0.0.7:6379[/bold]
    """
    found = _ask((url, name, prefix, username, password_file), lambda admin: admin.nodes())
    rows = [
        {
            "node": record.node,
            "state": record.state,
            "blocks": record.blocks,
            "epoch": record.epoch,
            "incarnation": f"{record.incarnation:016x}",
            "identity": record.identity.hex()[:16],
            "addresses": record.addresses,
        }
        for record in found
    ]
    if as_json:
        typer.echo(json.dumps({"nodes": rows}, indent=2))
        return
    table = Table(title=f"nodes of cluster {name}", title_justify="left")
    for column in ("node", "state", "blocks", "epoch", "incarnation", "identity", "addresses"):
        table.add_column(column, justify="right" if column in ("blocks", "epoch") else "left")
    for row in rows:
        where = " ".join(f"{courier}={place}" for courier, place in row["addresses"].items())
        table.add_row(*(escape(str(value)) for value in [*list(row.values())[:-1], where]))
    Console().print(table)


@app.command()
def drain(
    node: Annotated[str, typer.Argument(help="Name of the node, as `nodes` shows it.")],
    url: Url = _URL,
    name: Name = _NAME,
    prefix: Prefix = _PREFIX,
    username: User = "",
    password_file: PasswordFile = None,
    undo: Annotated[bool, typer.Option("--undo", help="Keep it after all.")] = False,
    as_json: Json = False,
) -> None:
    """Tell a node that it is going to leave; others go on reading from it, and keep what they read.

    Example: [bold]flexkv cluster drain host-7 --url redis://10.0.0.7:6379[/bold]
    """
    place = (url, name, prefix, username, password_file)
    _ask(place, lambda admin: admin.drain(node, undo=undo))
    if as_json:
        typer.echo(json.dumps({"node": node, "draining": not undo}))
    else:
        Console().print(f"{escape(node)}: {'stays' if undo else 'draining'}", highlight=False)


@app.command()
def reset(
    url: Url = _URL,
    name: Name = _NAME,
    prefix: Prefix = _PREFIX,
    username: User = "",
    password_file: PasswordFile = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.0)] = 30.0,
    as_json: Json = False,
) -> None:
    """Have every node drop everything. What was stored before is not found afterwards, by anybody.

    Ends with 1 when a node that is alive has not done so in time; it does before it serves again.

    Example: [bold]flexkv cluster reset --url redis://10.0.0.7:6379[/bold]
    """
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("nodes", total=None)

        def progress(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        place = (url, name, prefix, username, password_file)
        found = _ask(place, lambda admin: admin.reset(timeout_s * 1e3, progress))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        console = Console()
        console.print(f"epoch {found['epoch']}, dropped by {found['done']} nodes", highlight=False)
        if found["waiting"]:
            console.print("still to do so: " + escape(", ".join(found["waiting"])))
    if found["waiting"]:
        raise typer.Exit(1)


def _ask(
    place: tuple[str, str, str, str, Path | None],
    verb: Callable[[Admin], Coroutine[Any, Any, Any]],
) -> Any:
    """Run one verb of Admin; errors end the command with one line."""
    import anyio

    from flexkv.cluster.admin import Admin
    from flexkv.cluster.settings import ClusterSettings

    url, name, prefix, username, password_file = place

    async def run() -> Any:
        settings = ClusterSettings(
            url=url,
            name=name,
            prefix=prefix,
            username=username,
            password_file=str(password_file or ""),
        )
        async with Admin(settings) as admin:
            return await verb(admin)

    try:
        return anyio.run(run)
    except FlexKVError as error:
        Console(stderr=True).print(f"[red]flexkv cluster:[/red] {escape(str(error))}")
        raise typer.Exit(1) from error
