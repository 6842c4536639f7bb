"""Seven defects of an earlier public simulator, each planted here: the guard against it must fail.

The defects are listed in docs/simulation.md. A guard is a function that holds the simulator against
a formula or a law; it passes on the code as it is, and it fails as soon as its defect is planted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexkv.errors import ConservationError
from flexkv.sim.clock import VirtualClock
from flexkv.sim.columns import columns
from flexkv.sim.compute import ComputeModel, shape
from flexkv.sim.decode import compare as modes
from flexkv.sim.decode.compare import Question
from flexkv.sim.decode.dma import Dma
from flexkv.sim.decode.residency import Residency
from flexkv.sim.decode.run import simulate
from flexkv.sim.decode.settings import OVERLAPPED, SERIAL, Settings
from flexkv.sim.decode.workload import attention
from flexkv.sim.profiles import PROTOTYPE, hardware
from flexkv.sim.replay import replay
from flexkv.sim.servers import Priority, Server
from flexkv.traces import Trace, TraceRequest

H100 = hardware("h100")
QUESTION = Question(contexts=(8192,), steps=48)
Plant = Callable[[pytest.MonkeyPatch], None]


def nothing() -> None:
    """Hear of an arrival."""


# 1. gigabits taken for gigabytes


def rates_are_bytes() -> None:
    """2 steps over 32 k tokens move known bytes; at 3.35e12 bytes per second that is the time."""
    model = ComputeModel(shape("llama-3.1-8b"), 989.4e12, 3.35e12)
    result = simulate(
        attention([32768], model, steps=2, batch=1),
        Settings(H100, orchestrated=False, staging=False),
    )
    moved = 2 * (model.model.weight_bytes() + 2049 * 16 * model.model.kv_bytes_per_token())
    assert result.elapsed_s == pytest.approx(moved / 3.35e12, rel=0.02)


def plant_bits(patch: pytest.MonkeyPatch) -> None:
    right = Server.rate_bytes_per_s
    patch.setattr(Server, "rate_bytes_per_s", lambda self, write: right(self, write) / 8)


# 2. latency paid once per block


def latency_is_shared_by_what_is_in_flight() -> None:
    clock = VirtualClock()
    dma = Dma(clock, Settings(PROTOTYPE, OVERLAPPED))
    dma.read("hbm", "none", 1000, 1000 * 8192, "demand", Priority.DEMAND_READ, nothing)
    assert clock.run() < 3 * (300e-9 + 1000 * 8192 / 3e12)


def plant_no_depth(patch: pytest.MonkeyPatch) -> None:
    right = Dma._server
    patch.setattr(
        Dma,
        "_server",
        lambda self, profile: right(self, replace(profile, queue_depth=1, channels=1)),
    )


# 3. a hit of the staging buffers counted as a read of HBM


def hits_read_nothing_from_tiers() -> None:
    question = replace(QUESTION, codec="none", predictor="none")
    result = modes.run_orchestrated(question)
    assert result.staging_hits > 0
    demand = result.read_bytes_by_cause["demand"]
    from_tiers = sum(size for tier, size in demand.items() if tier != "sram")
    assert from_tiers == (result.accesses - result.staging_hits) * 8192


def plant_hits_as_reads(patch: pytest.MonkeyPatch) -> None:
    right = Dma.read

    def read(self: Dma, tier: str, *rest: Any) -> Any:
        return right(self, "hbm" if tier == "sram" else tier, *rest)

    patch.setattr(Dma, "read", read)


# 4. evictions that free what was needed, not the victim's size; victims that stay where they were


def residency_is_what_the_blocks_say() -> None:
    result = modes.run_orchestrated(replace(QUESTION, capacity_bytes={"hbm": 4e6}))
    assert result.evicted_blocks > 0
    assert result.peak_resident_bytes["hbm"] <= 4e6


def plant_wrong_size(patch: pytest.MonkeyPatch) -> None:
    right = Residency.commit

    def commit(self: Residency, blocks: Any, tier: int, codec: int) -> None:
        self.held_bytes[0] -= 8192 if tier else 0
        right(self, blocks, tier, codec)

    patch.setattr(Residency, "commit", commit)


def plant_victim_stays(patch: pytest.MonkeyPatch) -> None:
    right = Residency.commit

    def commit(self: Residency, blocks: Any, tier: int, codec: int) -> None:
        before = self.tier[blocks].copy()
        right(self, blocks, tier, codec)
        self.tier[blocks] = before

    patch.setattr(Residency, "commit", commit)


# 5. one DMA for demand and prefetch of all tiers; migrations that take no time


def demand_does_not_queue_behind_prefetch_of_another_tier() -> None:
    def arrival(prefetches: int) -> float:
        clock = VirtualClock()
        dma = Dma(clock, Settings(PROTOTYPE, OVERLAPPED))
        for _ in range(prefetches):
            dma.read("dram", "none", 10, 81920, "prefetch", Priority.PREFETCH, nothing)
        when: list[float] = []
        done = lambda: when.append(clock.now_s)  # noqa: E731
        dma.read("hbm", "none", 1, 8192, "demand", Priority.DEMAND_READ, done)
        clock.run()
        return when[0]

    assert arrival(50) == arrival(0)


def plant_one_dma(patch: pytest.MonkeyPatch) -> None:
    right = Dma.__init__

    def init(self: Dma, clock: VirtualClock, settings: Settings) -> None:
        right(self, clock, replace(settings, pipeline=SERIAL))

    patch.setattr(Dma, "__init__", init)


def migrations_occupy_their_tiers() -> None:
    clock = VirtualClock()
    dma = Dma(clock, Settings(PROTOTYPE, OVERLAPPED))
    dma.move("hbm", "none", "cxl", "int8", 100, 100 * 8192, nothing)
    read_s, write_s = 100 * 8192 / 3e12, 100 * 8192 * 0.53 / 300e9
    assert clock.run() >= read_s + write_s
    assert dma.served_bytes()["cxl"] == pytest.approx(100 * 8192 * 0.53)


def plant_free_migration(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dma, "move", lambda self, *rest: rest[-1]())


# 6. a baseline without any cache, and windows that change with the policy


def the_opponent_may_stage_too() -> None:
    results = modes.compare(QUESTION)
    fair = [r for r in results if r.mode.startswith("baseline") and r.pipeline == "overlapped"][-1]
    assert fair.staging_hits > 0.5 * fair.accesses
    assert results[-1].exposed_s <= fair.exposed_s


def plant_weak_opponent(patch: pytest.MonkeyPatch) -> None:
    right = modes.run_baseline
    patch.setattr(modes, "run_baseline", lambda question, heard, staging=False: right(question))


def policies_get_the_same_windows() -> None:
    def windows(policy: str) -> Any:
        settings = replace(QUESTION, policy=policy).settings(
            OVERLAPPED, orchestrated=True, staging=True
        )
        return replace(settings, placement=replace(settings.placement, policy="lru"))

    assert windows("lru") == windows("lfu") == windows("hot-warm-cold")


def plant_windows_by_policy(patch: pytest.MonkeyPatch) -> None:
    right = Question.settings

    def settings(self: Question, *args: Any, **kwargs: Any) -> Settings:
        found = right(self, *args, **kwargs)
        window = 128 if self.policy == "lru" else 64
        return replace(found, placement=replace(found.placement, hot_age_tokens=window))

    patch.setattr(Question, "settings", settings)


# 7. requests that share no prefix, no seed, nothing to repeat


def requests_share_their_prefixes() -> None:
    """The request-level simulator runs the index that serves: a second prompt finds the first."""
    ids = np.arange(4)
    requests = [TraceRequest(1000.0 * i, None, 64, 1, ids) for i in range(2)]
    found = replay(columns(Trace("two", 16, requests, 4, 8)), "lru", 8)
    assert found.matched.tolist() == [0, 4]


def plant_private_blocks(patch: pytest.MonkeyPatch) -> None:
    right = columns

    def private(trace: Trace) -> Any:
        requests = [
            replace(request, block_ids=request.block_ids + 4 * i)
            for i, request in enumerate(trace.requests)
        ]
        return right(replace(trace, requests=requests, distinct=8))

    patch.setitem(globals(), "columns", private)


GUARDS = [
    pytest.param(rates_are_bytes, plant_bits, id="1 bits for bytes"),
    pytest.param(latency_is_shared_by_what_is_in_flight, plant_no_depth, id="2 serial latency"),
    pytest.param(hits_read_nothing_from_tiers, plant_hits_as_reads, id="3 hits as reads"),
    pytest.param(residency_is_what_the_blocks_say, plant_wrong_size, id="4 freed size"),
    pytest.param(residency_is_what_the_blocks_say, plant_victim_stays, id="4 victim's tier"),
    pytest.param(
        demand_does_not_queue_behind_prefetch_of_another_tier, plant_one_dma, id="5 shared DMA"
    ),
    pytest.param(migrations_occupy_their_tiers, plant_free_migration, id="5 free migration"),
    pytest.param(the_opponent_may_stage_too, plant_weak_opponent, id="6 weak baseline"),
    pytest.param(policies_get_the_same_windows, plant_windows_by_policy, id="6 windows"),
    pytest.param(requests_share_their_prefixes, plant_private_blocks, id="7 nothing shared"),
]


@pytest.mark.parametrize(("guard", "plant"), GUARDS)
def test_a_guard_holds_and_finds_its_defect(
    guard: Callable[[], None], plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard()
    plant(monkeypatch)
    with pytest.raises((AssertionError, ConservationError)):
        guard()
