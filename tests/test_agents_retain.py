"""The agents' example: hints of steps to execution raise the hit rate, and never lower it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("agents_retain")


def test_a_workload_is_told_truly_and_is_the_same_again(example: ModuleType) -> None:
    given = {"agents": 4, "rounds": 3, "strangers": 1, "seed": 5}
    steps = list(example.workload(**given))
    assert [step.tokens for step in example.workload(**given)] == [step.tokens for step in steps]
    runs = [step for step in steps if step.ahead]
    assert len(runs) == 12
    for at, run in enumerate(runs):
        for prompt, distance in run.ahead:
            if at + distance < len(runs):
                assert runs[at + distance].tokens[: len(prompt)] == prompt


@pytest.mark.parametrize("seed", [1, 2])
async def test_hints_raise_the_hit_rate_of_agents(example: ModuleType, seed: int) -> None:
    steps = list(example.workload(agents=8, rounds=6, strangers=2, seed=seed))
    needed = example.SYSTEM + 8 * example.OWN
    rates = {
        hints: await example.serve(steps, host_blocks=needed // 2, hints=hints)
        for hints in (False, True)
    }
    # half of the host is held: 52 blocks, the shared 16 and own ones of the agents that come next
    assert rates[True] > rates[False] + 8


async def test_hints_help_every_policy(example: ModuleType) -> None:
    steps = list(example.workload(agents=6, rounds=4, strangers=2, seed=3))
    for policy in ("fifo", "lfu", "s3fifo", "steps"):
        without, with_hints = [
            await example.serve(steps, host_blocks=80, hints=hints, eviction_policy=policy)
            for hints in (False, True)
        ]
        assert with_hints > without, policy
