"""Servers against closed forms: latency plus bytes, depth, channels, contention, priorities."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.errors import SimulationError
from flexkv.sim.clock import VirtualClock
from flexkv.sim.profiles import TierProfile
from flexkv.sim.servers import (
    Activity,
    Job,
    Priority,
    Server,
    batch_seconds,
    cancel,
    coalesce,
    overlap_s,
    raise_priority,
    submit,
)


def tier(rate: float = 1000.0, latency_s: float = 0.0, **changes: object) -> TierProfile:
    return TierProfile("tier", math.inf, latency_s, rate, rate, **changes)  # type: ignore[arg-type]


def one_by_one(
    fragments: int, size: float, latency_s: float, rate: float, depth: int, channels: int = 1
) -> float:
    """Serve every request on its own: a window of `depth`, transfers one after another."""
    ends, free = [], [0.0] * channels
    for i in range(fragments):
        admitted = ends[i - depth] if i >= depth else 0.0
        start = max(admitted, min(free))
        end = start + size / (rate / channels)
        free[free.index(min(free))] = end
        ends.append(end + latency_s)
    return max(ends)


def test_one_request_costs_its_latency_and_its_bytes() -> None:
    clock = VirtualClock()
    job = submit([Server(clock, tier(latency_s=0.25))], 500.0)
    clock.run()
    assert job.finish_s == 0.25 + 500.0 / 1000.0


@given(
    fragments=st.integers(1, 60),
    depth=st.integers(1, 16),
    latency_s=st.floats(0, 10),
    size=st.floats(1, 5000),
)
@settings(max_examples=200, deadline=None)
def test_a_batch_takes_what_requests_take_one_by_one(
    fragments: int, depth: int, latency_s: float, size: float
) -> None:
    expected = one_by_one(fragments, size, latency_s, 1000.0, depth)
    got = batch_seconds(fragments, size, latency_s, 1000.0, depth)
    assert got == pytest.approx(expected, rel=1e-9)


def test_without_depth_latencies_add_up_and_with_depth_they_do_not() -> None:
    def run(depth: int) -> float:
        clock = VirtualClock()
        server = Server(clock, tier(rate=1e6, latency_s=1.0, queue_depth=depth))
        submit([server], 1000.0, fragments=100)
        return clock.run()

    assert run(1) == pytest.approx(100 * (1.0 + 10 / 1e6))
    assert run(100) == pytest.approx(1.0 + 1000 / 1e6)


def test_two_tiers_behind_one_link_get_half_of_it_each() -> None:
    def run(tiers: int) -> float:
        clock = VirtualClock()
        link = Server(clock, tier(1000.0, chunk_bytes=10))
        jobs = [
            submit([Server(clock, tier(1e9, chunk_bytes=10)), link], 5000.0) for _ in range(tiers)
        ]
        clock.run()
        ends = [job.finish_s for job in jobs]
        assert max(e for e in ends if e) - min(e for e in ends if e) <= 10 / 1000.0 + 1e-9
        return max(e for e in ends if e)

    assert run(2) == pytest.approx(2 * run(1), rel=0.01)


def test_a_path_is_as_fast_as_its_slowest_server_and_not_as_their_sum() -> None:
    clock = VirtualClock()
    path = [Server(clock, tier(500.0, chunk_bytes=50)), Server(clock, tier(1000.0, chunk_bytes=50))]
    job = submit(path, 5000.0)
    clock.run()
    assert job.finish_s == pytest.approx(5000 / 500 + 50 / 1000)  # the last chunk passes the second


def test_a_single_request_uses_one_channel_and_many_use_all() -> None:
    def run(fragments: int) -> float:
        clock = VirtualClock()
        submit([Server(clock, tier(channels=4))], 400.0, fragments=fragments)
        return clock.run()

    assert run(1) == pytest.approx(400 / 250)
    assert run(4) == pytest.approx(400 / 1000)


def test_random_arrivals_wait_as_long_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: mean wait = rho * x / (2 * (1 - rho))."""
    clock, seed, load, service_s = VirtualClock(), random.Random(5), 0.7, 0.01
    server = Server(clock, tier(rate=1.0 / service_s, chunk_bytes=1 << 30))
    jobs: list[Job] = []
    when_s = 0.0
    for _ in range(40_000):
        when_s += seed.expovariate(load / service_s)
        clock.at(when_s, lambda: jobs.append(submit([server], 1.0)))
    clock.run()
    waits = [job.start_s - job.submitted_s for job in jobs if job.start_s is not None]
    expected = load * service_s / (2 * (1 - load))
    assert np.mean(waits) == pytest.approx(expected, rel=0.05)
    assert server.utilisation() == pytest.approx(load, rel=0.02)


