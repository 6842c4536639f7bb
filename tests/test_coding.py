"""The break-even rule against a brute-force pipeline: shares that pass a link and a codec."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.coding import Coding
from flexkv.errors import ConfigError

MB = 1_000_000
CODINGS = st.builds(
    Coding,
    block_bytes=st.integers(4096, 4 * MB),
    stored_bytes=st.integers(2048, 4 * MB),
    encode_bytes_per_s=st.floats(1e6, 1e11),
    decode_bytes_per_s=st.floats(1e6, 1e11),
    cores=st.integers(1, 8),
    share_bytes=st.integers(4096, 8 * MB),
)


def brute_force_s(shares: int, first_s: float, second_s: float) -> float:
    """When the last of so many shares has passed two servers that take one share at a time."""
    free = [0.0, 0.0]
    for _ in range(shares):
        free[0] += first_s
        free[1] = max(free[0], free[1]) + second_s
    return free[1]


@settings(deadline=None)
@given(CODINGS, st.integers(1, 300), st.floats(1e6, 1e11), st.booleans())
def test_a_batch_takes_what_its_shares_take_one_after_the_other(
    coding: Coding, blocks: int, link: float, writing: bool
) -> None:
    shares = math.ceil(blocks / max(1, coding.share_bytes // coding.block_bytes))
    rate = coding.encode_bytes_per_s if writing else coding.decode_bytes_per_s
    stages = [
        blocks * coding.stored_bytes / shares / link,
        blocks * coding.block_bytes / shares / (rate * min(coding.cores, shares)),
    ]
    expected = brute_force_s(shares, *(stages[::-1] if writing else stages))
    found = coding.payoff(blocks, link, writing=writing)
    assert found.coded_s == pytest.approx(expected)
    assert found.plain_s == pytest.approx(blocks * coding.block_bytes / link)
    assert found.pays == (found.speedup > 1)


@settings(deadline=None)
@given(CODINGS, st.integers(1, 300), st.booleans())
def test_it_pays_below_the_break_even_rate_and_not_above(
    coding: Coding, blocks: int, writing: bool
) -> None:
    border = coding.break_even_bytes_per_s(blocks, writing=writing)
    rates = [10.0**power for power in range(5, 14)]
    if not border:
        assert not any(coding.payoff(blocks, rate, writing=writing).pays for rate in rates)
        return
    for rate in (*rates, border * 0.999, border * 1.001):
        if abs(rate / border - 1) > 5e-4:
            assert coding.payoff(blocks, rate, writing=writing).pays == (rate < border)


def test_one_share_pays_up_to_what_it_saves_and_a_stream_up_to_the_codecs_speed() -> None:
    coding = Coding(1 * MB, MB // 2, 1e9, 2e9, share_bytes=MB)
    assert coding.break_even_bytes_per_s(1) == pytest.approx(1e9)
    assert coding.break_even_bytes_per_s(1_000_000) == pytest.approx(2e9, rel=1e-5)


def test_blocks_that_do_not_shrink_never_pay() -> None:
    coding = Coding(4096, 4096, 1e9, 1e12)
    assert coding.break_even_bytes_per_s(64) == 0
    assert not coding.payoff(64, 1e6).pays


def test_no_blocks_take_no_time() -> None:
    assert Coding(4096, 2048, 1e9, 1e9).payoff(0, 1e9) == (0.0, 0.0)


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0, got"):
        Coding(4096, 2048, 1e9, 0.0)
