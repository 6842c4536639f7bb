"""Which blocks move when: begin, written, read, end; the orchestration between tiers and codecs.

A baseline only spills what does not fit. Orchestrated: the context starts by its distance (near
tiers for what is close), a block outside HBM that turns hot or warm is promoted with the bytes
that were just read, a warm block in HBM is encoded once that pays, victims are demoted encoded.
"""

from __future__ import annotations

import numpy as np

from flexkv.sim.decode.dma import Dma
from flexkv.sim.decode.residency import COLD, WARM, Ids, Residency
from flexkv.sim.decode.settings import TIERS, Settings
from flexkv.sim.decode.workload import Workload

_TOGETHER = 64  # blocks of one move
_ROOM_SHARE = 0.02  # of HBM, freed at once when it is full


class Movement:
    """Placement of blocks, and the moves that change it."""

    def __init__(
        self, workload: Workload, settings: Settings, dma: Dma, residency: Residency
    ) -> None:
        self.workload, self.settings = workload, settings
        self.dma, self.residency = dma, residency
        self.names = list(settings.codecs)
        self.raw = self.names.index("none")
        self.codec = self.names.index(settings.codec) if settings.orchestrated else self.raw
        self._waves = min(settings.waves, workload.layers)
        self.encoded = 0
        self.promoted = 0
        self._newest = np.zeros(len(workload.contexts), np.int64)

    def _of(self, sequences: tuple[int, ...]) -> Ids:
        base = self.workload.base
        return np.concatenate([np.arange(base[s], base[s + 1]) for s in sequences])

    def _layers(self, blocks: Ids) -> Ids:
        workload = self.workload
        sequences = workload.sequence[blocks]
        counts = np.array(workload.counts, np.int64)[sequences]
        layers: Ids = (blocks - workload.base[sequences]) // counts
        return layers

    def begin(self, sequences: tuple[int, ...]) -> None:
        """Place the context of new sequences, as their prefill has left it."""
        workload, rule = self.workload, self.settings.placement
        blocks = self._of(sequences)
        if not workload.from_start:
            blocks = blocks[workload.distance_tokens[blocks] > 0]  # those ahead are not written yet
        blocks = blocks[np.argsort(workload.distance_tokens[blocks], kind="stable")]
        distance = workload.distance_tokens[blocks]
        tiers = np.zeros(len(blocks), np.int8)
        self.residency.codec[blocks] = self.raw
        if self.settings.orchestrated:
            settled = blocks[distance > rule.hot_age_tokens]
            self.residency.codec[settled] = self.codec
            if not workload.spans_layers:  # who reads everything each step wants it near
                tiers[distance > rule.hot_age_tokens] = 1
                tiers[distance > rule.near_tokens] = 2
                tiers[self._layers(blocks) * self._waves < rule.near_waves * workload.layers] = 0
        self.residency.place(blocks, tiers, self.codec)

    def written(self, blocks: Ids, step: int) -> None:
        """Enter the blocks that the step's new tokens go to, raw and near."""
        for sequence in self.workload.batch(step).sequences:
            self._newest[sequence] = self.workload.position(step, sequence)
        new = blocks[~self.residency.alive[blocks]]
        if len(new):
            self._make_room(len(new) * self.workload.block_bytes, new, step)
            self.residency.codec[new] = self.raw
            self.residency.reads[new] = self.settings.placement.warm_reuse
            self.residency.last[new] = step
            self.residency.place(new, np.zeros(len(new), np.int8), self.codec)

    def _make_room(self, need_bytes: float, keep: Ids, step: int) -> None:
        """Demote victims when HBM is full; what does not fit in time starts in the next tier."""
        short = need_bytes - self.residency.room(0)
        if short <= 0:
            return
        kept = np.zeros(self.workload.blocks, np.bool_)
        kept[keep] = True
        more = _ROOM_SHARE * self.residency.capacity_bytes[0]
        victims = self.residency.victims(0, short + more, kept, step)
        victims = victims[: self.settings.pipeline.max_migrations_per_step]
        for target in range(1, len(TIERS)):
            taken = self._move(victims, target, self.codec)
            victims = victims[~np.isin(victims, taken)]

    def _move(self, blocks: Ids, tier: int, codec: int) -> Ids:
        """Read blocks where they lie and write them to `tier`; return those that found room."""
        for held_as in np.unique(self.residency.codec[blocks]).tolist():
            group = blocks[self.residency.codec[blocks] == held_as]
            new_codec = codec if held_as == self.raw else held_as  # encoded once, not twice
            planned = self.residency.plan(group, tier, new_codec)
            for start in range(0, len(planned), _TOGETHER):
                part = planned[start : start + _TOGETHER]
                for source in np.unique(self.residency.tier[part]).tolist():
                    self._send(
                        part[self.residency.tier[part] == source], source, held_as, tier, new_codec
                    )
        return blocks[self.residency.moving[blocks]]

    def _send(self, blocks: Ids, source: int, held_as: int, tier: int, codec: int) -> None:
        names, workload = self.names, self.workload
        requests = self.dma.requests(TIERS[source], blocks, workload.block_bytes, workload.parts)
        self.dma.move(
            TIERS[source], names[held_as], TIERS[tier], names[codec],
            requests, len(blocks) * workload.block_bytes,
            lambda: self.residency.commit(blocks, tier, codec),
        )  # fmt: skip

    def read(self, blocks: Ids, step: int) -> None:
        """Classify what a step has read, and begin the moves that follow."""
        residency = self.residency
        newest = self._newest[self.workload.sequence[blocks]]
        residency.read(blocks, step, newest)
        if not self.settings.orchestrated:
            return
        classes = residency.classify(blocks, step, newest)
        budget = self.settings.pipeline.max_migrations_per_step
        if not self.workload.spans_layers:
            self._promote(blocks[(classes != COLD) & (residency.tier[blocks] > 0)][:budget], step)
        if self.codec != self.raw:
            pays = residency.warm_reads[blocks] >= self.settings.placement.encode_after_reads
            raw = (residency.tier[blocks] == 0) & (residency.codec[blocks] == self.raw)
            chosen = blocks[(classes == WARM) & pays & raw][:budget]
            self.encoded += len(self._move(chosen, 0, self.codec))

    def _promote(self, blocks: Ids, step: int) -> None:
        """Write blocks that were just read, and so are on chip, into HBM as they are encoded.

        What finds no room waits for its next read; victims leave meanwhile.
        """
        if len(blocks):
            self._make_room(float(self.residency.sizes(blocks).sum()), blocks, step)
        for codec in np.unique(self.residency.codec[blocks]).tolist():
            group = self.residency.plan(blocks[self.residency.codec[blocks] == codec], 0, codec)
            if len(group) == 0:
                continue
            self.promoted += len(group)
            self.dma.write(
                "hbm", self.names[codec], len(group) * self.workload.parts,
                len(group) * self.workload.block_bytes, "migration",
                lambda group=group, codec=codec: self.residency.commit(group, 0, codec),  # type: ignore[misc]
            )  # fmt: skip

    def end(self, sequences: tuple[int, ...]) -> None:
        """Forget sequences that are done."""
        self.residency.remove(self._of(sequences))
