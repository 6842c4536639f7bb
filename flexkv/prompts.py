"""Whole prompts, for the eviction policies that want to see them.

`PromptPolicy` (the door) - `Prompts.read` (what a put keeps of its prompt), `Prompts.place` (the
numbers its blocks have got) - `show`, `placed` (the same, for a prompt of one group). Synchronous
and deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from flexkv.groups import GroupKeys
from flexkv.index import PrefixIndex
from flexkv.model import ABSENT, NO_BLOCK, BlockIds, KeyArray
from flexkv.tier import Tier


@runtime_checkable
class PromptPolicy(Protocol):
    """Optional capability of an eviction policy: it sees every prompt that is put, once and whole,
    and may refuse the blocks at its end.
    """

    def prompt(self, keys: KeyArray, known: BlockIds, now: float, output_tokens: int | None) -> int:
        """How many blocks, from the first, the tier should hold; len(keys) for all.

        `known` are the numbers of the first blocks, as far as the index has them; those that are
        READY in the tier are told to `touched` next, with the same `now`. `output_tokens` is the
        length of the answer, if somebody knows it.
        """
        ...

    def placed(self, blocks: BlockIds, first: int) -> None:
        """Hear the numbers of that prompt's new blocks; `first` blocks stand before them.

        They are told to `inserted` when their bytes are there, if ever.
        """
        ...


class Kept(NamedTuple):
    """What a put keeps of its prompt, and how many blocks at its end were refused."""

    groups: Sequence[GroupKeys]
    blocks: BlockIds
    bypassed: int


class Prompts:
    """The tiers whose policies see prompts; those of models with several groups are not shown."""

    def __init__(self, index: PrefixIndex, host: Tier) -> None:
        self._index, self._host, self._known = index, host, 0
        audiences = [index.audience(tier) for tier in range(len(index.tiers))]
        policies: list[object] = [one.policy for one in audiences if one.policy is not None]
        self._policies = len(policies)
        self.readers = [policy for policy in policies if isinstance(policy, PromptPolicy)]

    def read(
        self,
        groups: Sequence[GroupKeys],
        blocks: BlockIds,
        now: float,
        output_tokens: int | None,
    ) -> Kept:
        """Show a prompt that is put to the policies; see `show`.

        `blocks` are the entries of its keys, NO_BLOCK where there is none.
        """
        if not self.readers or len(groups) != 1 or groups[0].window is not None:
            return Kept(groups, blocks, 0)
        keys = groups[0].keys
        known = blocks[: int(np.count_nonzero(blocks != NO_BLOCK))]
        keep = self.show(keys, known, now, output_tokens)
        if keep == len(keys):
            return Kept(groups, blocks, 0)
        return Kept([GroupKeys(keys[:keep])], blocks[:keep], len(keys) - keep)

    def show(
        self, keys: KeyArray, known: BlockIds, now: float, output_tokens: int | None = None
    ) -> int:
        """How many blocks of a prompt its put keeps: what the tier that wants most of it wants, and
        what the host has anyway. `known` are the entries of its first keys.
        """
        self._known = len(known)
        wanted = [policy.prompt(keys, known, now, output_tokens) for policy in self.readers]
        keep = max(wanted) if len(wanted) == self._policies else len(keys)
        if keep < len(keys):
            absent = np.flatnonzero(self._index.states(self._host.number, known) == ABSENT)
            keep = max(keep, int(absent[0]) if len(absent) else len(known))
        return min(keep, len(keys))

    def place(self, groups: Sequence[GroupKeys], blocks: BlockIds) -> None:
        """Tell the policies the numbers of the blocks that are kept."""
        if self.readers and len(groups) == 1 and groups[0].window is None:
            self.placed(blocks[self._known :])

    def placed(self, blocks: BlockIds) -> None:
        """Tell the policies the numbers of the new blocks of the prompt shown last."""
        for policy in self.readers:
            policy.placed(blocks, self._known)
