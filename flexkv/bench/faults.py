"""What a node feels of faults around it: `run`.

Real nodes (processes), at the sites of fault_sites.py. Node b loads a prompt of its own and
prompts that lie elsewhere at the same time; for each fault its local hits in a healthy phase just
before are compared with those while the fault lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexkv.bench.fault_sites import SITES, Site, open_site
from flexkv.bench.report import Progress, Result, median, percentile
from flexkv.errors import ConfigError

FAULTS = tuple(name for site in SITES for name in site.faults)
_IDLE_S = 15.0


def run(
    progress: Progress,
    *,
    faults: Sequence[str] = FAULTS,
    phase_s: float = 5.0,
    pause_s: float = 60.0,
) -> list[Result]:
    """Measure the p99 of local hits in milliseconds during each fault; the ratio is to the healthy
    phase just before.

    `params` say the p50 and its ratio, how many gets of blocks that lie elsewhere (at the other
    node, in the store) were served and missed, the longest of them, wrong blocks, hangs, local
    misses, pins left behind, and the seconds until such blocks came again. `owner_stopped` lasts
    `pause_s`, all others `phase_s`.

    Raises:
        ConfigError: there is no such fault, or a program that it needs is not installed.
        StorageError: a node of the benchmark has ended.
    """
    if unknown := [name for name in faults if name not in FAULTS]:
        raise ConfigError(f"faults must be some of {', '.join(FAULTS)}, got {unknown[0]!r}")
    results: list[Result] = []
    for kind in SITES:
        wanted = [name for name in faults if name in kind.faults]
        if not wanted:
            continue
        with open_site(kind) as site:
            for name in wanted:
                progress(name.replace("_", " "), len(results), len(faults))
                results.append(_suffer(site, name, phase_s, pause_s))
    return results


def _suffer(site: Site, name: str, phase_s: float, pause_s: float) -> Result:
    """Compare a healthy phase with one in which something is wrong, and heal it."""
    healthy = site.b.ask("phase", phase_s)
    seconds = pause_s if name == "owner_stopped" else phase_s
    break_it, heal = site.ways(name)
    site.b.tell("phase", seconds)
    break_it()
    faulty = site.b.hear(seconds + 120)
    heal()
    after = site.recover()
    pins = sum(node.ask("idle", _IDLE_S) for node in site.nodes)
    return _result(name, seconds, (healthy, faulty, after), pins)


def _result(name: str, seconds: float, phases: Sequence[dict[str, Any]], pins: int) -> Result:
    healthy, faulty, after = phases
    before, during = healthy["local_ms"], faulty["local_ms"]
    recovery_s = after["recovery_s"]
    params = {
        "fault": name,
        "seconds": seconds,
        "p50_ms": round(median(during), 3),
        "p50_ratio": round(median(during) / median(before), 3),
        "local_missed": healthy["local_missed"] + faulty["local_missed"],
        "served": faulty["served"],
        "missed": faulty["missed"],
        "longest_remote_ms": round(max(faulty["remote_ms"], default=0.0), 1),
        "healthy_served": healthy["served"],
        "healthy_missed": healthy["missed"],
        "wrong_blocks": sum(phase["wrong"] for phase in phases),
        "hangs": sum(phase["hangs"] for phase in phases),
        "pins_left": pins,
        "recovery_s": None if recovery_s is None else round(recovery_s, 2),
    }
    p99, limit = percentile(during, 99), percentile(before, 99)
    return Result(
        "local_p99", p99, "ms", limit, ratio=p99 / limit, samples=len(during), params=params
    )
