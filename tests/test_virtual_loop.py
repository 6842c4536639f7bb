"""The virtual loop: time passes only where everybody waits, and nothing else changes."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from flexkv.testing.loop import StandstillError, VirtualLoop


def test_waiting_takes_no_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return loop.time()

    begun = time.monotonic()
    assert VirtualLoop().run(main()) == pytest.approx(7200)
    assert time.monotonic() - begun < 5


def test_timers_fire_in_order_and_callbacks_first_come_first_served() -> None:
    async def main() -> list[str]:
        loop, seen = asyncio.get_running_loop(), []
        loop.call_later(2, seen.append, "late")
        loop.call_later(1, seen.append, "early")
        for name in ("a", "b", "c"):
            loop.call_soon(seen.append, name)
        await asyncio.sleep(3)
        return seen

    assert VirtualLoop().run(main()) == ["a", "b", "c", "early", "late"]


def test_task_groups_scopes_and_timeouts_of_anyio_work() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def sleeper(name: str, delay_s: float) -> None:
            try:
                await anyio.sleep(delay_s)
                seen.append(name)
            except anyio.get_cancelled_exc_class():
                seen.append(f"{name} cancelled")
                raise

        with anyio.move_on_after(5) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(sleeper, "short", 1)
                group.start_soon(sleeper, "long", 50)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.sleep(2)
        return seen

    assert VirtualLoop().run(main()) == ["short", "long cancelled"]


def test_a_wait_that_nobody_can_end_is_told() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StandstillError, match="nothing will happen"):
        VirtualLoop().run(main())


def test_limits_of_time_and_turns_are_told() -> None:
    async def sleep() -> None:
        await asyncio.sleep(100)

    async def spin() -> None:
        for _ in range(1000):
            await asyncio.sleep(0)

    with pytest.raises(StandstillError, match="virtual time"):
        VirtualLoop(limit_s=10).run(sleep())
    with pytest.raises(StandstillError, match="turned"):
        VirtualLoop(limit_turns=50).run(spin())


def test_what_main_left_behind_is_cancelled() -> None:
    ended = []

    async def straggler() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            ended.append(True)

    async def main() -> None:
        asyncio.get_running_loop().create_task(straggler())
        await asyncio.sleep(0)

    VirtualLoop().run(main())
    assert ended == [True]


def test_each_turn_is_looked_at_and_may_end_the_run() -> None:
    turns = []

    def look() -> None:
        turns.append(True)
        if len(turns) == 5:
            raise ValueError("seen enough")

    async def main() -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    with pytest.raises(ValueError, match="seen enough"):
        VirtualLoop(look).run(main())
    assert len(turns) == 5


def test_threads_of_an_executor_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(threading.get_ident)

    with pytest.raises(RuntimeError, match="no threads"):
        VirtualLoop().run(main())


def test_sets_of_tasks_have_the_same_order_in_every_run() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.sleep(1)
            finally:
                seen.append(name)

        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(wait, str(number))
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        return seen

    orders = {tuple(VirtualLoop().run(main())) for _ in range(5)}
    assert len(orders) == 1
