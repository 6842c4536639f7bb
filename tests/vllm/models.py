"""Random models for vLLM, made on the spot. Usage: models.py DIRECTORY [LAYERS HIDDEN VOCAB], or
models.py DIRECTORY hybrid
"""

from __future__ import annotations

import sys
from pathlib import Path


def make(path: Path, layers: int = 2, hidden: int = 256, vocab: int = 1024) -> None:
    """Save a random Llama in fp32 with a byte-level tokenizer; the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(2, hidden // 128),
        head_dim=64,
        vocab_size=vocab,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.08 if hidden <= 256 else 0.03,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    save_tokenizer(path, vocab)


def make_hybrid(path: Path, window: int = 100, vocab: int = 1024) -> None:
    """Save a random Olmo 3 of five layers: full attention in two, a sliding window in three. vLLM
    makes three groups of them, of which one lacks a layer.
    """
    import torch
    from transformers import Olmo3Config, Olmo3ForCausalLM

    torch.manual_seed(0)
    near, far = "sliding_attention", "full_attention"
    config = Olmo3Config(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        layer_types=[near, near, far, near, far],
        sliding_window=window,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=16384,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.08,
    )
    Olmo3ForCausalLM(config).save_pretrained(path)
    save_tokenizer(path, vocab)


def save_tokenizer(path: Path, vocab: int) -> None:
    """Save a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)


if __name__ == "__main__":
    if sys.argv[2:] == ["hybrid"]:
        make_hybrid(Path(sys.argv[1]))
    else:
        make(Path(sys.argv[1]), *(int(number) for number in sys.argv[2:]))
