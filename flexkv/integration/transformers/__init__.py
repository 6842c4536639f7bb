"""Prefix reuse for Hugging Face transformers: see docs/quickstart.md for a complete server.

`PrefixReuse` (restore, store, generate) - `config_for`, `kv_spec` (settings from a model) -
`load_model` (local weights) - `use_grouped_attention` (faster questions behind long prefixes on
CPUs). Names load on first use: the demo's parent process needs none of them, and torch takes
seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexkv.integration.transformers.forward import use_grouped_attention
    from flexkv.integration.transformers.reuse import Generation, PrefixReuse, Restored, config_for
    from flexkv.integration.transformers.seats import SeatCache, Seats, kv_spec
    from flexkv.integration.transformers.weights import fingerprint, load_model

__all__ = [
    "Generation",
    "PrefixReuse",
    "Restored",
    "SeatCache",
    "Seats",
    "config_for",
    "fingerprint",
    "kv_spec",
    "load_model",
    "use_grouped_attention",
]
_HOMES = {
    "forward": ("use_grouped_attention",),
    "reuse": ("Generation", "PrefixReuse", "Restored", "config_for"),
    "seats": ("SeatCache", "Seats", "kv_spec"),
    "weights": ("fingerprint", "load_model"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
