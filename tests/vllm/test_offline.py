"""One process, stock vLLM: the same greedy tokens whichever way the KV came back.

Each engine start costs 15 to 30 seconds, so a test drives one engine through many things.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import BLOCK, BUILT_IN, MODULE, Engine, connector, prompt

pytestmark = [pytest.mark.timeout(600)]
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


def check_idle(engine: Any) -> None:
    """Nothing is pinned or under way, and vLLM can empty its cache."""
    assert engine.settle()
    manager = engine.usage()["manager"]
    idle = {name: manager[name] for name in ("plans", "transfers", "pinned", "tickets")}
    assert idle == dict.fromkeys(idle, 0)
    assert engine.reset_local()


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
    tokens = prompt(LONG, 4)
    settings = {
        "disk_cache_bytes": "64MiB",
        "disk_dirs": [str(tmp_path / "ssd")],
        "model": "tiny",
    }
    with Engine(tiny, connector(**settings)) as engine:
        cold = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert engine.settle()
        assert engine.usage()["disk"]["resident"] >= WHOLE // BLOCK
        engine.kill()
    with Engine(tiny, connector(**settings)) as engine:
        again = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert again["cached"] == [WHOLE]
        assert again["tokens"] == cold["tokens"]
        check_idle(engine)
    spoil(tmp_path / "ssd")
    with Engine(tiny, connector(**settings)) as engine:
        again = engine.generate(prompts=[tokens], tokens=ANSWER)
        assert again["tokens"] == cold["tokens"]
        counters = engine.counters()
        assert sum(counters["damaged_blocks"].values()) == 1
        check_idle(engine)


def spoil(directory: Path) -> None:
    """Change one byte in the middle of what is stored there."""
    (path,) = directory.rglob("flexkv.data")
    content = np.fromfile(path, np.uint8)
    used = np.flatnonzero(content)
    with path.open("r+b") as file:
        file.seek(int(used[len(used) // 2]))
        file.write(bytes([content[used[len(used) // 2]] ^ 0xFF]))


@pytest.mark.parametrize("load", ["async", "sync"])
def test_preemption_aborts_and_failed_loads_change_no_answer(tiny: Path, load: str) -> None:
    shared = [prompt(256, 10 + group) for group in range(4)]
    prompts = [shared[i % 4] + prompt(40, 100 + i) for i in range(20)]
    small = {"max_num_seqs": 8, "max_model_len": 1024}
    with Engine(tiny, **small) as plain:
        clear = plain.clearest(prompts=prompts, tokens=100)[:16]
        assert len(clear) == 16
        prompts = [prompts[number] for number in clear]
        expected = plain.generate(prompts=prompts, tokens=100)["tokens"]
    with Engine(tiny, connector(load=load), num_gpu_blocks_override=60, **small) as engine:
        for seed in range(4):
            if seed == 2:
                engine.fail_loads(share=0.3)
            aborted = [(seed * 5 + i * 7) % 16 for i in range(2)]
            ran = engine.churn(prompts=prompts, tokens=100, aborted=aborted, seed=seed)
            for number, tokens in ran["finished"].items():
                assert tokens == expected[int(number)], f"round {seed}, request {number}"
            assert len(ran["finished"]) >= 14
            check_idle(engine)
        metrics = engine.metrics()
        assert metrics["vllm:num_preemptions"] > 0
        assert metrics["vllm:external_prefix_cache_hits"] > 0
