"""`flexkv calibrate`: measure this machine's backends; write a profile that the simulator reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from flexkv.cli.trace_files import Json, print_json, progress_bar, showing

if TYPE_CHECKING:
    from flexkv.sim.serving.measured import Calibration

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

Out = Annotated[Path, typer.Option(help="File to write.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="Directory whose file system is measured.")]
Device = Annotated[str, typer.Option(help="Device plug-in: cpu, simulated, ...")]
DeviceOptions = Annotated[str, typer.Option(help="Its options, as YAML or JSON.")]
BlockKib = Annotated[str, typer.Option(help="Block sizes in KiB, comma between.")]
Repeats = Annotated[int, typer.Option(min=1, help="Samples of each figure; the median counts.")]
Model = Annotated[
    Path | None, typer.Option(help="Directory of a causal LM whose prefill rate is measured.")
]


@app.command()
def calibrate(
    out: Out = Path("flexkv-profile.json"),
    directory: Dir = None,
    device: Device = "cpu",
    device_options: DeviceOptions = "{}",
    block_kib: BlockKib = "4,16,64,256,1024",
    repeats: Repeats = 11,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Measure device copies, disk I/O, codecs, and what planning adds; a minute or less.

    Do it on an idle machine: the simulator's times are as good as these.

    Example: [bold]flexkv calibrate --dir /mnt/nvme --out profile.json[/bold]
    """
    from flexkv.bench import calibrate as bench

    with showing():
        sizes = [_kib(word) << 10 for word in block_kib.split(",")]
        options = yaml.safe_load(device_options) or {}
        with progress_bar("calibrating") as report:
            found = bench.run(
                lambda _, done, of: report(done, of),
                directory=directory,
                device=device,
                device_options=options,
                block_bytes=sizes,
                repeats=repeats,
                model=model,
            )
        found.write(out)
    if as_json:
        print_json(json.loads(out.read_text()))
        return
    console = Console()
    console.print(_table(found))
    for kind, part in found.software.items():
        console.print(
            f"software, {kind}: {part.base_s * 1e6:.0f} us and {part.block_s * 1e6:.2f} us a block"
        )
    console.print(f"written: {out}")


def _kib(word: str) -> int:
    if not word.strip().isdigit():
        raise typer.BadParameter(f"{word!r} is no number of KiB", param_hint="--block-kib")
    return int(word)


def _table(found: Calibration) -> Table:
    table = Table(title="milliseconds of one batch, alone", title_justify="left")
    table.add_column("path", no_wrap=True)
    table.add_column("block KiB", justify="right")
    counts = sorted({sample.blocks for samples in found.batches.values() for sample in samples})
    for count in counts:
        table.add_column(f"{count} blocks", justify="right")
    table.add_column("GB/s, many", justify="right")
    for edge, samples in found.batches.items():
        for size in sorted({sample.block_bytes for sample in samples}):
            times = {s.blocks: f"{s.seconds * 1e3:.3f}" for s in samples if s.block_bytes == size}
            rate = f"{found.bytes_per_s[edge] / 1e9:.2f}"
            cells = [times.get(count, "-") for count in counts]
            table.add_row("->".join(edge), str(size >> 10), *cells, rate)
    return table
