"""Hybrid models: full attention and sliding windows, each with blocks of its own.

The model has five layers in three groups, one of which lacks a layer; its window of 100 tokens
spans parts of four or five blocks of 32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import made
from engines import BLOCK, Engine, connector, prompt
from test_offline import ANSWER, LONG, WHOLE, check_idle, on_disk, reload_after_a_crash, reuse
from test_server import reuse as through_server
from test_server import serve

pytestmark = [pytest.mark.timeout(600)]


def test_a_prompt_of_a_hybrid_model_comes_back_and_so_does_what_prompts_share(
    hybrid: Path,
) -> None:
    with Engine(hybrid, connector()) as engine:
        assert engine.groups() == 3
        answer = reuse(engine, prompt(LONG))
        assert engine.metrics()["vllm:external_prefix_cache_hits"] == WHOLE

        # the next turn of the conversation: the window at the end of the answer was stored
        assert engine.reset_local()
        longer = prompt(LONG) + answer + prompt(50, 1)
        more = engine.generate(prompts=[longer], tokens=ANSWER)
        assert more["cached"][0] >= WHOLE

        # another prompt that parts in the middle: no window was stored there, but it is from now on
        shared = prompt(LONG)[: 20 * BLOCK]
        others = [shared + prompt(200, 2 + number) for number in range(3)]
        ask = [
            engine.reset_local() and engine.generate(prompts=[other], tokens=ANSWER)
            for other in others
        ]
        assert [again["cached"][0] for again in ask] == [0, 20 * BLOCK, 20 * BLOCK]
        check_idle(engine)

        # what comes back is what would be computed
        assert engine.reset_all()
        for prompts, before in [([longer], more), *zip([[o] for o in others], ask, strict=True)]:
            cold = engine.generate(prompts=prompts, tokens=ANSWER)
            assert cold["tokens"] == before["tokens"]
        check_idle(engine)


def test_a_hybrid_prompt_comes_back_from_disk_after_a_crash(hybrid: Path, tmp_path: Path) -> None:
    settings = on_disk(tmp_path / "ssd", "hybrid")
    reload_after_a_crash(hybrid, prompt(LONG, 4), settings, WHOLE // BLOCK + 1)


def test_preemption_aborts_and_failed_loads_change_no_answer_of_a_hybrid_model(
    hybrid: Path,
) -> None:
    shared = [prompt(256, 10 + group) for group in range(4)]
    prompts = [shared[i % 4] + prompt(40, 100 + i) for i in range(20)]
    small = {"max_num_seqs": 8, "max_model_len": 1024}
    with Engine(hybrid, **small) as plain:
        clear = plain.clearest(prompts=prompts, tokens=100)[:16]
        assert len(clear) == 16
        prompts = [prompts[number] for number in clear]
        expected = plain.generate(prompts=prompts, tokens=100)["tokens"]
    with Engine(hybrid, connector(), num_gpu_blocks_override=120, **small) as engine:
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


def test_stages_of_a_pipeline_hold_one_block_together(tmp_path: Path) -> None:
    """Three layers over two stages. Without compiling vLLM's CPU workers cannot pass on what the
    first stage has computed.
    """
    model = made(tmp_path / "three", "3")
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    stages = ["--pipeline-parallel-size", "2", "--no-enforce-eager"]
    compiled = ["--compilation-config", '{"mode": 2, "backend": "eager"}']
    with serve(model, connector(), *stages, *compiled, **cores) as server:
        through_server(server)
        assert len(server.workers()) == 2
