"""A fake CUDA for machines without a GPU: the runtime, driver and NVML calls that flexkv makes, in
C over host memory (see fake.h). It proves calls, order and release of things; nothing about speed.

`build` (compiled once, among temporary files) - `Fake` (the control panel: faults, counts, what
lives) - `Memory`, `FakeTensor` (device memory, closed to the host, with a back door).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

VERSIONS = (12000, 12080, 13000)  # no batches of copies; batches with failIdx; without
FAULTS = {"refused": 0, "partial": 1, "failed": 2, "lost": 3, "slow": 4, "context": 5}
LIVING = ("memory", "streams", "events", "registrations", "imports", "libraries")
ALWAYS = 0xFFFF_FFFF_FFFF_FFFF
# numpy has no bfloat16 and no fp8: words of their size take their place
_WORDS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}

ffi = FFI()
ffi.cdef(
    """
    int cudaMalloc(void **address, size_t size);
    int cudaFree(void *address);
    int cudaGetDevice(int *device);
    int cudaSetDevice(int device);
    int cudaEventCreateWithFlags(void **event, unsigned flags);
    int cudaEventDestroy(void *event);
    int cudaEventRecord(void *event, void *stream);
    int cudaStreamWaitEvent(void *stream, void *event, unsigned flags);
    int cudaStreamDestroy(void *stream);
    int cudaLaunchHostFunc(void *stream, void *function, void *argument);
    void *fake_engine_stream(void);
    void *fake_translate(const void *address, uint64_t size);
    int fake_inject(const char *name, int fault, int error, uint64_t skip, uint64_t times,
                    uint64_t amount);
    void fake_clear(void);
    void fake_heal(void);
    void fake_hold(int held);
    void fake_jitter(uint64_t us);
    uint64_t fake_calls(const char *name);
    int64_t fake_live(int kind);
    uint64_t fake_violations(char *last);
    void fake_pardon(void);
    uint64_t fake_most_blocks(void);
    """
)


def build(version: int = VERSIONS[-1]) -> Path:
    """Compile the fake of one CUDA version, unless it is there; return its path."""
    folder = Path(__file__).parent
    sources = sorted(folder.glob("*.c"))
    text = b"".join(path.read_bytes() for path in [*sources, folder / "fake.h"])
    name = f"fake_cudart-{version}-{hashlib.sha256(text).hexdigest()[:16]}.so"
    kept = Path(tempfile.gettempdir()) / f"flexkv-fakes-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    made = kept / name
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=kept) as place:
            new = Path(place, name)
            flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
            flags += ["-fPIC", "-shared", "-pthread", f"-DFAKE_CUDART_VERSION={version}"]
            subprocess.run(["cc", *flags, "-o", str(new), *map(str, sources)], check=True)
            new.rename(made)
    return made


@cache
def fake(version: int = VERSIONS[-1]) -> Fake:
    """The fake of one CUDA version, one for each process."""
    return Fake(build(version))


class Fake:
    """The control panel of a fake that is loaded: `lib` has its functions, `path` is its file."""

    def __init__(self, path: Path) -> None:
        self.path, self.lib = path, ffi.dlopen(str(path))

    def inject(
        self,
        name: str,
        fault: str = "refused",
        error: int = 1,
        *,
        skip: int = 0,
        times: int = 1,
        amount: int = 0,
    ) -> None:
        """Let `times` calls of a name, after `skip` of them, return `error` ("refused"), or break
        the context with it ("context").

        Names of work: "copy", "kernel", "event", "wait", "callback" may be "failed" (after `amount`
        pieces, with a broken context), "slow" (by `amount` us), and a callback "lost"; a "batch"
        of copies may be "partial": `amount` of them are queued.
        """
        assert not self.lib.fake_inject(name.encode(), FAULTS[fault], error, skip, times, amount)

    @contextmanager
    def trouble(self) -> Iterator[Fake]:
        """Take back faults and lost contexts at the end."""
        try:
            yield self
        finally:
            self.lib.fake_clear()
            self.lib.fake_heal()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep all streams while inside."""
        self.lib.fake_hold(1)
        try:
            yield
        finally:
            self.lib.fake_hold(0)

    def calls(self, name: str) -> int:
        """How often a function was called."""
        return int(self.lib.fake_calls(name.encode()))

    def living(self) -> dict[str, int]:
        """How many things of each kind are not released."""
        return {kind: int(self.lib.fake_live(number)) for number, kind in enumerate(LIVING)}

    def violations(self) -> list[str]:
        """The last broken rule, if any was broken; forgets it."""
        last = ffi.new("char[256]")
        count = int(self.lib.fake_violations(last))
        self.lib.fake_pardon()
        return [f"{count} times, the last: {ffi.string(last).decode()}"] if count else []

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Make a device the calling thread's."""
        before = ffi.new("int *")
        self.lib.cudaGetDevice(before)
        self.lib.cudaSetDevice(device)
        try:
            yield
        finally:
            self.lib.cudaSetDevice(before[0])


class Memory:
    """One allocation; `address` is closed to the host. Freed with the last that holds it."""

    def __init__(self, size_bytes: int, device: int = 0, source: Fake | None = None) -> None:
        source = source or fake()
        place = ffi.new("void **")
        with source.current(device):
            error = source.lib.cudaMalloc(place, size_bytes)
        assert not error, f"no fake device memory: {error}"
        self.address = int(ffi.cast("uintptr_t", place[0]))
        self.size_bytes, self.device, self._lib = size_bytes, device, source.lib
        self.free = weakref.finalize(self, source.lib.cudaFree, place[0])

    def window(self) -> NDArray[np.uint8]:
        """The bytes, as the streams see them: the back door."""
        place = self._lib.fake_translate(ffi.cast("void *", self.address), self.size_bytes)
        return np.frombuffer(ffi.buffer(place, self.size_bytes), np.uint8)


class FakeTensor:
    """A tensor in fake device memory, with the questions that torch tensors answer."""

    def __init__(
        self,
        memory: Memory,
        shape: Sequence[int],
        dtype: str,
        strides_bytes: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self.memory, self.shape, self.dtype = memory, tuple(shape), dtype
        self.device = SimpleNamespace(type="cuda", index=memory.device)
        self._word = np.dtype(_WORDS.get(dtype, dtype))
        self._strides, self._offset = tuple(strides_bytes), offset_bytes

    def data_ptr(self) -> int:
        return self.memory.address + self._offset

    def element_size(self) -> int:
        return int(self._word.itemsize)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self._word.itemsize for step in self._strides)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of a fake GPU is no array: peek() copies its bytes")

    def peek(self, index: Any = ()) -> NDArray[Any]:
        """A copy of (a part of) the content, by the back door."""
        return np.array(self._view()[index])

    def poke(self, content: Any, index: Any = ()) -> None:
        """Write (a part of) the content, by the back door."""
        self._view()[index] = content

    def _view(self) -> NDArray[Any]:
        return np.ndarray(self.shape, self._word, self.memory.window(), self._offset, self._strides)


def like(
    array: NDArray[Any], dtype: str | None = None, device: int = 0, source: Fake | None = None
) -> FakeTensor:
    """A tensor in fake device memory with the shape, the strides and the content of `array`."""
    steps = list(zip(array.shape, array.strides, strict=True))
    low = sum(min(0, stride * (count - 1)) for count, stride in steps)
    high = sum(max(0, stride * (count - 1)) for count, stride in steps)
    memory = Memory(high - low + array.itemsize, device, source)
    made = FakeTensor(memory, array.shape, dtype or str(array.dtype), array.strides, -low)
    made.poke(array)
    return made
