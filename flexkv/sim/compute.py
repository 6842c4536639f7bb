"""What a model computes and reads: ModelShape, shape, ComputeModel.prefill_seconds, decode_seconds.

A multiply-add counts two FLOPs. Linear layers: 2 FLOPs per weight and token; attention: 4 * heads
* head_dim FLOPs per layer, token and earlier token (scores and weighted sum), as in Kaplan et al.
2020 (arXiv 2001.08361, table 1) and Chowdhery et al. 2022 (arXiv 2204.02311, appendix B). Time is
the larger of FLOPs over FLOPs per second and bytes over bytes per second (roofline).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with gated feed-forward layers."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    weight_item_bytes: float = 2.0
    kv_item_bytes: float = 2.0
    source: str = "config.json of the model's public repository"

    def linear_weights(self) -> int:
        """Return the weights that every token passes, embeddings and output head excluded."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    def weight_bytes(self) -> float:
        """Return what a decode step reads besides KV: layers and output head."""
        return (self.linear_weights() + self.hidden * self.vocabulary) * self.weight_item_bytes

    def kv_bytes_per_token(self) -> float:
        """Return keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_item_bytes

    def attention_flops(self, new_tokens: int, past_tokens: int = 0) -> float:
        """Return the attention FLOPs of `new_tokens` after `past_tokens`, causal."""
        pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1) / 2
        return 4.0 * self.layers * self.heads * self.head_dim * pairs

    def crossover_tokens(self) -> float:
        """Return the position at which attention takes as many FLOPs as the linear layers."""
        return self.linear_weights() / (2 * self.layers * self.heads * self.head_dim)

    def prefill_flops(self, new_tokens: int, past_tokens: int = 0) -> float:
        """Return the FLOPs of prefilling `new_tokens` after `past_tokens`, one token's logits."""
        linear = 2.0 * new_tokens * self.linear_weights()
        head = 2.0 * self.hidden * self.vocabulary
        return linear + head + self.attention_flops(new_tokens, past_tokens)


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152),
    )
}


def shape(name: str) -> ModelShape:
    """Return a known model's shape."""
    if name not in SHAPES:
        raise ConfigError(f"no model shape {name!r}; known are {sorted(SHAPES)}")
    return SHAPES[name]


@dataclass(frozen=True, slots=True)
class ComputeModel:
    """Seconds on one accelerator; the shares say how much of its peaks is reached.

    The default shares are assumptions: `flexkv calibrate` measures the prefill rate of a model.
    """

    model: ModelShape
    flops_per_s: float
    hbm_bytes_per_s: float
    flops_share: float = 0.5
    bandwidth_share: float = 0.8
    accelerators: int = 1

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "hbm_bytes_per_s", "flops_share", "bandwidth_share"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)!r}")

    def flops_seconds(self, flops: float) -> float:
        """Return FLOPs as seconds."""
        return flops / (self.flops_per_s * self.flops_share * self.accelerators)

    def bytes_seconds(self, size_bytes: float) -> float:
        """Return bytes of HBM as seconds."""
        return size_bytes / (self.hbm_bytes_per_s * self.bandwidth_share * self.accelerators)

    def prefill_seconds(self, new_tokens: int, past_tokens: int = 0) -> float:
        """Return the time to prefill `new_tokens` after `past_tokens` cached ones."""
        if new_tokens <= 0:
            return 0.0
        model = self.model
        read = model.weight_bytes() + past_tokens * model.kv_bytes_per_token()
        return max(
            self.flops_seconds(model.prefill_flops(new_tokens, past_tokens)),
            self.bytes_seconds(read),
        )

    def decode_flops(self, contexts: Sequence[int]) -> float:
        """Return the FLOPs of one token for each sequence of `contexts` tokens."""
        return sum(self.model.prefill_flops(1, context) for context in contexts)

    def decode_seconds(self, contexts: Sequence[int]) -> float:
        """Return the time of one decode step of a batch whose KV lies in HBM."""
        if not contexts:
            return 0.0
        read = self.model.weight_bytes() + sum(contexts) * self.model.kv_bytes_per_token()
        return max(self.flops_seconds(self.decode_flops(contexts)), self.bytes_seconds(read))
