"""Retention hints: prompts whose blocks should stay while others leave; a bias, never a lock.

`Hints.retain` (say how much a prompt is worth, and until when; again: anew; nothing: no more) -
`Hints.advance` (time passes, hints end) - `weight_of` (priority and steps as one number) -
`RetainLimits` (what hints may take) - `HintTree` (prompts that share their beginnings).

A block weighs as much as the heaviest live hint on a prompt that it begins: ancestors weigh no less
than their descendants, and of agents that share a block the one that runs soonest counts. Hints on
blocks that are not there wait for them. Which blocks of a tier are held is up to `flexkv.holds`.
Synchronous and deterministic: `now` is an argument.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from flexkv import groups as grouped
from flexkv.errors import InputError
from flexkv.groups import GroupKeys
from flexkv.holds import Holds
from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, KeyArray
from flexkv.tier import Tier

MAX_PRIORITY, ORDINARY = 100, 50
_NEAR = 1 << 16  # steps that are told apart


@dataclass(frozen=True, slots=True)
class RetainLimits:
    """What hints may take: a share of each tier, so many blocks in the table whether they are there
    or not, so many seconds (`ttl_s` if a hint names none).
    """

    share: float = 0.5
    blocks: int = 1 << 17
    ttl_s: float = 300.0
    max_ttl_s: float = 3600.0


def weight_of(priority: int | None, steps: int | None) -> int:
    """Return the weight of a hint, 0 for none: priority first, then fewer steps to execution.

    Without a priority it is that of an ordinary hint, 50, or with `steps` 0: those alone count.

    Raises:
        InputError: priority is not in 0..100, steps is negative, or one is not a whole number.
    """
    for name, value in (("priority", priority), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer | None):
            raise InputError(f"{name} must be a whole number, got {value!r}")
    if priority is None:
        priority = ORDINARY if steps is None else 0
    if not 0 <= priority <= MAX_PRIORITY:
        raise InputError(f"priority must be 0 (no hint) to {MAX_PRIORITY}, got {priority}")
    if steps is not None and steps < 0:
        raise InputError(f"steps (to the execution that needs the prefix) must be >= 0: {steps}")
    soon = 0 if steps is None else _NEAR - min(int(steps), _NEAR - 1)
    return int(priority) * 2 * _NEAR + soon


class _Segment:
    """A run of keys that belongs to the same hints, and how often each weight occurs there."""

    __slots__ = ("best", "keys", "weights")

    def __init__(self, keys: list[int], weights: dict[int, int], best: int) -> None:
        self.keys, self.weights, self.best = keys, weights, best


class HintTree:
    """Weights of the blocks of prompts, by the low half of their keys; prompts are added and taken
    back in time that hardly depends on their length.
    """

    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}  # by each of its keys

    def __len__(self) -> int:
        return len(self._segments)

    def weight(self, key: int) -> int:
        """Return the weight of a block, 0 if no hint covers it."""
        found = self._segments.get(key)
        return 0 if found is None else found.best

    def add(self, path: list[int], weight: int) -> None:
        """Enter a prompt, all of its keys in order."""
        at = 0
        while at < len(path):
            segment = self._segments.get(path[at])
            if segment is None:
                segment = _Segment(path[at:], {}, 0)
                self._segments.update(dict.fromkeys(segment.keys, segment))
            else:
                self._split(segment, _common(segment.keys, path, at))
            segment.weights[weight] = segment.weights.get(weight, 0) + 1
            segment.best = max(segment.best, weight)
            at += len(segment.keys)

    def take(self, path: list[int], weight: int) -> None:
        """Take back a prompt that was added with this weight."""
        at = 0
        while at < len(path):
            segment = self._segments[path[at]]
            at += len(segment.keys)
            segment.weights[weight] -= 1
            if segment.weights[weight]:
                continue
            del segment.weights[weight]
            if segment.weights:
                segment.best = max(segment.weights)
                continue
            for key in segment.keys:
                del self._segments[key]

    def weights(self, path: list[int]) -> NDArray[np.int32]:
        """Return the weights of the blocks of a prompt, whether it is there or not."""
        found, at = np.zeros(len(path), np.int32), 0
        while at < len(path) and (segment := self._segments.get(path[at])) is not None:
            common = _common(segment.keys, path, at)
            found[at : at + common] = segment.best
            at += common
            if common < len(segment.keys):  # here the prompt parts from those that are there
                break
        return found

    def _split(self, segment: _Segment, length: int) -> None:
        """Cut a segment so that it has `length` keys; the rest is another one."""
        if length < len(segment.keys):
            rest = _Segment(segment.keys[length:], dict(segment.weights), segment.best)
            self._segments.update(dict.fromkeys(rest.keys, rest))
            del segment.keys[length:]


def _common(keys: list[int], path: list[int], at: int) -> int:
    """How many of the first keys stand in `path` from `at` on. Keys are chained: where one differs,
    all later ones do.
    """
    low, high = 1, min(len(keys), len(path) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == path[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class _Hint:
    """A hint that is alive: its prompt, group by group; `serial` tells it from earlier ones."""

    groups: Sequence[GroupKeys]
    name: bytes
    weight: int
    ends_at: float
    blocks: int
    serial: int


class Hints:
    """The hints of a brain, and what they make of its tiers."""

    def __init__(
        self, index: PrefixIndex, tiers: Sequence[Tier], limits: RetainLimits | None = None
    ) -> None:
        self.limits = limits or RetainLimits()
        self.due = math.inf  # when the next hint ends
        self.blocks = self.dropped = 0  # in the table; of hints that found no room there, ever
        self._index, self._tiers, self._tree = index, tiers, HintTree()
        self.holds: dict[str, Holds] = {}  # by tier, while there are hints
        self._hints: dict[bytes, _Hint] = {}
        self._serial = 0
        self._ends: list[tuple[float, int, bytes]] = []  # heaps; of hints that are no more, too
        self._least: list[tuple[int, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._hints)

    def retain(
        self,
        groups: Sequence[GroupKeys],
        now: float,
        *,
        priority: int | None = None,
        ttl_s: float | None = None,
        steps: int | None = None,
    ) -> bool:
        """Keep the blocks of a prompt while others leave; see `KVManager.retain`. Returns whether
        there is a hint on the prompt now.

        Raises:
            InputError: an argument is out of its range.
        """
        weight = weight_of(priority, steps)
        life_s = self.limits.ttl_s if ttl_s is None else ttl_s
        if not isinstance(life_s, int | float) or not life_s >= 0:
            raise InputError(f"ttl_s must be >= 0 seconds, got {ttl_s!r}")
        self.advance(now)
        groups = [_needed(group) for group in groups]
        name = b"".join(group.keys[-1:].tobytes() for group in groups)
        old = self._hints.get(name)
        if old is not None:
            self._forget(old)
        hint: _Hint | None = None
        blocks = sum(len(group.keys) for group in groups)
        if weight and life_s and blocks:
            ends_at = now + min(life_s, self.limits.max_ttl_s)
            self._serial += 1
            hint = _Hint(groups, name, weight, ends_at, blocks, self._serial)
            self._enter(hint)
        self._weigh(groups)
        self._tidy()
        return hint is not None and self._hints.get(name) is hint

    def advance(self, now: float) -> None:
        """End the hints whose time is over."""
        if now < self.due:
            return
        while self._ends and self._ends[0][0] <= now:
            _, serial, name = heapq.heappop(self._ends)
            hint = self._hints.get(name)
            if hint is not None and hint.serial == serial:
                self._forget(hint)
                self._weigh(hint.groups)
        self._tidy()

    def clear(self) -> None:
        """Forget all hints."""
        for hint in list(self._hints.values()):
            self._forget(hint)
            self._weigh(hint.groups)
        self._tidy()

    def live(self) -> list[tuple[Sequence[GroupKeys], int, float]]:
        """Return (prompt, weight, end in seconds) of every hint, oldest first."""
        return [(hint.groups, hint.weight, hint.ends_at) for hint in self._hints.values()]

    def count(self, tier: str, what: Literal["hinted", "held"]) -> int:
        """How many blocks of a tier are hinted, or held."""
        holds = self.holds.get(tier)
        return 0 if holds is None else int(getattr(holds, what))

    def _enter(self, hint: _Hint) -> None:
        """Add a hint; the lightest ones go when there are too many blocks."""
        self._hints[hint.name] = hint
        self.blocks += hint.blocks
        for group in hint.groups:
            for path in _paths(group):
                self._tree.add(path, hint.weight)
        heapq.heappush(self._ends, (hint.ends_at, hint.serial, hint.name))
        heapq.heappush(self._least, (hint.weight, hint.serial, hint.name))
        while self.blocks > self.limits.blocks:
            _, serial, name = heapq.heappop(self._least)
            found = self._hints.get(name)
            if found is not None and found.serial == serial:
                self._forget(found)
                self._weigh(found.groups)
                self.dropped += found.blocks

    def _forget(self, hint: _Hint) -> None:
        del self._hints[hint.name]
        self.blocks -= hint.blocks
        for group in hint.groups:
            for path in _paths(group):
                self._tree.take(path, hint.weight)

    def _weigh(self, groups: Sequence[GroupKeys]) -> None:
        """Tell the tiers what the blocks of a prompt weigh now."""
        if self._hints and not self.holds:
            self._open()
        if not self.holds:
            return
        blocks = grouped.find(self._index, groups)
        paths = [path for group in groups for path in _paths(group)]
        weights = np.concatenate([self._tree.weights(path) for path in paths] or [_NOTHING])
        there = blocks != NO_BLOCK
        for holds in self.holds.values():
            holds.assign(blocks[there], weights[there])

    def _open(self) -> None:
        share, index = self.limits.share, self._index
        for tier in self._tiers:
            holds = Holds(index, tier.number, int(share * tier.capacity), self._tree)
            self.holds[tier.name] = holds
            holds.open()

    def _tidy(self) -> None:
        """Keep what belongs to hints that are no more within bounds; without hints, nothing."""
        if len(self._ends) > 2 * len(self._hints) + 64 or len(self._least) > len(self._ends) + 64:
            hints = self._hints.values()
            self._ends = [(hint.ends_at, hint.serial, hint.name) for hint in hints]
            self._least = [(hint.weight, hint.serial, hint.name) for hint in hints]
            heapq.heapify(self._ends)
            heapq.heapify(self._least)
        if not self._hints:
            self._ends.clear()
            self._least.clear()
            for holds in self.holds.values():
                holds.close()
            self.holds.clear()
        self.due = self._ends[0][0] if self._ends else math.inf


_NOTHING = np.empty(0, np.int32)


def _needed(group: GroupKeys) -> GroupKeys:
    """What a match that ends with the prompt needs of a group."""
    if group.window is None:
        return group
    return GroupKeys(group.keys[max(0, len(group.keys) - group.window) :], group.window)


def _paths(group: GroupKeys) -> list[list[int]]:
    """The keys of a group's blocks in the tree: one path, but for blocks that stand alone."""
    keys: list[int] = _low(group.keys)
    return [keys] if group.window is None else [[key] for key in keys]


def _low(keys: KeyArray) -> list[int]:
    low: list[int] = keys[:, 0].tolist()
    return low
