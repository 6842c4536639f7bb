"""Built-in codecs: error bounds from their formulas, the same bytes from every instruction set,
layouts, odd values; their conformance is `--flexkv-verify`'s.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexkv import plugins
from flexkv.codecs.layout import Part, as_values, parts, to_bytes
from flexkv.codecs.lossless import Lossless
from flexkv.codecs.quant import Int4, Int8, _Quantised
from flexkv.errors import ConfigError, InputError
from flexkv.model import KVSpec, LayerGroup
from flexkv.protocols import Codec
from flexkv.testing import CodecHarness, CodecTests
from flexkv.testing.built_in import QuantHarness

BOTH = (Int8, Int4)
GRID = 2 ** (1 / 16)  # a step is at most this much larger than it must be
FINITE = {"bfloat16": 3.3895314e38, "float16": 65504.0, "float32": 3.4028235e38}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}

SPECS = st.builds(
    lambda layers, heads, size, dtype, kinds, tokens, axes: KVSpec.uniform(
        layers, heads, size, dtype, parts=kinds, tokens_per_block=tokens, axes=axes
    ),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 80),
    st.sampled_from(sorted(FINITE)),
    st.integers(1, 2),
    st.integers(1, 70),
    st.sampled_from(["PNHD", "PHND", "HNPD", "NHPD", "NPHD", "HPND"]),
)


class TestInt8Keeps(CodecTests):
    @pytest.fixture
    def harness(self) -> CodecHarness:
        return QuantHarness(Int8)


class TestInt4Keeps(CodecTests):
    @pytest.fixture
    def harness(self) -> CodecHarness:
        return QuantHarness(Int4)


class TestLosslessKeeps(CodecTests):
    @pytest.fixture
    def harness(self) -> CodecHarness:
        pytest.importorskip("zstandard")
        return CodecHarness(Lossless)


def blocks_of(spec: KVSpec, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return to_bytes(values, spec.groups[0].dtype).reshape(len(values), spec.block_bytes)


def random_values(spec: KVSpec, blocks: int, seed: int) -> NDArray[np.float32]:
    """Normal values whose magnitude differs from one to the next by up to 10^6."""
    chance = np.random.default_rng(seed)
    shape = (blocks, spec.block_bytes // spec.groups[0].itemsize_bytes)
    powers = 10.0 ** chance.uniform(-3, 3, shape)
    return (chance.standard_normal(shape) * powers).astype(np.float32)


def encoded_by(codec: Codec, spec: KVSpec, source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    target = np.full((len(source), codec.encoded_bytes(spec)), 0xA5, np.uint8)
    codec.encode(spec, source, target)
    return target


def round_trip(codec: Codec, spec: KVSpec, source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    back = np.full_like(source, 0x5A)
    codec.decode(spec, encoded_by(codec, spec, source), back)
    return back


def group_extremes(
    values: NDArray[np.float32], part: Part
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Least and largest value of each value's group: 64 neighbours at most, evenly cut."""
    axis = 1 if part.is_key else 3
    length = values.shape[axis]
    groups = -(-length // 64)
    size = -(-length // groups)
    least, most = np.empty_like(values), np.empty_like(values)
    for first in range(0, length, size):
        at: list[slice] = [slice(None)] * 4
        at[axis] = slice(first, first + size)
        here = values[tuple(at)]
        least[tuple(at)] = here.min(axis, keepdims=True)
        most[tuple(at)] = here.max(axis, keepdims=True)
    return least, most


@pytest.mark.parametrize("kind", BOTH)
@settings(max_examples=30, deadline=None)
@given(spec=SPECS, seed=st.integers(0, 2**32 - 1))
def test_an_error_is_at_most_half_a_step(kind: type[_Quantised], spec: KVSpec, seed: int) -> None:
    """A step is what the group needs, rounded up to the grid; a part's least one is 2^-15.9 of its
    largest.
    """
    source = blocks_of(spec, random_values(spec, 2, seed))
    back = round_trip(kind(), spec, source)
    for part in parts(spec):
        before, after = as_values(source, part), as_values(back, part)
        least, most = group_extremes(before, part)
        magnitude = np.maximum(np.abs(least), np.abs(most))
        need = magnitude / 127 if kind is Int8 else np.maximum((most - least) / 15, magnitude / 127)
        floor = need.max(axis=(1, 2, 3), keepdims=True) * 2 ** (-254 / 16)
        step = np.maximum(need, floor) * GRID
        rounding = (np.abs(before) + step) * ROUNDING[part.dtype] + 2.0**-25
        assert (np.abs(after - before) <= step / 2 * 1.0001 + rounding).all()


@pytest.mark.parametrize("kind", BOTH)
@settings(max_examples=20, deadline=None)
@given(spec=SPECS, seed=st.integers(0, 2**32 - 1))
def test_every_instruction_set_gives_the_same_bytes(
    kind: type[_Quantised], spec: KVSpec, seed: int
) -> None:
    plain = type("Plain", (kind,), {"portable": True})()
    source = np.frombuffer(np.random.default_rng(seed).bytes(2 * spec.block_bytes), np.uint8)
    for blocks in (source.reshape(2, -1), blocks_of(spec, random_values(spec, 2, seed))):
        encoded = encoded_by(kind(), spec, blocks)
        assert np.array_equal(encoded, encoded_by(plain, spec, blocks))
        assert np.array_equal(round_trip(kind(), spec, blocks), round_trip(plain, spec, blocks))


@pytest.mark.parametrize("kind", BOTH)
def test_every_half_is_read_alike_by_every_instruction_set(kind: type[_Quantised]) -> None:
    spec = KVSpec.uniform(1, 1, 64, "float16", tokens_per_block=1)
    plain = type("Plain", (kind,), {"portable": True})()
    source = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, spec.block_bytes)
    encoded = encoded_by(kind(), spec, source)
    assert np.array_equal(encoded, encoded_by(plain, spec, source))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_halves_are_written_as_numpy_rounds_them(kind: type[_Quantised], portable: bool) -> None:
    """From subnormal ones to those that are too large: the same bytes as floats, rounded."""
    half, single = (
        KVSpec.uniform(1, 1, 67, dtype, tokens_per_block=1) for dtype in ("float16", "float32")
    )
    codec = type("Either", (kind,), {"portable": portable})()
    chance = np.random.default_rng(3)
    encoded = chance.integers(0, 256, (500, codec.encoded_bytes(half)), np.uint8)
    section = encoded.shape[1] // 2
    for top in (0, section):  # of a part: the largest step is 2^(top / 16)
        encoded[:, top : top + 2] = chance.integers(-28 * 16, 12 * 16, 500, np.int16)[:, None].view(
            np.uint8
        )
    wide = np.empty((500, single.block_bytes), np.uint8)
    codec.decode(single, encoded, wide)
    narrow = np.empty((500, half.block_bytes), np.uint8)
    codec.decode(half, encoded, narrow)
    wanted = np.clip(wide.view(np.float32), -65504, 65504).astype(np.float16)
    assert np.array_equal(narrow.view(np.uint16), wanted.view(np.uint16))
    assert (np.abs(wanted) == 65504).any()
    assert ((wanted != 0) & (np.abs(wanted) < 2.0**-14)).any()


@pytest.mark.parametrize("kind", BOTH)
@settings(max_examples=20, deadline=None)
@given(spec=SPECS, noise=st.binary(min_size=1, max_size=64))
def test_foreign_bytes_decode_to_finite_values(
    kind: type[_Quantised], spec: KVSpec, noise: bytes
) -> None:
    codec = kind()
    foreign = np.resize(np.frombuffer(noise, np.uint8), (1, codec.encoded_bytes(spec)))
    target = np.empty((1, spec.block_bytes), np.uint8)
    codec.decode(spec, foreign, target)
    for part in parts(spec):
        assert np.isfinite(as_values(target, part)).all()


@pytest.mark.parametrize("dtype", sorted(FINITE))
@pytest.mark.parametrize("kind", BOTH)
def test_no_number_and_infinity_are_the_largest_value_of_their_sign(
    kind: type[_Quantised], dtype: str
) -> None:
    spec = KVSpec.uniform(1, 1, 4, dtype, tokens_per_block=1)
    odd = np.array([[np.inf, -np.inf, np.nan, 0, 0, 0, np.inf, -np.inf]], np.float32)
    back = round_trip(kind(), spec, blocks_of(spec, odd))
    key, value = (as_values(back, part).ravel() for part in parts(spec))
    largest = FINITE[dtype]
    for got, wanted in ((key, [1, -1, 1, 0]), (value, [0, 0, 1, -1])):
        assert np.abs(got / largest - wanted).max() <= (0.003 if kind is Int8 else 0.07)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("dtype", sorted(FINITE))
def test_the_smallest_and_the_largest_numbers_survive(dtype: str) -> None:
    spec = KVSpec.uniform(1, 1, 2, dtype, tokens_per_block=1)
    for size in (FINITE[dtype], 1.0, 2.0**-14, 2.0**-24):
        values = np.array([[size, -size, size, -size]], np.float32)
        back = round_trip(Int8(), spec, blocks_of(spec, values))
        got = np.concatenate([as_values(back, part).ravel() for part in parts(spec)])
        assert np.abs(got / values - 1).max() <= 0.5 * GRID / 127 + 2 * ROUNDING[dtype] + (
            0.5 if (dtype, size) == ("float16", 2.0**-24) else 0
        )


def test_a_quiet_group_beside_a_loud_one_keeps_its_own_scale() -> None:
    spec = KVSpec.uniform(1, 1, 64, "float32", tokens_per_block=16)
    values = np.ones((1, 2 * 16 * 64), np.float32)
    values.reshape(2, 16, 64)[0, :, 5] = 1000.0  # one channel of K, in all tokens
    values.reshape(2, 16, 64)[1, 7] = 1000.0  # one token of V, in all channels
    for kind, loss in ((Int8, 0.0042), (Int4, 0.0356)):
        back = round_trip(kind(), spec, blocks_of(spec, values)).view(np.float32)
        assert np.abs(back / values - 1).max() <= loss


@pytest.mark.parametrize(("kind", "ratio"), [(Int8, 1.85), (Int4, 3.4)])
def test_smollm2_blocks_shrink_as_promised_scales_included(
    kind: type[_Quantised], ratio: float
) -> None:
    spec = KVSpec.uniform(30, 3, 64, "bfloat16")
    assert spec.block_bytes / kind().encoded_bytes(spec) >= ratio


def test_encoded_again_a_block_loses_at_most_another_half_step() -> None:
    spec = KVSpec.uniform(2, 3, 64, "bfloat16")
    source = blocks_of(spec, random_values(spec, 8, 3))
    once = round_trip(Int8(), spec, source)
    twice = round_trip(Int8(), spec, once)
    for part in parts(spec):
        first, second = as_values(once, part), as_values(twice, part)
        least, most = group_extremes(first, part)
        need = np.maximum(np.abs(least), np.abs(most)) / 127
        step = np.maximum(need, need.max(axis=(1, 2, 3), keepdims=True) * 2 ** (-254 / 16)) * GRID
        assert (np.abs(second - first) <= step / 2 * 1.0001 + np.abs(first) * 2**-8).all()


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_no_float_is_refused_by_name(kind: type[_Quantised]) -> None:
    with pytest.raises(ConfigError, match=r"not float8_e4m3fn: choose no codec"):
        kind().encoded_bytes(KVSpec.uniform(1, 1, 8, "fp8"))
    with pytest.raises(ConfigError, match="a head of 2000 elements is more than 1024"):
        kind().encoded_bytes(KVSpec.uniform(1, 1, 2000))


def test_layers_of_different_shapes_are_encoded_side_by_side() -> None:
    groups = (
        LayerGroup((0, 2), 2, 64, "bfloat16"),
        LayerGroup((1,), 1, 576, "float16", parts=1),
    )
    spec = KVSpec(groups, tokens_per_block=8)
    values = np.random.default_rng(5).standard_normal((3, spec.block_bytes // 2)).astype("f4")
    source = np.empty((3, spec.block_bytes), np.uint8)
    for part in parts(spec):
        begin, size = part.offset, part.tokens * part.heads * part.size * 2
        numbers = values[:, begin // 2 : (begin + size) // 2]
        source[:, begin : begin + size] = to_bytes(numbers, part.dtype).reshape(3, size)
    back = round_trip(Int8(), spec, source)
    for part in parts(spec):
        before, after = as_values(source, part), as_values(back, part)
        assert np.abs(after - before).max() <= np.abs(before).max() / 127 * GRID / 2 + 2**-6


def test_arrays_of_another_shape_are_refused() -> None:
    spec = KVSpec.uniform(1, 1, 8, tokens_per_block=2)
    codec = Int8()
    right = np.zeros((1, spec.block_bytes), np.uint8)
    with pytest.raises(InputError, match=r"encoded blocks must be uint8 \[blocks, "):
        codec.encode(spec, right, right)
    encoded = np.zeros((1, codec.encoded_bytes(spec)), np.uint8)
    with pytest.raises(InputError, match="2 decoded blocks cannot pair 1"):
        codec.encode(spec, np.zeros((2, spec.block_bytes), np.uint8), encoded)


@pytest.mark.parametrize("kind", [Int8, Int4, Lossless])
def test_threads_may_share_a_codec(kind: type[Codec]) -> None:
    if kind is Lossless:
        pytest.importorskip("zstandard")
    spec, codec = KVSpec.uniform(2, 2, 64, "float16"), kind()
    sources = [blocks_of(spec, random_values(spec, 4, seed)) for seed in range(4)]
    wanted = [round_trip(codec, spec, source) for source in sources]

    def work(number: int) -> NDArray[np.uint8]:
        return [round_trip(codec, spec, sources[number]) for _ in range(5)][-1]

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(work, range(4)))
    assert all(np.array_equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_lossless_rows_say_how_much_of_them_counts() -> None:
    pytest.importorskip("zstandard")
    spec = KVSpec.uniform(2, 2, 64, "bfloat16")
    codec = Lossless()
    chance = np.random.default_rng(1)
    normal = blocks_of(spec, chance.standard_normal((3, spec.block_bytes // 2)).astype("f4"))
    noise = chance.integers(0, 256, (1, spec.block_bytes), np.uint8)
    encoded = encoded_by(codec, spec, np.concatenate([normal, noise]))
    sizes = codec.sizes(encoded)
    assert sizes[3] == spec.block_bytes + 4  # noise is kept as it is
    assert (sizes[:3] < 0.8 * spec.block_bytes).all()
    assert not any(row[size:].any() for row, size in zip(encoded, sizes, strict=True))


def test_lossless_refuses_bytes_that_it_did_not_write() -> None:
    pytest.importorskip("zstandard")
    spec = KVSpec.uniform(1, 1, 8, tokens_per_block=2)
    foreign = np.full((1, spec.block_bytes + 4), 7, np.uint8)
    with pytest.raises(InputError, match="not encoded by lossless"):
        Lossless().decode(spec, foreign, np.empty((1, spec.block_bytes), np.uint8))


def test_the_codecs_are_installed_under_their_names() -> None:
    assert {"int8", "int4", "lossless"} <= set(plugins.available(plugins.CODECS))
    assert plugins.load(plugins.CODECS, "int8") is Int8
