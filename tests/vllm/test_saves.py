"""Saves while a request still runs: what an abort leaves behind, and what preemption must not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import BLOCK, Engine, connector, prompt
from test_offline import check_idle

pytestmark = [pytest.mark.timeout(600)]
EVERY, ANSWER = 512, 24


def test_a_long_prompt_is_a_hit_up_to_the_last_boundary_after_an_abort(tiny: Path) -> None:
    long = prompt(3000, 5)
    with Engine(tiny, connector(save_every_tokens=EVERY, load="sync")) as engine:
        computed = engine.abort_after(prompt=long, steps=4)
        saved = engine.usage()["host"]["resident"] * BLOCK
        assert EVERY < saved <= computed < len(long)
        assert saved % EVERY == 0
        check_idle(engine)
        again = engine.generate(prompts=[long], tokens=ANSWER)
        assert again["cached"] == [saved]
        assert engine.settle()
        assert engine.reset_all()
        cold = engine.generate(prompts=[long], tokens=ANSWER)
        assert cold["cached"] == [0]
        assert cold["tokens"] == again["tokens"]
        check_idle(engine)


def test_what_was_saved_on_the_way_is_not_saved_again_at_the_end(tiny: Path) -> None:
    long = prompt(4 * EVERY + 3, 6)  # the answer does not fill another block
    with Engine(tiny, connector(save_every_tokens=EVERY)) as engine:
        engine.generate(prompts=[long], tokens=ANSWER)
        assert engine.settle()
        puts = [n for labels, n in engine.counters()["transfers"].items() if "put" in labels]
        assert puts == [4]
        assert engine.usage()["host"]["resident"] == 4 * EVERY // BLOCK
        assert engine.reset_local()
        assert engine.generate(prompts=[long], tokens=ANSWER)["cached"] == [4 * EVERY]
        check_idle(engine)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_preemption_while_saves_are_under_way_stores_no_wrong_byte(tiny: Path, load: str) -> None:
    prompts = [prompt(256, 10 + i) + prompt(40, 100 + i) for i in range(16)]
    small = {"max_num_seqs": 8, "max_model_len": 1024}
    with Engine(tiny, **small) as plain:
        clear = plain.clearest(prompts=prompts, tokens=100)[:12]
        assert len(clear) == 12
        prompts = [prompts[number] for number in clear]
        expected = plain.generate(prompts=prompts, tokens=100)["tokens"]
    often = connector(load=load, save_every_tokens=BLOCK)
    with Engine(tiny, often, num_gpu_blocks_override=48, **small) as engine:
        engine.slow_saves(pause_s=0.05)
        for seed in range(3):
            ran = engine.churn(prompts=prompts, tokens=100, aborted=[seed], seed=seed)
            for number, tokens in ran["finished"].items():
                assert tokens == expected[int(number)], f"round {seed}, request {number}"
            check_idle(engine)
        assert engine.lost_blocks() > 0
        assert engine.metrics()["vllm:external_prefix_cache_hits"] > 0


def test_the_built_in_class_refuses_saves_on_the_way() -> None:
    from flexkv.errors import ConfigError
    from flexkv.integration.vllm.vllm_v1_adapter import FlexKVConnectorV1Impl

    transfer = SimpleNamespace(kv_connector_extra_config={"save_every_tokens": EVERY})
    with pytest.raises(ConfigError, match="kv_connector_module_path"):
        FlexKVConnectorV1Impl(SimpleNamespace(kv_transfer_config=transfer), None)
