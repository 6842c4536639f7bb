"""Charts of simulation results as small PNGs: draw(document, folder) -> paths.

A document is what `flexkv sim ... --json` prints. Its rows say which charts they can fill: decode
runs (bytes by context length, exposed and hidden time, staging over steps, placement policies),
policy comparisons (bars, miss-ratio curves with the bound), capacity sweeps (cost against TTFT).
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flexkv.errors import ConfigError, InputError

Row = Mapping[str, Any]
COLOURS = ("#2b7a78", "#d08c2e", "#3c6eb4", "#7a4a8a", "#c0504d", "#6b8e23", "#5b6770", "#b07aa1")
BOUND, QUIET, GRID = "#1b1f23", "#9aa5b1", "#dfe5ea"
_DPI = 90
_WINDOW = 16  # steps of the running mean


def _figure(width: float, height: float, panels: int = 1, *, share_y: bool = False) -> Any:
    """Return a figure and its axes, drawn without a display."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(
            figsize=(width, height + 0.3), dpi=_DPI, layout="constrained"
        )
    except ImportError:
        raise ConfigError(
            "charts need matplotlib, which is not installed: pip install 'flexkv[plots]'"
        ) from None
    axes = figure.subplots(1, panels, squeeze=False, sharey=share_y)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
    return figure, list(axes)


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)


def _outside(figure: Any, axis: Any) -> None:
    """Put the legend of one axis below the panels, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    columns = 3 if max(map(len, labels)) < 24 else 1
    place = "outside lower center"
    figure.legend(handles, labels, loc=place, ncols=columns, fontsize=8, frameon=False)


def _colours(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        if name not in found:
            found[name] = COLOURS[len(found) % len(COLOURS)]
    return found


def _logarithmic(axis: Any, values: Iterable[float], show: Callable[[float], str]) -> None:
    """Give an axis the given values as its only ticks, on a logarithmic scale."""
    ticks = sorted(set(values))
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [show(tick) for tick in ticks])
    axis.minorticks_off()


def _run(row: Row) -> str:
    return f"{row['mode']}, {row['pipeline']}"


# -- decode runs


def bytes_by_context(rows: Sequence[Row]) -> Any:
    """Bytes that a step reads from HBM and from the tiers below, against the context length."""
    lines: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: float(row["context_tokens"])):
        lines[row["mode"]].append(row)
    colours = _colours(lines)
    panels = {"from HBM": ("hbm",), "from CXL and DRAM": ("cxl", "dram")}
    if not any(row["kv_read_bytes"][tier] for row in rows for tier in ("cxl", "dram")):
        del panels["from CXL and DRAM"]
    figure, axes = _figure(7.4 if len(panels) > 1 else 5.4, 3.0, len(panels))
    for axis, (title, tiers) in zip(axes, panels.items(), strict=True):
        for mode, found in lines.items():
            x = [row["context_tokens"] for row in found]
            y = [sum(row["kv_read_bytes"][t] for t in tiers) / row["steps"] / 1e6 for row in found]
            axis.plot(x, y, "o-", color=colours[mode], label=mode, markersize=4)
        _label(axis, f"KV {title}, by a step", "context, tokens", "MB")
        _logarithmic(axis, (row["context_tokens"] for row in rows), lambda n: f"{n / 1024:.0f}k")
        axis.yaxis.set_major_formatter("{x:,.6g}")
        axis.set_ylim(bottom=0)
    _outside(figure, axes[0])
    return figure


def exposed_and_hidden(rows: Sequence[Row]) -> Any:
    """Time that steps wait for transfers, and transfer time under compute, for each run."""
    pipelines = list(dict.fromkeys(row["pipeline"] for row in rows))
    most = max(sum(row["pipeline"] == one for row in rows) for one in pipelines)
    figure, axes = _figure(7.4, 1.3 + 0.45 * most, len(pipelines))
    for axis, pipeline in zip(axes, pipelines, strict=True):
        found = [row for row in rows if row["pipeline"] == pipeline]
        names = [row["mode"] for row in found]
        exposed = [1e3 * row["exposed_s"] for row in found]
        hidden = [1e3 * row["hidden_s"] for row in found]
        places = range(len(found))
        axis.barh(places, exposed, 0.6, color=COLOURS[4], label="exposed")
        axis.barh(places, hidden, 0.6, left=exposed, color=QUIET, label="hidden")
        widest = max(a + b for a, b in zip(exposed, hidden, strict=True))
        for place, (a, b) in enumerate(zip(exposed, hidden, strict=True)):
            axis.text(a + b + 0.02 * widest, place, f"{a:,.2f}", va="center", fontsize=8)
        axis.set_yticks(list(places), names)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.25 * widest)
        axis.grid(visible=False, axis="y")
        _label(axis, pipeline, "ms (number: exposed)", "")
    _outside(figure, axes[-1])
    return figure


def staging_over_steps(rows: Sequence[Row]) -> Any:
    """Share of a step's reads that the staging buffers answer, step by step."""
    figure, (axis,) = _figure(6.4, 3.2)
    for row, colour in zip(rows, COLOURS, strict=False):
        records = row["records"]
        hits, accesses = records["staging_hits"], records["accesses"]
        x, y = [], []
        for start in range(0, len(hits), _WINDOW):
            asked = sum(accesses[start : start + _WINDOW])
            x.append(start + _WINDOW / 2)
            y.append(100 * sum(hits[start : start + _WINDOW]) / asked if asked else 0.0)
        axis.plot(x, y, color=colour, label=f"{_run(row)} ({row['predictor']})", linewidth=1.5)
    axis.set_ylim(0, 105)
    _label(axis, "reads answered by the staging buffers", f"step (means of {_WINDOW})", "%")
    _outside(figure, axis)
    return figure


