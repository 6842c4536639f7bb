"""Prefix reuse for Hugging Face transformers: see docs/quickstart.md for a complete server.

`PrefixReuse` (restore, store, generate) - `config_for`, `kv_spec` (settings from a model) - `load_model` (local
weights) - `use_grouped_attention` (faster questions behind long prefixes on CPUs).
"""

from flexkv.integration.transformers.forward import use_grouped_attention
from flexkv.integration.transformers.lanes import LaneCache, Lanes, kv_spec
from flexkv.integration.transformers.reuse import Generation, PrefixReuse, Restored, config_for
from flexkv.integration.transformers.weights import fingerprint, load_model

__all__ = [
    "Generation",
    "LaneCache",
    "Lanes",
    "PrefixReuse",
    "Restored",
    "config_for",
    "fingerprint",
    "kv_spec",
    "load_model",
    "use_grouped_attention",
]
