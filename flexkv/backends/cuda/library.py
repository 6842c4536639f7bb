"""The CUDA runtime, the driver and NVML, as they are on this machine: no build dependency.

`Paths` (which files; `find` looks for them) - `Cuda`: `check` (an answer -> CudaError), `on` (a
device for the calling thread), `batch` (cudaMemcpyBatchAsync of 12.8 and of 13) - `devices` (by
NVML, which makes no context, so that a process may still fork).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cffi import FFI

from flexkv.errors import ConfigError, TransferError
from flexkv.protocols import DeviceInfo

NOT_READY = 600
_LOADED = 0x4  # RTLD_NOLOAD of glibc: only what the process has already
_RUNTIMES = ("libcudart.so.13", "libcudart.so.12")
_HINT = "install a torch with CUDA or nvidia-cuda-runtime, or name the file as device option cudart"

ffi: Any = FFI()
ffi.cdef(
    """
    typedef struct { int type; int device; void *device_pointer, *host_pointer; long reserved[8]; }
        cudaPointerAttributes;
    typedef struct { char reserved[64]; } cudaIpcMemHandle_t;
    typedef struct { int type, id; } cudaMemLocation;
    typedef struct { int order; cudaMemLocation source, target; unsigned flags; }
        cudaMemcpyAttributes;
    int cudaRuntimeGetVersion(int *version);
    int cudaGetDeviceCount(int *count);
    int cudaGetDevice(int *device);
    int cudaSetDevice(int device);
    int cudaGetLastError(void);
    const char *cudaGetErrorName(int error);
    int cudaDeviceGetPCIBusId(char *name, int length, int device);
    int cudaDeviceGetByPCIBusId(int *device, const char *name);
    int cudaStreamCreateWithPriority(uintptr_t *stream, unsigned flags, int priority);
    int cudaStreamDestroy(uintptr_t stream);
    int cudaStreamQuery(uintptr_t stream);
    int cudaStreamWaitEvent(uintptr_t stream, uintptr_t event, unsigned flags);
    int cudaEventCreateWithFlags(uintptr_t *event, unsigned flags);
    int cudaEventDestroy(uintptr_t event);
    int cudaEventRecord(uintptr_t event, uintptr_t stream);
    int cudaEventQuery(uintptr_t event);
    int cudaLaunchHostFunc(uintptr_t stream, uintptr_t function, uintptr_t argument);
    int cudaMemcpyAsync(uintptr_t target, uintptr_t source, size_t size, int kind,
                        uintptr_t stream);
    int cudaMemcpy2DAsync(uintptr_t target, size_t target_pitch, uintptr_t source,
                          size_t source_pitch, size_t width, size_t height, int kind,
                          uintptr_t stream);
    int cudaMemcpyBatchAsync(void *targets, void *sources, void *sizes, size_t count,
                             cudaMemcpyAttributes *attributes, size_t *starts, size_t n_attributes,
                             uintptr_t stream);
    int cudaMalloc(uintptr_t *address, size_t size);
    int cudaFree(uintptr_t address);
    int cudaPointerGetAttributes(cudaPointerAttributes *found, uintptr_t address);
    int cudaHostRegister(uintptr_t address, size_t size, unsigned flags);
    int cudaHostUnregister(uintptr_t address);
    int cudaHostGetDevicePointer(uintptr_t *on_device, uintptr_t address, unsigned flags);
    int cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, uintptr_t address);
    int cudaIpcOpenMemHandle(uintptr_t *address, cudaIpcMemHandle_t handle, unsigned flags);
    int cudaIpcCloseMemHandle(uintptr_t address);

    int cuInit(unsigned flags);
    int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t address);
    int cuLibraryLoadData(uintptr_t *library, const void *code, void *a, void *b, unsigned n_a,
                          void *c, void *d, unsigned n_b);
    int cuLibraryUnload(uintptr_t library);
    int cuLibraryGetKernel(uintptr_t *kernel, uintptr_t library, const char *name);
    int cuLaunchKernel(uintptr_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                       uintptr_t stream, void **arguments, void **extra);

    typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
    int nvmlInit_v2(void);
    int nvmlShutdown(void);
    int nvmlDeviceGetCount_v2(unsigned *count);
    int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device);
    int nvmlDeviceGetName(void *device, char *name, unsigned length);
    int nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory);
    """
)
_BATCH_12 = (
    "int(*)(void *, void *, void *, size_t, cudaMemcpyAttributes *, size_t *, size_t, size_t *, "
    "uintptr_t)"
)


class CudaError(TransferError):
    """A CUDA call failed; `code` is its cudaError_t or CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.code = code


@dataclass(frozen=True, slots=True)
class Paths:
    """Which libraries to load: files, or names for the dynamic linker. An empty `runtime` is
    looked for.
    """

    runtime: str = ""
    driver: str = "libcuda.so.1"
    nvml: str = "libnvidia-ml.so.1"


