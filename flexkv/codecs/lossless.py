"""`Lossless`: byte planes and zstd. The bytes of a float that hold sign and exponent differ little
from their neighbours; side by side they compress, the rest is noise.

An encoded row is a u32 of how many bytes follow, then a zstd frame of the planes, or the block as
it is when that is smaller; zeros fill the rest. `sizes` tells what a store that keeps rows of
different lengths need keep. zstd comes through python-zstandard: kept up since 2016, wheels for
every platform, releases the interpreter's lock, and zstd's entropy stage suits planes that have
few repeats; lz4 has none and finds nothing here (measured in docs/codecs.md).
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flexkv.codecs.rows import Rows, check
from flexkv.errors import ConfigError, InputError
from flexkv.model import KVSpec
from flexkv.protocols import API_VERSION

_HEAD_BYTES = 4
_RAW = 1 << 31  # of the header: the block follows as it is
_LEVEL = 1  # higher ones cost more and gain below 1 %


class Lossless:
    """Every byte comes back. As large as a block in the worst case, so fixed slots gain nothing."""

    flexkv_api: ClassVar[int] = API_VERSION
    lossy: ClassVar[bool] = False

    def __init__(self) -> None:
        try:
            self._zstd: Any = import_module("zstandard")
        except ImportError as error:
            raise ConfigError("the codec lossless needs `pip install flexkv[lossless]`") from error
        self._own = threading.local()  # contexts are not for several threads at once

    def encoded_bytes(self, spec: KVSpec) -> int:
        """Bytes of one encoded block in the worst case: the block itself and four more."""
        return spec.block_bytes + _HEAD_BYTES

    def encode(self, spec: KVSpec, source: Rows, target: Rows) -> None:
        """Encode blocks [n, block_bytes] into [n, encoded_bytes]; see `sizes` for what counts."""
        check(source, spec.block_bytes, target, self.encoded_bytes(spec))
        for block, row in zip(source, target, strict=True):
            frame = self._contexts()[0].compress(_split(block, spec).data)
            size, mark = len(frame), 0
            if size >= len(block):
                frame, size, mark = block.data, len(block), _RAW
            row[:_HEAD_BYTES] = np.frombuffer((size | mark).to_bytes(4, "little"), np.uint8)
            row[_HEAD_BYTES : _HEAD_BYTES + size] = np.frombuffer(frame, np.uint8)
            row[_HEAD_BYTES + size :] = 0

    def decode(self, spec: KVSpec, source: Rows, target: Rows) -> None:
        """Decode blocks.

        Raises:
            InputError: bytes that `encode` did not write.
        """
        check(target, spec.block_bytes, source, self.encoded_bytes(spec))
        for row, size, raw, block in zip(source, *self._heads(source), target, strict=True):
            body = row[_HEAD_BYTES : _HEAD_BYTES + int(size)]
            if raw:
                block[:] = body
                continue
            try:
                planes = self._contexts()[1].decompress(body.data, max_output_size=len(block))
            except self._zstd.ZstdError as error:
                raise InputError(f"a block that was not encoded by lossless: {error}") from error
            _join(np.frombuffer(planes, np.uint8), spec, block)

    def sizes(self, encoded: Rows) -> NDArray[np.int64]:
        """Bytes at the start of each row that hold it; the rest are zeros."""
        return self._heads(encoded)[0] + _HEAD_BYTES

    def _heads(self, encoded: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        heads = np.ascontiguousarray(encoded[:, :_HEAD_BYTES]).view("<u4")[:, 0]
        return (heads & (_RAW - 1)).astype(np.int64), (heads & _RAW) != 0

    def _contexts(self) -> tuple[Any, Any]:
        if not hasattr(self._own, "pair"):
            compressor = self._zstd.ZstdCompressor(level=_LEVEL)
            self._own.pair = (compressor, self._zstd.ZstdDecompressor())
        pair: tuple[Any, Any] = self._own.pair
        return pair


def _spans(spec: KVSpec) -> list[tuple[int, int, int]]:
    """(offset, bytes, item size) of runs of layers of one item size."""
    spans: list[tuple[int, int, int]] = []
    for layer, offset in enumerate(spec.layer_offsets()):
        group = spec.group_of(layer)
        size, item = group.layer_bytes(spec.tokens_per_block), group.itemsize_bytes
        if spans and spans[-1][2] == item:
            spans[-1] = (spans[-1][0], spans[-1][1] + size, item)
        else:
            spans.append((offset, size, item))
    return spans


def _split(block: NDArray[np.uint8], spec: KVSpec) -> NDArray[np.uint8]:
    """The block with first bytes of all values together, then the second ones, and so on."""
    split = np.empty(len(block), np.uint8)
    for offset, size, item in _spans(spec):
        end = offset + size
        split[offset:end].reshape(item, -1)[:] = block[offset:end].reshape(-1, item).T
    return split


def _join(split: NDArray[np.uint8], spec: KVSpec, block: NDArray[np.uint8]) -> None:
    if len(split) != len(block):
        raise InputError(f"a block of {len(split)} bytes, not {len(block)}: of another spec")
    for offset, size, item in _spans(spec):
        end = offset + size
        block[offset:end].reshape(-1, item)[:] = split[offset:end].reshape(item, -1).T
