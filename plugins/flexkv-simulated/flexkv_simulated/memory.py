"""Device memory and its tensors: the host holds their addresses, and cannot touch what is there.

`allocate` (shape and dtype -> DeviceTensor) - `like` (the same shape, strides and content as an
array) - `Memory` (one allocation; `open_memory` maps that of another process) - `find` (which
memory an address belongs to). The back door for tests, slow and never used by a copy:
`DeviceTensor.peek` and `poke`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import CapacityError, LayoutError
from flexkv_simulated._native import ffi, lib

# numpy has no bfloat16 and no fp8: words of their size take their place behind the back door
_WORDS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


class Memory:
    """One allocation of device memory: `address` is what the host sees, `fd` its file.

    It is given back when the last tensor or region on it is gone.
    """

    def __init__(self, size_bytes: int, fd: int = -1) -> None:
        self._native = ffi.gc(ffi.new("sim_memory *"), lib.sim_memory_close)
        self._native.fd = -1
        error = lib.sim_memory_open(fd, size_bytes, self._native)
        if error:
            raise CapacityError(
                f"no {size_bytes} bytes of simulated device memory: {os.strerror(-error)}"
            )
        self.size_bytes = size_bytes
        _memories[self.address] = self

    @property
    def address(self) -> int:
        """Where the host sees the memory; touching it there is a segmentation fault."""
        return int(self._native.address)

    @property
    def fd(self) -> int:
        """The memory as a file; it stays ours."""
        return int(self._native.fd)

    @property
    def shift(self) -> int:
        """What copy engines add to an address."""
        return int(self._native.alias) - self.address

    def window(self) -> NDArray[np.uint8]:
        """Return the bytes as the engines see them, valid while this object lives: back door."""
        return np.frombuffer(
            ffi.buffer(ffi.cast("char *", self._native.alias), self.size_bytes), np.uint8
        )


# what an address may belong to
_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


def open_memory(fd: int) -> Memory:
    """Map the device memory of another process; `fd` may be closed afterwards.

    Raises:
        CapacityError: it cannot be mapped.
    """
    return Memory(os.fstat(fd).st_size, fd)


def find(low: int, high: int) -> Memory:
    """Return the memory that covers the half-open range of addresses.

    Raises:
        LayoutError: no memory of the device does.
    """
    for memory in list(_memories.values()):
        if memory.address <= low and high <= memory.address + memory.size_bytes:
            return memory
    raise LayoutError(f"addresses {low:#x}..{high:#x} are not memory of the simulated device")


class DeviceTensor:
    """A tensor in device memory, with the questions that torch tensors answer: `shape`, `dtype`,
    `device.type`, `data_ptr()`, `element_size()`, `stride()` (in elements).

    It is no array: numpy refuses it, and its address is closed to the host.
    """

    device = SimpleNamespace(type="simulated", index=0)

    def __init__(
        self,
        memory: Memory,
        shape: Sequence[int],
        dtype: str,
        strides_bytes: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self.memory, self.shape, self.dtype = memory, tuple(shape), dtype
        self._word = np.dtype(_WORDS.get(dtype, dtype))
        self._strides, self._offset = tuple(strides_bytes), offset_bytes

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        return self.memory.address + self._offset

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return int(self._word.itemsize)

    def stride(self) -> tuple[int, ...]:
        """Return the steps between elements of each dimension, in elements."""
        return tuple(step // self._word.itemsize for step in self._strides)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of the simulated device is no array: peek() copies its bytes")

    def peek(self, index: Any = ()) -> NDArray[Any]:
        """Return a copy of (a part of) the content, by the back door."""
        return np.array(self._view()[index])

    def poke(self, content: Any, index: Any = ()) -> None:
        """Write (a part of) the content, by the back door."""
        self._view()[index] = content

    def _view(self) -> NDArray[Any]:
        return np.ndarray(self.shape, self._word, self.memory.window(), self._offset, self._strides)


def allocate(shape: Sequence[int], dtype: str, *, order: Sequence[int] | None = None) -> Any:
    """Return a tensor of zeros in device memory.

    Args:
        dtype: a name such as "bfloat16" or "uint8".
        order: dimensions from the outermost in memory to the innermost; None: as they are.

    Raises:
        CapacityError: the machine has no room for it.
    """
    word = np.dtype(_WORDS.get(dtype, dtype)).itemsize
    strides, step = [0] * len(shape), word
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= shape[axis]
    return DeviceTensor(Memory(step), shape, dtype, strides)


def like(array: NDArray[Any], dtype: str | None = None) -> DeviceTensor:
    """Return a tensor in device memory with the shape, the strides and the content of `array`.

    `dtype` names what numpy cannot (a uint16 array may stand for bfloat16).
    """
    steps = list(zip(array.shape, array.strides, strict=True))
    low = sum(min(0, stride * (count - 1)) for count, stride in steps)
    high = sum(max(0, stride * (count - 1)) for count, stride in steps)
    memory = Memory(high - low + array.itemsize)
    made = DeviceTensor(memory, array.shape, dtype or str(array.dtype), array.strides, -low)
    made.poke(array)
    return made
