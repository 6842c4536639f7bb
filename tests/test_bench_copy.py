"""The copy benchmark runs at a small size, checks what it copies and reports what it promises."""

from __future__ import annotations

import math

import pytest

from flexkv.bench.copy import run
from flexkv.errors import ConfigError

SIZES = {"segments_bytes": (32 << 10, 2 << 20), "threads": (1, 2), "memory_bytes": 64 << 20}


def test_every_competitor_is_measured_in_both_directions() -> None:
    steps: list[tuple[str, int, int]] = []
    results = run(lambda *step: steps.append(step), repeats=2, **SIZES)  # type: ignore[arg-type]
    assert [result.name for result in results] == ["gather", "scatter"] * 4
    for result in results:
        assert (result.unit, result.samples) == ("GB/s", 2)
        for figure in (result.value, result.limit, result.peer, result.ratio):
            assert figure is not None
            assert 0 < figure < math.inf
        for name in ("memcpy", "plain", "pagewise"):
            assert result.params[f"{name}_gb_per_s"] > 0
            assert result.params[f"ratio_to_{name}"] > 0
        assert result.limit == max(
            result.params[f"{name}_gb_per_s"] for name in ("plain", "pagewise")
        )
    sizes = [(result.params["segment_bytes"], result.params["threads"]) for result in results[::2]]
    assert sizes == [(32 << 10, 1), (32 << 10, 2), (2 << 20, 1), (2 << 20, 2)]
    assert steps[-1][1:] == (8, 8)


@pytest.mark.parametrize(
    "options",
    [{"segments_bytes": (5000,)}, {"segments_bytes": (4 << 20,)}, {"memory_bytes": 1 << 20}],
)
def test_sizes_that_do_not_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        run(lambda *_: None, **options)  # type: ignore[arg-type]
