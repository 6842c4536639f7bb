"""vLLM's KV cache groups, as the scheduler's side sees them: what a load fills, what a save finds.

`GroupTable.to_load`, `to_save`, `give_back` - `keep_window`. All groups take their blocks from one
pool. A group of full attention has a block for every position of a request; a window has blocks
near its end only, and block 0 stands where one has been given up. Given-up blocks keep their
content until somebody takes them: vLLM's pool still knows those that it could hit itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import TransferError
from flexkv.integration.vllm.geometry import Geometry
from flexkv.integration.vllm.requests import Work
from flexkv.model import KeyArray
from flexkv.transfer import Plan

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
        """Find the first `count` blocks of a request; of windows, those before the last of them and
        before each of `ends` (tokens), if the whole window is there.
        """
        blocks = (tokens // self._size for tokens in ends)
        found, last = Found(), {count, *(end for end in blocks if 0 < end < count)}
        for number, window in self._groups:
            if window is None:
                found.held.append(None)
                found.blocks += ids[number][:count]
                continue
            here: dict[int, int] = {}
            for end in sorted(last):
                table, span = ids[number], range(max(0, end - window), end)
                self._add_window(request, table, number, span, here, found)
            found.held.append(np.array(sorted(here), np.int64))
            found.blocks += [here[position] for position in sorted(here)]
        return found

    def loaded(self, plan: Plan) -> Iterator[tuple[KeyArray, int, int]]:
        """Yield the keys of a load by stretches: keys, number of the first block, vLLM's group."""
        start, end = 0, (plan.offset + plan.matched) // self._size
        for (number, _), tokens in zip(self._groups, plan.parts, strict=True):
            count = tokens // self._size
            yield plan.keys[start : start + count], end - count, number
            start += count

    def saved(
        self, keys: KeyArray, held: Sequence[NDArray[np.int64] | None] | None
    ) -> Iterator[tuple[KeyArray, int, int]]:
        """Yield the keys of a save likewise."""
        left = len(keys) - sum(0 if some is None else len(some) for some in held or ())
        chained = [number for number, window in self._groups if window is None]
        start = 0
        for (number, _), some in zip(self._groups, held or (None,), strict=True):
            if some is None:
                count = left // len(chained)
                yield keys[start : start + count], 0, number
                start += count
                continue
            for stretch in np.split(some, np.flatnonzero(np.diff(some) > 1) + 1):
                if len(stretch):
                    yield keys[start : start + len(stretch)], int(stretch[0]), number
                    start += len(stretch)

    def check(self, plan: Plan, load: Work) -> None:
        """See that a plan brings what a load of several groups needs; else cancel it.

        Raises:
            TransferError: blocks have left the cache since it was asked, or vLLM gave none.
        """
        if not self.by_block and (plan.parts != load.parts or NULL_BLOCK in load.blocks):
            plan.cancel()
            raise TransferError(f"a hybrid load needs {load.parts} tokens, found {plan.parts}")

    def complete(self, ids: Sequence[Sequence[int]], count: int) -> int:
        """Return how many of `count` blocks every group without a window has."""
        return min([count, *(len(ids[n]) for n, window in self._groups if window is None)])

    def give_back(self, kept: list[Any]) -> None:
        """Let vLLM have the blocks again that were held for a save, the last ones first."""
        if kept:
            self._pool.free_blocks(reversed(kept))
            kept.clear()

    def _add_window(
        self,
        request: Any,
        table: Sequence[int],
        number: int,
        span: range,
        here: dict[int, int],
        found: Found,
    ) -> None:
        """Add the blocks of a window to those by position; nothing if one is missing."""
        blocks, kept = {}, []
        for position in span:
            block = here.get(position, NULL_BLOCK)
            if block == NULL_BLOCK and position < len(table):
                block = int(table[position])
            if block == NULL_BLOCK:
                cached = self._cached(request, position, number)
                if cached is None:
                    return
                kept.append(cached)
                block = int(cached.block_id)
            blocks[position] = block
        if kept:
            self._pool.touch(kept)
            found.kept += kept
        here |= blocks

    def _cached(self, request: Any, position: int, number: int) -> Any:
        """A block that the pool knows and nobody has: then nobody can be about to write it."""
        if self._pool is None or position >= len(request.block_hashes):
            return None
        cached = self._pool.get_cached_block(request.block_hashes[position], [number])
        return cached[0] if cached and not cached[0].ref_cnt else None
