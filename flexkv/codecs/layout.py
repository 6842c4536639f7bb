"""Where the values of a block lie: `parts` (of every layer, with strides), `as_values`,
`as_array` (blocks as numbers), `FLOATS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexkv.model import KVSpec

FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Part:
    """K (`is_key`), V or a latent of one layer: `tokens` x `heads` rows of `size` neighbouring
    elements; strides and `offset` in bytes.
    """

    is_key: bool
    dtype: str
    itemsize: int
    tokens: int
    heads: int
    size: int
    token_stride: int
    head_stride: int
    offset: int


def parts(spec: KVSpec) -> Iterator[Part]:
    """Yield the parts of a block, layers in ascending order, K before V."""
    for layer, offset in enumerate(spec.layer_offsets()):
        group = spec.group_of(layer)
        lengths = {"P": group.parts, "N": spec.tokens_per_block, "H": group.heads}
        strides, step = {}, group.head_size * group.itemsize_bytes
        for axis in reversed(spec.axes[:-1]):
            strides[axis] = step
            step *= lengths[axis]
        for number in range(group.parts):
            yield Part(
                group.parts == 2 and number == 0,
                group.dtype,
                group.itemsize_bytes,
                spec.tokens_per_block,
                group.heads,
                group.head_size,
                strides["N"],
                strides["H"],
                offset + number * strides["P"],
            )


def as_values(blocks: NDArray[np.uint8], part: Part) -> NDArray[np.float32]:
    """Return one part of blocks [blocks, block_bytes] as numbers [blocks, tokens, heads, size]."""
    shape = (len(blocks), part.tokens, part.heads, part.size * part.itemsize)
    strides = (blocks.strides[0], part.token_stride, part.head_stride, 1)
    window = np.lib.stride_tricks.as_strided(blocks[:, part.offset :], shape, strides)
    return to_floats(np.ascontiguousarray(window), part.dtype)


def to_floats(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Return bytes of a float dtype as float32, the last axis divided by the item size."""
    if dtype == "bfloat16":
        wide: NDArray[np.float32] = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide
    return data.view(dtype).astype(np.float32)


def to_bytes(values: NDArray[np.float32], dtype: str) -> NDArray[np.uint8]:
    """Return float32 values as bytes of a float dtype, rounded to nearest, ties to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)
