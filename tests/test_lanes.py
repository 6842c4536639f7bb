"""Lanes: a limit that holds, turns in order of priority and arrival, cancelled waiters that pass
their turn on.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from loop_matrix import LOOPS, run_on

from flexkv.lanes import Lane


async def turns(count: int = 3) -> None:
    """Let everybody who can go on go on."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        turned = loop.create_future()
        loop.call_soon(turned.set_result, None)
        await turned


class Crowd:
    """Tasks that acquire, note their name when it is their turn, and hold until told."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.held: dict[str, int] = {}

    async def join(self, name: str, size: int, priority: int = 0) -> None:
        async def hold() -> None:
            self.held[name] = await self.lane.acquire(size, priority)
            self.order.append(name)

        self.tasks[name] = asyncio.ensure_future(hold())
        await turns()

    async def leave(self, name: str) -> None:
        self.lane.release(self.held.pop(name))
        await turns()


async def test_arrivals_of_one_priority_have_their_turns_in_order() -> None:
    crowd = Crowd(Lane("test", 2))
    for name in "abcdef":
        await crowd.join(name, 1)
    for name in "abcdef":
        await crowd.leave(name)
    assert crowd.order == list("abcdef")
    assert (crowd.lane.in_flight, crowd.lane.waiting) == (0, 0)


async def test_lower_numbers_go_first() -> None:
    crowd = Crowd(Lane("test", 1))
    await crowd.join("first", 1, 3)
    await crowd.join("spill", 1, 3)
    await crowd.join("prefetch", 1, 2)
    await crowd.join("get", 1, 0)
    await crowd.join("get too", 1, 0)
    for name in ["first", "get", "get too", "prefetch"]:
        await crowd.leave(name)
    assert crowd.order == ["first", "get", "get too", "prefetch", "spill"]
    await crowd.leave("spill")


async def test_small_requests_do_not_overtake_a_large_one() -> None:
    crowd = Crowd(Lane("test", 4))
    await crowd.join("half", 2)
    await crowd.join("whole", 4)
    await crowd.join("small", 1)
    assert crowd.order == ["half"]
    await crowd.leave("half")
    assert crowd.order == ["half", "whole"]
    await crowd.leave("whole")
    assert crowd.order == ["half", "whole", "small"]
    await crowd.leave("small")


async def test_a_request_above_the_limit_has_the_lane_alone() -> None:
    crowd = Crowd(Lane("test", 4))
    await crowd.join("one", 1)
    await crowd.join("huge", 100)
    assert crowd.order == ["one"]
    await crowd.leave("one")
    assert crowd.held == {"huge": 4}
    assert crowd.lane.in_flight == 4
    await crowd.leave("huge")


async def test_a_cancelled_waiter_passes_its_turn_on() -> None:
    crowd = Crowd(Lane("test", 1))
    for name in "abc":
        await crowd.join(name, 1)
    crowd.lane.release(crowd.held.pop("a"))  # the turn is b's, who has not run yet
    crowd.tasks["b"].cancel()
    await turns()
    assert crowd.order == ["a", "c"]
    await crowd.leave("c")
    assert crowd.lane.in_flight == 0


async def test_a_cancelled_waiter_lets_smaller_ones_behind_it_through() -> None:
    crowd = Crowd(Lane("test", 4))
    await crowd.join("half", 2)
    await crowd.join("whole", 4)
    await crowd.join("small", 2)
    crowd.tasks["whole"].cancel()
    await turns()
    assert crowd.order == ["half", "small"]
    await crowd.leave("half")
    await crowd.leave("small")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("seed", range(5))
def test_the_limit_holds_whoever_is_cancelled_when(loop: str, seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        lane = Lane("test", 10)
        holding = 0
        served = 0
        over: list[bool] = []

        async def visit(size: int, priority: int, stay: int) -> None:
            nonlocal holding, served
            held = await lane.acquire(size, priority)
            holding += held
            over.append(not holding <= lane.in_flight <= lane.limit)
            try:
                await turns(stay)
                served += 1
            finally:
                holding -= held
                lane.release(held)

        tasks: list[asyncio.Task[None]] = []
        for _ in range(300):
            visitor = visit(chance.randint(0, 14), chance.randint(0, 3), chance.randint(0, 4))
            tasks.append(asyncio.ensure_future(visitor))
            if chance.random() < 0.4:
                chance.choice(tasks).cancel()
            if chance.random() < 0.3:
                await turns(1)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(over)
        assert served >= sum(not task.cancelled() for task in tasks) > 0
        assert (lane.in_flight, lane.waiting, holding) == (0, 0, 0)

    run_on(loop, main())
