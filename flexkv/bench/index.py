"""`flexkv bench index`: what a request costs in the brain, at a full cache, in microseconds.

`run` measures hashing, matching, planning, evicting, and the steady state of a full index (match,
touch, evict, insert, land, ready), for prompts of 32 k tokens in blocks of 16. Limits are the
budgets of docs/design.md. A figure that was taken over several shapes is that of the worst one;
`params` holds the p50 and p99 of each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flexkv import plugins
from flexkv.bench.report import Progress, Result, percentile
from flexkv.groups import GroupKeys
from flexkv.index import PrefixIndex
from flexkv.keys import Keyring, as_tokens
from flexkv.ledger import Ledger
from flexkv.model import HOST, NO_BLOCK, BlockIds, Identity, KeyArray, KVSpec, SlotIds
from flexkv.planner import Planner
from flexkv.pool import SlotPool
from flexkv.protocols import EvictionPolicy
from flexkv.tier import Tier

TOKENS, TOKENS_PER_BLOCK = 32_768, 16
PROMPT = TOKENS // TOKENS_PER_BLOCK  # blocks of a prompt
SHARES = (0.5, 0.7, 0.9)  # of a prompt that is a document other prompts begin with, too
DOCUMENTS = 32
NODE, BRANCHES = 8, 248  # blocks from one branch point to the next, branch points of a deep path
VICTIMS = 2048
BUDGET_US = {
    "hash_32k": 25.0,
    "match_32k": 6.0,
    "match_deep": 6.0,
    "plan_32k": 80.0,
    "evict_2048": 60.0,
    "steady_p50": 40.0,
    "steady_p99": 300.0,
}
LIMIT_TO_LRU = 1.5  # of the steady p50 under another policy to that under lru
Samples = dict[str, list[float]]  # microseconds by shape


class World:
    """An index with one tier of `blocks` slots, and a seeded source of prompts to fill it."""

    def __init__(self, blocks: int, policy: str, seed: int) -> None:
        self.index = PrefixIndex(blocks, [HOST])
        made: EvictionPolicy = plugins.load(plugins.POLICIES, policy)()
        self.index.set_policy(0, made, {})
        self.pool = SlotPool(blocks)
        tier = Tier(HOST, 0, self.index, self.pool)
        ledger = Ledger(self.index, [tier], max_blocks=blocks)
        self.planner = Planner(ledger, chunk_blocks=64, chunks_in_flight=3)
        self.random = np.random.default_rng(seed)
        self.now = 0.0

    def keys(self, count: int) -> KeyArray:
        """Fresh keys: chained ones are as good as random."""
        return self.random.integers(0, 1 << 64, (count, 2), np.uint64)

    def store(self, keys: KeyArray) -> None:
        """Serve one request at once: use what is there, evict what must go, insert the rest.

        What was just touched is never evicted here, so nothing needs a pin.
        """
        index = self.index
        self.now += 1.0
        matched = index.match(keys)
        shown = self.planner.prompts.readers
        if shown:
            keys = keys[: self.planner.prompts.show(keys, matched, self.now)]
        index.touch(matched, self.now)
        missing = len(keys) - len(matched)
        slots = self._room(missing)
        parent = int(matched[-1]) if len(matched) else NO_BLOCK
        added = index.insert(keys[len(matched) :], parent)
        if shown:
            self.planner.prompts.placed(added)
        index.land(0, added, slots)
        index.ready(0, added, self.now)

    def _room(self, count: int) -> SlotIds:
        short = count - self.pool.free
        if short <= 0:
            return self.pool.take(count)
        freed = self.index.evict(0, short)[1]
        if short == count:
            return freed
        return np.concatenate((freed, self.pool.take(count - short)))

    def extend(self, parent: int, count: int) -> tuple[KeyArray, BlockIds]:
        """Add a node of `count` blocks below `parent`."""
        self.now += 1.0
        keys = self.keys(count)
        blocks = self.index.insert(keys, parent)
        self.index.land(0, blocks, self._room(count))
        self.index.ready(0, blocks, self.now)
        return keys, blocks

    @property
    def full(self) -> bool:
        """Whether another prompt would evict."""
        return self.pool.free < PROMPT


class SharedPrompts(World):
    """Prompts that begin with one of a few documents."""

    def __init__(self, blocks: int, policy: str, share: float) -> None:
        super().__init__(blocks, policy, seed=int(share * 100))
        self.head = int(PROMPT * share)
        documents = min(DOCUMENTS, max(1, blocks // PROMPT // 2))
        self.documents = [self.keys(self.head) for _ in range(documents)]
        self.prompts: list[KeyArray] = []
        while not self.full:
            self.prompts.append(self.prompt())
            self.store(self.prompts[-1])

    def prompt(self) -> KeyArray:
        """A document and a fresh end."""
        document = self.documents[int(self.random.integers(len(self.documents)))]
        return np.concatenate((document, self.keys(PROMPT - self.head)))

    def stored(self) -> KeyArray:
        """Any of the prompts that fill the cache, as if it had just been hashed."""
        return self.prompts[int(self.random.integers(len(self.prompts)))].copy()


class DeepTree(World):
    """Paths with a branch point every `NODE` blocks, at each of which another prompt went on."""

    def __init__(self, blocks: int, policy: str) -> None:
        super().__init__(blocks, policy, seed=2)
        self.paths: list[KeyArray] = []
        while not self.full:
            self.grow()

    def grow(self) -> None:
        """Add a path and its side branches, as far as they fit without evicting."""
        parent = NO_BLOCK
        path: list[KeyArray] = []
        while len(path) < BRANCHES and self.pool.free >= 2 * NODE:
            keys, blocks = self.extend(parent, NODE)
            parent = int(blocks[-1])
            self.extend(parent, NODE)
            path.append(keys)
        self.paths.append(np.concatenate(path))


class RandomTree(World):
    """Nodes of `NODE` blocks, each below a random earlier one."""

    def __init__(self, blocks: int, policy: str) -> None:
        super().__init__(blocks, policy, seed=3)
        ends: list[int] = []
        while not self.full:
            known = len(ends) > 64
            parent = ends[int(self.random.integers(len(ends)))] if known else NO_BLOCK
            ends.append(int(self.extend(parent, NODE)[1][-1]))


def timed(action: Callable[..., Any], *arguments: Any) -> float:
    """Microseconds that one call of `action` takes."""
    start = time.perf_counter_ns()
    action(*arguments)
    return (time.perf_counter_ns() - start) / 1e3


def figure(name: str, samples: Samples, params: Mapping[str, Any]) -> Result:
    """The worst shape's p50 (p99 where the name says so) against the budget."""
    percent = 99.0 if name.endswith("p99") else 50.0
    value = max(percentile(taken, percent) for taken in samples.values())
    shapes = {
        shape: {f"p{p:g}": round(percentile(taken, p), 2) for p in (50.0, 99.0)}
        for shape, taken in samples.items()
    }
    limit = BUDGET_US[name]
    count = min(len(taken) for taken in samples.values())
    return Result(
        name, value, "us", limit, None, value / limit, count, {**params, "shapes": shapes}
    )


