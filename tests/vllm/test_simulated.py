"""The simulated accelerator between the engine's tensors and the host: late, out of order, failing.

The tensors stay in host memory, where vLLM for CPUs computes; what moves between them and the host
tier passes through the device's streams and engines, and has its delays and faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, Engine, check_idle, connector, prompt

pytestmark = [pytest.mark.timeout(600)]
LENGTH, ANSWER, COUNT = 700, 16, 4
ALL_CACHED = [LENGTH // BLOCK * BLOCK] * COUNT
DEVICE = {
    "host_tensors": True,
    "engines": 2,
    "streams": 3,
    "latency_us": 300,
    "jitter_us": 3000,
    "seed": 1,
    "timeout_ms": 100,
}
# pieces of a layer of a few blocks, so that a load is many copies that overtake each other
ROUGH = {
    "device": "simulated",
    "device_options": DEVICE,
    "chunk_bytes": 128 << 10,
    "rank_timeout_ms": 10_000,
}


class Asked:
    """An engine and prompts whose answers are known, as they were computed when all was new.

    Prompts whose answers rounding could change are left out: steps differ in what they compute.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        prompts = [prompt(LENGTH, seed) for seed in range(8)]
        clear = engine.clearest(prompts=prompts, tokens=ANSWER)[:COUNT]
        assert len(clear) == COUNT
        self.prompts = [prompts[number] for number in clear]
        assert engine.reset_all()
        self.expected, cached = self._ask()
        assert cached == [0] * COUNT

    def again(self, *, forget: bool = False) -> list[int]:
        """Ask with nothing in vLLM's own cache, nor (`forget`) in flexkv's; return how many tokens
        of each prompt were cached. Answers are the same and nothing stays behind.
        """
        assert self.engine.reset_all() if forget else self.engine.reset_local()
        tokens, cached = self._ask()
        assert tokens == self.expected
        check_idle(self.engine)
        return cached

    def _ask(self) -> tuple[list[list[int]], list[int]]:
        got = self.engine.generate(prompts=self.prompts, tokens=ANSWER)
        return got["tokens"], got["cached"]

    def counted(self, name: str, source: str, target: str) -> float:
        """What the manager has counted of moves from source to target."""
        counts = self.engine.counters().get(name, {})
        return float(counts.get(f"source={source},target={target}", 0))


@pytest.fixture(scope="module", params=["async", "sync"])
def asked(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Asked]:
    """One engine for each way to load."""
    with Engine(tiny, connector(load=request.param, **ROUGH)) as engine:
        yield Asked(engine)


def test_prompts_come_back_through_the_device_with_the_same_answers(asked: Asked) -> None:
    engine = asked.engine
    ask = {"prompts": asked.prompts, "tokens": ANSWER}
    everything = {"tokens": asked.expected, "cached": ALL_CACHED}
    assert engine.generate(**ask) == everything  # from vLLM's own cache
    assert not asked.counted("transfer_bytes", "host", "device")
    assert engine.reset_local()
    assert engine.generate(**ask) == everything
    work = engine.device_work()
    assert work["overtaken"] > 0
    for way in (("host", "device"), ("device", "host")):
        assert work[way[0]] == asked.counted("transfer_bytes", *way) > 0
        assert not asked.counted("failed_blocks", *way)
    check_idle(engine)


@pytest.mark.parametrize("fault", ["refused", "failed", "sticky"])
def test_what_the_device_fails_to_load_is_computed(asked: Asked, fault: str) -> None:
    before = asked.counted("failed_blocks", "host", "device")
    failed = asked.engine.metrics()["vllm:flexkv_failed_loads"]
    asked.engine.inject(fault=fault, on="to_device", skip=2, times=2, blocks=1)
    asked.again()
    assert asked.counted("failed_blocks", "host", "device") > before
    assert asked.engine.metrics()["vllm:flexkv_failed_loads"] > failed
    assert asked.engine.heal() == (fault == "sticky")
    asked.again()
    assert asked.again() == ALL_CACHED


@pytest.mark.parametrize("fault", ["refused", "failed", "sticky"])
def test_what_the_device_fails_to_save_is_not_found(asked: Asked, fault: str) -> None:
    before = asked.counted("failed_blocks", "device", "host")
    asked.engine.inject(fault=fault, on="from_device", skip=2, times=2, blocks=1)
    assert asked.again(forget=True) == [0] * COUNT
    assert asked.counted("failed_blocks", "device", "host") > before
    assert asked.engine.heal() == (fault == "sticky")
    assert sum(asked.again()) < sum(ALL_CACHED)
    assert asked.again() == ALL_CACHED


@pytest.mark.parametrize("fault", ["lost", "late", "slow"])
def test_a_completion_that_is_lost_or_late_costs_time_only(asked: Asked, fault: str) -> None:
    ways = (("device", "host"), ("host", "device"))
    before = [asked.counted("failed_blocks", *way) for way in ways]
    for on, cached in (("from_device", [0] * COUNT), ("to_device", ALL_CACHED)):
        asked.engine.inject(fault=fault, on=on, skip=1, times=3, late_us=150_000)
        assert asked.again(forget=on == "from_device") == cached
        asked.engine.heal()
    assert [asked.counted("failed_blocks", *way) for way in ways] == before
