"""What benchmarks share: a result, the machine it was measured on, and honest comparisons.

`Result` (one figure) - `machine` (where) - `interleave` (run the competitors in turn) - `median`,
`percentile`, `ratio_of_pairs` (figures from noisy samples) - `report` (all of it as plain data).
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Progress = Callable[[str, int, int], None]  # what is running, steps done, steps in all


@dataclass(frozen=True, slots=True)
class Result:
    """One figure: `value` in `unit`, the median of `samples` of them.

    `limit` is what the machine can do at best and `peer` what another implementation did in the
    same run, both in `unit`; `ratio` is `value` to the limit, or to the peer where there is no
    limit. `params` say what was measured.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    peer: float | None = None
    ratio: float | None = None
    samples: int = 0
    params: dict[str, Any] = field(default_factory=dict)


def median(values: Sequence[float]) -> float:
    """Return the median; nan for no values."""
    return float(statistics.median(values)) if values else math.nan


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed; nan for no values."""
    if not values:
        return math.nan
    rank = math.ceil(percent / 100 * len(values)) - 1
    return float(sorted(values)[max(0, rank)])


def interleave(actions: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run the actions in turn, `repeats` times round, so that a noisy minute hits all of them.

    The order turns with each round: nobody always runs in the wake of the same other one.
    Returns what each action returned, by name.
    """
    taken: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for turn in range(repeats):
        shift = turn % len(names) if names else 0
        for name in (*names[shift:], *names[:shift]):
            taken[name].append(actions[name]())
    return taken


def ratio_of_pairs(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of ours/theirs over pairs that were measured side by side."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} samples are no pairs")
    return median([one / other for one, other in zip(ours, theirs, strict=True) if other])


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores, memory, kernel, versions. Imports no torch."""
    from importlib.metadata import version

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "flexkv": version("flexkv"),
    }


def cpu_name() -> str:
    """Return the processor's name, or its architecture where the kernel does not tell."""
    return next(iter(cpu_facts("model name")), "") or platform.machine()


def cpu_facts(name: str) -> list[str]:
    """Return the values of one field of /proc/cpuinfo, one per core; empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for key, _, value in pairs if key.strip() == name]


def report(bench: str, results: Sequence[Result]) -> dict[str, Any]:
    """Return what `flexkv bench X --json` prints; figures that are not numbers become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Mapping):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "bench": bench,
        "machine": machine(),
        "results": [plain(asdict(result)) for result in results],
    }