def _bars(axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw bars side by side: one group each on the x axis, one colour per series."""
    width = 0.8 / len(series)
    for number, (name, colour) in enumerate(_colours(series).items()):
        places = [i - 0.4 + width * (number + 0.5) for i in range(len(groups))]
        axis.bar(places, series[name], width * 0.92, color=colour, label=name)
    axis.set_xticks(range(len(groups)), groups)


def placement_policies(rows: Sequence[Row]) -> Any:
    """Exposed time under each placement policy, by what else was varied."""
    orchestrated = [row for row in rows if row["mode"] == "orchestrated"]
    others = [name for name in orchestrated[0]["varied"] if name != "policy"]
    groups = list(dict.fromkeys(_case(row, others) for row in orchestrated))
    names = list(dict.fromkeys(row["policy"] for row in orchestrated))
    found = {(row["policy"], _case(row, others)): 1e3 * row["exposed_s"] for row in orchestrated}
    figure, (axis,) = _figure(6.4, 3.2)
    _bars(axis, groups, {name: [found[name, group] for group in groups] for name in names})
    _label(axis, "exposed time by placement policy, equal windows", "", "ms")
    _outside(figure, axis)
    return figure


def _case(row: Row, names: Sequence[str]) -> str:
    parts = []
    for name in names:
        value = row["varied"][name]
        if isinstance(value, Mapping):
            for tier, number in value.items():
                shown = f"{number / 1e6:,.0f} MB" if name == "capacity_bytes" else f"{number:g}"
                parts.append(f"{tier} {shown}")
        else:
            parts.append(str(value))
    return ", ".join(parts) or "all"


# -- policy comparisons


def _traces(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_trace: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_trace[row["trace"]].append(row)
    return by_trace


def miss_ratio_curves(rows: Sequence[Row]) -> Any:
    """Share of blocks missed against capacity, for each policy; the bound is black."""
    by_trace = _traces(rows)
    figure, axes = _figure(0.8 + 3.6 * len(by_trace), 3.4, len(by_trace))
    colours = _colours(row["policy"] for row in rows if row["policy"] != "opt")
    for axis, (trace, found) in zip(axes, by_trace.items(), strict=True):
        for policy in dict.fromkeys(row["policy"] for row in found):
            line = sorted(
                (row["capacity_percent"], 100 - row["block_hit_percent"])
                for row in found
                if row["policy"] == policy
            )
            bound = policy == "opt"
            axis.plot(
                [x for x, _ in line], [y for _, y in line], "--" if bound else "o-",
                color=BOUND if bound else colours[policy], markersize=3, linewidth=1.4,
                label="opt (bound)" if bound else policy,
            )  # fmt: skip
        _label(axis, trace, "capacity, % of distinct blocks", "blocks missed, %")
        _logarithmic(axis, (row["capacity_percent"] for row in found), lambda n: f"{n:g}")
    _outside(figure, axes[-1])
    return figure


def policy_bars(rows: Sequence[Row]) -> Any:
    """Block hit rates of the policies side by side, at each capacity."""
    by_trace = _traces(rows)
    figure, axes = _figure(0.8 + 3.9 * len(by_trace), 3.2, len(by_trace))
    for axis, (trace, found) in zip(axes, by_trace.items(), strict=True):
        capacities = sorted({row["capacity_percent"] for row in found})
        policies = list(dict.fromkeys(row["policy"] for row in found))
        hit = {(r["policy"], r["capacity_percent"]): r["block_hit_percent"] for r in found}
        series = {p: [hit.get((p, c), 0.0) for c in capacities] for p in policies}
        _bars(axis, [f"{capacity:g} %" for capacity in capacities], series)
        _label(axis, trace, "capacity, % of distinct blocks", "blocks hit, %")
    _outside(figure, axes[0])
    return figure


# -- capacity sweeps


def cost_against_ttft(rows: Sequence[Row]) -> Any:
    """Cost of a million tokens against TTFT; the line joins what nothing beats in both."""
    figure, (axis,) = _figure(6.4, 3.6)
    points = sorted(
        (row["usd_per_mtoken"], row["ttft_ms"]["p95"] / 1e3, row) for row in _priced(rows)
    )
    front: list[tuple[float, float, Row]] = []
    for point in points:
        if not front or point[1] < front[-1][1]:
            front.append(point)
    axis.plot([p[0] for p in points], [p[1] for p in points], "o", color=QUIET, markersize=4)
    axis.plot([p[0] for p in front], [p[1] for p in front], "o-", color=COLOURS[0], markersize=5)
    for usd, seconds, row in front:
        sizes = f"{row['host_bytes'] / 1e9:,.0f} + {row['disk_bytes'] / 1e9:,.0f} GB"
        axis.annotate(sizes, (usd, seconds), textcoords="offset points", xytext=(5, 5), fontsize=7)
    axis.margins(x=0.15, y=0.12)
    _label(axis, "cost against TTFT (host + disk)", "$ per million tokens", "TTFT p95, s")
    return figure


def _priced(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in an order that decides between equal points."""
    return sorted(rows, key=lambda row: (row["host_bytes"], row["disk_bytes"]))


def _charts(rows: Sequence[Row]) -> dict[str, Callable[[], Any]]:
    """Return the charts that these rows can fill, by the name of their file."""
    charts: dict[str, Callable[[], Any]] = {}
    first = rows[0]
    if "kv_read_bytes" in first:
        varied = set(first.get("varied", ()))
        staged = [row for row in rows if row["staging_hits"] and row.get("records")]
        if "contexts" in varied:
            charts["bytes_by_context"] = lambda: bytes_by_context(rows)
        if "policy" in varied:
            charts["placement_policies"] = lambda: placement_policies(rows)
        if not varied:
            charts["exposed_hidden"] = lambda: exposed_and_hidden(rows)
            if staged:
                charts["staging_over_steps"] = lambda: staging_over_steps(staged)
    elif "block_hit_percent" in first:
        charts["policies"] = lambda: policy_bars(rows)
        if len({row["capacity_percent"] for row in rows}) > 1:
            charts["miss_ratio"] = lambda: miss_ratio_curves(rows)
    elif "usd_per_mtoken" in first:
        charts["cost_ttft"] = lambda: cost_against_ttft(rows)
    return charts


def draw(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw what a result can show as PNGs into `folder`, which is made if it is missing.

    Raises:
        InputError: the document holds nothing to draw.
        ConfigError: matplotlib is not installed.
    """
    rows = document.get("results") if isinstance(document, Mapping) else None
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], Mapping):
        raise InputError(
            "there is nothing to draw: give what a `flexkv sim` command prints as JSON"
        )
    charts = _charts(rows)
    if not charts:
        raise InputError(
            f"no chart is known for rows with the fields {sorted(rows[0])[:8]}; known are decode"
            " runs, policy-compare, and sweep-capacity"
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in charts.items():
        path = folder / f"{name}.png"
        make().savefig(path, metadata={"Software": None})
        paths.append(path)
    return paths