def compared(ratios: Mapping[str, float], rounds: int, params: Mapping[str, Any]) -> Result:
    """The worst shape's cost in units of lru's."""
    value = max(ratios.values())
    shapes = {"shapes": {shape: round(ratio, 3) for shape, ratio in ratios.items()}}
    share = value / LIMIT_TO_LRU
    return Result(
        "steady_to_lru", value, "x", LIMIT_TO_LRU, None, share, rounds, {**params, **shapes}
    )


def hashing(rounds: int) -> Result:
    """Keys of 32 k tokens, as int64 and int32; `as_tokens` is the check at the door."""
    identity = Identity("bench", spec=KVSpec.uniform(1, 1, 1, tokens_per_block=TOKENS_PER_BLOCK))
    keyring = Keyring(identity)
    root, random = keyring.root(None), np.random.default_rng(0)
    samples: Samples = {"int64": [], "int32": []}
    door: Samples = {"int64": [], "int32": []}
    for _ in range(rounds):
        for dtype in samples:
            tokens = random.integers(0, 150_000, TOKENS).astype(dtype)
            door[dtype].append(timed(as_tokens, tokens))
            samples[dtype].append(timed(keyring.chain, tokens, root))
    checks = {f"as_tokens_{dtype}_p50": percentile(taken, 50.0) for dtype, taken in door.items()}
    return figure("hash_32k", samples, {"tokens": TOKENS, **checks})


def matching(world: SharedPrompts, rounds: int) -> list[float]:
    """Match stored prompts, each time another one."""
    return [timed(world.index.match, world.stored()) for _ in range(rounds)]


