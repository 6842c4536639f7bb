"""Completions: awaiting is listening, the last part wakes everyone, and closing loses no memory."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from loop_matrix import LOOPS, run_on

from flexkv._core import lib
from flexkv.completion import Completions, Done, Ticket
from flexkv.errors import CapacityError, ClosedError, FlexKVError, InputError

pytestmark = pytest.mark.parametrize("loop", LOOPS)


class Buffer:
    """Stands for memory that hardware writes to; a weak reference tells whether it lives."""


@asynccontextmanager
async def opened(**sizes: int) -> AsyncIterator[Completions]:
    completions = Completions(**sizes)
    try:
        yield completions
    finally:
        assert await completions.aclose() == 0


def start(
    completions: Completions, delay_us: int = 0, error: int = 0, keep: object = None
) -> Ticket:
    ticket = completions.ticket(keep=keep)
    assert lib.fx_crew_delay(completions.crew, delay_us, ticket.number, error) == 0
    return ticket


def test_many_tickets_from_other_threads_need_few_wakeups(loop: str) -> None:
    async def main() -> None:
        async with opened(crew_threads=2) as completions:
            tickets = [start(completions, error=i % 7) for i in range(500)]
            done = await asyncio.gather(*tickets)
            assert done == [Done(int(i % 7 > 0), i % 7) for i in range(500)]
            assert completions.in_flight == 0
            assert completions.wakeups < 100

    run_on(loop, main())


def test_more_tickets_than_one_drain_takes_complete_in_one_wakeup(loop: str) -> None:
    async def main() -> None:
        async with opened() as completions:
            tickets = [completions.ticket() for _ in range(1000)]
            for ticket in tickets:
                lib.fx_complete(ticket.address)
            assert await asyncio.gather(*tickets) == [Done(0, 0)] * 1000
            assert completions.wakeups == 1

    run_on(loop, main())


def test_parts_are_counted_down_and_failures_reported(loop: str) -> None:
    async def main() -> None:
        async with opened() as completions:
            ticket = completions.ticket(3)
            completions.fail(ticket, -errno.EAGAIN, parts=1)
            for error in (0, errno.EIO):
                lib.fx_crew_delay(completions.crew, 100, ticket.number, error)
            assert await ticket == Done(2, errno.EAGAIN)
            whole = completions.ticket(3)
            completions.fail(whole, errno.ENOMEM)
            assert await whole == Done(3, errno.ENOMEM)

    run_on(loop, main())


def test_a_ticket_may_be_awaited_by_many_before_and_after(loop: str) -> None:
    async def main() -> None:
        async with opened() as completions:

            async def listen(ticket: Ticket) -> Done:
                return await ticket

            ticket = start(completions, delay_us=2000, error=errno.EIO)
            assert ticket.done is None
            listeners = [asyncio.create_task(listen(ticket)) for _ in range(5)]
            assert await asyncio.gather(*listeners) == [Done(1, errno.EIO)] * 5
            assert await ticket == ticket.done == Done(1, errno.EIO)

    run_on(loop, main())


async def cancel_the_task(ticket: Ticket) -> None:
    async def listen() -> None:
        await ticket

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(ticket: Ticket) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await ticket


async def wait_for(ticket: Ticket) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ticket, 0.001)


async def leave_a_scope(ticket: Ticket) -> None:
    with anyio.move_on_after(0.001) as scope:
        await ticket
    assert scope.cancelled_caught


async def fail_a_task_group(ticket: Ticket) -> None:
    async def listen() -> None:
        await ticket

    async def fail_together() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            await anyio.lowlevel.checkpoint()
            raise LookupError

    with pytest.raises(ExceptionGroup):
        await fail_together()


@pytest.mark.parametrize(
    "give_up", [cancel_the_task, time_out, wait_for, leave_a_scope, fail_a_task_group]
)
def test_a_listener_that_gives_up_releases_nothing(
    loop: str, give_up: Callable[[Ticket], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with opened(tickets=1) as completions:
            buffer = Buffer()
            alive = weakref.ref(buffer)
            ticket = completions.ticket(keep=[buffer])
            del buffer
            other = asyncio.ensure_future(ticket)
            await give_up(ticket)
            gc.collect()
            assert alive() is not None
            assert completions.in_flight == 1
            with pytest.raises(CapacityError):
                completions.ticket()
            lib.fx_crew_delay(completions.crew, 0, ticket.number, 0)
            assert await other == Done(0, 0)  # who listens on is not disturbed
            assert await ticket == Done(0, 0)
            gc.collect()
            assert alive() is None
            assert await start(completions) == Done(0, 0)  # the slot is free again

    run_on(loop, main())


def test_a_ticket_nobody_holds_still_keeps_its_memory(loop: str) -> None:
    async def main() -> None:
        async with opened() as completions:
            buffer = Buffer()
            alive = weakref.ref(buffer)
            number = completions.ticket(keep=buffer).number
            del buffer
            gc.collect()
            assert alive() is not None
            lib.fx_crew_delay(completions.crew, 1000, number, 0)
            await start(completions, delay_us=2000)
            await completions.aclose()
            assert alive() is None

    run_on(loop, main())


def test_duplicate_and_late_completions_are_ignored(loop: str) -> None:
    async def main() -> None:
        async with opened(tickets=1) as completions:
            first = completions.ticket()
            lib.fx_complete(first.address)
            lib.fx_fail(first.address, errno.EIO)
            assert await first == Done(0, 0)
            second = completions.ticket()
            lib.fx_fail(first.address, errno.EIO)
            assert completions.stale == 2
            completions.request_drain()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert second.done is None
            lib.fx_complete(second.address)
            assert await second == Done(0, 0)

    run_on(loop, main())


def test_spurious_signals_do_no_harm(loop: str) -> None:
    async def main() -> None:
        async with opened() as completions:
            ticket = completions.ticket()
            os.eventfd_write(lib.fx_hub_fd(completions.hub), 5)
            await start(completions, delay_us=1000)
            assert ticket.done is None
            lib.fx_complete(ticket.address)
            await ticket

    run_on(loop, main())


def test_misuse_is_told(loop: str) -> None:
    async def main() -> None:
        async with opened(tickets=2) as completions:
            for parts in (0, -1, 1 << 14):
                with pytest.raises(InputError, match="parts"):
                    completions.ticket(parts)
            assert completions.in_flight == 0
            errors: list[BaseException] = []

            def elsewhere() -> None:
                try:
                    completions.ticket()
                except FlexKVError as error:
                    errors.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert "flexkv.sync" in str(errors[0])
            assert completions.now() == pytest.approx(asyncio.get_running_loop().time(), abs=1)
        with pytest.raises(ClosedError):
            completions.ticket()
        with pytest.raises(FlexKVError, match="tickets"):
            Completions(tickets=0)
        async with opened(crew_threads=0) as completions:
            with pytest.raises(FlexKVError, match="threads"):
                _ = completions.crew

    run_on(loop, main())


def test_timers_are_the_loops(loop: str) -> None:
    async def main() -> None:
        async with opened() as completions:
            called: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            never = completions.call_later(0.001, called.cancel)
            never.cancel()
            start = completions.now()
            completions.call_later(0.01, lambda late: called.set_result(completions.now()), 1)
            assert await called - start >= 0.009

    run_on(loop, main())


def test_completions_need_a_running_loop(loop: str) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        Completions()


def test_closing_waits_for_tickets_and_may_be_repeated(loop: str) -> None:
    async def main() -> None:
        completions = Completions()
        tickets = [start(completions, delay_us) for delay_us in (0, 5_000, 20_000)]
        assert await asyncio.gather(completions.aclose(), completions.aclose()) == [0, 0]
        assert [ticket.done for ticket in tickets] == [Done(0, 0)] * 3
        assert await completions.aclose() == completions.close_now() == 0
        assert completions.in_flight == completions.stale == 0

    run_on(loop, main())


def test_a_cancelled_close_can_be_taken_up_again(loop: str) -> None:
    async def main() -> None:
        completions = Completions()
        ticket = completions.ticket()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.002):
                await completions.aclose()
        with pytest.raises(ClosedError):
            completions.ticket()
        lib.fx_crew_delay(completions.crew, 1000, ticket.number, 0)
        assert await completions.aclose() == 0
        assert ticket.done == Done(0, 0)

    run_on(loop, main())


def test_a_lost_ticket_ends_its_listeners_and_never_frees_its_memory(loop: str) -> None:
    async def main() -> None:
        completions = Completions()
        buffer = Buffer()
        alive = weakref.ref(buffer)
        ticket = completions.ticket(2, keep=buffer)
        del buffer
        listener = asyncio.ensure_future(ticket)
        assert await completions.aclose(timeout_ms=5) == 1
        assert await listener == Done(2, errno.ETIMEDOUT)
        lib.fx_complete(ticket.address)  # hardware wakes up after all
        lib.fx_fail(ticket.address, errno.EIO)
        del completions
        gc.collect()
        assert alive() is not None

    run_on(loop, main())


def test_the_fd_is_no_longer_watched_when_its_number_is_recycled(loop: str) -> None:
    async def main() -> None:
        completions = Completions()
        number = lib.fx_hub_fd(completions.hub)
        await completions.aclose()
        fds = os.pipe()
        assert number in fds
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(fds[0], arrived.set_result, None)
        os.write(fds[1], b"x")
        await asyncio.wait_for(arrived, 5)
        asyncio.get_running_loop().remove_reader(fds[0])
        for fd in fds:
            os.close(fd)

    run_on(loop, main())


def test_a_loop_that_ends_without_aclose_can_be_closed_from_outside(loop: str) -> None:
    kept: list[Any] = []

    async def main() -> None:
        completions = Completions()
        buffer = Buffer()
        kept.extend([completions, weakref.ref(buffer), start(completions, 20_000, keep=buffer)])

    run_on(loop, main())
    completions, alive, ticket = kept
    gc.collect()
    assert alive() is not None
    assert completions.close_now() == 0
    gc.collect()
    assert ticket.done == Done(0, 0)
    assert alive() is None


def test_close_now_blocks_inside_the_loop_and_gives_up_in_time(loop: str) -> None:
    async def main() -> None:
        completions = Completions()
        ticket = start(completions, 20_000)
        assert completions.close_now() == 0
        assert await ticket == Done(0, 0)
        completions = Completions()
        lost = asyncio.ensure_future(completions.ticket())
        assert completions.close_now(timeout_ms=5) == 1
        assert await lost == Done(1, errno.ETIMEDOUT)

    run_on(loop, main())
