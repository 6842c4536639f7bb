"""What the kit must know about a plug-in: how it is made, and a back door to its bytes.

`DeviceHarness` (device memory: `allocate`, `tensor`, `read_back`, `write_raw`, `free`) -
`StorageHarness` (a store's content: `settings`, `read_back`, `write_raw`) - `DirectHarness` (both)
- `PolicyHarness` - `CodecHarness`. The defaults fit host memory and stores without a back door; a
plug-in brings its own under its own name in the entry-point group `flexkv.harnesses`, or returns it
from the `harness` fixture of its test class.

A back door never goes through the backend under test: a backend must not vouch for itself. A child
process makes the harness again from its class, plug-in and options, which must be picklable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flexkv.model import DTYPE_BYTES, KVSpec
from flexkv.protocols import (
    API_VERSION,
    Codec,
    DeviceBackend,
    EvictionPolicy,
    Region,
    Services,
    StorageBackend,
)

Bytes = NDArray[np.uint8]
CREW_QUEUE = 256  # jobs that wait for the two crew threads of the kit's services, at most

PER_LAYER = ["BPNHD", "PBNHD", "BNPHD", "BPHND", "PBHND", "BHNC", "BNHC", "TPHD", "PTHD", "HTC"]
ONE_TENSOR = ["LBPNHD", "BLPNHD", "LPBNHD", "LBHNC", "BLHNC", "LTPHD"]


class Unsupported(Exception):
    """A harness does not offer what a test needs; the message says which method would."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where a KV tensor lies in its memory: what the engine would register.

    `axes` names the dimensions (see `flexkv.backends.layout`), `shape` and `strides_bytes` have one
    entry per axis, `dtype` is one of `flexkv.model.DTYPE_BYTES`; `size_bytes` is the memory it
    needs.
    """

    axes: str
    dtype: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """What a child process makes a harness from."""

    kind: type[Any]
    plugin: Callable[[], Any]
    options: dict[str, Any]

    def make(self) -> Any:
        """Make the harness."""
        return self.kind(self.plugin, self.options)


class Harness:
    """A plug-in under test: `plugin` makes one that is not open, `options` are its settings."""

    flexkv_api: ClassVar[int] = API_VERSION

    def __init__(self, plugin: Callable[[], Any], options: Mapping[str, Any] | None = None) -> None:
        self.plugin = plugin
        self.options = dict(options or {})

    @property
    def origin(self) -> Origin:
        """What a child process makes this harness from."""
        return Origin(type(self), self.plugin, self.options)

    def make(self) -> Any:
        """Make the plug-in, not open. Every call makes another one."""
        return self.plugin()

    def settings(self, place: Path) -> dict[str, Any]:
        """What the plug-in is opened with. `place` is an empty folder of the test."""
        return dict(self.options)


class DeviceHarness(Harness):
    """A device backend. As it stands, the device's memory is host memory (numpy arrays).

    Override the five verbs of memory for a device with memory of its own. They are called while a
    backend is open, in its process; `free` also after it has closed.
    """

    axes: Sequence[str] = (*PER_LAYER, *ONE_TENSOR)
    """Layouts of the engine's tensors that the backend must take, as letters."""
    latent_axes: Sequence[str] = ("BND", "TD", "BN1D", "LBND")
    """Layouts of tensors with one part and one head."""
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8")
    random_strides: bool = True
    """Whether tensors may have any order in memory, and gaps; else they are contiguous."""
    exportable: bool = True
    """Whether memory of `allocate(shared=True)` can be exported; else export raises LayoutError."""
    layer_ranges: bool = True
    """Whether `copy` takes a range of layers (`BlockCopy.layers`)."""

    def make(self) -> DeviceBackend:
        """Make the backend, not open."""
        made: DeviceBackend = self.plugin()
        return made

    # --- the back door

    def allocate(self, size_bytes: int, *, shared: bool = False) -> Any:
        """Take device memory. `shared`: such that `export_region` can offer it to others."""
        if shared:
            from flexkv.memory import Arena

            return Arena(1, -(-size_bytes // 4096) * 4096, huge_pages=False).view(0)[:size_bytes]
        return np.zeros(size_bytes, np.uint8)

    def free(self, memory: Any) -> None:
        """Give memory of `allocate` back."""

    def tensor(self, memory: Any, layout: TensorLayout) -> Any:
        """Make the tensor that an engine would register, on `memory`, without copying."""
        words = {1: np.uint8, 2: np.uint16, 4: np.float32}[DTYPE_BYTES[layout.dtype]]
        return np.ndarray(
            layout.shape, words, memory.data, layout.offset_bytes, layout.strides_bytes
        )

    def read_back(self, memory: Any) -> Bytes:
        """All bytes of `memory`, as a copy, by a way that is not the backend's `copy`."""
        return np.array(memory, np.uint8)

    def write_raw(self, memory: Any, data: Bytes) -> None:
        """Overwrite all bytes of `memory`, by a way that is not the backend's `copy`."""
        memory[:] = data

    def make_region(
        self, backend: DeviceBackend, tensors: dict[str, Any], spec: KVSpec, axes: str
    ) -> Region:
        """Register `tensors`, in layer order or one over all layers."""
        kv_caches = next(iter(tensors.values())) if "L" in axes else tensors
        return backend.make_region(kv_caches, spec, axes)

    # --- trouble on purpose, where the hardware allows it

    def hold(self, backend: DeviceBackend, services: Services) -> AbstractContextManager[None]:
        """Make the hardware stand still: copies that start inside land after the block, not before.

        Raises:
            Unsupported: cannot be done here; the tests that need it are skipped.
        """
        raise Unsupported("give the harness a `hold` to test copies that take their time")

    def fail(self, backend: DeviceBackend, services: Services) -> AbstractContextManager[None]:
        """Make every copy that starts inside the block fail.

        Raises:
            Unsupported: cannot be done here; the tests that need it are skipped.
        """
        raise Unsupported("give the harness a `fail` to test copies that fail")

    def lose(self, backend: DeviceBackend, services: Services) -> AbstractContextManager[None]:
        """Have the completions of copies that start inside the block never come.

        Raises:
            Unsupported: cannot be done here; the tests that need it are skipped.
        """
        raise Unsupported("give the harness a `lose` to test completions that never come")


class StorageHarness(Harness):
    """A storage backend. As it stands, there is no back door to what it stores.

    Opening with the same `settings` again opens the same store again.
    """

    capacity_blocks: int = 32
    """At least 32."""
    persistent: bool = True
    """Whether blocks are found again by `open` after `aclose`."""
    exclusive: bool = True
    """Whether a store that is open cannot be opened a second time."""
    pool_threads: int = 0
    """Threads that a library of the store keeps when the store is closed, for the next one."""

    def make(self) -> StorageBackend:
        """Make the backend, not open."""
        made: StorageBackend = self.plugin()
        return made

    # --- the back door

    def read_back(self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec) -> Bytes:
        """The stored bytes of a block, shape [spec.block_bytes], not through the backend.

        `place` is what `settings` was given, `key` the block's key, shape [2]. The store is open or
        closed.

        Raises:
            Unsupported: what is stored cannot be seen; the tests that need it are skipped.
        """
        raise Unsupported("give the harness `read_back` to check what is stored")

    def write_raw(
        self, place: Path, slot: int, key: NDArray[np.uint64], spec: KVSpec, data: Bytes
    ) -> None:
        """Overwrite the stored bytes of a block, which must come back as damaged.

        Raises:
            Unsupported: what is stored cannot be reached; the tests that need it are skipped.
        """
        raise Unsupported("give the harness `write_raw` to test that damage is noticed")

    # --- trouble on purpose, where the store allows it

    def hold(self, backend: StorageBackend, services: Services) -> AbstractContextManager[None]:
        """Make the store stand still: batches that start inside end after the block, not before.

        Raises:
            Unsupported: cannot be done here; the tests that need it are skipped.
        """
        raise Unsupported("give the harness a `hold` to test batches that take their time")

    def fail(
        self, backend: StorageBackend, services: Services, verb: str, skip: int, count: int
    ) -> AbstractContextManager[None]:
        """Make blocks number `skip` .. `skip + count` of the next batch fail.

        `verb` is "read" or "write".

        Raises:
            Unsupported: cannot be done here; the tests that need it are skipped.
        """
        raise Unsupported("give the harness a `fail` to test batches that fail in part")


class DirectHarness(DeviceHarness):
    """A device backend that also reads from a store by itself (DirectStorage).

    `store` is the harness of the store; the device is opened after it, with `settings(place)`, and
    reads what the store wrote.
    """

    store: StorageHarness


class PolicyHarness(Harness):
    """An eviction policy."""

    def make(self) -> EvictionPolicy:
        """Make the policy, not open."""
        made: EvictionPolicy = self.plugin()
        return made


class CodecHarness(Harness):
    """A codec. `max_error` is what a lossy one may lose, in units of a block's largest value."""

    dtypes: Sequence[str] = ("bfloat16", "float16", "float32", "float8_e4m3fn", "uint8")
    max_error: float = 0.05

    def make(self) -> Codec:
        """Make the codec."""
        made: Codec = self.plugin()
        return made
