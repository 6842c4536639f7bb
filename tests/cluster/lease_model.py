"""Schedules of lease, evict, publish and crash, at random and in virtual time, with the real code.

`walk(seed, steps)` drives one owner's brain, arena and lender, and readers that copy leased slots
when it pleases them: in time, late, after a release, from an owner that has begun another life.
More steps than the tests take: `PYTHONPATH=tests python tests/cluster/lease_model.py SEED STEPS`.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray
from rig import SPEC, STRIDE, TOKENS_PER_BLOCK, pattern, prompt

from flexkv.backends.remote.heads import checksums
from flexkv.brain import Brain, build_brain
from flexkv.cluster.leases import Lease
from flexkv.cluster.lender import Lender, Loan
from flexkv.completion import Completions
from flexkv.errors import CapacityError
from flexkv.groups import WHOLE, split
from flexkv.keys import Keyring
from flexkv.memory import Arena
from flexkv.model import HOST, LANDED, PEER, Identity
from flexkv.testing.loop import VirtualLoop

SLOTS, TTL_S = 8, 4.0
RING = Keyring(Identity("model", "", SPEC), b"")
SHARED = prompt(99, 2)
PROMPTS = [prompt(name, 2 + name % 3, shared=SHARED if name % 2 else ()) for name in range(8)]


@dataclass
class Held:
    """A lease in a reader's hands."""

    lease: Lease
    loan: Loan
    checksums: NDArray[np.uint64]
    tokens: list[int]
    numbers: list[int]  # which blocks of the prompt they are
    life: int


