"""Policies by their definitions, one block at a time, in plain dicts and lists: slow and obvious.

`with_leaf_rule` (a trace under any policy that ranks: the smallest rank among unpinned leaves
leaves) - `sieve`, `s3fifo`, `arc` (as published, for prompts of one block: there are no leaves to
mind) - `best_possible` (every choice there is) - `random_trace`.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

Path = Sequence[int]
CROSSOVER = 30_000


def random_trace(seed: int, *, requests: int, branches: int, longest: int) -> list[list[int]]:
    """Prompts that go on where others stopped, with chained block numbers."""
    rng = random.Random(seed)
    children: dict[tuple[int, int], int] = {}
    trace: list[list[int]] = []
    for _ in range(requests):
        path: list[int] = []
        for _ in range(rng.randint(1, longest)):
            step = min(rng.randrange(branches), rng.randrange(branches))
            parent = path[-1] if path else -1
            path.append(children.setdefault((parent, step), len(children)))
        trace.append(path)
    return trace


class LeafRank:
    """What a ranked policy remembers of each block. `age` is for those that age."""

    def __init__(self, kind: str, tokens_per_block: int) -> None:
        self.kind, self.size = kind, tokens_per_block
        self.born: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.base: dict[int, float] = {}
        self.age = 0.0

    def use(self, block: int, depth: int, when: int, *, new: bool) -> None:
        self.uses[block] = 1 if new else self.uses[block] + 1
        self.last[block] = when
        if new:
            self.born[block] = when
        worth = 1 + (depth + 0.5) * self.size / CROSSOVER if self.kind == "gdsf" else 1.0
        self.base[block] = self.age + self.uses[block] * worth

    def rank(self, block: int) -> tuple[float, float]:
        last, born, hits = self.last[block], self.born[block], self.uses[block] - 1
        return {
            "lru": (last, 0),
            "mru": (-last, 0),
            "fifo": (born, 0),
            "filo": (-born, 0),
            "lfu": (hits, last),
            "slru": (hits >= 2, last),
            "lfu-da": (self.base[block], last),
            "gdsf": (self.base[block], last),
        }[self.kind]


def with_leaf_rule(
    kind: str, trace: Sequence[Path], capacity: int, tokens_per_block: int
) -> list[int]:
    """Blocks matched for each request."""
    ranks, there, matched = LeafRank(kind, tokens_per_block), {}, []
    for number, path in enumerate(trace):
        hits = next((i for i, block in enumerate(path) if block not in there), len(path))
        matched.append(hits)
        kept = path[:capacity]
        for depth, block in enumerate(kept[:hits]):
            ranks.use(block, depth, 2 * number, new=False)
        for depth in range(len(kept) - 1, hits - 1, -1):
            if len(there) == capacity:
                interior = {there[block] for block in there}
                leaves = [b for b in there if b not in interior and b not in kept]
                victim = min(leaves, key=lambda block: (*ranks.rank(block), block))
                ranks.age = max(ranks.age, ranks.base[victim])
                del there[victim]
            there[kept[depth]] = kept[depth - 1] if depth else None
            ranks.use(kept[depth], depth, 2 * number + 1, new=True)
    return matched


def _flat(trace: Sequence[int], access: Callable[[int], bool]) -> list[int]:
    return [int(access(block)) for block in trace]


def sieve(trace: Sequence[int], capacity: int) -> list[int]:
    """SIEVE, NSDI'24, algorithm 1: a queue from new to old, a hand, visited bits."""
    queue: list[int] = []  # oldest first
    visited: dict[int, bool] = {}
    hand: int | None = None  # the block it points to

    def access(block: int) -> bool:
        nonlocal hand
        if block in visited:
            visited[block] = True
            return True
        if len(queue) == capacity:
            at = queue.index(hand) if hand in visited else 0
            while visited[queue[at]]:
                visited[queue[at]] = False
                at = (at + 1) % len(queue)
            victim = queue.pop(at)
            del visited[victim]
            hand = queue[at] if at < len(queue) else None
        queue.append(block)
        visited[block] = False
        return False

    return _flat(trace, access)


def s3fifo(trace: Sequence[int], capacity: int, small_share: float = 0.1) -> list[int]:
    """S3-FIFO, SOSP'23, algorithm 1: queues S, M and G."""
    wanted = max(1, int(capacity * small_share))
    small: OrderedDict[int, int] = OrderedDict()  # block -> uses
    main: OrderedDict[int, int] = OrderedDict()
    ghosts: OrderedDict[int, None] = OrderedDict()

    def evict_main() -> None:
        while True:
            block, uses = main.popitem(last=False)
            if uses == 0:
                return
            main[block] = uses - 1

    def evict() -> None:
        while len(small) >= wanted:
            block, uses = small.popitem(last=False)
            if uses > 1:
                main[block] = 0
                continue
            ghosts[block] = None
            if len(ghosts) > capacity - wanted:
                ghosts.popitem(last=False)
            return
        evict_main()

    def access(block: int) -> bool:
        for queue in (small, main):
            if block in queue:
                queue[block] = min(3, queue[block] + 1)
                return True
        if len(small) + len(main) == capacity:
            evict()
        if block in ghosts:
            del ghosts[block]
            main[block] = 0
        else:
            small[block] = 0
        return False

    return _flat(trace, access)


def arc(trace: Sequence[int], capacity: int) -> list[int]:
    """ARC, FAST'03, figure 4, but that a slot is freed before the goal p learns of a ghost."""
    once: OrderedDict[int, None] = OrderedDict()
    often: OrderedDict[int, None] = OrderedDict()
    ghosts_once: OrderedDict[int, None] = OrderedDict()
    ghosts_often: OrderedDict[int, None] = OrderedDict()
    goal = 0.0

    def access(block: int) -> bool:
        nonlocal goal
        if block in once or block in often:
            once.pop(block, None)
            often[block] = None
            often.move_to_end(block)
            return True
        if len(once) + len(often) == capacity:
            if len(once) > int(goal) or not often:
                ghosts_once[once.popitem(last=False)[0]] = None
            else:
                ghosts_often[often.popitem(last=False)[0]] = None
            while len(once) + len(ghosts_once) > capacity:
                ghosts_once.popitem(last=False)
            while len(once) + len(often) + len(ghosts_once) + len(ghosts_often) > 2 * capacity:
                ghosts_often.popitem(last=False)
        sizes = max(1, len(ghosts_once)), max(1, len(ghosts_often))
        if block in ghosts_once:
            goal = min(float(capacity), goal + max(1.0, sizes[1] / sizes[0]))
            del ghosts_once[block]
            often[block] = None
        elif block in ghosts_often:
            goal = max(0.0, goal - max(1.0, sizes[0] / sizes[1]))
            del ghosts_often[block]
            often[block] = None
        else:
            once[block] = None
        return False

    return _flat(trace, access)


def best_possible(trace: Sequence[Path], capacity: int) -> int:
    """The most blocks that can be matched in all, by trying everything that could be kept."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for path in trace:
        after: dict[frozenset[int], int] = {}
        for state, total in best.items():
            hits = next((i for i, block in enumerate(path) if block not in state), len(path))
            room = sorted(state | set(path))
            for size in range(min(capacity, len(room)) + 1):
                for kept in itertools.combinations(room, size):
                    now = frozenset(kept)
                    after[now] = max(after.get(now, 0), total + hits)
        best = after
    return max(best.values())
