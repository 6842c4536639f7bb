"""`flexkv sim baseline|orchestrated|compare|sweep`: decode steps and what they wait for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from flexkv.sim.decode.compare import Heard, Question
    from flexkv.sim.decode.result import DecodeResult

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 1e3, "mb": 1e6, "gb": 1e9}

WorkloadName = Annotated[
    str,
    typer.Option("--workload", help="prototype, sparse (its reads at real lengths) or attention."),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--context-length", help="Tokens; several with commas (sweep: one after another)."
    ),
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Take the context lengths of a request trace.")
]
Requests = Annotated[
    int | None, typer.Option("--requests", help="Sequences; of a trace the first.")
]
Steps = Annotated[int | None, typer.Option("--steps", help="Decode steps of each sequence.")]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Sequences that decode together.")]
PipelineName = Annotated[str, typer.Option("--pipeline", help="serial or overlapped.")]
Hardware = Annotated[
    str | None,
    typer.Option("--hardware", help="h100, h200, b200, mi300x, prototype, h100+nvme4, or a file."),
]
CodecName = Annotated[str, typer.Option("--codec", help="none, int8 or int4; sweep: with commas.")]
PredictorName = Annotated[
    str | None,
    typer.Option(
        "--predictor", help="none, next-window, markov, session, steps or oracle (the bound)."
    ),
]
PolicyName = Annotated[str, typer.Option("--policy", help="lru, lfu or hot-warm-cold.")]
Bandwidth = Annotated[
    str | None,
    typer.Option("--bandwidth", help="TIER=FACTOR, such as hbm=0.5; sweep: hbm=0.5,1,2."),
]
Capacity = Annotated[
    str | None,
    typer.Option("--capacity", help="TIER=BYTES, such as hbm=4GiB; sweep: hbm=1GiB,4GiB."),
]
Codecs = Annotated[
    Path | None,
    typer.Option("--codecs", help="Measured codec figures: what flexkv calibrate wrote."),
]
Model = Annotated[str, typer.Option("--model", help="Shape of the model for real attention.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _fail(error: Exception) -> typer.Exit:
    typer.echo(f"flexkv sim: {error}", err=True)
    return typer.Exit(2)


def _numbers(text: str, what: str, convert: Callable[[str], float]) -> list[float]:
    from flexkv.errors import InputError

    try:
        found = [convert(part.strip()) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{what}: {text!r} is not a number or a list of them with commas"
        ) from None
    if min(found) <= 0:
        raise InputError(f"{what}: {text!r} must be > 0")
    return found


def _bytes(text: str) -> float:
    digits = text.rstrip("KMGiBkmgb")
    unit = text[len(digits) :].lower()
    if unit not in _UNITS:
        raise ValueError(text)
    return float(digits) * _UNITS[unit]


def _by_tier(text: str, what: str, convert: Callable[[str], float]) -> list[dict[str, float]]:
    from flexkv.errors import InputError

    tier, equals, values = text.partition("=")
    if not equals:
        raise InputError(f"{what} takes TIER=VALUE, got {text!r}")
    return [{tier: value} for value in _numbers(values, what, convert)]


def _lengths(
    trace: Path | None, lengths: str | None, requests: int | None
) -> tuple[list[int], list[int]]:
    """Return the contexts, and the given lengths one by one for a sweep."""
    from flexkv.errors import InputError

    if trace is None:
        given = [int(n) for n in _numbers(lengths or "8192", "--context-length", float)]
        return (given * (requests or 8) if len(given) == 1 else given), given
    if lengths is not None:
        raise InputError("--trace and --context-length exclude each other")
    from flexkv.traces import read_trace

    found = [r.input_tokens for r in read_trace(trace).requests if r.input_tokens > 0]
    return found[: requests or 64], []


def _question(
    workload: str, lengths: str | None, trace: Path | None, requests: int | None,
    bandwidth: str | None, capacity: str | None, **given: Any,
) -> tuple[Question, dict[str, list[Any]]]:  # fmt: skip
    """Return the question, and the axes on which several values were given."""
    from flexkv.errors import InputError
    from flexkv.sim.decode.compare import Question

    if trace is not None and workload == "prototype":
        raise InputError("the prototype's workload has its own lengths; take --workload sparse")
    contexts, each = _lengths(trace, lengths, requests)
    axes: dict[str, list[Any]] = {}
    if len(each) > 1:
        axes["contexts"] = [(length,) * (requests or 8) for length in each]
    for name in ("codec", "policy", "predictor"):
        values = (given.get(name) or "").split(",")
        if len(values) > 1:
            axes[name], given[name] = values, values[0]
    for name, text, convert in (
        ("bandwidth", bandwidth, float),
        ("capacity_bytes", capacity, _bytes),
    ):
        if text is not None:
            values_of = _by_tier(text, f"--{name.removesuffix('_bytes')}", convert)
            given[name] = values_of[0]
            if len(values_of) > 1:
                axes[name] = values_of
    return Question(workload=workload, contexts=tuple(contexts), **given), axes


@contextmanager
def _progress() -> Iterator[Heard]:
    """Show a bar on stderr, on a terminal only."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("")

        def heard(what: str, step: int, steps: int) -> None:
            bar.update(task, description=what, completed=step, total=steps)

        yield heard


