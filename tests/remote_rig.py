"""A remote store by itself, open on a small arena: `opened`, and batches of known bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from flexkv.backends.remote.store import RemoteStore
from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import LANDED, Identity, KVSpec
from flexkv.protocols import BlockIO, Services

SPEC = KVSpec.uniform(2, 2, 64, tokens_per_block=16)
BLOCKS = 8


class Opened:
    def __init__(self, store: RemoteStore, services: Services) -> None:
        self.store, self.arena, self.services = store, services.arena, services

    def batch(self, numbers: list[int]) -> BlockIO:
        count = len(numbers)
        keys = np.array([(number + 1, 77) for number in numbers], np.uint64)
        slots = np.arange(count, dtype=np.uint32)
        return BlockIO(slots, slots, keys, np.zeros((count, 2), np.uint64), slots)

    async def write(self, numbers: list[int]) -> list[int]:
        for slot, number in enumerate(numbers):
            self.arena.view(slot)[:] = number
        return (await self.store.write(self.batch(numbers))).tolist()

    async def ask(self, numbers: list[int]) -> list[int]:
        """Read, and look at the statuses only."""
        return (await self.store.read(self.batch(numbers))).tolist()

    async def read(self, numbers: list[int]) -> list[int]:
        for slot in range(len(numbers)):
            self.arena.view(slot)[:] = 255
        statuses = await self.ask(numbers)
        for slot, (number, status) in enumerate(zip(numbers, statuses, strict=True)):
            if status == LANDED:
                assert (self.arena.view(slot)[: SPEC.block_bytes] == number).all()
        return statuses


@asynccontextmanager
async def opened(kind: type[RemoteStore], **settings: Any) -> AsyncIterator[Opened]:
    completions = Completions(crew_threads=1)
    arena = Arena(BLOCKS, SPEC.stride_bytes, huge_pages=False)
    chosen = {"timeout_ms": 300, "retry_ms": 50} | settings
    services = Services(completions, arena, Identity("remote-test", "", SPEC), chosen)
    store = kind()
    await store.open(services)
    try:
        yield Opened(store, services)
    finally:
        await store.aclose()
        assert completions.in_flight == 0
        assert not await completions.aclose(1000)
        arena.close()


NUMBERS = list(range(BLOCKS))
