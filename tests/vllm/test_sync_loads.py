"""Synchronous loads: attention of the first layer runs while the others are on their way."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Engine, connector, prompt
from test_offline import ANSWER, LONG, WHOLE, check_idle

pytestmark = [pytest.mark.timeout(600)]


def test_the_first_layer_is_computed_while_later_ones_have_not_landed(tiny: Path) -> None:
    tokens = prompt(LONG, 7)
    # a load that was waited for as a whole would end with load_wait_ms, and be computed
    with Engine(tiny, connector(load="sync", chunk_bytes=65536, load_wait_ms=20_000)) as engine:
        cold = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert engine.reset_local()
        engine.hold_layers()
        again = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert again["cached"] == [WHOLE]
        assert again["tokens"] == cold["tokens"]
        assert engine.held_parts() > 0
        assert not engine.counters().get("failed_blocks")
        check_idle(engine)


def test_a_failed_load_of_a_request_that_is_aborted_spoils_no_other(tiny: Path) -> None:
    shared = prompt(LONG, 8)
    with Engine(tiny, connector(load="sync")) as engine:
        cold = engine.generate(prompts=[shared], tokens=ANSWER)
        assert engine.reset_local()
        engine.fail_loads(share=1.0)
        engine.abort_while_loading(prompt=shared)
        engine.fail_loads(share=0.0)
        again = engine.generate(prompts=[shared], tokens=ANSWER)
        assert again["tokens"] == cold["tokens"]
        check_idle(engine)


def test_who_begins_alike_reads_nothing_of_a_load_that_failed(tiny: Path) -> None:
    """Neither in the same step nor while the prefix is being computed again, chunk by chunk."""
    shared = prompt(LONG, 9)
    first, second = shared + prompt(40, 90), shared + prompt(40, 91)
    with Engine(tiny) as plain:
        expected = plain.generate(prompts=[first, second], tokens=ANSWER)["tokens"]
    with Engine(tiny, connector(load="sync")) as engine:
        engine.generate(prompts=[shared], tokens=1)
        assert engine.reset_local()
        engine.fail_loads(share=1.0)
        got = engine.same_step(first=first, second=second, tokens=ANSWER)
        assert got == {"a": expected[0], "b": expected[1], "c": expected[1]}
        check_idle(engine)
