"""`flexkv trace replay`: the sizes of its tiers from what the user typed, and its table."""

from __future__ import annotations

from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from flexkv.compat import parse_size
from flexkv.errors import FlexKVError


def blocks_of(text: str, distinct: int, stride_bytes: int, option: str) -> int:
    """Return how many blocks "10%" (of the distinct ones) or "2GiB" are."""
    try:
        if text.endswith("%"):
            return int(distinct * float(text[:-1]) / 100) if float(text[:-1]) >= 0 else -1
        size = parse_size(text)
        return int(size) // stride_bytes
    except (FlexKVError, ValueError, TypeError) as error:
        raise typer.BadParameter(
            f"expected a share such as 10% or a size such as 2GiB, got {text!r}", param_hint=option
        ) from error


def result_table(found: dict[str, Any]) -> Table:
    """One row per figure."""
    made = Table(title=f"flexkv trace replay: {escape(found['trace'])}", title_justify="left")
    made.add_column("")
    made.add_column("", justify="right", overflow="fold")
    rows = {
        "policy": found["policy"],
        "requests": f"{found['requests']:,}",
        "capacity, blocks": _pairs(found["capacity_blocks"]),
        "block accesses": f"{found['accesses']:,}",
        "hits": f"{found['hits']:,} ({found['hit_percent']:.3f} %)",
        "hits by tier": _pairs(found["hits_by_tier"]),
        "evicted blocks": _pairs(found["evicted_by_tier"]),
        "bytes moved": _pairs(found["bytes_by_route"]),
        "puts without room": f"{found['refused_puts']:,}",
        "elapsed s": f"{found['elapsed_s']:,.2f}",
        "requests/s": f"{found['requests_per_s']:,.0f}",
        "blocks/s": f"{found['blocks_per_s']:,.0f}",
        "get ms p50 / p90 / p99": _three(found["get_ms"]),
        "put ms p50 / p90 / p99": _three(found["put_ms"]),
        "late ms p50 / p90 / p99": _three(found["late_ms"]),
    }
    for name, text in rows.items():
        made.add_row(name, text)
    return made


def _pairs(values: dict[str, int]) -> str:
    return "\n".join(f"{name} {value:,}" for name, value in values.items()) or "-"


def _three(values: dict[str, float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values.values()) or "-"
