"""What is left of a real prefix is measured as it would be used: where it stood, and alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.model]
BLOCK, BLOCKS = 16, 8


@pytest.fixture(scope="module")
def sample() -> Any:
    pytest.importorskip("transformers")
    from flexkv.integration.transformers.fidelity import Sample

    return Sample(prefix_tokens=BLOCK * BLOCKS, continuation_tokens=64, tokens_per_block=BLOCK)


def test_a_thinned_prefix_answers_as_a_mask_over_the_whole_one(sample: Any) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from flexkv.integration.transformers.forward import cache_argument

    blocks = np.array([0, 3, 6, 7])
    stays = torch.zeros(BLOCKS, dtype=torch.long)
    stays[torch.from_numpy(blocks)] = 1
    after = torch.tensor([sample._after])
    mask = torch.cat([stays.repeat_interleave(BLOCK), torch.ones(after.shape[1], dtype=torch.long)])
    first = BLOCK * BLOCKS
    with torch.inference_mode():
        logits = sample._model(
            input_ids=after,
            **{cache_argument(sample._model): sample._cache(sample.values)},
            attention_mask=mask[None],
            position_ids=torch.arange(first, first + after.shape[1])[None],
        ).logits[0]
    found = sample.thinned(blocks)
    loss = float(cross_entropy(logits[:-1], after[0, 1:])) - sample.reference.loss
    same = float((logits.argmax(-1).numpy() == sample.reference.tokens).mean())
    assert found["loss_increase_nats"] == pytest.approx(loss, abs=1e-4)
    assert found["next_token_agreement"] == pytest.approx(same, abs=0.005)
    assert 0 < found["attention_relative_rms"] < 1


def test_all_of_a_prefix_is_exact_and_without_its_beginning_it_is_worse(sample: Any) -> None:
    whole = sample.thinned(np.arange(BLOCKS))
    assert whole == {
        "attention_relative_rms": 0.0,
        "next_token_agreement": 1.0,
        "loss_increase_nats": 0.0,
    }
    sink, none = (sample.thinned(np.array([first, 5, 6, 7])) for first in (0, 4))
    assert sink["loss_increase_nats"] < none["loss_increase_nats"]
    assert none["loss_increase_nats"] > 0


def test_attention_is_a_share_of_one_per_query_head_and_layer_and_the_first_token_has_most(
    sample: Any,
) -> None:
    config = sample._model.config
    mass = sample.attention(last_tokens=8)
    assert mass.shape == (BLOCK * BLOCKS,)
    queries = 8 * config.num_attention_heads * config.num_hidden_layers
    assert mass.sum() == pytest.approx(queries, rel=1e-6)
    assert mass.argmax() == 0
    assert mass[-1] < queries / 8  # only the last of the tokens sees the last one
