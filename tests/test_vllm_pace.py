"""What vLLM's steps tell of prefill, and the connector where prefixes are weighed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_modules
from vllm_rig import Load, options_of, running, side

from flexkv.worth import prefill_tokens


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[Any]:
    with vllm_modules.installed() as module:
        yield module


def step(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """A SchedulerOutput of requests with (tokens, tokens that are there)."""
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (count, _) in (new | cached).items()},
        total_num_scheduled_tokens=sum(count for count, _ in (new | cached).values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=past)
            for name, (_, past) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[past for _, past in cached.values()]
        ),
    )


def paced(steps_ahead: int = 2) -> tuple[Any, list[tuple[int, float, int]]]:
    from flexkv.integration.vllm.pace import Pace

    told: list[tuple[int, float, int]] = []
    return Pace(lambda *values: told.append(values), steps_ahead), told


def test_a_step_takes_from_its_start_to_its_end() -> None:
    pace, told = paced()
    pace.scheduled(step({"a": (100, 0)}, {}), 10.0)
    pace.over(10.5)
    pace.scheduled(step({}, {"a": (1, 100)}), 20.0)
    pace.over(20.25)
    assert told == [(100, 500.0, 0), (0, 250.0, 0)]


def test_a_step_scheduled_ahead_begins_when_the_one_before_is_over() -> None:
    pace, told = paced()
    for at in (1.0, 1.1):
        pace.scheduled(step({"a": (10, 0)}, {}), at)
    pace.over(2.0)
    pace.over(4.0)
    assert [elapsed_ms for _, elapsed_ms, _ in told] == [1000.0, 2000.0]


def test_steps_without_tokens_and_outcomes_that_do_not_come_confuse_nobody() -> None:
    pace, told = paced(1)
    pace.over(0.5)
    pace.scheduled(step({}, {}), 1.0)
    pace.over(2.0)
    pace.scheduled(step({"lost": (7, 0)}, {}), 3.0)
    pace.scheduled(step({"b": (20, 40)}, {}), 5.0)
    pace.over(6.0)
    assert told == [(20, 1000.0, 40)]


def test_prompts_of_one_step_cost_together_what_is_told() -> None:
    pace, told = paced()
    parts = {"a": (100, 3000), "b": (50, 800), "c": (1, 5000)}
    pace.scheduled(step({"a": parts["a"]}, {"b": parts["b"], "c": parts["c"]}), 0.0)
    pace.over(1.0)
    tokens, _, past = told[0]

    def cost(count: int, start: int) -> float:
        return prefill_tokens(float(start + count)) - prefill_tokens(float(start))

    assert tokens == 150
    assert cost(tokens, past) == pytest.approx(cost(100, 3000) + cost(50, 800), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_that_weighs_reads_its_own_bytes_and_leaves_nothing(vllm: Any, seed: int) -> None:
    from flexkv.integration.vllm.connector import FlexKVConnector

    dice = random.Random(4000 + seed)
    options = options_of(dice) | {
        "disk_cache_bytes": 1 << 20,
        "fetch_or_recompute": True,
        "prefill_tokens_per_s": dice.choice((0, 20_000)),
        "fetch_probe_s": 0.1,
    }
    vllm.__version__ = f"0.{options['minor']}.0"
    with running(FlexKVConnector, dice, dice.choice((0.0, 0.2)), **options) as engine:
        load = Load(engine, dice)
        load.run(200)
        engine.settle()
        load.check()
        side(engine).kv.call(int)  # what was posted before is done
        assert side(engine).kv.manager.telemetry.value("prefill_tokens_per_s") > 0
