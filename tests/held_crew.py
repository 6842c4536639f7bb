"""A crew whose threads wait until they are let go: `held`, for tests of what happens meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cffi import FFI

from flexkv._core import ffi, lib

_posix = FFI()
_posix.cdef(
    "int sem_init(void *, int, unsigned); int sem_post(void *); int sem_wait(void *);"
    "int sem_destroy(void *);"
)
_libc: Any = _posix.dlopen(None)


@contextlib.contextmanager
def held(crew: Any) -> Iterator[None]:
    """Keep every thread of the crew in a semaphore while the context lasts."""
    threads = lib.fx_crew_threads(crew)
    semaphore = _posix.new("char[64]")
    assert _libc.sem_init(semaphore, 0, 0) == 0
    address = int(_posix.cast("uintptr_t", _posix.addressof(_libc, "sem_wait")))
    work = ffi.cast("void (*)(void *)", address)
    argument = ffi.cast("void *", int(_posix.cast("uintptr_t", semaphore)))
    for _ in range(threads):
        assert lib.fx_crew_run(crew, work, argument) == 0
    _kept.append(semaphore)  # a thread may still be on its way out of it
    try:
        yield
    finally:
        for _ in range(threads):
            _libc.sem_post(semaphore)


_kept: list[Any] = []
