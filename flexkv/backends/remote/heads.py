"""What stands before the bytes of a block in a remote store: enough to know them again.

`HEAD` (its layout) - `make_heads` (for blocks of the arena) - `judge` (bytes that came back).
Checksums are bound to keys: a block that another client put under this name, or that was damaged on
the way, is never taken for the one that was asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.memory import Arena
from flexkv.model import DAMAGED, LANDED, KeyArray, SlotIds, Statuses

MAGIC, VERSION = b"FXRB", 1
HEAD = np.dtype(
    {
        "names": ["magic", "version", "block_bytes", "depth", "checksum", "parent"],
        "formats": ["S4", "<u4", "<u4", "<u4", "<u8", ("<u8", 2)],
        "offsets": [0, 4, 8, 12, 16, 24],
        "itemsize": 64,
    }
)
Heads = NDArray[np.void]


def checksums(arena: Arena, slots: SlotIds, keys: KeyArray, block_bytes: int) -> NDArray[np.uint64]:
    """Return XXH3-64 of the blocks in arena `slots`, each seeded by its key. Lets the lock go."""
    sums = np.zeros(len(slots), np.uint64)
    slots, keys = np.ascontiguousarray(slots, np.uint32), np.ascontiguousarray(keys, np.uint64)
    lib.fx_checksum_blocks(
        arena.base,
        arena.stride_bytes,
        ffi.from_buffer("uint32_t[]", slots),
        block_bytes,
        ffi.from_buffer("uint64_t[]", keys),
        len(slots),
        ffi.from_buffer("uint64_t[]", sums),
    )
    return sums


def make_heads(
    arena: Arena, slots: SlotIds, keys: KeyArray, parents: Any, depths: Any, block_bytes: int
) -> Heads:
    """Return the heads of blocks that lie in arena `slots`."""
    heads = np.zeros(len(slots), HEAD)
    heads["magic"], heads["version"], heads["block_bytes"] = MAGIC, VERSION, block_bytes
    heads["checksum"] = checksums(arena, slots, keys, block_bytes)
    if parents is not None:
        heads["parent"], heads["depth"] = parents, depths
    return heads


def judge(
    arena: Arena, heads: Heads, slots: SlotIds, keys: KeyArray, statuses: Statuses, block_bytes: int
) -> None:
    """Turn LANDED into DAMAGED where head and bytes are not those of the key."""
    landed = np.flatnonzero(statuses == LANDED)
    if not len(landed):
        return
    found = heads[landed]
    good = (found["magic"] == MAGIC) & (found["version"] == VERSION)
    good &= found["block_bytes"] == block_bytes
    good &= found["checksum"] == checksums(arena, slots[landed], keys[landed], block_bytes)
    statuses[landed[~good]] = DAMAGED
