"""Prompts whose layers are kept in several groups of blocks: what of them is there, what is new.

`GroupKeys` (the keys of one group), `split` (a prompt's keys -> those of its groups) - `match` (the
longest prefix that every group can give) - `find`, `insert` (entries).

Full attention looks at every block of a prefix: its blocks are chained, and a match ends at the
first that is missing. A window looks at the last blocks only: they stand alone, so that those
before them may be gone. Synchronous and deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import InputError
from flexkv.index import PrefixIndex
from flexkv.keys import Keyring, as_tokens
from flexkv.model import NO_BLOCK, BlockIds, CacheGroup, KeyArray

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Keys of one group's blocks, in prompt order; `window` counts the blocks before the end of a
    prefix that the group needs (None: all).
    """

    keys: KeyArray
    window: int | None = None

    def only(self, numbers: Any) -> GroupKeys:
        """Return those of the blocks with these numbers, None: all.

        Raises:
            InputError: they do not ascend within the prompt, or the group needs all of its blocks.
        """
        if numbers is None:
            return self
        chosen = as_tokens(numbers, name="held")
        if self.window is None:
            raise InputError("a group without a window is put as a whole: held must be None")
        if len(chosen) and (chosen[-1] >= len(self.keys) or (np.diff(chosen) < 1).any()):
            raise InputError(f"held must ascend below {len(self.keys)} blocks, got {chosen}")
        return GroupKeys(self.keys[chosen], self.window)


WHOLE = (CacheGroup(),)  # a model whose layers all share their blocks


def split(keyring: Keyring, keys: KeyArray, groups: Sequence[CacheGroup]) -> list[GroupKeys]:
    """Return the keys that the blocks of a prompt have in each group."""
    size = keyring.tokens_per_block
    return [
        GroupKeys(
            keyring.of_group(keys, group.label, alone=group.window_tokens > 0),
            -(-group.window_tokens // size) if group.window_tokens else None,
        )
        for group in groups
    ]


class Match(NamedTuple):
    """The end of a prefix, each group's blocks up to there, and how far the groups without a window
    reach.
    """

    end: int
    blocks: list[BlockIds]
    reach: int


def match(index: PrefixIndex, groups: Sequence[GroupKeys], first: int) -> Match:
    """Find the longest prefix of which every group can give what it needs, from block `first` on.

    No block is returned if it ends before.
    """
    blocks: list[BlockIds] = [np.empty(0, np.uint32)] * len(groups)
    end = min(len(group.keys) for group in groups)
    for number, group in enumerate(groups):
        if group.window is None:
            blocks[number] = index.match(group.keys[:end])
            end = len(blocks[number])
    reach, before = end, -1
    while before != end and end > first:  # what one window lacks, no other has to have
        before = end
        for number, group in enumerate(groups):
            if group.window is not None:
                end, blocks[number] = index.alone.window(group.keys[:end], first, group.window)
    if end <= first:
        return Match(end, [part[:0] for part in blocks], reach)
    chosen = [
        part[first:end] if group.window is None else part
        for group, part in zip(groups, blocks, strict=True)
    ]
    return Match(end, chosen, reach)


def joined(parts: Sequence[NDArray[_T]]) -> NDArray[_T]:
    """Put the arrays of all groups one behind the other; no copy where there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def find(index: PrefixIndex, groups: Sequence[GroupKeys]) -> BlockIds:
    """Return the entries of all keys, group by group, NO_BLOCK where there is none."""
    blocks = np.full(sum(len(group.keys) for group in groups), NO_BLOCK, np.uint32)
    start = 0
    for group in groups:
        found = index.find(group.keys) if group.window is None else index.alone.find(group.keys)
        blocks[start : start + len(found)] = found
        start += len(group.keys)
    return blocks


def insert(index: PrefixIndex, groups: Sequence[GroupKeys], blocks: BlockIds) -> None:
    """Make entries where `blocks`, as `find` returned them, have none, and fill them in.

    Raises:
        CapacityError: the index has no room for all of them; nothing was done.
    """
    index.require(int(np.count_nonzero(blocks == NO_BLOCK)))
    start = 0
    for group in groups:
        mine = blocks[start : start + len(group.keys)]  # a view
        missing = np.flatnonzero(mine == NO_BLOCK)
        if len(missing) and group.window is None:
            parent = int(mine[missing[0] - 1]) if missing[0] else NO_BLOCK
            mine[missing] = index.insert(group.keys[missing[0] :], parent)
        elif len(missing):
            mine[missing] = index.alone.insert(group.keys[missing])
        start += len(group.keys)
