"""The real `cuda` backend on the fake: `FakeCuda`, one for each CUDA version; `FakeHarness`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fake_cuda import ALWAYS, VERSIONS, Fake, FakeTensor, Memory, fake
from flexkv.backends.cuda import CudaBackend
from flexkv.backends.cuda.library import Paths
from flexkv.testing import DeviceHarness
from flexkv.testing.harness import TensorLayout


class FakeCuda(CudaBackend):
    """CUDA 13: batched copies without failIdx. Setting `jitter_us`: what work takes at most."""

    version: ClassVar[int] = VERSIONS[-1]

    @classmethod
    def fake(cls) -> Fake:
        """The control panel."""
        return fake(cls.version)

    @classmethod
    def paths(cls) -> Paths:
        path = str(cls.fake().path)
        return Paths(path, path, path)

    def configure(self, settings: dict[str, Any]) -> None:
        if "jitter_us" in settings:
            self.fake().lib.fake_jitter(settings.pop("jitter_us"))
        super().configure(settings)


class FakeCuda128(FakeCuda):
    """CUDA 12.8: batched copies with failIdx."""

    version = 12080


class FakeCuda120(FakeCuda):
    """CUDA 12.0: no batched copies."""

    version = 12000


class FakeHarness(DeviceHarness):
    """Streams that take their time; the back door is the streams' mapping."""

    def settings(self, place: Path) -> dict[str, Any]:
        """Completions are missed soon, chunks are small."""
        return {"timeout_ms": 100, "pin_chunk_bytes": 1 << 16, "jitter_us": 300} | self.options

    @property
    def fake(self) -> Fake:
        """The fake of the backend's version."""
        made = self.make()
        assert isinstance(made, FakeCuda)
        return made.fake()

    def allocate(self, size_bytes: int, *, shared: bool = False) -> Memory:
        return Memory(size_bytes, source=self.fake)

    def free(self, memory: Memory) -> None:
        memory.free()

    def tensor(self, memory: Memory, layout: TensorLayout) -> FakeTensor:
        return FakeTensor(
            *(memory, layout.shape, layout.dtype, layout.strides_bytes, layout.offset_bytes)
        )

    def read_back(self, memory: Memory) -> NDArray[np.uint8]:
        return memory.window().copy()

    def write_raw(self, memory: Memory, data: NDArray[np.uint8]) -> None:
        memory.window()[:] = data

    def hold(self, backend: Any, services: Any) -> AbstractContextManager[None]:
        return self.fake.held()

    @contextmanager
    def fail(self, backend: Any, services: Any) -> Iterator[None]:
        """Copies and kernels fail with what no later call forgives, until the block ends."""
        with self.fake.trouble() as trouble:
            for work in ("copy", "kernel"):
                trouble.inject(work, "failed", 719, times=ALWAYS, amount=2)
            yield

    @contextmanager
    def lose(self, backend: Any, services: Any) -> Iterator[None]:
        with self.fake.trouble() as trouble:
            trouble.inject("callback", "lost", times=ALWAYS)
            yield
