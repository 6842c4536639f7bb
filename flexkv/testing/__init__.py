"""For tests of flexkv and of its plug-ins; needs the `test` extra.

The conformance kit: `DeviceBackendTests`, `StorageBackendTests`, `DirectStorageTests`,
`EvictionPolicyTests`, `CodecTests` with a harness each (`flexkv.testing.harness`), and
`pytest --flexkv-verify NAME` - `faults` (things that go wrong with storage, on purpose).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexkv.testing.device import DeviceBackendTests as DeviceBackendTests
    from flexkv.testing.harness import DeviceHarness as DeviceHarness
    from flexkv.testing.harness import StorageHarness as StorageHarness
    from flexkv.testing.storage import StorageBackendTests as StorageBackendTests

_WHERE = {
    "DeviceBackendTests": "device",
    "StorageBackendTests": "storage",
    "DeviceHarness": "harness",
    "StorageHarness": "harness",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
