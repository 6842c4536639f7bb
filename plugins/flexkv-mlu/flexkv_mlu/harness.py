"""What the conformance kit must know about MLUs: `MluHarness`, memory of torch's allocator."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from flexkv.testing.harness import DeviceHarness, Unsupported
from flexkv_mlu.backend import MluBackend


class MluHarness(DeviceHarness):
    """The `mlu` backend on the MLU number 0.

    Raises:
        Unsupported: there is no MLU here, or no torch_mlu.
    """

    exportable = False

    def __init__(self, plugin: Any, options: Any = None) -> None:
        super().__init__(plugin, options)
        if not MluBackend.probe():
            raise Unsupported("there is no MLU here; tests/test_mlu.py runs it on a fake")
        self._torch = import_module("torch")

    def allocate(self, size_bytes: int, *, shared: bool = False) -> Any:
        """Take device memory."""
        return self._torch.zeros(size_bytes, dtype=self._torch.uint8, device="mlu:0")

    def tensor(self, memory: Any, layout: Any) -> Any:
        """Make a strided view of it."""
        dtype = getattr(self._torch, layout.dtype)
        words = memory[: layout.size_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = [stride // dtype.itemsize for stride in layout.strides_bytes]
        return words.as_strided(layout.shape, strides, layout.offset_bytes // dtype.itemsize)

    def read_back(self, memory: Any) -> Any:
        """Copy it with torch."""
        return memory.cpu().numpy()

    def write_raw(self, memory: Any, data: Any) -> None:
        """Fill it with torch."""
        memory.copy_(self._torch.from_numpy(np.ascontiguousarray(data)))