def load_runtime(path: str = "") -> Any:
    """Load libcudart: the file that is named, else what the process has already (torch's), else a
    wheel's, else the system's.

    Raises:
        ConfigError: there is none.
    """
    tried: list[str] = []
    for name in [path] if path else [*_RUNTIMES, *_wheels(), *_RUNTIMES]:
        flags = 0 if path or tried[len(_RUNTIMES) - 1 :] else _LOADED
        try:
            return ffi.dlopen(name, ffi.RTLD_NOW | flags)
        except OSError as error:
            tried.append(str(error))
    raise ConfigError(f"there is no CUDA runtime 12 or 13: {tried[-1]}; {_HINT}")


def _wheels() -> list[str]:
    """Runtimes that came with pip: nvidia-cuda-runtime-cu12, nvidia-cuda-runtime (13)."""
    spec = importlib.util.find_spec("nvidia")
    found: list[str] = []
    for place in (spec.submodule_search_locations if spec else None) or ():
        for pattern in ("cu13/lib/libcudart.so.13", "cuda_runtime/lib/libcudart.so.1[23]"):
            found += map(str, sorted(Path(place).glob(pattern), reverse=True))
    return found


class Cuda:
    """The libraries of one process. `runtime` and `driver` have the calls, which answer 0 or an
    error; `version` is 1000 * major + 10 * minor.
    """

    def __init__(self, paths: Paths) -> None:
        self.runtime = load_runtime(paths.runtime)
        try:
            self.driver: Any = ffi.dlopen(paths.driver, ffi.RTLD_NOW)
        except OSError as error:
            raise ConfigError(f"there is no NVIDIA driver: {error}") from error
        number = ffi.new("int *")
        self.check("cudaRuntimeGetVersion", self.runtime.cudaRuntimeGetVersion(number))
        self.version = int(number[0])
        self.check("cudaGetDeviceCount", self.runtime.cudaGetDeviceCount(number))
        self.devices = int(number[0])
        if not 12000 <= self.version < 14000 or not self.devices:
            raise ConfigError(
                f"CUDA runtime {self.version} with {self.devices} devices: 12 or 13 and a GPU are "
                "needed"
            )
        self._batch = self._find_batch()
        self._attributes = ffi.new("cudaMemcpyAttributes *", {"order": 1})  # in stream order
        self._starts = ffi.new("size_t[1]")

    def check(self, call: str, code: int) -> None:
        """Raise CudaError when a call's answer is an error."""
        if code:
            with contextlib.suppress(AttributeError):
                self.runtime.cudaGetLastError()  # ours: nobody else is to find it
            name = self.runtime.cudaGetErrorName(code)
            raise CudaError(call, code, ffi.string(name).decode() if name else "an error")

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call of the runtime; raises CudaError."""
        self.check(name, getattr(self.runtime, name)(*arguments))

    @contextlib.contextmanager
    def on(self, device: int, *, to_release: bool = False) -> Iterator[None]:
        """Make `device` the calling thread's, and give the thread its own back.

        Raises:
            CudaError: its context is lost; not where things are released, which goes on.
        """
        before = ffi.new("int *")
        code = self.runtime.cudaGetDevice(before)
        # also where it is the same: only cudaSetDevice makes the context of a new thread
        code = self.runtime.cudaSetDevice(device) or code
        if not to_release:
            self.check("cudaSetDevice", code)
        try:
            yield
        finally:
            if before[0] != device:
                self.runtime.cudaSetDevice(before[0])

    @property
    def batches(self) -> bool:
        """Whether cudaMemcpyBatchAsync is there (12.8 and newer)."""
        return self._batch is not None

    def batch(self, targets: Any, sources: Any, sizes: Any, stream: int) -> int:
        """Queue copies from `sources` to `targets`, arrays of uint64 with `sizes` in bytes."""
        arrays = (ffi.from_buffer(array) for array in (targets, sources, sizes))
        one = (len(targets), self._attributes, self._starts, 1)
        return int(self._batch(*arrays, *one, stream))

    def _find_batch(self) -> Any:
        try:
            found = self.runtime.cudaMemcpyBatchAsync
        except AttributeError:
            return None
        if self.version >= 13000:
            return found
        older = ffi.cast(_BATCH_12, ffi.addressof(self.runtime, "cudaMemcpyBatchAsync"))
        failed = ffi.new("size_t *")
        return lambda *given: older(*given[:-1], failed, given[-1])


def devices(path: str) -> list[DeviceInfo]:
    """List the GPUs that NVML sees; CUDA_VISIBLE_DEVICES may leave fewer.

    Raises:
        OSError: there is no NVML, or it fails.
    """
    nvml: Any = ffi.dlopen(path)

    def ask(name: str, *arguments: Any) -> None:
        code = getattr(nvml, name)(*arguments)
        if code:
            raise OSError(f"{name} answers {code}")

    ask("nvmlInit_v2")
    try:
        count, device = ffi.new("unsigned *"), ffi.new("void **")
        name, memory = ffi.new("char[96]"), ffi.new("nvmlMemory_t *")
        ask("nvmlDeviceGetCount_v2", count)
        found = []
        for index in range(count[0]):
            ask("nvmlDeviceGetHandleByIndex_v2", index, device)
            ask("nvmlDeviceGetName", device[0], name, 96)
            ask("nvmlDeviceGetMemoryInfo", device[0], memory)
            text = os.fsdecode(ffi.string(name))
            found.append(DeviceInfo(f"cuda:{index}", int(memory.total), text))
        return found
    finally:
        nvml.nvmlShutdown()