def planning(world: SharedPrompts, rounds: int) -> list[float]:
    """Match, pin, touch and make the graph of a get that the host can serve."""
    planner, device_blocks = world.planner, np.arange(PROMPT, dtype=np.uint32)

    def plan(keys: KeyArray) -> None:
        (blocks,) = planner.match([GroupKeys(keys)]).blocks
        planner.plan_get(blocks, keys, device_blocks, world.now)

    taken = []
    for _ in range(rounds):
        keys = world.stored()
        world.now += 1.0
        taken.append(timed(plan, keys))
        planner.release(world.index.match(keys))
    return taken


def serving(world: SharedPrompts, rounds: int) -> list[float]:
    """Serve fresh prompts from a full cache."""
    return [timed(world.store, world.prompt()) for _ in range(rounds)]


def to_lru(world: SharedPrompts, lru: SharedPrompts, rounds: int) -> float:
    """Serve the same kind of prompts under a policy and under lru, in turns; the ratio of the
    medians.
    """
    taken: list[float] = []
    base: list[float] = []
    for _ in range(rounds):
        taken.append(timed(world.store, world.prompt()))
        base.append(timed(lru.store, lru.prompt()))
    return percentile(taken, 50.0) / percentile(base, 50.0)


def evicting(world: World, rounds: int) -> list[float]:
    """Evict from a full cache, down to nine tenths of it (half of a small one)."""
    floor = world.pool.capacity * (0.9 if world.pool.capacity > 50 * VICTIMS else 0.5)
    taken: list[float] = []
    while len(taken) < rounds and world.index.resident(0) - VICTIMS >= floor:
        start = time.perf_counter_ns()
        slots = world.index.evict(0, VICTIMS)[1]
        taken.append((time.perf_counter_ns() - start) / 1e3)
        world.pool.give(slots)
    return taken


def descending(world: DeepTree, rounds: int) -> Samples:
    """Match deep paths: the next turn of one conversation, and another path each time."""
    order = world.random.integers(len(world.paths), size=rounds)
    match = world.index.match
    again = [timed(match, world.paths[0]) for _ in range(rounds + 1)][1:]
    other = [timed(match, world.paths[i].copy()) for i in order]
    return {"same path": again, "another path": other}


def run(
    progress: Progress, *, blocks: int = 1_000_000, policy: str = "lru", rounds: int = 1000
) -> list[Result]:
    """Measure everything at `blocks` cached blocks under `policy`; `rounds` samples of each figure.

    Args:
        progress: called as progress(what, steps done, steps in all).
        blocks: capacity of the tier; at least a few prompts of 2,048 blocks.
        policy: name of an eviction policy; any but lru is also measured in turns with lru.
        rounds: samples per figure and shape.
    """
    steps = len(SHARES) + 3
    progress("hash", 0, steps)
    results = [hashing(min(rounds, 200))]
    match, plan, steady, evict = {}, {}, {}, {}
    ratios: dict[str, float] = {}
    for step, share in enumerate(SHARES, 1):
        progress(f"{share:.0%} shared", step, steps)
        world, name = SharedPrompts(blocks, policy, share), f"{share:.0%} shared"
        match[name], plan[name] = matching(world, rounds), planning(world, rounds)
        steady[name] = serving(world, rounds)
        if policy != "lru":
            ratios[name] = to_lru(world, SharedPrompts(blocks, "lru", share), rounds)
        evict[name] = evicting(world, rounds)
        del world
    progress("deep tree", steps - 2, steps)
    deep = DeepTree(blocks, policy)
    down = descending(deep, rounds)
    evict["deep tree"] = evicting(deep, rounds)
    del deep
    progress("random tree", steps - 1, steps)
    evict["random tree"] = evicting(RandomTree(blocks, policy), rounds)
    progress("done", steps, steps)
    again = {"same path": down.pop("same path")}
    cold = {f"another_path_p{p:g}": percentile(down["another path"], p) for p in (50.0, 99.0)}
    common: dict[str, Any] = {"blocks": blocks, "policy": policy}
    shape = {"node_blocks": NODE, "branch_points": BRANCHES}
    return [
        *results,
        figure("match_32k", match, common),
        figure("match_deep", again, {**common, **shape, **cold}),
        figure("plan_32k", plan, common),
        figure("evict_2048", evict, {**common, **shape}),
        figure("steady_p50", steady, common),
        figure("steady_p99", steady, common),
        *([compared(ratios, rounds, common)] if ratios else []),
    ]
