"""The arrays of the codec door, checked once: `check` (shapes and strides), `address` (for C)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi
from flexkv.errors import InputError

if TYPE_CHECKING:
    from flexkv._core import CData

Rows = NDArray[np.uint8]


def check(decoded: Rows, decoded_bytes: int, encoded: Rows, encoded_bytes: int) -> int:
    """Return how many blocks there are.

    Raises:
        InputError: an array is not uint8 [blocks, bytes] with contiguous rows.
    """
    wanted = ((decoded, decoded_bytes, "decoded"), (encoded, encoded_bytes, "encoded"))
    for array, size, what in wanted:
        fits = array.dtype == np.uint8 and array.ndim == 2 and array.shape[1] == size
        if not fits or (array.size and array.strides[1] != 1):
            raise InputError(
                f"{what} blocks must be uint8 [blocks, {size}] with contiguous rows, got "
                f"{array.dtype} {list(array.shape)} with strides {list(array.strides)}"
            )
    if len(decoded) != len(encoded):
        raise InputError(f"{len(decoded)} decoded blocks cannot pair {len(encoded)} encoded ones")
    return len(decoded)


def address(rows: Rows) -> CData:
    """Return the address of the first row; the array must outlive its use."""
    return ffi.cast("uint8_t *", int(rows.__array_interface__["data"][0]))
