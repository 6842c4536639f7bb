"""What the tests of the disk tier share: `Rig` (an open tier with patterned blocks), `pattern`,
`keys_of`, `ENGINES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv._core import lib
from flexkv.backends.disk import DiskBackend
from flexkv.backends.disk.engines import explain_ring
from flexkv.completion import Completions
from flexkv.memory import Arena
from flexkv.model import Identity, IOStatus, KVSpec
from flexkv.protocols import BlockIO, Services

LANDED, FAILED, DAMAGED, MISSING, SKIPPED = (int(status) for status in IOStatus)

# 5,120 bytes in slots of 8,192: what lies between is written too, but belongs to nobody
SPEC = KVSpec.uniform(layers=2, heads=1, head_size=40, tokens_per_block=16)
IDENTITY = Identity("test-model", "r1", SPEC)
_failure = lib.fx_ring_probe()
ENGINES = [
    pytest.param(
        "io_uring", marks=pytest.mark.skipif(_failure != 0, reason=explain_ring(_failure))
    ),
    "threads",
]


_noise = np.random.default_rng(0).integers(0, 1 << 63, 1 << 17, np.uint64)


def pattern(number: int, size: int = SPEC.block_bytes) -> NDArray[np.uint8]:
    """The bytes of block `number`, which differ from those of any other in every 8 of them."""
    words = _noise[: -(-size // 8)] ^ np.uint64((number + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    return words.view(np.uint8)[:size]


def keys_of(numbers: Sequence[int] | NDArray[Any]) -> NDArray[np.uint64]:
    """The keys of blocks."""
    numbers = np.asarray(numbers, np.uint64)
    return np.stack([numbers + np.uint64(1), numbers * np.uint64(0x9E3779B97F4A7C15)], axis=1)


def numbers_of(keys: NDArray[np.uint64]) -> list[int]:
    """The numbers of blocks, given their keys."""
    return [int(key) - 1 for key in keys[:, 0]]


def folders(root: Path, count: int) -> list[Path]:
    """`count` directories below `root`."""
    return [root / f"ssd{number}" for number in range(count)]


class Rig:
    """An open disk tier: `put` and `get` blocks by number; block n is the child of block n - 1."""

    def __init__(
        self,
        directories: Sequence[Path],
        slots: int = 32,
        *,
        identity: Identity = IDENTITY,
        host_slots: int = 32,
        completions: dict[str, int] | None = None,
        **settings: Any,
    ) -> None:
        self.settings = {"directories": list(directories), **settings}
        self.slots = slots
        self.identity = identity
        self.host_slots = host_slots
        self._completions = completions or {"crew_threads": 2}

    async def __aenter__(self) -> Rig:
        self.completions = Completions(**self._completions)
        self.arena = Arena(self.host_slots, self.identity.spec.stride_bytes, huge_pages=False)
        self.backend = DiskBackend()
        services = Services(self.completions, self.arena, self.identity, self.settings, self.slots)
        try:
            self.recovered = await self.backend.open(services)
        except BaseException:
            await self._close_rest()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.backend.aclose()
        await self._close_rest()

    async def _close_rest(self) -> None:
        left = await self.completions.aclose()
        self.arena.close()
        assert left == 0

    @property
    def found(self) -> dict[int, int]:
        """What opening recovered: slot by block number."""
        if self.recovered is None:
            return {}
        return dict(
            zip(numbers_of(self.recovered.keys), self.recovered.slots.tolist(), strict=True)
        )

    def batch(
        self, numbers: Sequence[int], slots: Sequence[int] | None = None, first: int = 0
    ) -> BlockIO:
        """A batch of blocks between arena slots from `first` on and `slots` (default: the
        numbers).
        """
        numbers = list(numbers)
        store = np.array(numbers if slots is None else list(slots), np.uint32)
        parents = keys_of(np.maximum(np.array(numbers, np.int64), 1) - 1)
        return BlockIO(
            np.arange(first, first + len(numbers), dtype=np.uint32),
            store,
            keys_of(numbers),
            parents,
            np.array(numbers, np.uint32),
        )

    async def put(
        self, numbers: Sequence[int], slots: Sequence[int] | None = None, first: int = 0
    ) -> list[int]:
        """Write blocks; their statuses."""
        batch = self.batch(numbers, slots, first)
        for host, number in zip(batch.host_slots, numbers, strict=True):
            self.arena.view(int(host))[: self.identity.spec.block_bytes] = pattern(
                number, self.identity.spec.block_bytes
            )
        return list((await self.backend.write(batch)).tolist())

    async def get(
        self, numbers: Sequence[int], slots: Sequence[int] | None = None, first: int = 0
    ) -> list[int]:
        """Read blocks; their statuses. Fails when a block LANDED with other bytes than its own."""
        batch = self.batch(numbers, slots, first)
        for host in batch.host_slots:
            self.arena.view(int(host))[:] = 0xEE
        statuses = list((await self.backend.read(batch)).tolist())
        for host, number, status in zip(batch.host_slots, numbers, statuses, strict=True):
            if status == LANDED:
                size = self.identity.spec.block_bytes
                assert np.array_equal(self.arena.view(int(host))[:size], pattern(number, size))
        return statuses

    async def drop(self, numbers: Sequence[int], slots: Sequence[int] | None = None) -> list[int]:
        """Discard blocks; their statuses."""
        return list((await self.backend.discard(self.batch(numbers, slots))).tolist())
