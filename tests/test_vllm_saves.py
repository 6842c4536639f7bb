"""When blocks of running requests are saved, step by step, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flexkv.integration.vllm.requests import State, Work
from flexkv.integration.vllm.saves import Saves

SIZE, EVERY = 16, 64


class Rig:
    """One request, computed in steps of 32 tokens; `started` are the saves."""

    def __init__(self, tokens: int = 1000) -> None:
        self.started: list[Work] = []
        self.saves = Saves(EVERY, SIZE, self.start, prompt_only=False)
        self.state = State(())
        self.request = SimpleNamespace(
            request_id="a", num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=0
        )
        self.saves.admitted(self.request, self.state)
        self.blocks = 0

    def start(self, request: Any, state: State, block_ids: Sequence[list[int]], count: int) -> Work:
        save = Work(request.request_id, block_ids[0][:count], False, tokens=count * SIZE)
        self.started.append(save)
        return save

    def step(
        self, *, first: bool = False, preempted: bool = False, resumed: bool = False
    ) -> list[int]:
        """Schedule 32 tokens (or take the blocks away)."""
        request, ids = self.request, [self.blocks, self.blocks + 1]
        new, cached, counts = [], ([], [], []), {}
        if preempted:
            request.num_computed_tokens = 0
        else:
            counts = {"a": 32}
            self.blocks += 2
            if first:
                entry = {"req_id": "a", "block_ids": (ids,), "num_computed_tokens": 0}
                new = [SimpleNamespace(**entry)]
            else:
                cached = (["a"], [(ids,)], [request.num_computed_tokens])
        output = SimpleNamespace(
            preempted_req_ids={"a"} if preempted else set(),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached[0],
                new_block_ids=cached[1],
                num_computed_tokens=cached[2],
                resumed_req_ids={"a"} if resumed else set(),
            ),
            num_scheduled_tokens=counts,
        )
        withdrawn = self.saves.scheduled(output)
        request.num_computed_tokens += counts.get("a", 0)
        return withdrawn


def test_each_boundary_is_saved_once_with_all_blocks_before_it() -> None:
    rig = Rig()
    for number in range(6):
        rig.step(first=number == 0)
        rig.saves.computed()
    assert [save.blocks for save in rig.started] == [list(range(n)) for n in (4, 8, 12)]


def test_nothing_is_saved_before_the_outcome_of_its_step_is_known() -> None:
    rig = Rig()
    rig.step(first=True)
    rig.step()  # scheduled before the first one's outcome
    rig.step()
    rig.saves.computed()
    assert not rig.started
    rig.saves.computed()
    assert [len(save.blocks) for save in rig.started] == [4]


def test_what_a_failed_load_takes_back_is_not_saved_by_steps_scheduled_before() -> None:
    rig = Rig()
    for number in range(4):
        rig.step(first=number == 0)
    rig.request.num_computed_tokens = 16  # the first step's load has failed
    for _ in range(4):
        rig.saves.computed()
    assert not rig.started


@pytest.mark.parametrize("failed", [True, False])
def test_while_a_load_is_not_known_to_be_good_nothing_is_saved(failed: bool) -> None:
    rig = Rig()
    rig.state.load = load = Work("a", [0], True)
    for number in range(2):
        rig.step(first=number == 0)
    rig.saves.computed()
    load.reported = not failed
    rig.saves.computed()
    assert len(rig.started) == (0 if failed else 1)


def test_a_preempted_request_loses_what_its_saves_read_and_starts_anew() -> None:
    rig = Rig()
    for number in range(2):
        rig.step(first=number == 0)
        rig.saves.computed()
    (save,) = rig.started
    assert rig.step(preempted=True) == save.blocks
    rig.saves.over(save)  # it failed
    rig.saves.computed()
    assert rig.step(resumed=True) == []
    rig.saves.computed()
    rig.step()
    rig.saves.computed()
    assert rig.started[-1].blocks == [4, 5, 6, 7]


def test_blocks_of_a_finished_request_are_free_with_the_end_of_its_last_save() -> None:
    rig = Rig()
    for number in range(4):
        rig.step(first=number == 0)
        rig.saves.computed()
    first, second = rig.started
    first.moved_tokens = EVERY
    assert not rig.saves.over(first)
    assert rig.state.known_tokens == EVERY
    last = Work("a", list(range(9)), False)
    assert rig.saves.wait_for("a", [*rig.saves.finished("a"), last])
    assert not rig.saves.over(last)
    assert rig.saves.over(second)
    assert not rig.saves.wait_for("b", rig.saves.finished("b"))
