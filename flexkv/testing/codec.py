"""What every codec must do; `CodecTests` is the whole set.

Subclass it in a test module and return a `CodecHarness` from the fixture `harness`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.model import KVSpec
from flexkv.protocols import API_VERSION, Codec
from flexkv.testing.guard import KitTests, require
from flexkv.testing.harness import Bytes, CodecHarness

SIZE = "Codec.encoded_bytes"
ENCODE = "Codec.encode"
DECODE = "Codec.decode"
LOSSY = "Codec"

_GUARD_BYTES = 64


class CodecTests(KitTests):
    """All that a codec must do. Override `harness`."""

    @pytest.fixture
    def harness(self) -> CodecHarness:
        """What is tested: override this."""
        raise NotImplementedError("override the fixture `harness`: return a CodecHarness")

    @pytest.fixture
    def specs(self, harness: CodecHarness) -> list[KVSpec]:
        """What the codec meets, once per dtype of the harness."""
        return [KVSpec.uniform(3, 2, 40, dtype, tokens_per_block=4) for dtype in harness.dtypes]

    def test_it_has_the_verbs_of_the_door(self, harness: CodecHarness) -> None:
        codec = harness.make()
        require(
            isinstance(codec, Codec)
            and codec.flexkv_api == API_VERSION
            and isinstance(codec.lossy, bool),
            "Codec",
            f"{codec!r} must have flexkv_api = {API_VERSION}, lossy = True or False, and every "
            "verb",
        )

    def test_the_size_is_a_number_of_bytes(
        self,
        harness: CodecHarness,
        specs: list[KVSpec],
        record_property: Callable[[str, object], None],
    ) -> None:
        for spec in specs:
            codec = harness.make()
            size = codec.encoded_bytes(spec)
            require(isinstance(size, int) and size > 0, SIZE, f"{size!r} is no number of bytes")
            require(
                size == harness.make().encoded_bytes(spec),
                SIZE,
                "the encoded size depends on the spec alone: slots are cut to it",
            )
            ratio = size / spec.block_bytes
            record_property(f"ratio of {spec.groups[0].dtype}, with scales", round(ratio, 3))
            require(
                ratio < 1 or not codec.lossy,
                SIZE,
                f"a lossy codec whose blocks are {ratio:.2f} times as large as before saves "
                "nothing",
            )

    def test_encoding_fills_exactly_the_bytes_it_asked_for(
        self, harness: CodecHarness, specs: list[KVSpec], flexkv_rng: random.Random
    ) -> None:
        """Nothing beyond the target, and no byte of it left to chance: all are checksummed."""
        for spec in specs:
            codec, source = harness.make(), _values(spec, flexkv_rng, 5)
            size, results = codec.encoded_bytes(spec), []
            for fill in (0x5A, 0xA5):
                room = np.full((5, size + _GUARD_BYTES), fill, np.uint8)
                before = source.copy()
                codec.encode(spec, source, room[:, :size])
                require(np.array_equal(source, before), ENCODE, "encode changed its source")
                beyond = (room[:, size:] == fill).all()
                what = f"encode wrote beyond the {size} bytes that encoded_bytes promised"
                require(beyond, ENCODE, what)
                results.append(room[:, :size].copy())
            require(
                np.array_equal(results[0], results[1]),
                ENCODE,
                f"of the {size} bytes that encoded_bytes promised, some were not written, or the "
                "same block is encoded otherwise the next time",
            )

    def test_blocks_come_back(
        self, harness: CodecHarness, specs: list[KVSpec], flexkv_rng: random.Random
    ) -> None:
        """Exactly, or as near as the harness says if the codec says that it is lossy."""
        for spec in specs:
            codec, source = harness.make(), _values(spec, flexkv_rng, 7)
            back = _round_trip(codec, spec, source)
            if not codec.lossy:
                require(
                    np.array_equal(back, source),
                    LOSSY,
                    "a block came back with other bytes, but the codec says lossy = False",
                )
                continue
            wanted, got = _floats(source, spec), _floats(back, spec)
            scale = np.abs(wanted).max(axis=1, keepdims=True)
            error = float((np.abs(got - wanted) / scale).max())
            require(
                error <= harness.max_error,
                DECODE,
                f"values came back wrong by {error:.3f} of the block's largest, more than "
                f"max_error = {harness.max_error}",
            )

    def test_any_bytes_come_back_from_a_lossless_codec(
        self, harness: CodecHarness, specs: list[KVSpec], flexkv_rng: random.Random
    ) -> None:
        codec = harness.make()
        if codec.lossy:
            pytest.skip("the codec is lossy")
        for spec in specs:
            noise = flexkv_rng.randbytes(4 * spec.block_bytes)  # NaNs, infinities, signed zeros
            source = np.frombuffer(noise, np.uint8).reshape(4, -1).copy()
            source[0], source[1] = 0, 0xFF
            back = _round_trip(codec, spec, source)
            require(
                np.array_equal(back, source),
                DECODE,
                "random bytes, zeros or 0xFF did not come back",
            )

    def test_zeros_come_back_as_zeros(self, harness: CodecHarness, specs: list[KVSpec]) -> None:
        for spec in specs:
            source = np.zeros((2, spec.block_bytes), np.uint8)
            back = _floats(_round_trip(harness.make(), spec, source), spec)
            require(not back.any(), DECODE, "a block of zeros came back as something else (0 / 0?)")

    def test_a_block_is_encoded_alike_in_any_batch(
        self, harness: CodecHarness, specs: list[KVSpec], flexkv_rng: random.Random
    ) -> None:
        for spec in specs:
            codec, source = harness.make(), _values(spec, flexkv_rng, 6)
            size = codec.encoded_bytes(spec)
            together = np.zeros((6, size), np.uint8)
            codec.encode(spec, source, together)
            for block in range(6):
                alone = np.zeros((1, size), np.uint8)
                codec.encode(spec, source[block : block + 1], alone)
                what = f"block {block} of 6 is encoded otherwise when it comes alone"
                require(np.array_equal(alone[0], together[block]), ENCODE, what)
            order = flexkv_rng.sample(range(6), 6)
            back = np.zeros((6, spec.block_bytes), np.uint8)
            codec.decode(spec, together[order], back)
            straight = np.zeros((6, spec.block_bytes), np.uint8)
            codec.decode(spec, together, straight)
            what = "blocks decoded in another order are other blocks"
            require(np.array_equal(back, straight[order]), DECODE, what)

    def test_an_empty_batch_is_nothing(self, harness: CodecHarness, specs: list[KVSpec]) -> None:
        for spec in specs:
            codec = harness.make()
            size = codec.encoded_bytes(spec)
            codec.encode(
                spec, np.empty((0, spec.block_bytes), np.uint8), np.empty((0, size), np.uint8)
            )
            codec.decode(
                spec, np.empty((0, size), np.uint8), np.empty((0, spec.block_bytes), np.uint8)
            )


def _round_trip(codec: Codec, spec: KVSpec, source: Bytes) -> Bytes:
    """Encode, carry exactly the encoded bytes elsewhere, decode by another codec of the kind."""
    encoded = np.zeros((len(source), codec.encoded_bytes(spec)), np.uint8)
    codec.encode(spec, source, encoded)
    back = np.full(source.shape, 0x5A, np.uint8)
    type(codec)().decode(spec, encoded.copy(), back)
    return back


def _values(spec: KVSpec, rng: random.Random, blocks: int) -> Bytes:
    """Blocks of normal values of different magnitudes; bytes where there are no floats."""
    dtype = spec.groups[0].dtype
    chance = np.random.default_rng(rng.randrange(1 << 32))
    if dtype not in ("bfloat16", "float16", "float32"):
        return chance.integers(0, 1 << 8, (blocks, spec.block_bytes), np.uint8)
    count = spec.block_bytes // spec.groups[0].itemsize_bytes
    values = chance.standard_normal((blocks, count)).astype(np.float32)
    values *= 10.0 ** chance.integers(-2, 3, (blocks, 1))
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def _floats(data: Bytes, spec: KVSpec) -> NDArray[np.float64]:
    """The values of blocks; bytes as they are where there are no floats."""
    dtype = spec.groups[0].dtype
    if dtype == "bfloat16":
        wide = data.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    if dtype in ("float16", "float32"):
        return data.view(dtype).astype(np.float64)
    return data.astype(np.float64)
