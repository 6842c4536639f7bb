"""Mooncake's Transfer Engine by itself, as a yardstick: `bare_engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module

import numpy as np

from flexkv.cluster.mooncake_courier import parse
from flexkv.errors import StorageError


@contextmanager
def bare_engine(
    place: str, size: int, count: int, batch: int, connections: int
) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Read `count` neighbouring blocks of `size` bytes from the arena at `place`, `batch` at a time
    in `connections` threads.

    Yields two actions: seconds of everything, and of one block.
    """
    session, base = parse(place)
    room = np.ones(count * size, np.uint8)
    here = room.__array_interface__["data"][0]
    engine = import_module("mooncake.engine").TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    if code or engine.register_memory(here, room.nbytes):
        raise StorageError(f"Mooncake's engine cannot be set up: {code}")

    def fetch(at: int, blocks: int) -> None:
        offsets = [number * size for number in range(at, min(at + blocks, count))]
        targets, sources = [here + o for o in offsets], [base + o for o in offsets]
        sizes = [size] * len(offsets)
        if code := engine.batch_transfer_sync_read(session, targets, sources, sizes):
            raise StorageError(f"Mooncake's engine answered {code}")

    def everything() -> float:
        began = time.perf_counter()
        for done in [pool.submit(fetch, at, batch) for at in range(0, count, batch)]:
            done.result()
        return time.perf_counter() - began

    def one() -> float:
        began = time.perf_counter()
        fetch(0, 1)
        return time.perf_counter() - began

    with ThreadPoolExecutor(connections) as pool:
        yield everything, one
    engine.unregister_memory(here)
    room.fill(0)  # it lives until here
