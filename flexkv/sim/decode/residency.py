"""The residency tracker: place, read, classify, victims, plan, commit, held, check.

For every block: its tier, its codec, when it was last read, how often. A move reserves room in its
target when it is decided and frees its source when the bytes have landed, block by block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import CapacityError, ConservationError
from flexkv.model import BoolArray
from flexkv.sim.decode.settings import TIERS, Placement
from flexkv.sim.decode.workload import Workload

Ids = NDArray[np.int64]
Classes = NDArray[np.int8]
HOT, WARM, COLD = 0, 1, 2
CLASSES = ("hot", "warm", "cold")


class Residency:
    """Where every block lies; sizes in bytes."""

    def __init__(
        self, workload: Workload, placement: Placement, capacity_bytes: list[float],
        codec_names: list[str], ratios: list[float],
    ) -> None:  # fmt: skip
        self.workload, self.placement = workload, placement
        self.capacity_bytes = capacity_bytes
        self.codec_names = codec_names
        self.size_bytes = np.array(ratios) * workload.block_bytes
        count = workload.blocks
        self.tier = np.zeros(count, np.int8)
        self.codec = np.zeros(count, np.int8)
        self.last = np.full(count, -(1 << 30), np.int64)
        self.reads = np.zeros(count, np.int64)
        self.warm_reads = np.zeros(count, np.int64)
        self.moving = np.zeros(count, np.bool_)
        self.leaving = np.zeros(count, np.bool_)  # gone as soon as their move has landed
        self.alive = np.zeros(count, np.bool_)
        self.held_bytes = np.zeros(len(TIERS))
        self.reserved_bytes = np.zeros(len(TIERS))  # for moves under way
        self.peak_bytes = np.zeros(len(TIERS))
        self.evicted = 0

    def sizes(self, blocks: Ids) -> NDArray[np.float64]:
        """Return the bytes that blocks take where they are."""
        found: NDArray[np.float64] = self.size_bytes[self.codec[blocks]]
        return found

    def place(self, blocks: Ids, tiers: Classes, codec: int) -> None:
        """Enter new blocks, near tiers first; what does not fit goes to the next tier, encoded.

        `tiers` is where each would like to be; codec applies outside HBM and to blocks that are
        not hot, the caller has set those.
        """
        new = blocks[~self.alive[blocks]]
        tiers = tiers[~self.alive[blocks]]
        for number in range(len(TIERS)):
            here = new[tiers == number]
            if number > 0:
                self.codec[here] = codec
            ends = np.cumsum(self.sizes(here)) + self.held_bytes[number]
            fits = ends + self.reserved_bytes[number] <= self.capacity_bytes[number]
            self.tier[here[fits]] = number
            self.alive[here[fits]] = True
            self.held_bytes[number] += float(self.sizes(here[fits]).sum())
            if not fits.all():
                if number + 1 == len(TIERS):
                    raise CapacityError(
                        f"{int((~fits).sum())} blocks of {self.workload.name!r} fit in none of"
                        f" {TIERS} with {self.capacity_bytes} bytes; give a tier more capacity or"
                        " shorten the contexts"
                    )
                moved = np.isin(new, here[~fits])
                tiers = np.where(moved, np.int8(number + 1), tiers)
        self._note_peak()

    def remove(self, blocks: Ids) -> None:
        """Forget blocks of sequences that are done; those that are moving leave with their move."""
        self.leaving[blocks[self.alive[blocks] & self.moving[blocks]]] = True
        gone = blocks[self.alive[blocks] & ~self.moving[blocks]]
        for number in range(len(TIERS)):
            here = gone[self.tier[gone] == number]
            self.held_bytes[number] -= float(self.sizes(here).sum())
        self.alive[gone] = False
        self._settle()

    def _settle(self) -> None:
        """Sums of sizes that cancel leave rounding behind; a hair below zero is zero."""
        tiny = self.workload.block_bytes * 1e-6
        self.held_bytes[np.abs(self.held_bytes) < tiny] = 0.0
        self.reserved_bytes[np.abs(self.reserved_bytes) < tiny] = 0.0

    def read(self, blocks: Ids, step: int, newest: NDArray[np.int64]) -> None:
        """Note one step's reads; `newest` is the token that each block's sequence decodes."""
        warm = self.classify(blocks, step, newest) != HOT
        self.warm_reads[blocks[warm]] += 1
        self.last[blocks] = step
        self.reads[blocks] += 1

    def classify(self, blocks: Ids, step: int, newest: NDArray[np.int64]) -> Classes:
        """Return HOT, WARM or COLD for each block, by age in tokens, idle steps and reads."""
        rule = self.placement
        age = newest - self.workload.index[blocks] * 16
        hot = (age >= 0) & (age <= rule.hot_age_tokens)
        idle = step - self.last[blocks]
        warm = (self.reads[blocks] >= rule.warm_reuse) & (idle <= rule.warm_idle_steps)
        classes: Classes = np.where(hot, HOT, np.where(warm, WARM, COLD)).astype(np.int8)
        return classes

    def victims(self, tier: int, need_bytes: float, keep: BoolArray, step: int) -> Ids:
        """Return the blocks of a tier that leave first until `need_bytes` are free.

        lru: read longest ago. lfu: read least often, then longest ago. hot-warm-cold: cold before
        warm, each read longest ago. Blocks in `keep` and blocks that move stay.
        """
        there = np.flatnonzero(self.alive & (self.tier == tier) & ~self.moving & ~keep)
        if len(there) == 0:
            return there
        last, reads = self.last[there], self.reads[there]
        if self.placement.policy == "lru":
            order = np.lexsort((there, last))
        elif self.placement.policy == "lfu":
            order = np.lexsort((there, last, reads))
        else:
            warm = (reads >= self.placement.warm_reuse) & (
                step - last <= self.placement.warm_idle_steps
            )
            order = np.lexsort((there, last, warm))
        ranked = there[order]
        freed = np.cumsum(self.sizes(ranked))
        count = int(np.searchsorted(freed, need_bytes)) + 1
        return ranked[: min(count, len(ranked))]

    def room(self, tier: int) -> float:
        """Return the bytes of a tier that are neither held nor promised."""
        return float(self.capacity_bytes[tier] - self.held_bytes[tier] - self.reserved_bytes[tier])

    def plan(self, blocks: Ids, tier: int, codec: int) -> Ids:
        """Reserve room for moves to `tier`; return the blocks, in order, that fit."""
        blocks = blocks[self.alive[blocks] & ~self.moving[blocks]]
        blocks = blocks[: max(0, int((self.room(tier) + 1e-6) // self.size_bytes[codec]))]
        self.moving[blocks] = True
        self.reserved_bytes[tier] += len(blocks) * self.size_bytes[codec]
        self._note_peak()
        return blocks

    def commit(self, blocks: Ids, tier: int, codec: int) -> None:
        """The bytes of a move have landed: the blocks lie in `tier` now and nowhere else."""
        for number in range(len(TIERS)):
            here = blocks[self.tier[blocks] == number]
            self.held_bytes[number] -= float(self.sizes(here).sum())
            self.evicted += len(here) if number < tier else 0
        self.tier[blocks], self.codec[blocks] = tier, codec
        self.moving[blocks] = False
        moved_bytes = len(blocks) * self.size_bytes[codec]
        self.reserved_bytes[tier] -= moved_bytes
        self.held_bytes[tier] += moved_bytes
        self._settle()
        gone = blocks[self.leaving[blocks]]
        if len(gone):
            self.leaving[gone] = False
            self.remove(gone)

    def _note_peak(self) -> None:
        np.maximum(self.peak_bytes, self.held_bytes + self.reserved_bytes, out=self.peak_bytes)

    def check(self) -> None:
        """Count everything again from the blocks and hold it against the running sums."""
        alive = np.flatnonzero(self.alive)
        counted = np.bincount(self.tier[alive], weights=self.sizes(alive), minlength=len(TIERS))
        for number, name in enumerate(TIERS):
            held = self.held_bytes[number]
            if abs(counted[number] - held) > 1e-6 * max(1.0, counted[number]) + 1.0:
                raise ConservationError(
                    f"residency of {name!r} has drifted: its blocks take {counted[number]} bytes,"
                    f" the running sum says {held}"
                )
