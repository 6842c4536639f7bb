"""flexkv: a KV-cache manager for LLM serving. Public names only."""

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
    StorageError,
    TransferError,
)
from flexkv.manager import KVManager
from flexkv.model import Identity, KVSpec, LayerGroup
from flexkv.sync import BlockingKVManager
from flexkv.transfer import GetResult, Plan, PutResult, Transfer

__version__ = "0.1.0"

__all__ = [
    "BlockingKVManager",
    "BrokenManagerError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
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
    "StorageError",
    "Transfer",
    "TransferError",
    "__version__",
]
