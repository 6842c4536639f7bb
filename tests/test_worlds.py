"""Worlds: thousands of managers in virtual time violate nothing; planted bugs are found, replayed
by their seed and told in a few steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from planted import PLANTED

from flexkv.testing.worlds import explain, search, tell, write_story
from flexkv.testing.worlds.chance import Chance, mix
from flexkv.testing.worlds.disk import Platter
from flexkv.testing.worlds.story import Step, Story

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("first", "count", "processes"),
    [
        (0, 200, 1),
        *(pytest.param(n, 600, CORES, marks=pytest.mark.once) for n in (200, 800, 1400)),
    ],
)
def test_no_world_violates_anything(first: int, count: int, processes: int) -> None:
    failed = search(range(first, first + count), processes=processes)
    told = "\n".join(f"seed {seed}: {outcome.violation}" for seed, outcome in failed.items())
    assert not failed, f"{told}\npython -m flexkv.testing.worlds --seed {next(iter(failed))}"


@pytest.mark.parametrize("place", ["read", "write", "record"])
def test_a_disk_that_never_answers_keeps_no_manager_behind_a_codec_from_closing(
    place: str,
) -> None:
    settings = dict(write_story(20).settings) | {"host": 2, "disk": 6, "remote": 0}
    settings |= {"spill": "through", "codec": "world-half", "policy": "lru", "close_ms": 1000}
    prompts = [{"path": (branch,), "namespace": ()} for branch in range(4)]
    puts = [Step(at, "put", 100, prompt | {"durable": True}) for at, prompt in enumerate(prompts)]
    fault = Step(5, "fault", 0, {"place": place, "kind": "never", "skip": 0, "times": 1})
    last = Step(6, "get", 50, prompts[0]), Step(7, "flush", 100, {"wait": False})
    steps = (*puts[:3], fault, puts[3], *last)
    outcome = tell(Story(20, tuple(settings.items()), steps), keep=True)
    assert outcome.violation is None
    assert any("for 1e+09 ms" in line for line in outcome.lines)


def test_a_seed_always_tells_the_same() -> None:
    for seed in range(20):
        assert write_story(seed) == write_story(seed)
        first, second = tell(write_story(seed)), tell(write_story(seed), keep=True)
        assert (first.trace, first.events, first.turns) == (
            second.trace,
            second.events,
            second.turns,
        )
        assert len(second.lines) == second.events


def test_another_process_tells_the_same() -> None:
    program = (
        "from flexkv.testing.worlds import tell, write_story\n"
        "print([tell(write_story(seed)).trace for seed in range(40)])"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    runs = [
        subprocess.run(
            command,
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=100,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].strip() == str([tell(write_story(seed)).trace for seed in range(40)])


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_replayed_and_told(name: str) -> None:
    with PLANTED[name]():
        seed = next(seed for seed in range(10_000) if tell(write_story(seed)).violation)
        found, again = tell(write_story(seed)), tell(write_story(seed))
        assert found.violation is not None
        assert again.violation is not None
        assert (found.trace, str(found.violation)) == (again.trace, str(again.violation))
        story, outcome = explain(seed)
        assert outcome.violation is not None
        assert outcome.violation.kind == found.violation.kind
        assert len(story.steps) <= min(10, len(write_story(seed).steps))
        assert story.describe().count("\n") == len(story.steps)
    assert tell(story).violation is None
    assert tell(write_story(seed)).violation is None


def test_the_command_tells_a_story() -> None:
    command = [sys.executable, "-m", "flexkv.testing.worlds"]
    for arguments, shown in (
        (["--seed", "7"], "all is well"),
        (["--seed", "7", "--story"], "opened, disk holds"),
        (["--worlds", "5", "--first", "3"], "5 worlds, seeds 3 to 7: 0 violations"),
    ):
        answer = subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True, timeout=60
        )
        assert shown in answer.stdout


def test_dropping_a_step_leaves_the_others_as_they_were() -> None:
    story = write_story(12)
    lines = tell(story, keep=True).lines
    longer = replace(story, steps=(*story.steps, Step(99, "flush")))
    common = tell(longer, keep=True).lines
    last = next(i for i, line in enumerate(lines) if f" #{story.steps[-1].number} " in line)
    assert common[:last] == lines[:last]


def test_chance_depends_on_its_purpose_alone() -> None:
    one, other = Chance(5), Chance(5)
    other.bits("something else")
    assert one.bits("read", 3) == other.bits("read", 3)
    assert one.bits("read", 3) != other.bits("write", 3)
    assert mix(1, 2) != mix(2, 1)


def test_a_power_failure_takes_late_writes_back_and_a_kill_does_not() -> None:
    fates = set()
    for seed in range(30):
        platter = Platter(2, 4096)
        platter.write_data(0, platter.data[0] + 7)
        assert (platter.crash("kill", seed).data[0] == 7).all()
        found = platter.crash("power", seed).data[0]
        fates.add((int(found[0]), int(found[-1])))
    assert fates == {(0, 0), (7, 0), (7, 7)}
    platter.write_data(1, platter.data[1] + 9)
    platter.sync()
    assert (platter.crash("power", 0).data[1] == 9).all()
