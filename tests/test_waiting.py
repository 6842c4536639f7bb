"""Latches, signals, deadlines and carriers: who is woken, when, and in which task."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import anyio
import pytest

from flexkv.carriers import Carriers
from flexkv.completion import Latch
from flexkv.waiting import Deadlines, Signal


class Clock:
    """The clock and the timers of Completions, moved by hand."""

    def __init__(self) -> None:
        self.time = 0.0
        self.timers: list[tuple[float, Any, tuple[Any, ...]]] = []
        self.made = 0

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Any, *arguments: Any) -> Any:
        self.made += 1
        entry = (self.time + delay_s, callback, arguments)
        self.timers.append(entry)
        clock = self

        class Handle:
            def cancel(self) -> None:
                if entry in clock.timers:
                    clock.timers.remove(entry)

        return Handle()

    def advance(self, seconds: float) -> None:
        self.time += seconds
        for entry in [entry for entry in self.timers if entry[0] <= self.time]:
            self.timers.remove(entry)
            entry[1](*entry[2])


async def test_a_latch_wakes_those_who_wait_and_holds_up_nobody_later() -> None:
    latch, woken = Latch(), []

    async def wait(name: str) -> None:
        await latch.wait()
        woken.append(name)

    async with anyio.create_task_group() as group:
        for name in "ab":
            group.start_soon(wait, name)
        await anyio.wait_all_tasks_blocked()
        assert not woken
        assert not latch.is_set()
        latch.set()
    assert sorted(woken) == ["a", "b"]
    await latch.wait()
    latch.set()
    assert latch.is_set()


async def test_a_signal_wakes_only_those_who_wait_already() -> None:
    signal = Signal()
    signal.raise_()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await signal.wait()
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(signal.wait)
        await anyio.wait_all_tasks_blocked()
        signal.raise_()


def test_items_expire_in_order_and_share_one_timer() -> None:
    clock, expired = Clock(), []
    deadlines: Deadlines[str] = Deadlines(clock, 10.0, expired.append)  # type: ignore[arg-type]
    for name in "abc":
        deadlines.add(name)
        clock.advance(1.0)
    assert clock.made == 1
    deadlines.remove("b")
    deadlines.remove("b")
    clock.advance(7.0)
    assert expired == ["a"]
    assert deadlines.items() == ["c"]
    clock.advance(1.9)
    assert expired == ["a"]
    clock.advance(0.1)
    assert expired == ["a", "c"]
    assert len(deadlines) == 0
    assert not clock.timers
    deadlines.add("d")
    deadlines.clear()
    assert not clock.timers


def test_an_expiring_item_may_remove_and_add_others() -> None:
    clock, expired = Clock(), []

    def expire(name: str) -> None:
        expired.append(name)
        deadlines.remove("b")
        if name == "a":
            deadlines.add("late")

    deadlines: Deadlines[str] = Deadlines(clock, 1.0, expire)  # type: ignore[arg-type]
    deadlines.add("a")
    deadlines.add("b")
    clock.advance(1.0)
    assert expired == ["a"]
    clock.advance(1.0)
    assert expired == ["a", "late"]


async def test_a_carrier_is_used_again_and_jobs_never_wait_for_each_other() -> None:
    tasks, gate = [], Latch()

    async def work(job: str) -> None:
        tasks.append((job, asyncio.current_task()))
        if job == "slow":
            await gate.wait()

    async with anyio.create_task_group() as group:
        carriers = Carriers(group, work)
        carriers.start("one")
        await anyio.wait_all_tasks_blocked()
        carriers.start("slow")
        carriers.start("beside")
        await anyio.wait_all_tasks_blocked()
        gate.set()
        await anyio.wait_all_tasks_blocked()
        carriers.start("again")
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    made = dict(tasks)
    assert list(made) == ["one", "slow", "beside", "again"]
    assert made["one"] is made["slow"]
    assert made["beside"] is not made["slow"]
    assert made["again"] in (made["slow"], made["beside"])


async def test_a_job_does_not_see_the_context_of_those_who_start_jobs() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="nobody")
    seen = []

    async def work(job: int) -> None:
        seen.append(variable.get())

    async with anyio.create_task_group() as group:
        carriers = Carriers(group, work)
        variable.set("caller")
        for job in range(2):
            carriers.start(job)
            await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert seen == ["nobody", "nobody"]