def test_demand_overtakes_prefetch_at_the_next_chunk() -> None:
    clock = VirtualClock()
    server = Server(clock, tier(chunk_bytes=100))
    slow = submit([server], 1000.0, priority=Priority.PREFETCH)
    urgent: list[Job] = []
    clock.at(0.25, lambda: urgent.append(submit([server], 100.0)))
    clock.run()
    assert urgent[0].start_s == pytest.approx(0.3)  # the border after the third chunk
    assert slow.finish_s == pytest.approx(1.1)


def test_a_prefetch_that_is_asked_for_goes_before_others_from_then_on() -> None:
    clock = VirtualClock()
    server = Server(clock, tier(chunk_bytes=100))
    submit([server], 1000.0, priority=Priority.PREFETCH)
    wanted = submit([server], 100.0, priority=Priority.PREFETCH)
    clock.at(0.15, lambda: raise_priority(wanted, Priority.DEMAND_READ))
    clock.run()
    assert wanted.finish_s == pytest.approx(0.3)


def test_a_cancelled_job_gives_back_what_has_not_started() -> None:
    clock = VirtualClock()
    server = Server(clock, tier(chunk_bytes=100))
    called: list[Job] = []
    job = submit([server], 1000.0, priority=Priority.PREFETCH, on_done=called.append)
    clock.at(0.25, lambda: cancel(job) and None)
    assert clock.run() == pytest.approx(0.3)
    assert job.done
    assert called == []
    assert sum(server.served_bytes) == 300.0


def test_neighbours_are_merged_up_to_the_limit_and_others_are_not() -> None:
    slots = np.array([4, 5, 6, 7, 9, 3, 2])
    assert coalesce(slots, 10, 30).tolist() == [30, 10, 10, 10, 10]
    assert coalesce(slots, 10, 0).tolist() == [10] * 7
    assert coalesce(slots[:0], 10, 30).tolist() == []


@given(
    jobs=st.lists(
        st.tuples(
            st.floats(0, 5), st.integers(1, 30), st.integers(1, 400), st.sampled_from(Priority)
        ),
        min_size=1,
        max_size=25,
    ),
    channels=st.integers(1, 4),
    depth=st.integers(1, 8),
)
@settings(max_examples=80, deadline=None)
def test_every_byte_passes_every_server_once_and_none_is_busier_than_time(
    jobs: list[tuple[float, int, int, Priority]], channels: int, depth: int
) -> None:
    clock, shared = VirtualClock(), Activity()
    first = Server(clock, tier(900.0, 0.01, channels=channels, queue_depth=depth), shared)
    link = Server(clock, tier(700.0, 0.002, chunk_bytes=256), shared)
    done: list[Job] = []
    for when_s, count, size, priority in jobs:
        clock.at(
            when_s,
            lambda c=count, s=size, p=priority: (
                submit([first, link], c * s, fragments=c, priority=p, on_done=done.append) and None
            ),
        )
    end_s = clock.run()
    sent = sum(count * size for _, count, size, _ in jobs)
    assert len(done) == len(jobs)
    for server in (first, link):
        assert sum(server.served_bytes) == pytest.approx(sent)
        assert server.queued == 0
        assert server.busy_s() <= end_s + 1e-9
        assert 0 <= server.utilisation() <= 1 + 1e-9
    assert shared.total_s() <= first.busy_s() + link.busy_s() + 1e-9
    assert shared.total_s() >= max(first.busy_s(), link.busy_s()) - 1e-9


def test_overlap_of_intervals() -> None:
    assert overlap_s([(0, 2), (3, 5)], [(1, 4)]) == 2
    assert overlap_s([], [(1, 4)]) == 0


def test_an_empty_job_is_refused() -> None:
    with pytest.raises(SimulationError, match="0 servers"):
        submit([], 5.0)
    with pytest.raises(SimulationError, match=r"0\.0 bytes"):
        submit([Server(VirtualClock(), tier())], 0.0)
