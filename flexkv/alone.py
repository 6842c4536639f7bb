"""Blocks that stand alone: readable without what came before them, as a sliding window needs them.

`AloneBlocks.find`, `insert`, `window`. They are entries of the index like any other, but all of
them are roots; their keys still name the whole prefix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flexkv._core import lib
from flexkv.model import BlockIds, KeyArray
from flexkv.order import U32, as_keys, done, u32, u64


class AloneBlocks:
    """The blocks of one index that stand alone."""

    __slots__ = ("_index",)

    def __init__(self, index: Any) -> None:
        self._index = index

    def find(self, keys: KeyArray) -> BlockIds:
        """Return the entry of each key, NO_BLOCK where there is none."""
        keys = as_keys(keys)
        blocks = np.empty(len(keys), U32)
        lib.fx_index_find_alone(self._index, u64(keys), len(keys), u32(blocks))
        return blocks

    def insert(self, keys: KeyArray) -> BlockIds:
        """Make an entry for each key; none of them may have one, and there must be room."""
        keys = as_keys(keys)
        blocks = np.empty(len(keys), U32)
        done(lib.fx_index_insert_alone(self._index, u64(keys), len(keys), u32(blocks)))
        return blocks

    def window(self, keys: KeyArray, first: int, window: int) -> tuple[int, BlockIds]:
        """Find the longest prefix whose window can be read.

        Returns its end, and the blocks of the last `window` keys before it (of those from `first`
        on): each is READY in some tier.
        """
        keys = as_keys(keys)
        blocks = np.empty(len(keys), U32)
        end = lib.fx_index_window(self._index, u64(keys), len(keys), first, window, u32(blocks))
        return end, blocks[max(first, end - window) : end]
