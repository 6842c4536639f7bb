"""Books that must balance in every run: check_times, check_bytes, check_residency, check_signs.

Each raises ConservationError with both sides of the sum. A simulator calls all of them before it
returns a result; `check_run` is all four at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from flexkv.errors import ConservationError

RELATIVE = 1e-6  # of floating-point sums over millions of terms


def _close(one: float, other: float, scale: float) -> bool:
    return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=RELATIVE * scale + 1e-12)


def check_times(exposed_s: float, hidden_s: float, busy_s: float, what: str = "transfers") -> None:
    """Hold exposed + hidden against busy, each measured on its own, in seconds."""
    if not _close(exposed_s + hidden_s, busy_s, busy_s):
        raise ConservationError(
            f"{what}: exposed {exposed_s} s + hidden {hidden_s} s = {exposed_s + hidden_s} s, but"
            f" busy for {busy_s} s"
        )


def check_bytes(by_tier: Mapping[str, float], moved_bytes: float) -> None:
    """Hold the sum over tiers against what was moved."""
    total = math.fsum(by_tier.values())
    if not _close(total, moved_bytes, abs(moved_bytes)):
        raise ConservationError(
            f"the tiers sum to {total} bytes {dict(by_tier)}, but {moved_bytes} were moved"
        )


def check_residency(resident: Mapping[str, float], capacity: Mapping[str, float]) -> None:
    """Hold what every tier holds against its capacity, in the same unit."""
    for tier, held in resident.items():
        if tier not in capacity or held > capacity[tier] * (1 + RELATIVE):
            raise ConservationError(
                f"tier {tier!r} holds {held}, its capacity is {capacity.get(tier)}"
            )


def check_signs(values: Mapping[str, float]) -> None:
    """Refuse a negative or undefined count, size or time."""
    for name, value in values.items():
        if not value >= 0:
            raise ConservationError(
                f"{name} is {value}: counts, bytes and times are never negative"
            )


def check_run(
    *,
    exposed_s: float,
    hidden_s: float,
    busy_s: float,
    by_tier: Mapping[str, float],
    moved_bytes: float,
    resident: Mapping[str, float],
    capacity: Mapping[str, float],
    counts: Mapping[str, float],
) -> None:
    """Hold a whole run against all four laws."""
    times = {"exposed_s": exposed_s, "hidden_s": hidden_s, "busy_s": busy_s}
    check_signs({**times, **by_tier, **resident, **counts})
    check_times(exposed_s, hidden_s, busy_s)
    check_bytes(by_tier, moved_bytes)
    check_residency(resident, capacity)
