"""The index benchmark runs at a small size and reports the figures it promises."""

from __future__ import annotations

import math

import pytest

from flexkv.bench.index import BUDGET_US, LIMIT_TO_LRU, run


@pytest.mark.parametrize("policy", ["lru", "slru", "hazard"])
def test_every_figure_is_reported_for_every_shape(policy: str) -> None:
    steps: list[tuple[int, int]] = []
    results = run(
        lambda name, done, total: steps.append((done, total)),
        blocks=20_000,
        policy=policy,
        rounds=5,
    )
    if policy != "lru":
        ratio = results.pop()
        assert (ratio.name, ratio.unit, ratio.limit) == ("steady_to_lru", "x", LIMIT_TO_LRU)
        assert ratio.value == pytest.approx(max(ratio.params["shapes"].values()), abs=1e-3)
    assert [result.name for result in results] == list(BUDGET_US)
    for result in results:
        assert result.unit == "us"
        assert math.isfinite(result.value)
        assert result.value > 0
        assert result.ratio == pytest.approx(result.value / BUDGET_US[result.name])
        assert result.samples >= 2
    shapes = {result.name: list(result.params["shapes"]) for result in results}
    assert shapes["steady_p99"] == ["50% shared", "70% shared", "90% shared"]
    assert shapes["evict_2048"][-2:] == ["deep tree", "random tree"]
    assert [done for done, _ in steps] == list(range(len(steps)))
    assert steps[-1][0] == steps[-1][1]
