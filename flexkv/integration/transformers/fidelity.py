"""What a codec does to a real model: `Sample` (real KV of SmolLM2-135M or another local model over
real text, with what the model says behind it) - `Sample.compare` (the same with other KV),
`Sample.thinned` (the same with a part of it), `Sample.attention` (what the prefix's end looks at).

The text is `measured_text.md`, which nobody edits; the KV of its first part is the restored prefix,
the rest is read behind it token by token as it stands (teacher forcing).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from flexkv.integration.transformers.forward import cache_argument
from flexkv.integration.transformers.weights import load_model
from flexkv.model import KVSpec

_WATCHED = "flexkv_watched_sdpa"

Values = NDArray[np.float32]  # [layers, 2, tokens, heads, head size]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model said behind a prefix: its greedy choice at every token of the continuation,
    and the mean negative log-likelihood of the text, in nats.
    """

    tokens: NDArray[np.int64]
    loss: float


class Sample:
    """Real KV: `values` (as `dtype` has them) of `prefix_tokens` tokens, `spec` of its blocks, and
    the `reference` answers behind it.

    Args:
        prefix_tokens: a multiple of `tokens_per_block`.
        continuation_tokens: read behind it; None for all that is left of the text.
        model: a local transformers directory; None for SmolLM2-135M from its wheel.

    Raises:
        ConfigError: there is no such model here.
    """

    def __init__(
        self,
        *,
        prefix_tokens: int = 2048,
        continuation_tokens: int | None = None,
        tokens_per_block: int = 16,
        dtype: str = "bfloat16",
        model: Path | None = None,
    ) -> None:
        self._model, tokenizer = load_model(model)
        ids = _text(tokenizer)
        if prefix_tokens >= len(ids) or prefix_tokens % tokens_per_block:
            raise ValueError(f"prefix_tokens={prefix_tokens} of {len(ids)}, in whole blocks")
        self._after = ids[prefix_tokens:][:continuation_tokens]
        self.prefix_tokens, self.tokens_per_block, self.dtype = (
            prefix_tokens,
            tokens_per_block,
            dtype,
        )
        cache = DynamicCache(config=self._model.config)
        self._run(ids[:prefix_tokens], cache)
        exact = np.stack(
            [
                torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2).numpy()
                for layer in cache.layers
            ]
        )
        self.values, self._ids = _rounded(exact, dtype), ids[:prefix_tokens]
        layers, _, _, heads, size = exact.shape
        self.spec = KVSpec.uniform(layers, heads, size, dtype, tokens_per_block=tokens_per_block)
        self._queries: list[torch.Tensor] = []
        self.exact = self._answers(exact)  # of fp32 KV: how much the dtype alone changes
        _watch(self._model, self._queries)
        self.reference = self._answers(self.values)
        self._model.set_attn_implementation("sdpa")

    @property
    def continuation_tokens(self) -> int:
        """Tokens read behind the prefix."""
        return len(self._after)

    def blocks(self) -> NDArray[np.uint8]:
        """The prefix as blocks [blocks, spec.block_bytes]."""
        layers, kinds, tokens, heads, size = self.values.shape
        cut = self.values.reshape(layers, kinds, -1, self.tokens_per_block, heads, size)
        rows = np.ascontiguousarray(cut.transpose(2, 0, 1, 3, 4, 5))
        tensor = torch.from_numpy(rows).to(getattr(torch, self.dtype))
        return tensor.view(torch.uint8).numpy().reshape(tokens // self.tokens_per_block, -1)

    def compare(self, blocks: NDArray[np.uint8]) -> dict[str, float]:
        """Compare blocks that went through a codec with what they were: errors of K and V (max,
        mean absolute, cosine), of the attention outputs (relative, root mean square), and the
        share of next tokens that stay the same.
        """
        layers, kinds, _, heads, size = self.values.shape
        tensor = torch.from_numpy(blocks.copy()).view(getattr(torch, self.dtype)).float()
        cut = tensor.numpy().reshape(-1, layers, kinds, self.tokens_per_block, heads, size)
        values = np.ascontiguousarray(cut.transpose(1, 2, 0, 3, 4, 5)).reshape(self.values.shape)
        found: dict[str, float] = {}
        for number, name in enumerate(("key", "value")):
            before = self.values[:, number].astype(np.float64)
            after = values[:, number].astype(np.float64)
            error = np.abs(after - before)
            found[f"{name}_max_error"] = float(error.max())
            found[f"{name}_mean_abs_error"] = float(error.mean())
            found[f"{name}_relative_rms"] = float(np.sqrt((error**2).mean() / (before**2).mean()))
            norms = np.linalg.norm(before) * np.linalg.norm(after)
            found[f"{name}_cosine"] = float((before * after).sum() / norms)
        found["attention_relative_rms"] = self._attention_error(values)
        answers = self._answers(values)
        found["next_token_agreement"] = float((answers.tokens == self.reference.tokens).mean())
        found["loss_increase_nats"] = answers.loss - self.reference.loss
        return found

    def thinned(self, blocks: NDArray[np.int64]) -> dict[str, float]:
        """Compare the prefix with what is left of it when only these blocks stay, each where it
        stood: errors of attention and answers as in `compare`.
        """
        size = self.tokens_per_block
        values = self.values[:, :, (blocks[:, None] * size + np.arange(size)).ravel()]
        answers = self._answers(values)
        return {
            "attention_relative_rms": self._attention_error(values),
            "next_token_agreement": float((answers.tokens == self.reference.tokens).mean()),
            "loss_increase_nats": answers.loss - self.reference.loss,
        }

    def attention(self, last_tokens: int = 64) -> NDArray[np.float64]:
        """Return [prefix tokens] what its last tokens look at: weights of attention summed over
        them, heads and layers.
        """
        queries: list[torch.Tensor] = []
        first = self.prefix_tokens - last_tokens
        _watch(self._model, queries)
        self._run(self._ids[first:], self._cache(self.values[:, :, :first]), first)
        self._model.set_attn_implementation("sdpa")
        mass = torch.zeros(self.prefix_tokens, dtype=torch.float64)
        past = torch.ones(last_tokens, self.prefix_tokens, dtype=torch.bool).tril(first)
        for query, (keys, _) in zip(queries, torch.from_numpy(self.values), strict=True):
            key = keys.transpose(0, 1).repeat_interleave(query.shape[1] // keys.shape[1], 0)
            weights = query[0] @ key.transpose(1, 2) / query.shape[-1] ** 0.5
            mass += weights.masked_fill(~past, -torch.inf).softmax(-1).sum((0, 1))
        return mass.numpy()

    def _attention_error(self, values: Values) -> float:
        """Of attention over the prefix alone, with the model's own queries, over all layers."""
        wrong = right = 0.0
        for query, before, after in zip(self._queries, self.values, values, strict=True):
            outputs = []
            for pair in (before, after):
                key, value = torch.from_numpy(pair).transpose(1, 2)[:, None]
                outputs.append(scaled_dot_product_attention(query, key, value, enable_gqa=True))
            wrong += float(((outputs[1] - outputs[0]) ** 2).sum())
            right += float((outputs[0] ** 2).sum())
        return float(np.sqrt(wrong / right))

    def _cache(self, values: Values) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        for layer, pair in enumerate(torch.from_numpy(values)):
            key, value = pair.transpose(1, 2)[:, None].contiguous()
            cache.update(key, value, layer)
        return cache

    def _answers(self, values: Values) -> Answers:
        logits = self._run(self._after, self._cache(values), self.prefix_tokens)
        wanted = torch.tensor(self._after[1:])
        return Answers(logits.argmax(-1).numpy(), float(cross_entropy(logits[:-1], wanted)))

    def _run(self, tokens: list[int], cache: Any, first: int = 0) -> torch.Tensor:
        """Logits of tokens that stand from `first` on, whatever the cache has of those before."""
        with torch.inference_mode():
            arguments: dict[str, Any] = {cache_argument(self._model): cache, "use_cache": True}
            arguments["position_ids"] = torch.arange(first, first + len(tokens))[None]
            logits: torch.Tensor = self._model(input_ids=torch.tensor([tokens]), **arguments).logits
        return logits[0].clone()


def _text(tokenizer: Any) -> list[int]:
    text = Path(__file__).with_name("measured_text.md").read_text(encoding="utf-8")
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _rounded(values: Values, dtype: str) -> Values:
    rounded: Values = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    return rounded


def _watch(model: PreTrainedModel, queries: list[torch.Tensor]) -> None:
    """Keep the queries of every layer, [1, heads, tokens, head size], positions applied."""

    def attend(
        module: torch.nn.Module, query: torch.Tensor, *arguments: Any, **options: Any
    ) -> Any:
        queries.append(query.clone())
        return sdpa_attention_forward(module, query, *arguments, **options)

    AttentionInterface.register(_WATCHED, attend)
    AttentionMaskInterface.register(_WATCHED, sdpa_mask)
    model.set_attn_implementation(_WATCHED)
