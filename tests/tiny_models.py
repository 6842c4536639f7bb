"""Tiny random causal LMs of several shapes, made on the spot without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES = ("llama", "qwen2", "qwen3", "gpt2")
VOCABULARY = 199
# Logits of random weights must lie far enough apart that rounding cannot change the largest.
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.2}
_GROUPED: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(shape: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a model in eval mode: llama and qwen2 with grouped heads, qwen3 with a head size of
    its own, gpt2.
    """
    import torch
    import transformers as hf

    torch.manual_seed(seed)
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**{**_GROUPED, "num_key_value_heads": 2, **changes})
        ),
        "qwen2": lambda: hf.Qwen2ForCausalLM(
            hf.Qwen2Config(**{**_GROUPED, "num_key_value_heads": 2, **changes})
        ),
        "qwen3": lambda: hf.Qwen3ForCausalLM(
            hf.Qwen3Config(**{**_GROUPED, "num_key_value_heads": 1, "head_dim": 32, **changes})
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                **{
                    **_COMMON,
                    "n_embd": 64,
                    "n_layer": 2,
                    "n_head": 4,
                    "n_positions": 1024,
                    "bos_token_id": 1,
                    "eos_token_id": 2,
                    **changes,
                }
            )
        ),
    }
    return makers[shape]().eval()


def save_tiny(target: Path, shape: str = "llama", **changes: Any) -> Path:
    """Save a tiny model with a byte-level tokenizer of 260 tokens; return the directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tiny_model(shape, vocab_size=260, **changes).save_pretrained(target)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=260,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the light"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(target)
    return target
