"""The benchmark of the cuda backend runs on the fake: all figures but those that need torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_cuda import fake

from flexkv.bench.cuda import run
from flexkv.errors import ConfigError

PATH = str(fake().path)


def test_loop_time_and_speeds_are_measured_and_everything_is_released() -> None:
    before = fake().living()
    steps: list[tuple[str, int, int]] = []
    results = run(
        lambda *step: steps.append(step),
        blocks=64,
        segments_bytes=(4096, 65536),
        memory_bytes=8 << 20,
        repeats=2,
        cudart=PATH,
        libcuda=PATH,
    )
    names = [result.name for result in results]
    assert names == ["loop_time"] * 3 + ["to_device", "to_host"] * 2
    for result in results:
        assert 0 < result.value < math.inf
        assert result.samples == (16 if result.name == "loop_time" else 2)
    assert [result.params["segment_bytes"] for result in results[3:]] == [4096, 4096, 65536, 65536]
    assert fake().living() == before
    assert fake().violations() == []
    assert steps[-1] == ("done", 4, 4)


@pytest.mark.parametrize("options", [{"memory_bytes": 1 << 20}, {"blocks": 0}])
def test_sizes_that_do_not_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="memory_bytes must be at least"):
        run(lambda *_: None, **options)


def test_a_machine_without_cuda_is_told_so() -> None:
    with pytest.raises(ConfigError, match="no CUDA runtime"):
        run(lambda *_: None, cudart="/none/libcudart.so")
