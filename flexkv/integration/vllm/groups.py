"""vLLM's KV cache groups, as the scheduler's side sees them: what a load fills, what a save finds.

`GroupTable.to_load`, `to_save`, `give_back` - `keep_window`. All groups take their blocks from one
pool. A group of full attention has a block for every position of a request; a window has blocks
near its end only, and block 0 stands where one has been given up. Given-up blocks keep their
content until somebody takes them: vLLM's pool still knows those that it could hit itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.integration.vllm.geometry import Geometry

NULL_BLOCK = 0


@dataclass(slots=True)
class Found:
    """Blocks to save, group by group: their numbers within the request (None: all of them), their
    places on the device, and those of vLLM's blocks that are held for the sake of the save.
    """

    held: list[NDArray[np.int64] | None] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class GroupTable:
    """The groups of one engine."""

    def __init__(self, geometry: Geometry) -> None:
        self.by_block = geometry.by_block
        self.cache = tuple(group.cache for group in geometry.groups)
        self._size = geometry.tokens_per_block
        self._groups = [
            (group.number, -(-group.cache.window_tokens // self._size) or None)
            for group in geometry.groups
        ]
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool, to find blocks there that requests have given up."""
        if getattr(pool, "enable_caching", False) and pool.hash_block_size == self._size:
            self._pool = pool

    def keep_window(self, request: Any, tokens: int) -> None:
        """Have vLLM keep the window before the first `tokens` tokens of a request when it moves on:
        others share them, and only their window is missing (vLLM >= 0.30 drops it by default).
        """
        if tokens > getattr(request, "shared_prefix_boundary", tokens):
            request.shared_prefix_boundary = tokens

    def to_load(self, ids: Sequence[Sequence[int]], first: int, last: int) -> list[list[int]]:
        """Return the device blocks of each group that a load of blocks [first, last) fills."""
        return [
            list(ids[number][first if window is None else max(first, last - window) : last])
            for number, window in self._groups
        ]

    def to_save(
        self, request: Any, ids: Sequence[Sequence[int]], count: int, ends: Iterable[int]
    ) -> Found:
        """Find the first `count` blocks of a request, and of windows those before `count` and
        before each of `ends`, if the whole window is there.
        """
        found, last = Found(), {count, *(end for end in ends if 0 < end < count)}
        for number, window in self._groups:
            if window is None:
                found.held.append(None)
                found.blocks += ids[number][:count]
                continue
            here: dict[int, int] = {}
            for end in sorted(last):
                here |= self._window(
                    request, ids[number], number, range(max(0, end - window), end), found
                )
            found.held.append(np.array(sorted(here), np.int64))
            found.blocks += [here[position] for position in sorted(here)]
        return found

    def complete(self, ids: Sequence[Sequence[int]], count: int) -> int:
        """Return how many of `count` blocks every group without a window has."""
        return min([count, *(len(ids[n]) for n, window in self._groups if window is None)])

    def give_back(self, kept: list[Any]) -> None:
        """Let vLLM have the blocks again that were held for a save, the last ones first."""
        if kept:
            self._pool.free_blocks(reversed(kept))
            kept.clear()

    def _window(
        self, request: Any, table: Sequence[int], number: int, positions: range, found: Found
    ) -> dict[int, int]:
        """Blocks by position; none if one is missing."""
        here, kept = {}, []
        for position in positions:
            block = table[position] if position < len(table) else NULL_BLOCK
            if block == NULL_BLOCK:
                cached = self._cached(request, position, number)
                if cached is None:
                    return {}
                kept.append(cached)
                block = cached.block_id
            here[position] = int(block)
        if kept:
            self._pool.touch(kept)
            found.kept += kept
        return here

    def _cached(self, request: Any, position: int, number: int) -> Any:
        """A block that the pool knows and nobody has: then nobody can be about to write it."""
        if self._pool is None or position >= len(request.block_hashes):
            return None
        cached = self._pool.get_cached_block(request.block_hashes[position], [number])
        return cached[0] if cached and not cached[0].ref_cnt else None
