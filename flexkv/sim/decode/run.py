"""One decode run: simulate(workload, settings) -> DecodeResult, its books checked.

Step by step: what the step reads is looked up in the staging buffers and the residency table; wave
by wave (a group of layers) it is asked for and computed; then blocks are classified and moves
begin. Time passes only on the virtual clock. While a wave waits the time is exposed; a transfer
that runs while something computes is hidden; `exposed + hidden = busy` is checked, not defined.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flexkv.model import BoolArray
from flexkv.sim.clock import VirtualClock
from flexkv.sim.decode.closing import close
from flexkv.sim.decode.dma import SRAM, Dma, Transfer
from flexkv.sim.decode.movement import Movement
from flexkv.sim.decode.prefetch import Score, predictor
from flexkv.sim.decode.residency import Ids, Residency
from flexkv.sim.decode.result import DecodeResult, StepRecord, blank
from flexkv.sim.decode.settings import TIERS, Settings
from flexkv.sim.decode.staging import Staging
from flexkv.sim.decode.workload import Access, Workload
from flexkv.sim.servers import Priority

_CHECK_EVERY = 64  # steps between full recounts of the residency table
_NOT_COMING, _ASKED_FOR = -1, -2
_PREFETCH_TOGETHER = 16  # blocks of one prefetch transfer


class Run:
    """The parts of one run and the loop over them."""

    def __init__(self, workload: Workload, settings: Settings) -> None:
        self.workload, self.settings = workload, settings
        self.clock = VirtualClock()
        self.dma = Dma(self.clock, settings)
        self.codec_names = list(settings.codecs)
        ratios = [settings.codecs[name].ratio for name in self.codec_names]
        capacity = [settings.capacity_of(tier) for tier in TIERS]
        capacity[0] -= workload.weight_bytes
        self.capacity = dict(zip(TIERS, capacity, strict=True))
        self.residency = Residency(workload, settings.placement, capacity, self.codec_names, ratios)
        blocks = int(settings.capacity_of(SRAM) // workload.block_bytes) if settings.staging else 0
        self.staging = Staging(workload.blocks, blocks, settings.pipeline.retain_steps)
        self.predictor = predictor(
            settings.predictor if settings.orchestrated else "none", workload
        )
        self.movement = Movement(workload, settings, self.dma, self.residency)
        self.score = Score(block_bytes=workload.block_bytes)
        self.result = blank(workload, settings)
        self.waves = min(settings.waves, workload.layers)
        self.flight = np.full(workload.blocks, _NOT_COMING)  # or the number of its prefetch
        self.flying = 0  # blocks
        self.transfers: list[Transfer] = []
        self.computing: list[tuple[float, float]] = []
        self.waiting: list[tuple[float, float]] = []
        self.raw_read_bytes = 0.0

    # -- one step

    def step(self, step: int) -> None:
        """Read, compute, write and move what one decode step needs."""
        batch = self.workload.batch(step)
        if step == batch.first:
            self.movement.begin(batch.sequences)
        self.movement.written(self.workload.fresh(step), step)
        access = self.workload.access(step)
        before = self.result.exposed_s, self.dma.read_bytes["demand"]["hbm"]
        hits = self.staging.hits(access.blocks)
        self.predictor.learn(step, access)
        left = self._ask(step, access, hits)
        self._compute(step, access, left)
        self._after(step, access)
        self.result.records.append(
            StepRecord(
                len(access.blocks) * self._parts,
                int(hits.sum()) * self._parts,
                self.workload.compute_seconds(step, len(access.blocks)),
                self.result.exposed_s - before[0],
                self.dma.read_bytes["demand"]["hbm"] - before[1],
            )
        )
        if step + 1 == batch.first + batch.steps:
            self.movement.end(batch.sequences)
        if step % _CHECK_EVERY == 0:
            self.residency.check()

    @property
    def _parts(self) -> int:
        return self.workload.parts

    def _ask(self, step: int, access: Access, hits: BoolArray) -> Callable[[int], list[int]]:
        """Sort one step's reads by wave and place; return what asks for a wave when called."""
        blocks = access.blocks
        self.result.accesses += len(blocks) * self._parts
        self.result.staging_hits += int(hits.sum()) * self._parts
        self.score.in_time += self.staging.used(blocks[hits], step)
        flights = np.where(hits, _NOT_COMING, self.flight[blocks])
        late = flights >= 0
        demand = ~hits & ~late
        self.score.late += len(np.unique(blocks[late]))
        missed = np.unique(blocks[demand])
        self.score.missed += len(missed)
        self.flight[blocks[late]] = _ASKED_FOR  # counted once; staged when the transfer lands
        codecs = len(self.codec_names)
        place = (self.residency.tier[blocks] + 1) * codecs + self.residency.codec[blocks]
        place = np.where(hits, 0, place)
        lossy = np.array([self.settings.codecs[name].lossy for name in self.codec_names])
        self.result.lossy_accesses += int(lossy[self.residency.codec[blocks]].sum()) * self._parts
        groups = (len(TIERS) + 1) * codecs
        counted = hits | demand
        if self.workload.spans_layers:
            per_wave = np.bincount(place[counted], minlength=groups)
            counts = np.tile(per_wave, (self.waves, 1))
            late_of = [np.unique(flights[late])] * self.waves
        else:
            wave = access.layers * self.waves // self.workload.layers
            flat = np.bincount(
                wave[counted] * groups + place[counted], minlength=self.waves * groups
            )
            counts = flat.reshape(self.waves, groups)
            late_of = [np.unique(flights[late & (wave == w)]) for w in range(self.waves)]
        return self._asker(counts, late_of, codecs)

    def _asker(
        self,
        counts: Ids,
        late_of: list[Ids],
        codecs: int,
    ) -> Callable[[int], list[int]]:
        share = self.waves if self.workload.spans_layers else 1
        weights = self.workload.weight_bytes / self.waves

        def ask(wave: int) -> list[int]:
            left = [0]

            def landed() -> None:
                left[0] -= 1

            for group in np.flatnonzero(counts[wave]).tolist():
                count = int(counts[wave, group])
                number, codec = divmod(group, codecs)
                raw = count * self.workload.block_bytes / share
                requests = max(1, count * self._parts // share)
                tier, name = (
                    (SRAM, "none") if number == 0 else (TIERS[number - 1], self.codec_names[codec])
                )
                left[0] += 1
                self.raw_read_bytes += raw if number else 0.0
                self.dma.read(tier, name, requests, raw, "demand", Priority.DEMAND_READ, landed)
            if weights:
                left[0] += 1
                self.dma.read("hbm", "none", 256, weights, "weights", Priority.DEMAND_READ, landed)
            for flight in late_of[wave].tolist():
                transfer = self.transfers[flight]
                if transfer.done_s is None:
                    left[0] += 1
                    self._join(transfer, landed)
            return left

        return ask

    def _join(self, transfer: Transfer, landed: Callable[[], None]) -> None:
        """Wait for a prefetch that is on its way."""
        self.dma.want(transfer)
        inner = transfer.on_done

        def both() -> None:
            inner()
            landed()

        transfer.on_done = both

    def _compute(self, step: int, access: Access, ask: Callable[[int], list[int]]) -> None:
        """Compute the waves in order, each when its bytes are there; prefetch meanwhile."""
        clock = self.clock
        wave_s = self.workload.compute_seconds(step, len(access.blocks)) / self.waves
        asked: list[list[int]] = []
        for wave in range(self.waves):
            while len(asked) < min(self.waves, wave + 1 + self.settings.pipeline.lookahead_waves):
                asked.append(ask(len(asked)))
            if wave == 0:
                self._prefetch(step, access)
            left, since_s = asked[wave], clock.now_s
            if left[0]:
                clock.run_while(lambda left=left: left[0] > 0)  # type: ignore[misc]
            _extend(self.waiting, since_s, clock.now_s)
            self.result.exposed_s += clock.now_s - since_s
            start_s = clock.now_s
            clock.run(until_s=start_s + wave_s)
            _extend(self.computing, start_s, clock.now_s)
            self.result.compute_s += wave_s

    # -- prefetch

    def _retained(self, distinct: Ids) -> bool:
        fits = len(distinct) <= self.staging.capacity_blocks
        return self.settings.pipeline.retain_steps > 0 and fits

    def _prefetch(self, step: int, access: Access) -> None:
        """Ask for what the predictor names, sorted by where it lies, within the limits."""
        pipeline = self.settings.pipeline
        named = self.predictor.predict(step, pipeline.lead_steps)
        if len(named) == 0 or self.staging.capacity_blocks == 0:
            return
        _, first = np.unique(named, return_index=True)
        named = named[np.sort(first)]
        alive = self.residency.alive[named]
        coming = self.flight[named] != _NOT_COMING
        named = named[alive & ~self.staging.there[named] & ~coming]
        if self._retained(access.blocks):  # they stay on chip anyway
            named = named[~np.isin(named, access.blocks)]
        room = min(
            pipeline.max_prefetch_blocks,
            pipeline.max_prefetch_in_flight - self.flying,
            self.staging.capacity_blocks,
        )
        named = named[: max(0, room)]
        place = self.residency.tier[named].astype(np.int64) * 16 + self.residency.codec[named]
        for group in np.unique(place).tolist():
            here = named[place == group]
            tier, codec = TIERS[group // 16], self.codec_names[group % 16]
            for start in range(0, len(here), _PREFETCH_TOGETHER):
                self._fetch(here[start : start + _PREFETCH_TOGETHER], tier, codec, step)

    def _fetch(self, blocks: Ids, tier: str, codec: str, step: int) -> None:
        number = len(self.transfers)

        def landed() -> None:
            transfer = self.transfers[number]
            self.flying -= len(blocks)
            late_s = 0.0 if transfer.wanted_s is None else self.clock.now_s - transfer.wanted_s
            self.score.late_s += late_s
            unused = self.flight[blocks] == number  # the others were asked for on the way
            self.flight[blocks] = _NOT_COMING
            self.staging.wasted += int(self.staging.there[blocks[unused]].sum())  # came twice
            self.staging.add(blocks[unused], step, unused=True)
            self.staging.add(blocks[~unused], step, unused=False)

        self.score.issued += len(blocks)
        self.flying += len(blocks)
        self.flight[blocks] = number
        raw = len(blocks) * self.workload.block_bytes
        self.raw_read_bytes += raw
        requests = self.dma.requests(tier, blocks, self.workload.block_bytes, self._parts)
        self.transfers.append(
            self.dma.read(tier, codec, requests, raw, "prefetch", Priority.PREFETCH, landed)
        )

    # -- after the waves

    def _after(self, step: int, access: Access) -> None:
        """Write the new token's KV, keep what was read on chip, and begin moves."""
        self.dma.write("hbm", "none", 1, self.workload.written_bytes(step), "write", lambda: None)
        distinct = np.unique(access.blocks)
        self.movement.read(distinct, step)
        if self._retained(distinct):
            self.staging.add(distinct, step, unused=False)
        self.staging.expire(step, self.settings.pipeline.lead_steps)


def _extend(intervals: list[tuple[float, float]], start_s: float, end_s: float) -> None:
    if end_s <= start_s:
        return
    if intervals and intervals[-1][1] == start_s:
        intervals[-1] = (intervals[-1][0], end_s)
    else:
        intervals.append((start_s, end_s))


def simulate(
    workload: Workload, settings: Settings, on_step: Callable[[int], None] = lambda _: None
) -> DecodeResult:
    """Run all steps of a workload on a virtual clock; `on_step` hears of each.

    Raises:
        CapacityError: the blocks fit in no tier.
        ConservationError: the books do not balance: a bug here, never a result.
    """
    run = Run(workload, settings)
    for step in range(workload.steps):
        run.step(step)
        on_step(step)
    return close(run)
