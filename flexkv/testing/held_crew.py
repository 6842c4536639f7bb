"""A crew whose threads wait until they are let go, for tests of what happens meanwhile.

`held` (every thread stands still) - `full` (and no further job fits into the queue).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from cffi import FFI

from flexkv._core import ffi, lib

_posix = FFI()
_posix.cdef(
    "int sem_init(void *, int, unsigned); int sem_post(void *); int sem_wait(void *);"
    "int sem_destroy(void *); void free(void *);"
)
_libc: Any = _posix.dlopen(None)
_kept: list[Any] = []


@contextlib.contextmanager
def held(crew: Any) -> Iterator[None]:
    """Keep every thread of the crew in a semaphore while the context lasts."""
    threads = lib.fx_crew_threads(crew)
    semaphore = _posix.new("char[64]")
    assert _libc.sem_init(semaphore, 0, 0) == 0
    argument = ffi.cast("void *", int(_posix.cast("uintptr_t", semaphore)))
    for _ in range(threads):
        assert lib.fx_crew_run(crew, _function("sem_wait"), argument) == 0
    _kept.append(semaphore)  # a thread may still be on its way out of it
    try:
        yield
    finally:
        for _ in range(threads):
            _libc.sem_post(semaphore)


@contextlib.contextmanager
def full(crew: Any, queue_depth: int) -> Iterator[None]:
    """Keep the threads of an idle crew, and fill its queue of `queue_depth` jobs with nothing."""
    with held(crew):
        queued = lib.fx_crew_threads(crew)
        while queued < lib.fx_crew_threads(crew) + queue_depth:
            if lib.fx_crew_run(crew, _function("free"), ffi.NULL) == 0:
                queued += 1
            else:
                os.sched_yield()  # a thread has not taken its semaphore yet
        yield


def _function(name: str) -> Any:
    address = int(_posix.cast("uintptr_t", _posix.addressof(_libc, name)))
    return ffi.cast("void (*)(void *)", address)
