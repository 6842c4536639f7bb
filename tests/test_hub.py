"""The hub: a completion counts for exactly the ticket it was made for, or for nothing."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from typing import Any

import pytest

from flexkv._core import ffi, lib


def pointer(ticket: int) -> Any:
    return ffi.cast("void *", ticket)


def drain(hub: Any, capacity: int = 256) -> list[tuple[int, int, int]]:
    done = ffi.new("fx_done[]", capacity)
    count = lib.fx_hub_drain(hub, done, capacity)
    return [(done[i].ticket, done[i].failed, done[i].error) for i in range(count)]


def is_signalled(hub: Any) -> bool:
    return bool(select.select([lib.fx_hub_fd(hub)], [], [], 0)[0])


@pytest.fixture
def hub() -> Iterator[Any]:
    hub = lib.fx_hub_open(16)
    yield hub
    lib.fx_hub_close(hub, 0)


@pytest.mark.parametrize("tickets", [0, (1 << 20) + 1])
def test_nonsense_sizes_are_refused(tickets: int) -> None:
    assert lib.fx_hub_open(tickets) == ffi.NULL
    assert ffi.errno == errno.EINVAL


def test_a_ticket_counts_its_parts_down_and_keeps_the_first_error(hub: Any) -> None:
    ticket = lib.fx_ticket_take(hub, 4)
    lib.fx_complete(pointer(ticket))
    lib.fx_fail(pointer(ticket), errno.EIO)
    lib.fx_fail(pointer(ticket), errno.ENOSPC)
    assert drain(hub) == []
    assert not is_signalled(hub)
    lib.fx_complete(pointer(ticket))
    assert is_signalled(hub)
    assert drain(hub) == [(ticket, 2, errno.EIO)]
    assert lib.fx_hub_in_flight(hub) == 0


def test_tickets_run_out_and_come_back(hub: Any) -> None:
    tickets = [lib.fx_ticket_take(hub, 1) for _ in range(16)]
    assert 0 not in tickets
    assert len(set(tickets)) == 16
    assert lib.fx_ticket_take(hub, 1) == 0
    lib.fx_complete(pointer(tickets[3]))
    assert lib.fx_ticket_take(hub, 1) == 0  # finished, but nobody has been told yet
    drain(hub)
    assert lib.fx_ticket_take(hub, 1) not in [0, *tickets]


@pytest.mark.parametrize("parts", [0, 16_384])
def test_parts_that_do_not_fit_are_refused(hub: Any, parts: int) -> None:
    assert lib.fx_ticket_take(hub, parts) == 0
    assert lib.fx_hub_in_flight(hub) == 0


def test_the_largest_number_of_parts_works(hub: Any) -> None:
    parts = lib.fx_hub_max_parts()
    ticket = lib.fx_ticket_take(hub, parts)
    for _ in range(parts):
        lib.fx_fail(pointer(ticket), errno.EIO)
    assert drain(hub) == [(ticket, parts, errno.EIO)]


def test_duplicate_and_late_completions_are_ignored_and_counted(hub: Any) -> None:
    first = lib.fx_ticket_take(hub, 1)
    lib.fx_complete(pointer(first))
    lib.fx_complete(pointer(first))  # duplicate, before the drain
    lib.fx_fail(pointer(first), errno.EIO)
    assert drain(hub) == [(first, 0, 0)]
    lib.fx_complete(pointer(first))  # late, slot free
    second = lib.fx_ticket_take(hub, 2)  # the same slot again
    lib.fx_fail(pointer(first), errno.EIO)  # late, slot taken by another ticket
    assert drain(hub) == []
    lib.fx_complete(pointer(second))
    lib.fx_complete(pointer(second))
    assert drain(hub) == [(second, 0, 0)]
    assert lib.fx_hub_stale(hub) == 4


def test_nonsense_tickets_are_ignored(hub: Any) -> None:
    ticket = lib.fx_ticket_take(hub, 1)
    for number in (
        0,
        1,
        ticket + (15 << 36),
        ticket | 0xFFFFF << 36,
        2**64 - 1,
        ticket + (1 << 56),
    ):
        lib.fx_complete(pointer(number))
    assert drain(hub) == []
    assert lib.fx_hub_in_flight(hub) == 1


def test_completions_for_a_closed_hub_touch_no_later_hub() -> None:
    old = lib.fx_hub_open(1)
    lost = lib.fx_ticket_take(old, 1)
    assert lib.fx_hub_close(old, 0) == 1
    lib.fx_complete(pointer(lost))
    hubs = []
    while (hub := lib.fx_hub_open(1)) != ffi.NULL:  # every number of a hub is in use now
        hubs.append(hub)
    assert ffi.errno in (errno.EMFILE, errno.ENFILE)
    assert lib.fx_ticket_take(hubs[-1], 1) != 0
    for hub in hubs[:-1]:
        assert lib.fx_ticket_take(hub, 1) != lost
    lib.fx_complete(pointer(lost))
    assert all(drain(hub) == [] for hub in hubs)
    assert [lib.fx_hub_close(hub, 0) for hub in hubs] == [1] * len(hubs)
    assert len(hubs) > 200


def test_a_capped_drain_keeps_the_rest_in_order(hub: Any) -> None:
    tickets = [lib.fx_ticket_take(hub, 1) for _ in range(10)]
    for ticket in tickets[:8]:
        lib.fx_complete(pointer(ticket))
    assert [ticket for ticket, _, _ in drain(hub, 3)] == tickets[:3]
    for ticket in tickets[8:]:
        lib.fx_complete(pointer(ticket))
    rest = []
    while more := drain(hub, 3):
        rest += [ticket for ticket, _, _ in more]
    assert rest == tickets[3:]


def test_the_eventfd_is_written_only_when_nothing_was_waiting(hub: Any) -> None:
    for _ in range(2):
        for ticket in [lib.fx_ticket_take(hub, 1) for _ in range(16)]:
            lib.fx_complete(pointer(ticket))
        assert os.eventfd_read(lib.fx_hub_fd(hub)) == 1
        assert len(drain(hub)) == 16


def test_settling_without_wake_leaves_the_eventfd_alone(hub: Any) -> None:
    ticket = lib.fx_ticket_take(hub, 1)
    lib.fx_settle(ticket, errno.EIO, 0)
    assert not is_signalled(hub)
    assert drain(hub) == [(ticket, 1, errno.EIO)]


def test_close_waits_for_what_is_in_flight() -> None:
    hub, crew = lib.fx_hub_open(8), lib.fx_crew_open(2, 8)
    for delay_us in (0, 10_000, 30_000):
        lib.fx_crew_delay(crew, delay_us, lib.fx_ticket_take(hub, 1), 0)
    assert lib.fx_hub_close(hub, 10_000) == 0
    lib.fx_crew_close(crew)


def test_threads_that_share_a_ticket_count_every_part_once() -> None:
    hub, crew = lib.fx_hub_open(64), lib.fx_crew_open(4, 4096)
    tickets = [lib.fx_ticket_take(hub, 60) for _ in range(64)]
    for part in range(60):
        for ticket in tickets:
            assert lib.fx_crew_delay(crew, 0, ticket, errno.EIO if part % 3 == 0 else 0) == 0
    lib.fx_crew_close(crew)
    assert sorted(drain(hub)) == sorted((ticket, 20, errno.EIO) for ticket in tickets)
    assert lib.fx_hub_stale(hub) == 0
    lib.fx_hub_close(hub, 0)
