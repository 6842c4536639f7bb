"""Fetch or recompute: the decision against brute force, and the estimates against known costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexkv.estimates import ENOUGH, LineEstimate
from flexkv.model import (
    DEVICE,
    DISK,
    HOST,
    PRIORITY_GET,
    PRIORITY_PREFETCH,
    Copy,
    Span,
    TransferGraph,
)
from flexkv.worth import Worth, WorthLimits, prefill_tokens

TOKENS, BLOCK, CHUNK = 16, 1000, 4
CROSSOVER = 400.0
TIERS = (HOST, DISK, "remote")
WHOLE = np.zeros(1, np.uint8)


def graph_of(tier: str, blocks: int, priority: int = PRIORITY_GET) -> TransferGraph:
    ids = np.arange(blocks, dtype=np.uint32)
    copy = Copy(Span(tier, ids), Span(DEVICE, ids), np.arange(blocks))
    keys = np.zeros((blocks, 2), np.uint64)
    return TransferGraph((copy,), ids, keys, np.zeros(blocks, np.bool_), DEVICE, priority)


class Model:
    """A machine with known costs, and a Worth that has seen them often enough."""

    def __init__(
        self, lines: dict[str, tuple[float, float]], tokens_per_s: float, **limits: float
    ) -> None:
        self.lines, self.tokens_per_s = lines, tokens_per_s
        self.limits = WorthLimits(tokens_per_s, CROSSOVER, **{"margin": 0.0, **limits})
        self.worth = Worth(
            TIERS,
            tokens_per_block=TOKENS,
            block_bytes=BLOCK,
            chunk_blocks=CHUNK,
            limits=self.limits,
        )
        for tier in lines:
            self.see(tier, 0.0, (1, 7, 3, 20, 2))

    def see(self, tier: str, at: float, sizes: tuple[int, ...]) -> None:
        latency_s, block_s = self.lines[tier]
        for blocks in sizes:
            graph = graph_of(tier, blocks)
            self.worth.watch(graph)
            batch = self.worth.begin(graph, graph.ops[0], at, blocks)
            self.worth.end(batch, at + latency_s + blocks * block_s, WHOLE)

    def time(self, tiers: list[int], first: int, cut: int) -> float:
        """Seconds until the prompt is there with `cut` blocks fetched, added up token by token."""
        fetch_s = 0.0
        if cut:
            latency_s, block_s = self.lines[HOST]
            fetch_s = latency_s + cut * block_s
            for number, tier in enumerate(TIERS[1:], start=1):
                mine = tiers[:cut].count(number)
                if mine:
                    read_s = self.lines[tier][0] + mine * self.lines[tier][1]
                    fetch_s = max(fetch_s, read_s + latency_s + min(mine, CHUNK) * block_s)
        tokens = np.arange((first + cut) * TOKENS, (first + len(tiers)) * TOKENS) + 0.5
        compute_s = float((1 + tokens / CROSSOVER).sum()) / self.tokens_per_s
        return fetch_s + self.limits.weight * compute_s


def keep(model: Model, tiers: list[int], first: int = 0, now: float = 1.0) -> int:
    return model.worth.keep([np.array(tiers, np.int64)], first, now)


cost = st.tuples(st.floats(0, 0.05), st.floats(1e-5, 0.02))


@settings(max_examples=150, deadline=None)
@given(
    lines=st.fixed_dictionaries(dict.fromkeys(TIERS, cost)),
    tokens_per_s=st.floats(100, 1e6),
    weight=st.floats(0.2, 5),
    tiers=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    first=st.integers(0, 40),
)
def test_no_cut_is_sooner_than_the_one_that_is_kept(
    lines: dict[str, tuple[float, float]],
    tokens_per_s: float,
    weight: float,
    tiers: list[int],
    first: int,
) -> None:
    model = Model(lines, tokens_per_s, weight=weight)
    times = [model.time(tiers, first, cut) for cut in range(len(tiers) + 1)]
    kept = keep(model, tiers, first)
    assert times[kept] <= min(times) * (1 + 1e-3)  # the line through the samples is held to zero


@given(
    margin=st.floats(0, 0.9),
    tokens_per_s=st.floats(100, 1e6),
    tiers=st.lists(st.integers(0, 1), min_size=1, max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_a_cut_saves_at_least_the_margin(
    margin: float, tokens_per_s: float, tiers: list[int]
) -> None:
    model = Model({HOST: (0.001, 0.001), DISK: (0.004, 0.01)}, tokens_per_s, margin=margin)
    times = [model.time(tiers, 0, cut) for cut in range(len(tiers) + 1)]
    kept = keep(model, tiers)
    if kept < len(tiers):
        assert times[kept] <= (1 - margin) * times[-1] * (1 + 1e-3)
    else:
        assert min(times) >= (1 - margin) * times[-1] * (1 - 1e-3)


def test_a_tail_in_a_slow_tier_is_computed_and_the_head_in_a_fast_one_fetched() -> None:
    model = Model({HOST: (0.0, 0.0001), DISK: (0.0, 1.0)}, 10_000)
    assert keep(model, [0, 0, 0, 1, 1]) == 3
    # a gap cannot be left out: what lies behind it in the host goes with it
    assert keep(model, [0, 1, 0, 0, 0]) == 1


def test_later_tokens_are_fetched_where_earlier_ones_are_computed() -> None:
    # attention to all that is before makes a block at position 400 twice as dear as the first
    model = Model({HOST: (0.0, 1e-6), DISK: (0.0, 0.024)}, 1000)
    assert keep(model, [1] * 4, first=0) == 0
    assert keep(model, [1] * 4, first=25) == 4


@pytest.mark.parametrize("missing", ["prefill", "host", "disk"])
def test_what_is_not_known_is_fetched(missing: str) -> None:
    lines = {HOST: (0.0, 1.0), DISK: (0.0, 1.0)}
    rate = 0.0 if missing == "prefill" else 1e6
    model = Model({tier: line for tier, line in lines.items() if tier != missing}, rate)
    assert keep(model, [0, 1, 1]) == 3


def test_a_weight_keeps_work_from_busy_accelerators() -> None:
    lines = {HOST: (0.0, 1e-6), DISK: (0.0, 0.02)}
    assert keep(Model(lines, 1000), [1] * 4) == 0
    assert keep(Model(lines, 1000, weight=2.0), [1] * 4) == 4


def test_busy_accelerators_are_spared_and_idle_ones_are_not() -> None:
    model = Model({HOST: (0.0, 1e-6), DISK: (0.0, 0.02)}, 1000, probe_s=math.inf)
    assert keep(model, [1] * 4) == 0  # 0.069 s against 0.08 s
    for second in range(120):  # two accelerators, each of them busy half of the time
        for _ in range(2):
            model.worth.computed(0, 0, 0.5, float(second), share=0.5)
    assert model.worth.busy(119.0) == pytest.approx(0.5, abs=0.03)
    assert keep(model, [1] * 4, now=119.0) == 4
    assert model.worth.tokens_per_s() == 1000, "work without tokens says nothing of the rate"
    assert keep(model, [1] * 4, now=600.0) == 0


def test_a_declined_tier_is_tried_again_with_a_chunk_and_comes_back() -> None:
    model = Model({HOST: (0.0, 1e-6), DISK: (0.0, 1.0)}, 1000, probe_s=10)
    seen_at = model.worth.fetching[DISK].seen_at
    assert keep(model, [1] * 9, now=seen_at + 9) == 0
    assert keep(model, [1] * 9, now=seen_at + 10) == CHUNK
    assert keep(model, [1] * 9, now=seen_at + 11) == 0, "one try is enough for a while"
    assert model.worth.probes == 1
    model.lines[DISK] = (0.0, 1e-5)
    for number in range(1, 4):
        now = seen_at + 10 + 10 * number
        if keep(model, [1] * 9, now=now) == 9:
            break
        model.see(DISK, now, (CHUNK,))
    assert number <= 3, "a tier that is fast again comes back within a few tries"
    assert keep(model, [1] * 9, now=now + 1) == 9


def test_what_other_gets_have_under_way_counts() -> None:
    model = Model({HOST: (0.0, 1e-6), DISK: (0.0, 0.01)}, 1000, probe_s=math.inf)
    assert keep(model, [1] * 4) == 4  # 0.04 s against 0.066 s
    others = [graph_of(DISK, 100), graph_of(DISK, 3)]
    for graph in others:
        model.worth.watch(graph)
    # they take turns: 4 blocks of the long one and 3 of the short one go before our last
    fetch_s = model.worth.seconds([np.ones(4, np.int64)], 0, 2.0)
    assert fetch_s is not None
    assert fetch_s[-1] == pytest.approx((4 + 4 + 3) * 0.01, rel=1e-2)
    assert keep(model, [1] * 4) == 0
    for graph in others:
        batch = model.worth.begin(graph, graph.ops[0], 2.0, len(graph.blocks))
        model.worth.end(batch, 2.0 + 0.01 * len(graph.blocks), WHOLE)
    assert keep(model, [1] * 4) == 4


def test_a_prefetch_counts_with_what_is_on_its_way_only() -> None:
    model = Model({HOST: (0.0, 1e-6), DISK: (0.0, 0.01)}, 1000)
    prefetch = graph_of(DISK, 100, PRIORITY_PREFETCH)
    model.worth.watch(prefetch)
    before = model.worth.seconds([np.ones(4, np.int64)], 0, 2.0)
    batch = model.worth.begin(prefetch, prefetch.ops[0], 2.0, 5)
    after = model.worth.seconds([np.ones(4, np.int64)], 0, 2.0)
    assert before is not None
    assert after is not None
    assert after[-1] - before[-1] == pytest.approx(5 * 0.01, rel=1e-2)
    model.worth.end(batch, 2.05, WHOLE)


def test_a_read_that_failed_says_nothing_of_speed() -> None:
    model = Model({HOST: (0.0, 1e-6), DISK: (0.0, 0.01)}, 1000)
    seen = model.worth.fetching[DISK].seen
    graph = graph_of(DISK, 2)
    batch = model.worth.begin(graph, graph.ops[0], 3.0, 2)
    model.worth.end(batch, 99.0, np.array([0, 1], np.uint8))
    assert model.worth.fetching[DISK].seen == seen


def test_the_prefill_rate_follows_what_the_engine_tells() -> None:
    model = Model({HOST: (0.0, 1e-6), DISK: (0.0, 0.02)}, 1000)
    assert keep(model, [1] * 4) == 0
    for number in range(20):  # ten times slower than configured, at any length
        tokens, past = 16 * (1 + number % 5), 64 * (number % 3)
        pairs = sum(1 + (past + token + 0.5) / CROSSOVER for token in range(tokens))
        model.worth.computed(tokens, past, pairs / 100, float(number))
    assert model.worth.tokens_per_s() == pytest.approx(100, rel=0.02)
    assert keep(model, [1] * 4) == 4


@given(st.integers(0, 5000), st.floats(1, 1e6))
def test_prefill_tokens_add_up_positions(tokens: int, crossover: float) -> None:
    positions: NDArray[np.float64] = np.arange(tokens) + 0.5
    assert prefill_tokens(float(tokens), crossover) == pytest.approx(
        float((1 + positions / crossover).sum())
    )


# estimates


def fed(seed: int, count: int, first_s: float, unit_s: float, noise: float) -> LineEstimate:
    line, random = LineEstimate(0.05), np.random.default_rng(seed)
    for number in range(count):
        units = float(2 ** random.integers(10, 26))
        exact_s = first_s + units * unit_s
        line.add(units, exact_s * math.exp(noise * random.standard_normal()), float(number))
    return line


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("first_s", "unit_s"), [(0.0, 1e-9), (1e-4, 1e-9), (2e-2, 1e-9)])
def test_latency_and_rate_are_found_in_batches_of_any_size(
    seed: int, first_s: float, unit_s: float
) -> None:
    exact = fed(seed, 60, first_s, unit_s, 0.0)
    noisy = fed(seed, 60, first_s, unit_s, 0.05)
    for units in (1 << 12, 1 << 20, 1 << 25):
        true_s = first_s + units * unit_s
        assert exact.seconds(float(units)) == pytest.approx(true_s, rel=0.06)
        assert noisy.seconds(float(units)) == pytest.approx(true_s, rel=0.3)


@pytest.mark.parametrize("factor", [0.001, 0.1, 10, 100])
def test_an_estimate_follows_a_change(factor: float) -> None:
    line = fed(0, 40, 1e-3, 1e-9, 0.05)
    for number in range(40):
        units = float(2 ** (10 + number % 16))
        line.add(units, factor * (1e-3 + units * 1e-9), 40.0 + number)
    assert line.seconds(1e7) == pytest.approx(factor * 0.011, rel=0.1)


def test_a_stall_moves_it_little() -> None:
    line = fed(0, 40, 1e-3, 1e-9, 0.0)
    before_s = line.seconds(1e6)
    line.add(1e6, 1000 * before_s, 40.0)
    assert before_s <= line.seconds(1e6) <= 1.6 * before_s


def test_batches_that_wait_for_each_other_are_told_from_a_slow_tier() -> None:
    model = Model({HOST: (0.0, 1e-6), DISK: (0.001, 0.01)}, 1000)
    free_at = now = 100.0
    graph = graph_of(DISK, 400)
    model.worth.watch(graph)
    under_way: list[tuple[float, object]] = []
    for number in range(40):  # one wire, served in order; up to five batches at once
        blocks = 1 + number % 8
        batch = model.worth.begin(graph, graph.ops[0], now, blocks)
        free_at = max(free_at, now) + blocks * 0.01
        under_way.append((free_at + 0.001, batch))
        if len(under_way) == 5:
            now, first = under_way.pop(0)
            model.worth.end(first, now, WHOLE)  # type: ignore[arg-type]
    assert model.worth.bytes_per_s(DISK) == pytest.approx(BLOCK / 0.01, rel=0.1)


def test_small_changes_leave_what_is_in_use_as_it_is() -> None:
    line = fed(0, 40, 0.0, 1e-9, 0.0)
    in_use = line.first_s, line.unit_s
    for number in range(40):
        line.add(1e6, 1e-3 * (1.04 if number % 2 else 0.97), 40.0 + number)
        assert (line.first_s, line.unit_s) == in_use
    for number in range(40):
        line.add(1e6, 1.2e-3, 80.0 + number)
    assert line.seconds(1e6) == pytest.approx(1.2e-3, rel=0.05)


def test_small_samples_that_take_equally_long_do_not_make_large_ones_free() -> None:
    # as small prompts on an accelerator that reads all weights for any of them: 10 ms each
    line = LineEstimate(0.05)
    for number in range(30):
        line.add(float(20 + number % 5), 0.010, float(number))
    assert line.unit_s < 0.010 / 22 / 3
    assert line.share_s == pytest.approx(0.010 / 22, rel=0.05)
    for number in range(30):  # larger ones say what they take
        line.add(4000.0 + number, 0.010 + (4000 + number) / 30_000, 30.0 + number)
    assert line.share_s == pytest.approx(1 / 30_000, rel=0.15)


def test_it_is_known_after_enough_samples_and_not_by_nonsense() -> None:
    line = LineEstimate(0.1)
    for units, seconds in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, math.inf), (1.0, math.nan)):
        line.add(units, seconds, 0.0)
    assert (line.seen, line.known) == (0, False)
    for number in range(ENOUGH):
        assert not line.known
        line.add(10.0, 5.0, float(number))
    assert line.known
    assert line.seconds(20.0) == pytest.approx(10.0)
