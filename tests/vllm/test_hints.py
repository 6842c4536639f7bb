"""Hints that come with a request reach the manager, and keep its prompt while others push by."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import BLOCK, Engine, check_idle, connector, prompt

pytestmark = [pytest.mark.timeout(600)]

LENGTH = 8 * BLOCK + 1


def test_a_hint_keeps_a_prompt_that_others_would_have_pushed_out(tiny: Path) -> None:
    hinted, plain = prompt(LENGTH, 1), prompt(LENGTH, 2)
    others = [prompt(LENGTH, seed) for seed in range(10, 22)]
    room = {"host_cache_bytes": "4MiB", "eviction_policy": "lru"}
    with Engine(tiny, connector(**room)) as engine:
        engine.generate(prompts=[hinted], tokens=1, hint={"priority": 90, "ttl_s": 3600})
        assert engine.settle()
        assert engine.hints() == 1
        engine.generate(prompts=[plain], tokens=1)
        capacity = engine.usage()["host"]["capacity"]
        assert 3 * 8 < capacity < len(others) * 8, f"{capacity} blocks: others must push out"
        for other in others:
            engine.generate(prompts=[other], tokens=1)
        assert engine.reset_local()
        assert engine.generate(prompts=[hinted], tokens=1)["cached"] == [8 * BLOCK]
        assert engine.generate(prompts=[plain], tokens=1)["cached"] == [0]
        engine.generate(prompts=[hinted], tokens=1, hint={"ttl_s": 0})
        assert engine.settle()
        assert engine.hints() == 0
        check_idle(engine)
