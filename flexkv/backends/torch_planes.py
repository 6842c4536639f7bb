"""Planes of a region as torch sees them: views of the tensors' memory, rows of a staging buffer.

`TorchRegion` (a region with a view per plane): `views` - `Staged` (how chosen views lie in a
staging buffer): `gather`, `scatter` (on the device), `native` (for the C copy engine).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from flexkv._core import ffi
from flexkv.backends.layout import plane_extent
from flexkv.backends.packing import PackedRegion
from flexkv.errors import LayoutError
from flexkv.model import SlotIds
from flexkv.protocols import Plane, Region

if TYPE_CHECKING:
    from flexkv._core import CData

_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # any device can index these
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class View:
    """One plane: `memory` has shape [blocks, ..., words of a segment]; in the host block its
    `size_bytes` bytes follow each other from `offset`.
    """

    layer: int
    memory: Any
    size_bytes: int
    offset: int


class TorchRegion(PackedRegion):
    """A region whose memory belongs to torch tensors, which its `owner` holds.

    Raises:
        LayoutError: a plane lies in none of the owner's tensors.
    """

    def __init__(self, region: Region) -> None:
        super().__init__(region)
        storages = _storages(region.owner)
        self._views = [_view(plane, region.blocks, storages) for plane in region.planes]

    def views(self, layers: tuple[int, int] | None) -> list[View]:
        """The views of a half-open range of layers, None = all."""
        if layers is None:
            return self._views
        return [view for view in self._views if layers[0] <= view.layer < layers[1]]


@dataclass(frozen=True, slots=True)
class Staged:
    """Views whose blocks lie in a staging buffer, one view after the other."""

    views: Sequence[View]

    def size_bytes(self, count: int) -> int:
        """Bytes that `count` blocks take."""
        return sum(_padded(count * view.size_bytes) for view in self.views)

    def blocks_in(self, size_bytes: int) -> int:
        """How many blocks fit, at least 1."""
        one = sum(view.size_bytes for view in self.views)
        return max(1, (size_bytes - _ALIGNMENT * len(self.views)) // one)

    def buffer(self, size_bytes: int) -> Any:
        """Take memory on the views' device."""
        memory = self.views[0].memory
        return memory.new_empty(size_bytes, dtype=import_module("torch").uint8)

    def ids(self, blocks: SlotIds) -> Any:
        """Block numbers, on the views' device."""
        torch = import_module("torch")
        return self.views[0].memory.new_tensor(blocks.tolist(), dtype=torch.int64)

    def gather(self, buffer: Any, ids: Any) -> None:
        """Queue the copy of blocks into the buffer."""
        torch = import_module("torch")
        for view, rows in self._rows(buffer, len(ids)):
            torch.index_select(view.memory, 0, ids, out=rows)

    def scatter(self, buffer: Any, ids: Any) -> None:
        """Queue the copy of the buffer into blocks."""
        for view, rows in self._rows(buffer, len(ids)):
            view.memory.index_copy_(0, ids, rows)

    def _rows(self, buffer: Any, count: int) -> list[tuple[View, Any]]:
        found, at = [], 0
        for view in self.views:
            size = count * view.size_bytes
            part = buffer[at : at + size].view(view.memory.dtype)
            found.append((view, part.view(count, *view.memory.shape[1:])))
            at += _padded(size)
        return found

    def native(self, address: int, count: int) -> CData:
        """The buffer of `count` blocks at `address` as fx_plane[], rows for device blocks."""
        planes = ffi.new("fx_plane[]", len(self.views))
        for plane, view in zip(planes, self.views, strict=True):
            plane.base, plane.block_stride = address, view.size_bytes
            plane.count, plane.stride = [1, 1, 1], [0, 0, 0]
            plane.segment_bytes, plane.offset = view.size_bytes, view.offset
            address += _padded(count * view.size_bytes)
        return planes


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _storages(kv_caches: Any) -> list[tuple[int, int, Any]]:
    """(address, size, the bytes as a flat tensor) of every storage behind the caches."""
    if isinstance(kv_caches, Mapping):
        kv_caches = list(kv_caches.values())
    if hasattr(kv_caches, "untyped_storage"):
        storage = kv_caches.untyped_storage()
        flat = kv_caches.new_empty(0, dtype=import_module("torch").uint8).set_(storage)
        return [(storage.data_ptr(), storage.nbytes(), flat)]
    if not isinstance(kv_caches, Sequence):
        raise LayoutError(f"a region needs its torch tensors, not {type(kv_caches).__name__}")
    found = {item[0]: item for cache in kv_caches for item in _storages(cache)}
    return list(found.values())


def _view(plane: Plane, blocks: int, storages: list[tuple[int, int, Any]]) -> View:
    low, high = plane_extent(plane, blocks)
    inside = (item for item in storages if item[0] <= low and high <= item[0] + item[1])
    found = next(inside, None)
    if found is None:
        raise LayoutError(f"layer {plane.layer} lies in none of the registered tensors")
    start = plane.base - found[0]
    steps = [plane.block_stride, *(stride for _, stride in plane.loops)]
    word = math.gcd(start, plane.segment_bytes, *steps, _ALIGNMENT)
    flat = found[2][: found[1] // word * word].view(getattr(import_module("torch"), _WORDS[word]))
    shape = [blocks, *(count for count, _ in plane.loops), plane.segment_bytes // word]
    strides = [*(step // word for step in steps), 1]
    memory = flat.as_strided(shape, strides, start // word)
    size = plane.segment_bytes * int(np.prod([count for count, _ in plane.loops], dtype=np.int64))
    return View(plane.layer, memory, size, plane.offset)
