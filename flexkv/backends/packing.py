"""Regions and ids as the C core takes them, packed once and checked at the door.

`PackedRegion` (planes as a C array): `select` - `checked_ids` (block and slot numbers).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv._core import ffi
from flexkv.backends.layout import merge_planes
from flexkv.errors import InputError
from flexkv.model import NO_SLOT, SlotIds
from flexkv.protocols import Plane, Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flexkv._core import CData


class PackedRegion:
    """The planes of a region as fx_plane arrays; `end_bytes` is where its host block ends.

    It holds the region, so the region's `id` cannot be given to another while this lives.

    Args:
        planes: the region's, at the addresses that copies use; None: at those of the region.
    """

    def __init__(self, region: Region, planes: Sequence[Plane] | None = None) -> None:
        self.region = region
        planes = region.planes if planes is None else planes
        self._layers = [plane.layer for plane in planes]
        self._sizes = np.cumsum([0, *(_plane_bytes(plane) for plane in planes)]).tolist()
        self._planes = _pack(planes)
        merged = merge_planes(planes)
        self._whole = _pack(merged), len(merged), self._sizes[-1]
        self.end_bytes = max(plane.offset + _plane_bytes(plane) for plane in planes)

    def select(self, layers: tuple[int, int] | None) -> tuple[CData, int, int]:
        """Return (planes, their count, bytes per block) of a half-open range of layers, None = all.

        Raises:
            InputError: the range does not lie within the region's layers.
        """
        if layers is None:
            return self._whole
        first, last = layers
        if not 0 <= first <= last <= self._layers[-1] + 1:
            raise InputError(
                f"layers {first}..{last} are not within the region's {self._layers[-1] + 1} layers"
            )
        begin, end = bisect_left(self._layers, first), bisect_left(self._layers, last)
        return self._planes + begin, end - begin, self._sizes[end] - self._sizes[begin]


def checked_ids(ids: Any, limit: int, what: str) -> SlotIds:
    """Return ids as a contiguous uint32 array.

    Args:
        what: the name of the thing they number, for the message.

    Raises:
        InputError: one of them is negative or not below `limit`.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            f"{what}s must be integers of shape [blocks], got {array.dtype}{array.shape}"
        )
    if array.size:
        good = array < limit
        if array.dtype.kind == "i":
            good &= array >= 0
        if np.count_nonzero(good) < array.size:
            low, high = int(array.min()), int(array.max())
            wrong = low if low < 0 else high
            hint = " (NO_SLOT)" if wrong == NO_SLOT else ""
            raise InputError(f"{what} {wrong}{hint} does not exist; there are {limit}")
    return np.ascontiguousarray(array, dtype=np.uint32)


def _plane_bytes(plane: Plane) -> int:
    size = plane.segment_bytes
    for count, _ in plane.loops:
        size *= count
    return size


def _pack(planes: Sequence[Plane]) -> CData:
    packed = ffi.new("fx_plane[]", len(planes))
    for target, plane in zip(packed, planes, strict=True):
        loops = [(1, 0)] * (3 - len(plane.loops)) + list(plane.loops)
        target.base = plane.base
        target.block_stride = plane.block_stride
        target.stride = [stride for _, stride in loops]
        target.count = [count for count, _ in loops]
        target.segment_bytes = plane.segment_bytes
        target.offset = plane.offset
    return packed