def _answer(ask: Callable[[Heard], list[dict[str, Any]]], as_json: bool, title: str) -> None:
    from flexkv.errors import FlexKVError

    try:
        with _progress() as heard:
            results = ask(heard)
    except (FlexKVError, OSError) as error:
        raise _fail(error) from None
    if as_json:
        typer.echo(json.dumps({"kind": "decode", "title": title, "results": results}))
    else:
        _table(results, title)


def _table(results: list[dict[str, Any]], title: str) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    varied = list(results[0]["varied"])
    table = Table(
        title=title, caption=results[0]["note"], caption_justify="left", box=SIMPLE,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    numbers = ("HBM GB", "far GB", "staged", "exposed ms", "hidden ms", "prec.", "recall")
    for name in ("run", *varied):
        table.add_column("context" if name == "contexts" else name.removesuffix("_bytes"))
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for row in results:
        kv, prefetch = row["kv_read_bytes"], row["prefetch"]
        issued = prefetch["issued_blocks"] > 0
        table.add_row(
            f"{row['mode']}, {row['pipeline']}",
            *(_shown(row["varied"][name]) for name in varied),
            f"{kv['hbm'] / 1e9:,.3f}",
            f"{(kv['cxl'] + kv['dram']) / 1e9:,.3f}",
            f"{100 * row['staging_hit_share']:.1f} %",
            *(f"{1e3 * row[name]:,.3f}" for name in ("exposed_s", "hidden_s")),
            f"{prefetch['precision']:.2f}" if issued else "-",
            f"{prefetch['recall']:.2f}" if issued else "-",
        )
    Console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{tier}={number:g}" for tier, number in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rows(results: list[DecodeResult]) -> list[dict[str, Any]]:
    note = (
        f"{results[0].workload} on {results[0].hardware}, {results[0].steps} steps,"
        f" {results[0].accesses:,} reads of blocks, {results[0].context_tokens:,.0f} tokens of"
        " context; exposed + hidden = busy: checked"
    )
    return [{**result.as_json(steps=True), "varied": {}, "note": note} for result in results]


def baseline(
    workload: WorkloadName = "prototype", context_length: Lengths = None,
    trace: TraceFile = None, requests: Requests = None, steps: Steps = None,
    batch: BatchSize = None, pipeline: PipelineName = "overlapped", hardware: Hardware = None,
    bandwidth: Bandwidth = None, capacity: Capacity = None, model: Model = "llama-3.1-8b",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Decode with raw KV in HBM, on demand: what a step reads and waits for.

    Example: [bold]flexkv sim baseline --workload attention --context-length 32768[/bold]
    """

    def ask(heard: Heard) -> list[dict[str, Any]]:
        from flexkv.sim.decode.compare import run_baseline

        question, _ = _question(
            workload, context_length, trace, requests, bandwidth, capacity, steps=steps,
            batch=batch, pipeline=pipeline, hardware=hardware, model=model,
        )  # fmt: skip
        return _rows([run_baseline(question, heard)])

    _answer(ask, as_json, "baseline")


def orchestrated(
    workload: WorkloadName = "prototype", context_length: Lengths = None,
    trace: TraceFile = None, requests: Requests = None, steps: Steps = None,
    batch: BatchSize = None, pipeline: PipelineName = "overlapped", hardware: Hardware = None,
    codec: CodecName = "int8", codecs: Codecs = None,
    predictor: PredictorName = None,
    policy: PolicyName = "hot-warm-cold", bandwidth: Bandwidth = None, capacity: Capacity = None,
    model: Model = "llama-3.1-8b", as_json: Json = False,
) -> None:  # fmt: skip
    """Decode with placement by age and reuse, a codec, staging buffers and prefetch.

    Example: [bold]flexkv sim orchestrated --predictor session --codec int4[/bold]
    """

    def ask(heard: Heard) -> list[dict[str, Any]]:
        from flexkv.sim.decode.compare import run_orchestrated

        question, _ = _question(
            workload, context_length, trace, requests, bandwidth, capacity, steps=steps,
            batch=batch, pipeline=pipeline, hardware=hardware, codec=codec,
            codecs=codecs, predictor=predictor,
            policy=policy, model=model,
        )  # fmt: skip
        return _rows([run_orchestrated(question, heard)])

    _answer(ask, as_json, "orchestrated")


def compare(
    workload: WorkloadName = "prototype", context_length: Lengths = None,
    trace: TraceFile = None, requests: Requests = None, steps: Steps = None,
    batch: BatchSize = None, hardware: Hardware = None, codec: CodecName = "int8",
    codecs: Codecs = None,
    predictor: PredictorName = None, policy: PolicyName = "hot-warm-cold",
    bandwidth: Bandwidth = None, capacity: Capacity = None, model: Model = "llama-3.1-8b",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Hold baseline and orchestration side by side, serial and overlapped.

    Example: [bold]flexkv sim compare --workload sparse --trace conversation.jsonl.gz[/bold]
    """

    def ask(heard: Heard) -> list[dict[str, Any]]:
        from flexkv.sim.decode.compare import compare as run

        question, _ = _question(
            workload, context_length, trace, requests, bandwidth, capacity, steps=steps,
            batch=batch, hardware=hardware, codec=codec,
            codecs=codecs, predictor=predictor, policy=policy,
            model=model,
        )  # fmt: skip
        return _rows(run(question, heard))

    _answer(ask, as_json, "compare")


def sweep(
    workload: WorkloadName = "prototype", context_length: Lengths = None,
    trace: TraceFile = None, requests: Requests = None, steps: Steps = None,
    batch: BatchSize = None, pipeline: PipelineName = "overlapped", hardware: Hardware = None,
    codec: CodecName = "int8", codecs: Codecs = None,
    predictor: PredictorName = None,
    policy: PolicyName = "hot-warm-cold", bandwidth: Bandwidth = None, capacity: Capacity = None,
    model: Model = "llama-3.1-8b", as_json: Json = False,
) -> None:  # fmt: skip
    """Vary context length, bandwidth, codec, capacity, policy or predictor: every combination.

    Example: [bold]flexkv sim sweep --context-length 2048,8192,32768 --codec int8,int4[/bold]
    """

    def ask(heard: Heard) -> list[dict[str, Any]]:
        from flexkv.sim.decode.compare import sweep as run

        question, axes = _question(
            workload, context_length, trace, requests, bandwidth, capacity, steps=steps,
            batch=batch, pipeline=pipeline, hardware=hardware, codec=codec,
            codecs=codecs, predictor=predictor,
            policy=policy, model=model,
        )  # fmt: skip
        rows = []
        for one, result in run(question, axes, heard):
            varied = {name: getattr(one, name) for name in axes}
            if "contexts" in varied:
                varied["contexts"] = varied["contexts"][0]
            rows.append({**_rows([result])[0], "varied": varied})
        return rows

    _answer(ask, as_json, "sweep")
