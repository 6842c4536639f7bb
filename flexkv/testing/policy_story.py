"""Random stories of one tier, told to a policy whose every answer is checked against a model.

`Story`: `tell` (random steps) - `put`, `hit`, `drop`, `evict`, `ask`, `pin_all`, `unpin_all`
(single ones). The model is a set of resident blocks, their parents and pins, kept apart from the
index.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, BlockIds
from flexkv.testing.guard import require
from flexkv.testing.harness import PolicyHarness

CAPACITY = 48
VICTIMS = "EvictionPolicy.victims"


class Story:
    """A tier of `CAPACITY` blocks and one policy, opened.

    Args:
        seed: of everything random.
        step: seconds from one step to the next.
    """

    def __init__(
        self,
        harness: PolicyHarness,
        seed: int,
        *,
        step: float = 1.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.policy = harness.make()
        self.index = PrefixIndex(2 * CAPACITY, ["host"])
        chosen = {**harness.options, **(settings or {})}
        self.index.set_policy(0, self.policy, chosen, capacity_blocks=CAPACITY)
        self.resident: set[int] = set()
        self.parent: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.now, self._step = 0.0, step
        self._fresh = itertools.count(1)

    def tell(self, steps: int, *, keep: bool = True) -> list[list[int]]:
        """Take random steps; every answer of the policy is checked, and returned if `keep`."""
        answers: list[list[int]] = []
        for _ in range(steps):
            self.now += self._step
            deed = self.rng.choice(["put", "put", "hit", "hit", "pin", "unpin", "drop", "evict"])
            chains = sorted(self.resident)
            if deed == "put":
                self._put_somewhere(chains, answers if keep else [])
            elif deed == "unpin" and self.pins:
                self._unpin(self._path(self.rng.choice(sorted(self.pins))))
            elif deed == "evict":
                gone = self.evict(self.rng.choice([1, 2, 7])).tolist()
                if keep:
                    answers.append(gone)
            elif chains:
                path = self._path(self.rng.choice(chains))
                if deed == "hit":
                    self.hit(path)
                elif deed == "pin":
                    self._pin(path)
                elif deed == "drop":
                    self._drop_end(path)
        return answers

    def _put_somewhere(self, chains: list[int], answers: list[list[int]]) -> None:
        parent = self.rng.choice([None, *chains]) if chains else None
        path = [] if parent is None else self._path(parent)
        count = self.rng.randint(1, 6)
        self._pin(path)  # a put does not evict what it builds on
        while len(self.resident) + count > CAPACITY:
            gone = self.evict(len(self.resident) + count - CAPACITY)
            if not len(gone):
                break
            answers.append(gone.tolist())
        else:
            self.put(parent, count)
        self._unpin(path)

    def put(self, parent: int | None, count: int) -> list[int]:
        """Add a chain of new blocks below `parent`; they became readable now."""
        keys = np.array([[next(self._fresh), 7] for _ in range(count)], np.uint64)
        blocks = self.index.insert(keys, NO_BLOCK if parent is None else parent)
        self.index.land(0, blocks, blocks)
        chain: list[int] = blocks.tolist()
        for above, block in zip([parent, *chain], chain, strict=False):
            self.parent[block] = NO_BLOCK if above is None else above
        self.resident |= set(chain)
        self.index.ready(0, blocks, self.now)
        return chain

    def hit(self, path: list[int]) -> None:
        """Say that blocks, in prompt order, were used."""
        self.index.touch(np.array(path, np.uint32), self.now)

    def drop(self, blocks: list[int]) -> None:
        """Take blocks out, in this order."""
        self.resident -= set(blocks)
        self.index.drop(0, np.array(blocks, np.uint32))

    def ask(self, count: int) -> BlockIds:
        """Ask for victims and check the answer; nothing leaves."""
        __tracebackhide__ = True
        answer = self.policy.victims(count, lambda blocks: self.index.evictable(0, blocks))
        self._check(answer, count)
        return np.asarray(answer, np.uint32)

    def evict(self, count: int) -> BlockIds:
        """Ask for victims, check the answer, and take them out."""
        __tracebackhide__ = True
        answer = self.ask(count)
        self.drop(answer.tolist())
        return answer

    def pin_all(self) -> None:
        """Pin every block once."""
        self._pin(sorted(self.resident))

    def unpin_all(self) -> None:
        """Take all pins back."""
        for block, times in list(self.pins.items()):
            for _ in range(times):
                self._unpin([block])

    def _check(self, answer: Any, count: int) -> None:
        __tracebackhide__ = True
        array = np.asarray(answer)
        shaped = array.ndim == 1 and (not array.size or array.dtype.kind in "iu")
        require(shaped, VICTIMS, f"victims must answer block numbers of shape [blocks]: {answer!r}")
        victims = [int(block) for block in array]
        some = f"asked for {count}, with {len(self.resident)} blocks resident, it answers {victims}"
        require(len(victims) <= count, VICTIMS, f"{some}: too many")
        require(len(set(victims)) == len(victims), VICTIMS, f"{some}: one of them twice")
        gone: set[int] = set()
        for block in victims:
            require(block in self.resident, VICTIMS, f"{some}: {block} is not in the tier")
        for block in victims:
            require(not self.pins.get(block), VICTIMS, f"{some}: {block} is pinned")
        for block in victims:
            below = {b for b in self.resident - gone if self.parent[b] == block}
            what = f"{some}: {block} is interior, its children {sorted(below)} stay"
            require(not below, VICTIMS, what)
            gone.add(block)
        could = count and not victims and self._could_leave()
        require(not could, VICTIMS, f"{some}, but {could} could leave")

    def _could_leave(self) -> list[int]:
        interior = {self.parent[block] for block in self.resident}
        return sorted(b for b in self.resident - interior if not self.pins.get(b))

    def _path(self, block: int) -> list[int]:
        path = [block]
        while (above := self.parent[path[-1]]) != NO_BLOCK:
            path.append(above)
        return path[::-1]

    def _pin(self, blocks: list[int]) -> None:
        self.index.pin(np.array(blocks, np.uint32))
        for block in blocks:
            self.pins[block] = self.pins.get(block, 0) + 1

    def _unpin(self, blocks: list[int]) -> None:
        blocks = [block for block in blocks if self.pins.get(block)]
        for block in blocks:
            self.pins[block] -= 1
            if not self.pins[block]:
                del self.pins[block]
        self.index.unpin(np.array(blocks, np.uint32))

    def _drop_end(self, path: list[int]) -> None:
        """Drop the end of a path that nothing holds, in prompt order or leaves first."""
        end: list[int] = []
        for block in reversed(path):
            below = {b for b in self.resident if self.parent[b] == block} - set(end)
            if below or self.pins.get(block):
                break
            end.append(block)
        self.drop(end if self.rng.random() < 0.5 else end[::-1])
