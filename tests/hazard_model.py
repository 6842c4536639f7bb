"""What docs/hazard.md says, block by block and slowly: the model that tests hold `hazard` against.

`Model.put` (a prompt -> hits, LRU's hits, whether the learned order is followed, blocks held). No
runs are kept here but what a prompt used together, no order but what is looked for each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import frexp, inf, sqrt

BINS, GHOSTS = 48, 4
START = [0.0, *(0.25 * 2.0 ** ((number - 1) / 2.0) for number in range(1, BINS + 1))]


def bin_of(age: float) -> int:
    """The age bin: 0 below a quarter of a second, then half octaves."""
    if age < 0.25:
        return 0
    part, octaves = frexp(age / 0.25)
    return min(BINS - 1, 1 + 2 * (octaves - 1) + (part >= sqrt(0.5)))


class Class:
    """Blocks of a kind: how many came into each age, how many of them were reused in it."""

    def __init__(self, parent: Class | None) -> None:
        self.parent = parent
        self.events, self.exposure = [0.0] * BINS, [0.0] * BINS
        self.reused, self.entered = [0.0] * BINS, [0.0] * BINS
        self.hazard: list[float] = list(parent.hazard) if parent else [0.0] * BINS
        first = [1.0 / (1.0 + 4.0 * START[b]) for b in range(BINS)]
        self.value: list[float] = list(parent.value) if parent else first

    def priced(self) -> None:
        """The best reuses per block-second over all holding times, for every age."""
        stretches: list[tuple[float, float, float]] = []
        for b in reversed(range(BINS)):
            gain = self.hazard[b]
            cost = (1.0 - gain / 2.0) * (START[b + 1] - START[b])
            survival = 1.0 - gain
            while stretches and stretches[-1][0] * cost > gain * stretches[-1][1]:
                more, longer, left = stretches.pop()
                gain, cost = gain + survival * more, cost + survival * longer
                survival *= left
            stretches.append((gain, cost, survival))
            self.value[b] = gain / cost


class Rates:
    """The tree of classes, estimated in rounds of a hundred prompts."""

    def __init__(self) -> None:
        self.classes, self.length = [Class(None)], 1.0
        self.by_code: dict[tuple[int, int], int] = {}
        self.steps = self.rounds = self.due = self.counted = 0

    def find(self, codes: list[int]) -> int:
        """The class with these codes below the root."""
        at = 0
        for code in codes:
            if (at, code) not in self.by_code:
                self.by_code[at, code] = len(self.classes)
                self.classes.append(Class(self.classes[at]))
            at = self.by_code[at, code]
        return at

    @property
    def learned(self) -> bool:
        """Whether every class was estimated once."""
        return self.rounds > 1 or (self.rounds == 1 and self.due >= self.counted)

    def step(self) -> None:
        """After a prompt."""
        self.steps += 1
        if self.steps % 100 == 0:
            self._begin_round()
        for _ in range(self.counted // 25 + 1):
            if self.due < self.counted:
                self._estimate(self.due)
                self.due += 1

    def _begin_round(self) -> None:
        for one in self.classes:
            one.reused, one.entered = list(one.events), list(one.exposure)
            one.events = [0.97 * count for count in one.events]
            one.exposure = [0.97 * count for count in one.exposure]
        for one in reversed(self.classes[1:]):
            assert one.parent is not None
            for b in range(BINS):
                one.parent.reused[b] += one.reused[b]
                one.parent.entered[b] += one.entered[b]
        root, hazard, weight = self.classes[0], 0.05, 30.0 * self.length
        for b in range(BINS):
            entered = max(root.entered[b], root.reused[b])
            hazard = min(0.9, (root.reused[b] + weight * 0.7 * hazard) / (entered + weight))
            root.hazard[b] = hazard
        root.priced()
        self.counted, self.due, self.rounds = len(self.classes), 1, self.rounds + 1

    def _estimate(self, number: int) -> None:
        one = self.classes[number]
        above = one.parent
        assert above is not None
        events = expected = 0.0
        for b in range(BINS):
            events += one.reused[b]
            expected += one.entered[b] * above.hazard[b]
        weight = 10.0 * self.length
        scale, weight = (events + weight) / (expected + weight), 100.0 * self.length
        limit = 0.9 if above is self.classes[0] else 0.95
        for b in range(BINS):
            entered = max(one.entered[b], one.reused[b])
            prior = weight * min(0.9, scale * above.hazard[b])
            one.hazard[b] = min(limit, (one.reused[b] + prior) / (entered + weight))
        one.priced()


@dataclass(eq=False)
class Run:
    """Blocks of one prompt that were used about as often."""

    stamp: int
    last_use: float
    kind: int
    blocks: list[Block] = field(default_factory=list)
    next_bin: int = 0


@dataclass(eq=False)
class Block:
    """What is known of a block, whether held or a ghost."""

    name: int
    parent: Block | None
    run: Run
    uses: int = 0
    held: bool = False
    ended: bool = False


def uses_class(uses: int) -> int:
    """0, 1, 2, 3-4, 5-8, 9-16, more."""
    return next((n for n, top in enumerate((0, 1, 2, 4, 8, 16)) if uses <= top), 6)


class Model:
    """A cache of `capacity` blocks beside an LRU of as many."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rates = capacity, Rates()
        self.known: dict[int, Block] = {}
        self.ghosts: dict[Block, None] = {}  # oldest first
        self.runs: list[Run] = []  # in turn to be looked at
        self.lru: dict[int, tuple[int, int]] = {}  # name -> prompt, minus its depth
        self.prompts = self.asked = self.switched = 0
        self.lead, self.following = 0.0, False

    def put(self, names: list[int], now: float) -> tuple[int, int, bool, set[int]]:
        """Serve a prompt of at most `capacity` blocks."""
        path = [self.known[name] for name in names if name in self.known]
        hits = sum(block.held for block in path)
        lru_hits = self._use_lru(names)
        change = self._judge(len(names), hits, lru_hits)
        continues = bool(path) and path[-1].ended
        for run, blocks in self._by_run(path):
            self._learn(run, blocks, now)
        path = self._runs(names, path, continues, now)
        held = self._admit(path, hits, now)
        for block in reversed(path[held:]):
            self.ghosts[block] = None
        self._trim()
        self._sweep(now)
        self.rates.step()
        if change:
            if not self.following:
                self._start_from_lru()
            self.following = not self.following
        holds = {block.name for block in self.known.values() if block.held}
        return hits, lru_hits, self.following, holds

    def _use_lru(self, names: list[int]) -> int:
        hits = next((n for n, name in enumerate(names) if name not in self.lru), len(names))
        self.lru |= {name: (self.prompts, -depth) for depth, name in enumerate(names)}
        for name in sorted(self.lru, key=self.lru.__getitem__)[: -self.capacity]:
            del self.lru[name]
        return hits

    def _judge(self, asked: int, hits: int, lru_hits: int) -> bool:
        self.prompts += 1
        self.asked += asked
        mean = self.asked / self.prompts
        ahead = max(0.001 * self.capacity, 2.0 * mean)
        trust = 1.0 + min(1.0, (self.prompts - self.switched) / 2048.0)
        behind = trust * max(0.005 * self.capacity, 5.0 * mean)
        self.lead = min(behind, max(-behind, self.lead + hits - lru_hits))
        late = self.lead <= -behind if self.following else self.lead >= ahead
        if not late or (not self.following and self.prompts < 300):
            return False
        self.switched = self.prompts
        return True

    def _by_run(self, path: list[Block]) -> Iterator[tuple[Run, list[Block]]]:
        for run in dict.fromkeys(block.run for block in path):
            yield run, [block for block in path if block.run is run]

    def _learn(self, run: Run, blocks: list[Block], now: float) -> None:
        kind, weight = self.rates.classes[run.kind], sqrt(len(blocks))
        age = bin_of(now - run.last_use)
        kind.events[age] += weight
        for b in range(run.next_bin, age + 1):
            kind.exposure[b] += weight
        for block in blocks:
            block.uses = min(255, block.uses + 1)
            run.blocks.remove(block)
            self.ghosts.pop(block, None)
        if not run.blocks:
            self.runs.remove(run)

    def _runs(
        self, names: list[int], path: list[Block], continues: bool, now: float
    ) -> list[Block]:
        n, known = len(names), len(path)
        share = 0 if known <= 1 else 1 if 2 * known < n else 2
        kind = 0 if not known else 3 if continues else 1 if known == 1 else 2
        size = next((level for level, top in enumerate((4, 16, 64)) if n < top), 3)
        nowhere = Run(0, 0.0, 0)
        for name in names[known:]:
            self.known[name] = Block(name, path[-1] if path else None, nowhere)
            path.append(self.known[name])
        path[-1].ended = True
        start = 0
        while start < n:
            same = uses_class(path[start].uses)
            end = next((i for i in range(start, n) if uses_class(path[i].uses) != same), n)
            base = (start < known) | share << 1 | (end == n) << 3 | (start < 2) << 4
            number = self.rates.find([base, (n - known > 4) | kind << 1, size])
            run = Run(self.prompts, now, number, path[start:end])
            self.rates.length += 0.001 * (sqrt(end - start) - self.rates.length)
            self.runs.append(run)
            for block in run.blocks:
                block.run = run
            start = end
        return path

    def _leaf(self, run: Run) -> Block | None:
        """The deepest held block of a run, if nothing held stands on it."""
        held = [block for block in run.blocks if block.held]
        if not held or any(b.held and b.parent is held[-1] for b in self.known.values()):
            return None
        return held[-1]

    def _evict(self, block: Block) -> None:
        block.held = False
        self.ghosts[block] = None

    def _admit(self, path: list[Block], held: int, now: float) -> int:
        learned = self.rates.learned
        free = self.capacity - sum(block.held for block in self.known.values())
        for number in range(held, len(path)):
            if free == 0:
                worst: tuple[float, int] | None = None
                for run in self.runs:
                    leaf = self._leaf(run) if run.stamp != self.prompts else None
                    if leaf is None:
                        continue
                    oldest = min(
                        r.stamp
                        for r in self.runs
                        if r.kind == run.kind and r.stamp != self.prompts and self._leaf(r)
                    )
                    if run.stamp != oldest:
                        continue
                    age = bin_of(now - run.last_use)
                    value = self.rates.classes[run.kind].value[age] if learned else 0.0
                    if worst is None or (value, run.stamp) < worst:
                        worst, victim = (value, run.stamp), leaf
                offer = self.rates.classes[path[number].run.kind].value[0] if learned else inf
                if worst is None or worst[0] > offer:
                    return number
                self._evict(victim)
                free += 1
            path[number].held = True
            free -= 1
        return len(path)

    def _trim(self) -> None:
        while len(self.ghosts) > GHOSTS * self.capacity:
            block = next(iter(self.ghosts))
            del self.ghosts[block], self.known[block.name]
            block.run.blocks.remove(block)
            if not block.run.blocks:
                self.runs.remove(block.run)

    def _sweep(self, now: float) -> None:
        some = min(len(self.runs), len(self.runs) // 100 + 1)
        for run in self.runs[:some]:
            age = bin_of(now - run.last_use)
            for b in range(run.next_bin, age + 1):
                self.rates.classes[run.kind].exposure[b] += sqrt(len(run.blocks))
            run.next_bin = max(run.next_bin, age + 1)
        self.runs = self.runs[some:] + self.runs[:some]

    def _start_from_lru(self) -> None:
        for block in [block for block in self.known.values() if block.held]:
            self._evict(block)
        for name in self.lru:
            if name in self.known:
                self.known[name].held = True
                del self.ghosts[self.known[name]]
        self._trim()
