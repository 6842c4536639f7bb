"""One process, stock vLLM: the same greedy tokens whichever way the KV came back.

Each engine start costs 15 to 30 seconds, so a test drives one engine through many things.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, BUILT_IN, MODULE, Engine, check_idle, connector, prompt, spoil

pytestmark = [pytest.mark.timeout(600), pytest.mark.offline]
LONG, ANSWER = 1500, 24
WHOLE = LONG // BLOCK * BLOCK


def reuse(engine: Any, tokens: list[int]) -> list[int]:
    """Cold, local hit, reload: all the same. Returns the answer."""
    cold = engine.generate(prompts=[tokens], tokens=ANSWER)
    assert cold["cached"] == [0]
    hit = engine.generate(prompts=[tokens], tokens=ANSWER)
    assert hit["cached"] == [WHOLE]
    assert engine.reset_local()
    again = engine.generate(prompts=[tokens], tokens=ANSWER)
    assert again["cached"] == [WHOLE]
    assert cold["tokens"] == hit["tokens"] == again["tokens"]
    answer: list[int] = cold["tokens"][0]
    return answer


def reload_after_a_crash(
    model: Path, tokens: list[int], settings: dict[str, Any], blocks: int
) -> list[list[int]]:
    """Compute a prompt, kill the engine when `blocks` are on disk, and let another one reload it:
    the same answer, which is returned.
    """
    with Engine(model, connector(**settings)) as engine:
        cold = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert engine.settle()
        assert engine.usage()["disk"]["resident"] >= blocks
        engine.kill()
    with Engine(model, connector(**settings)) as engine:
        again = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert again["cached"] == [WHOLE]
        assert again["tokens"] == cold["tokens"]
        check_idle(engine)
    answers: list[list[int]] = cold["tokens"]
    return answers


def on_disk(path: Path, model: str) -> dict[str, Any]:
    """Settings of a connector with a disk tier."""
    return {"disk_cache_bytes": "64MiB", "disk_dirs": [str(path)], "model": model}


@pytest.mark.parametrize(
    ("how", "load"),
    [(MODULE, "async"), (MODULE, "sync"), (BUILT_IN, "async")],
    ids=["module-async", "module-sync", "built-in"],
)
def test_a_prompt_comes_back_from_host_memory_with_the_same_answer(
    tiny: Path, how: dict[str, str], load: str
) -> None:
    with Engine(tiny, connector(how, load=load)) as engine:
        answer = reuse(engine, prompt(LONG))
        metrics = engine.metrics()
        assert metrics["vllm:external_prefix_cache_hits"] == WHOLE

        # a longer conversation: what was generated has been stored too
        assert engine.reset_local()
        longer = prompt(LONG) + answer + prompt(50, 1)
        more = engine.generate(prompts=[longer], tokens=ANSWER)
        assert more["cached"][0] >= WHOLE
        assert engine.settle()
        assert engine.reset_all() or how is BUILT_IN  # the built-in class does not forward it
        if how is not BUILT_IN:
            cold = engine.generate(prompts=[longer], tokens=ANSWER)
            assert cold["cached"] == [0]
            assert cold["tokens"] == more["tokens"]

        # a whole number of blocks: the last token is computed again
        exact = prompt(WHOLE, 2)
        first = engine.generate(prompts=[exact], tokens=ANSWER)
        assert engine.reset_local()
        assert engine.generate(prompts=[exact], tokens=ANSWER)["tokens"] == first["tokens"]
        check_idle(engine)


def test_salts_keep_tenants_apart_and_spoilt_host_bytes_would_be_noticed(tiny: Path) -> None:
    tokens = prompt(LONG, 3)
    with Engine(tiny, connector()) as engine:
        ask = {"prompts": [tokens], "tokens": ANSWER}
        first = engine.generate(**ask, salts=["a"])
        assert engine.reset_local()
        assert engine.generate(**ask, salts=["b"])["cached"] == [0]
        assert engine.reset_local()
        assert engine.generate(**ask, salts=[None])["cached"] == [0]
        assert engine.reset_local()
        again = engine.generate(**ask, salts=["a"])
        assert again["cached"] == [WHOLE]
        assert again["tokens"] == first["tokens"]
        # what attention reads is what was loaded: other bytes give another answer
        check_idle(engine)
        engine.overwrite_host()
        assert engine.generate(**ask, salts=["a"])["tokens"] != first["tokens"]
        check_idle(engine)


def test_after_a_crash_the_prompt_comes_back_from_disk_and_damage_is_recomputed(
    tiny: Path, tmp_path: Path
) -> None:
    tokens, settings = prompt(LONG, 4), on_disk(tmp_path / "ssd", "tiny")
    answers = reload_after_a_crash(tiny, tokens, settings, WHOLE // BLOCK)
    spoil(tmp_path / "ssd")
    with Engine(tiny, connector(**settings)) as engine:
        again = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert again["tokens"] == answers
        counters = engine.counters()
        assert sum(counters["damaged_blocks"].values()) == 1
        check_idle(engine)
