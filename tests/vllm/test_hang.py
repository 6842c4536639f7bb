"""A manager whose loop hangs: the engine goes on without it, and with it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine, connector, prompt
from test_offline import ANSWER, LONG, WHOLE, check_idle

pytestmark = [pytest.mark.timeout(600)]
SHORT = {"match_timeout_ms": 200, "engine_wait_ms": 1500}


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("before_load", [False, True], ids=["before-match", "before-load"])
def test_a_manager_that_hangs_costs_time_and_no_answer(
    tiny: Path, load: str, before_load: bool
) -> None:
    known, new = prompt(LONG, 1), prompt(LONG, 2)
    with Engine(tiny, connector(load=load, **SHORT)) as engine:
        cold = engine.generate(prompts=[known], tokens=ANSWER)["tokens"]
        assert engine.reset_local()
        engine.hang_manager(before_load=before_load)
        assert engine.generate(prompts=[known], tokens=ANSWER)["tokens"] == cold
        other = engine.generate(prompts=[new], tokens=ANSWER)["tokens"]
        assert engine.settle()  # what it was to save has been given up
        assert engine.reset_local()
        mixed = engine.generate(prompts=[prompt(LONG, 3)], tokens=ANSWER)["tokens"]
        engine.release_manager()
        assert engine.settle()
        assert engine.reset_local()
        again = engine.generate(prompts=[known], tokens=ANSWER)
        assert again["tokens"] == cold
        assert again["cached"] == [WHOLE]
        for tokens, seed in ((other, 2), (mixed, 3)):
            assert engine.reset_local()
            ask = engine.generate(prompts=[prompt(LONG, seed)], tokens=ANSWER)
            assert ask["tokens"] == tokens
        check_idle(engine)
