"""What the conformance kit must know about NVIDIA GPUs: memory of torch's allocator.

`CudaHarness`: runs on a real GPU, and says that there is none where there is none.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from flexkv.backends.cuda import CudaBackend
from flexkv.testing.harness import Bytes, DeviceHarness, TensorLayout, Unsupported


class CudaHarness(DeviceHarness):
    """The `cuda` backend on the GPU number 0.

    Raises:
        Unsupported: there is no GPU here, or no torch that uses it.
    """

    def __init__(self, plugin: Any, options: Any = None) -> None:
        super().__init__(plugin, options)
        if not CudaBackend.probe():
            raise Unsupported("there is no NVIDIA GPU here; tests/test_cuda.py runs it on a fake")

    @property
    def torch(self) -> Any:
        """The module; raises Unsupported when it does not see the GPU."""
        torch = import_module("torch")
        if not torch.cuda.is_available():
            raise Unsupported("this torch does not use the GPU")
        return torch

    def allocate(self, size_bytes: int, *, shared: bool = False) -> Any:
        """Take device memory; all of it can be exported."""
        return self.torch.zeros(size_bytes, dtype=self.torch.uint8, device="cuda:0")

    def tensor(self, memory: Any, layout: TensorLayout) -> Any:
        """Make a strided view of it."""
        dtype = getattr(self.torch, layout.dtype)
        size = dtype.itemsize
        words = memory[: layout.size_bytes // size * size].view(dtype)
        strides = [stride // size for stride in layout.strides_bytes]
        return words.as_strided(layout.shape, strides, layout.offset_bytes // size)

    def read_back(self, memory: Any) -> Bytes:
        """Copy it with torch."""
        content: Bytes = memory.cpu().numpy()
        return content

    def write_raw(self, memory: Any, data: Bytes) -> None:
        """Fill it with torch."""
        memory.copy_(self.torch.from_numpy(np.ascontiguousarray(data)))
