"""The `cuda` backend, open on the fake: `Bench` (memory on both sides, and what a copy must do)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from fake_cuda import Fake, like
from fake_cuda.backend import FakeCuda
from numpy.typing import NDArray

from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec
from flexkv.protocols import BlockCopy, Region, Services

SPEC = KVSpec.uniform(2, 2, 64, "float16", tokens_per_block=4)  # 4 KiB per block, 1 KiB segments
SLOTS, BLOCKS = 16, 16
Kind = type[FakeCuda]


class Bench:
    """An open backend, its arena, and an engine's caches ([part, block, token, head, element] per
    layer) full of random bytes, with a region of them.
    """

    def __init__(self, backend: FakeCuda, arena: Arena, device: int) -> None:
        self.backend, self.arena = backend, arena
        rng = np.random.default_rng(device)
        shape = (2, BLOCKS, 4, 2, 64)
        content = [rng.integers(0, 1 << 16, shape, np.uint16) for _ in range(SPEC.layers)]
        self.caches = [like(array, device=device, source=backend.fake()) for array in content]
        self.region = backend.make_region(self.caches, SPEC, "PBNHD")

    async def copy(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        to_device: bool,
        region: Region | None = None,
        layers: tuple[int, int] | None = None,
    ) -> None:
        """Copy between device blocks and slots."""
        ids = np.array(blocks, np.uint32), np.array(slots, np.uint32)
        await self.backend.copy(BlockCopy(region or self.region, *ids, to_device, layers))

    def block(self, number: int) -> NDArray[np.uint8]:
        """A device block's bytes in host order, by the back door."""
        parts = [cache.peek(np.s_[:, number]) for cache in self.caches]
        return np.stack(parts).view(np.uint8).ravel()

    def slot(self, number: int) -> NDArray[np.uint8]:
        """The bytes in a slot."""
        return self.arena.view(number)[: SPEC.block_bytes]

    async def saves(self, blocks: Sequence[int], slots: Sequence[int]) -> bool:
        """Whether blocks, copied to slots, are there."""
        for slot in slots:
            self.arena.view(slot)[:] = 0
        await self.copy(blocks, slots, to_device=False)
        return all(
            np.array_equal(self.slot(slot), self.block(block))
            for block, slot in zip(blocks, slots, strict=True)
        )


@contextlib.asynccontextmanager
async def opened(kind: Kind = FakeCuda, device: int = 0, **settings: Any) -> AsyncIterator[Bench]:
    """Open a backend; at the end no rule of the fake was broken, and what it took is released."""
    fake = kind.fake()
    before = fake.living()
    assert fake.violations() == []
    completions = Completions(crew_threads=1)
    arena = Arena(SLOTS, SPEC.stride_bytes, huge_pages=False)
    backend = kind()
    services = Services(completions, arena, Identity("m", spec=SPEC), settings)
    try:
        await backend.open(services)
        yield Bench(backend, arena, device)
    finally:
        await backend.aclose()
        fake.lib.fake_jitter(0)
        assert await completions.aclose(1000) == 0
        arena.close()
    left = fake.living()
    del before["memory"], left["memory"]  # the engine's
    assert left == before
    assert fake.violations() == []


def current_device(fake: Fake) -> int:
    """The calling thread's."""
    from fake_cuda import ffi

    number = ffi.new("int *")
    fake.lib.cudaGetDevice(number)
    return int(number[0])
