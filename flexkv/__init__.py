"""flexkv: a KV-cache manager for LLM serving. Public names only.

Names are loaded when they are first used, so that `import flexkv` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexkv.cold import ColdCopy, SinkWindow, TopBlocks
    from flexkv.config import FlexKVConfig
    from flexkv.errors import (
        BrokenManagerError,
        CapacityError,
        ClosedError,
        ConfigError,
        FlexKVError,
        FormatError,
        InputError,
        LayoutError,
        OwnershipError,
        PluginError,
        StalledError,
        StorageError,
        TransferError,
    )
    from flexkv.events import BlockEvent, EventStream
    from flexkv.manager import KVManager
    from flexkv.model import Identity, KVSpec, LayerGroup
    from flexkv.sync import BlockingKVManager
    from flexkv.transfer import GetResult, Plan, PutResult, Transfer

__version__ = "0.1.0"

__all__ = [
    "BlockEvent",
    "BlockingKVManager",
    "BrokenManagerError",
    "CapacityError",
    "ClosedError",
    "ColdCopy",
    "ConfigError",
    "EventStream",
    "FlexKVConfig",
    "FlexKVError",
    "FormatError",
    "GetResult",
    "Identity",
    "InputError",
    "KVManager",
    "KVSpec",
    "LayerGroup",
    "LayoutError",
    "OwnershipError",
    "Plan",
    "PluginError",
    "PutResult",
    "SinkWindow",
    "StalledError",
    "StorageError",
    "TopBlocks",
    "Transfer",
    "TransferError",
    "__version__",
]

_HOMES = {
    "cold": ("ColdCopy", "SinkWindow", "TopBlocks"),
    "config": ("FlexKVConfig",),
    "events": ("BlockEvent", "EventStream"),
    "manager": ("KVManager",),
    "model": ("Identity", "KVSpec", "LayerGroup"),
    "sync": ("BlockingKVManager",),
    "transfer": ("GetResult", "Plan", "PutResult", "Transfer"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module 'flexkv' has no attribute {name!r}")
    value = getattr(import_module(f"flexkv.{_HOME_OF.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
