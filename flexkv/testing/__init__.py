"""For tests of flexkv and of its plug-ins; needs the `test` extra.

The conformance kit: `DeviceBackendTests`, `StorageBackendTests`, `DirectStorageTests`,
`EvictionPolicyTests`, `CodecTests` with a harness each (`flexkv.testing.harness`), and
`pytest --flexkv-verify NAME` - `faults` (things that go wrong with storage, on purpose).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexkv.testing.codec import CodecTests as CodecTests
    from flexkv.testing.device import DeviceBackendTests as DeviceBackendTests
    from flexkv.testing.direct import DirectStorageTests as DirectStorageTests
    from flexkv.testing.harness import CodecHarness as CodecHarness
    from flexkv.testing.harness import DeviceHarness as DeviceHarness
    from flexkv.testing.harness import DirectHarness as DirectHarness
    from flexkv.testing.harness import PolicyHarness as PolicyHarness
    from flexkv.testing.harness import StorageHarness as StorageHarness
    from flexkv.testing.policy import EvictionPolicyTests as EvictionPolicyTests
    from flexkv.testing.storage import StorageBackendTests as StorageBackendTests

_WHERE = {
    "CodecHarness": "harness",
    "CodecTests": "codec",
    "DeviceBackendTests": "device",
    "DeviceHarness": "harness",
    "DirectHarness": "harness",
    "DirectStorageTests": "direct",
    "EvictionPolicyTests": "policy",
    "PolicyHarness": "harness",
    "StorageBackendTests": "storage",
    "StorageHarness": "harness",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
