"""The crew: bounded, out of the way of signals, and it finishes what it has accepted."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flexkv._core import ffi, lib


@pytest.fixture
def hub() -> Iterator[Any]:
    hub = lib.fx_hub_open(256)
    yield hub
    lib.fx_hub_close(hub, 0)


def drain(hub: Any) -> list[tuple[int, int, int]]:
    done = ffi.new("fx_done[]", 256)
    count = lib.fx_hub_drain(hub, done, 256)
    return [(done[i].ticket, done[i].failed, done[i].error) for i in range(count)]


@pytest.mark.parametrize(("threads", "depth"), [(0, 1), (1, 0), (5000, 1)])
def test_nonsense_sizes_are_refused(threads: int, depth: int) -> None:
    assert lib.fx_crew_open(threads, depth) == ffi.NULL
    assert ffi.errno == errno.EINVAL


def test_close_runs_what_is_queued(hub: Any) -> None:
    crew = lib.fx_crew_open(2, 256)
    tickets = [lib.fx_ticket_take(hub, 1) for _ in range(200)]
    for ticket in tickets:
        assert lib.fx_crew_delay(crew, 50, ticket, 0) == 0
    assert lib.fx_crew_close(crew) == 0
    assert sorted(drain(hub)) == sorted((ticket, 0, 0) for ticket in tickets)


def test_a_full_queue_says_so_and_takes_nothing(hub: Any) -> None:
    crew = lib.fx_crew_open(1, 4)
    tickets = [lib.fx_ticket_take(hub, 1) for _ in range(12)]
    answers = [lib.fx_crew_delay(crew, 20_000, ticket, 0) for ticket in tickets]
    lib.fx_crew_close(crew)
    accepted = [ticket for ticket, answer in zip(tickets, answers, strict=True) if answer == 0]
    assert set(answers) == {0, -errno.EAGAIN}
    assert 4 <= len(accepted) <= 5  # the queue, and one that a thread may have taken out
    assert sorted(ticket for ticket, _, _ in drain(hub)) == sorted(accepted)


def test_one_thread_keeps_the_order(hub: Any) -> None:
    crew = lib.fx_crew_open(1, 256)
    tickets = [lib.fx_ticket_take(hub, 1) for _ in range(100)]
    for ticket in tickets:
        lib.fx_crew_delay(crew, 0, ticket, 0)
    lib.fx_crew_close(crew)
    assert [ticket for ticket, _, _ in drain(hub)] == tickets


def test_a_failing_job_fails_its_ticket(hub: Any) -> None:
    crew = lib.fx_crew_open(1, 4)
    ticket = lib.fx_ticket_take(hub, 1)
    lib.fx_crew_delay(crew, 0, ticket, errno.ENODEV)
    lib.fx_crew_close(crew)
    assert drain(hub) == [(ticket, 1, errno.ENODEV)]


def crew_threads() -> dict[str, int]:
    """Thread id -> blocked signals, of all crew threads of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended while we were looking
            if (task / "comm").read_text().strip() == "flexkv-crew":
                lines = (task / "status").read_text().splitlines()
                blocked = next(line.split()[1] for line in lines if line.startswith("SigBlk"))
                found[task.name] = int(blocked, 16)
    return found


def test_threads_are_named_and_leave_signals_alone() -> None:
    before = crew_threads()
    crew = lib.fx_crew_open(3, 4)
    found = {name: blocked for name, blocked in crew_threads().items() if name not in before}
    lib.fx_crew_close(crew)
    assert len(found) == 3
    for blocked in found.values():  # HUP, INT, TERM, CHLD, USR1: bit = number - 1
        assert all(blocked >> (number - 1) & 1 for number in (1, 2, 15, 17, 10))
    assert not found.keys() & crew_threads().keys()


def test_a_crew_left_alone_finishes_its_work(hub: Any) -> None:
    crew = lib.fx_crew_open(2, 64)
    tickets = [lib.fx_ticket_take(hub, 1) for _ in range(20)]
    for ticket in tickets:
        lib.fx_crew_delay(crew, 1000, ticket, 0)
    lib.fx_crew_leave(crew)
    finished: list[int] = []
    while len(finished) < len(tickets):
        assert select.select([lib.fx_hub_fd(hub)], [], [], 10)[0]
        os.eventfd_read(lib.fx_hub_fd(hub))
        finished += [ticket for ticket, _, _ in drain(hub)]
    assert sorted(finished) == sorted(tickets)
