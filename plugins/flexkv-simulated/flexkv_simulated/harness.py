"""What the conformance kit must know about the device: its memory's back door, trouble on purpose.

`SimulatedHarness`, `SimulatedDirectHarness`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.disk import DiskBackend
from flexkv.protocols import DeviceBackend, Services
from flexkv.testing import DeviceHarness, DirectHarness
from flexkv.testing.built_in import DiskHarness
from flexkv.testing.harness import TensorLayout
from flexkv_simulated.backend import SimulatedBackend
from flexkv_simulated.memory import DeviceTensor, Memory

_TROUBLE = {"engines": 2, "streams": 3, "jitter_us": 500, "timeout_ms": 100}


class SimulatedHarness(DeviceHarness):
    """Streams that overtake each other, latencies at random."""

    def settings(self, place: Path) -> dict[str, Any]:
        """Two engines, three streams, jitter, unless told otherwise."""
        return _TROUBLE | self.options

    def allocate(self, size_bytes: int, *, shared: bool = False) -> Memory:
        """Take device memory; all of it can be exported."""
        return Memory(size_bytes)

    def tensor(self, memory: Memory, layout: TensorLayout) -> DeviceTensor:
        """Make a tensor on it."""
        return DeviceTensor(
            *(memory, layout.shape, layout.dtype, layout.strides_bytes, layout.offset_bytes)
        )

    def read_back(self, memory: Memory) -> NDArray[np.uint8]:
        """Look through the engines' window."""
        return memory.window().copy()

    def write_raw(self, memory: Memory, data: NDArray[np.uint8]) -> None:
        """Write through the engines' window."""
        memory.window()[:] = data

    @contextmanager
    def hold(self, backend: DeviceBackend, services: Services) -> Iterator[None]:
        """Keep the engines from taking work."""
        assert isinstance(backend, SimulatedBackend)
        backend.device.pause()
        try:
            yield
        finally:
            backend.device.pause(False)

    def fail(self, backend: DeviceBackend, services: Services) -> AbstractContextManager[None]:
        """Have every copy fail after two blocks."""
        return _injected(backend, "failed")

    def lose(self, backend: DeviceBackend, services: Services) -> AbstractContextManager[None]:
        """Have copies done, and nobody told."""
        return _injected(backend, "lost")


@contextmanager
def _injected(backend: DeviceBackend, fault: str) -> Iterator[None]:
    assert isinstance(backend, SimulatedBackend)
    backend.device.inject(fault, times=None, blocks=2)
    try:
        yield
    finally:
        backend.device.clear_faults()


class SimulatedDirectHarness(SimulatedHarness, DirectHarness):
    """The same, reading from the built-in disk tier."""

    store: ClassVar[DiskHarness] = DiskHarness(DiskBackend)  # type: ignore[misc]
