"""Host memory that the GPU reaches by itself: registered once per process, in chunks.

`Pins.take` (an arena; chunks end between slots, because one copy may not cross the edge of a
registration) - `give_back` - `Scratch` (small pieces of such memory, for what kernels are told).
"""

from __future__ import annotations

import mmap
import threading
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flexkv.backends.cuda.library import Cuda, CudaError, ffi
from flexkv.errors import CapacityError

_PAGE = mmap.PAGESIZE
_FLAGS = 1 | 2  # for all contexts; at an address that kernels can use
PIECE_BYTES, PIECES = 64 << 10, 64


class Pins:
    """Registrations of this process, counted: two backends may share an arena."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _taken: ClassVar[dict[tuple[int, int], tuple[int, list[int]]]] = {}

    @classmethod
    def take(cls, cuda: Cuda, address: int, size_bytes: int, chunk_bytes: int) -> None:
        """Register a range of memory; takes about a second for every 4 GiB, so not on the loop.

        Raises:
            CapacityError: the system or the driver refuses; nothing stays registered.
        """
        with cls._lock:
            users, chunks = cls._taken.get((address, size_bytes), (0, []))
            if not users:
                chunks = _register(cuda, address, size_bytes, chunk_bytes)
            cls._taken[address, size_bytes] = users + 1, chunks

    @classmethod
    def give_back(cls, cuda: Cuda, address: int, size_bytes: int) -> None:
        """Undo a `take`; the last one unregisters, also in a context that is lost."""
        with cls._lock:
            users, chunks = cls._taken.pop((address, size_bytes))
            if users > 1:
                cls._taken[address, size_bytes] = users - 1, chunks
                return
            for chunk in chunks:
                cuda.runtime.cudaHostUnregister(chunk)


def chunk_slots(stride_bytes: int, chunk_bytes: int) -> int:
    """Slots of a chunk: as many as fit, such that chunks begin at pages."""
    pages = _PAGE // int(np.gcd(_PAGE, stride_bytes))
    return max(pages, chunk_bytes // (stride_bytes * pages) * pages)


def _register(cuda: Cuda, address: int, size_bytes: int, chunk_bytes: int) -> list[int]:
    done: list[int] = []
    for at in range(address, address + size_bytes, chunk_bytes):
        size = min(chunk_bytes, address + size_bytes - at)
        try:
            cuda.call("cudaHostRegister", at, size, _FLAGS)
        except CudaError as error:
            for chunk in done:
                cuda.runtime.cudaHostUnregister(chunk)
            raise CapacityError(
                f"cannot pin {size_bytes} bytes of host memory ({len(done)} chunks of "
                f"{chunk_bytes} went well): {error}; lower the host tier's size, or raise the "
                "limit of locked memory"
            ) from error
        done.append(at)
    return done


class Scratch:
    """Pieces of PIECE_BYTES in registered memory: `take` and `give` are for the loop's thread."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        memory = mmap.mmap(-1, PIECE_BYTES * PIECES)
        self._bytes = np.frombuffer(memory, np.uint8)
        self.base = int(self._bytes.__array_interface__["data"][0])
        cuda.call("cudaHostRegister", self.base, len(self._bytes), _FLAGS)
        self._free = list(range(PIECES))

    def reaches(self) -> bool:
        """Whether kernels find this memory, and the arena's, where the host does."""
        place = ffi.new("uintptr_t *")
        code = self._cuda.runtime.cudaHostGetDevicePointer(place, self.base, 0)
        return not code and place[0] == self.base

    def take(self) -> int | None:
        """The number of a free piece, None when all are in use."""
        return self._free.pop() if self._free else None

    def give(self, piece: int) -> None:
        """Have a piece back."""
        self._free.append(piece)

    def place(self, piece: int) -> tuple[int, NDArray[np.uint8]]:
        """Address and bytes of a piece."""
        at = piece * PIECE_BYTES
        return self.base + at, self._bytes[at : at + PIECE_BYTES]

    def close(self) -> None:
        """Unregister the memory."""
        self._cuda.runtime.cudaHostUnregister(self.base)