class Walk:
    """One owner and its readers."""

    def __init__(self, seed: int, completions: Completions) -> None:
        self.random, self.completions = random.Random(seed), completions
        self.arena = Arena(SLOTS, STRIDE, huge_pages=False)
        self.held: list[Held] = []
        self.seen: Counter[str] = Counter()
        self.life = 0
        self.brain: Brain
        self.lender: Lender
        self.begin()

    def begin(self) -> None:
        """The owner begins another life, with nothing; its memory holds what it held."""
        self.life += 1
        self.brain = build_brain(
            {HOST: SLOTS, PEER: 4},
            lambda tier: "lru",
            tokens_per_block=TOKENS_PER_BLOCK,
            foreign=(PEER,),
        )
        self.lender = Lender(
            self.brain.planner,
            self.completions,
            self.arena,
            incarnation=self.life,
            block_bytes=SPEC.block_bytes,
            promote=None,
            ttl_s=TTL_S,
            bytes_in_flight=12 * SPEC.block_bytes,
        )

    @property
    def now(self) -> float:
        return self.completions.now()

    # what may happen

    async def put(self) -> None:
        """Publish a prompt; others leave for it."""
        tokens = self.random.choice(PROMPTS)
        keys = RING.chain(np.asarray(tokens, np.int64), RING.root(None))
        planner = self.brain.planner
        try:
            plan = planner.plan_put(split(RING, keys, WHOLE), self.now)
        except CapacityError:
            self.seen["no room"] += 1
            return
        graph = planner.launch_put(plan, np.arange(len(plan.blocks), dtype=np.uint32))
        for position, slot in zip(plan.positions.tolist(), plan.slots.tolist(), strict=True):
            self.arena.view(slot)[: SPEC.block_bytes] = pattern(tokens, position)
        for op in graph.ops:
            landed = np.zeros(len(op), np.uint8)
            self.brain.ledger.commit(graph, op, op.positions, landed, self.now)
        planner.release(plan.blocks)
        self.seen["put"] += 1

    async def lend(self) -> None:
        """A reader leases some blocks of a prompt, in any order."""
        tokens = self.random.choice(PROMPTS)
        keys = RING.chain(np.asarray(tokens, np.int64), RING.root(None))
        numbers = self.random.sample(range(len(keys)), self.random.randint(1, len(keys)))
        reader = self.random.choice("ab")
        try:
            loan = await self.lender.lend(reader, keys[numbers], 0.01)
        except CapacityError:
            self.seen["refused"] += 1
            return
        if loan.lease is None:
            self.seen["nothing"] += 1
            return
        there = [numbers[i] for i in np.flatnonzero(loan.statuses == LANDED).tolist()]
        sums = await self.lender.vouch(loan)
        self.held.append(Held(loan.lease, loan, sums, tokens, there, self.life))
        self.seen["leased"] += 1

    async def read(self) -> None:
        """A reader copies the slots of a lease that it has or had. On lease, they hold the right
        bytes whatever else happened; else what passes the checksum does.
        """
        if not self.held:
            return
        held = self.random.choice(self.held)
        slots = held.loan.slots
        is_open = held.life == self.life and not held.lease.over
        is_open &= self.now < held.lease.expires
        found = checksums(self.arena, slots, held.loan.keys, SPEC.block_bytes) == held.checksums
        for good, slot, number in zip(found, slots.tolist(), held.numbers, strict=True):
            content = self.arena.view(slot)[: SPEC.block_bytes]
            right = np.array_equal(content, pattern(held.tokens, number))
            assert right or not is_open, "a slot on lease holds another block"
            assert right == bool(good), "a checksum lets another block pass, or not the right one"
            self.seen["right" if right else "recycled"] += 1

    async def release(self) -> None:
        """A reader gives a lease back, perhaps late, perhaps again, perhaps to another life."""
        if not self.held:
            return
        held = self.random.choice(self.held)
        counts = held.life == self.life and not held.lease.over and self.now < held.lease.expires
        assert self.lender.release([held.lease.token]) == [counts]
        self.seen["released" if counts else "late"] += 1
        if self.random.random() < 0.5:
            self.held.remove(held)

    async def wait(self) -> None:
        """Time passes: leases expire."""
        await anyio.sleep(self.random.choice([0.1, 1.0, TTL_S]))

    async def remove(self) -> None:
        """The owner forgets a prompt, as far as nobody holds it."""
        tokens = self.random.choice(PROMPTS)
        keys = RING.chain(np.asarray(tokens, np.int64), RING.root(None))
        (group,) = split(RING, keys, WHOLE)
        self.seen["removed"] += self.brain.ledger.remove(group)

    async def crash(self) -> None:
        """The owner dies and begins anew, or takes all back."""
        if self.random.random() < 0.9:
            return
        if self.random.random() < 0.5:
            self.lender.revoke()
            assert self.brain.index.pinned == 0
            self.seen["revoked"] += 1
            return
        self.lender.close()
        self.begin()
        self.seen["crashed"] += 1

    def check(self, *, deeply: bool) -> None:
        """Every pin is that of a lease."""
        assert self.brain.index.pinned == self.lender.leases.leased_blocks
        tier = self.brain.ledger.host
        assert self.brain.index.resident(tier.number) + tier.free == tier.capacity
        if deeply:
            self.brain.index.check_integrity()
        del self.held[:-12]


async def _walk(seed: int, steps: int) -> Counter[str]:
    completions = Completions(tickets=16)
    walk = Walk(seed, completions)
    verbs: list[Any] = [walk.put, walk.lend, walk.read, walk.release, walk.wait, walk.remove]
    weights = [5, 5, 8, 3, 1, 1]
    for step in range(steps):
        (verb,) = walk.random.choices([*verbs, walk.crash], [*weights, 1])
        await verb()
        walk.check(deeply=step % 64 == 0)
    await anyio.sleep(TTL_S)
    assert walk.brain.index.pinned == 0
    walk.lender.close()
    await completions.aclose()
    walk.arena.close()
    return walk.seen


def walk(seed: int, steps: int) -> Counter[str]:
    """Take so many steps; returns what happened how often."""
    return VirtualLoop(limit_s=1e9, limit_turns=1 << 40).run(_walk(seed, steps))


if __name__ == "__main__":
    print(dict(walk(int(sys.argv[1]), int(sys.argv[2]))))
