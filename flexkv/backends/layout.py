"""Where the bytes of a block lie in an engine's KV tensors: strides and names of axes -> Region.

`make_region` (tensors + spec -> Region) - `merge_planes` (fewer, longer segments for copies of
whole blocks) - `plane_extent` (which addresses a plane reaches) - `tensor_address`.

Axes are letters, one per dimension: L layer, B block, P part (K, V), N token in block, H head,
D element, C = P and D fused (K then V), T = B and N fused (a pool of single tokens), 1 = ignored.
"PBNHD", "BPNHD", "BHNC", "BND" (one part, one head), "LBPNHD", "THD", "1HTD" are all in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexkv.backends.axes import Dims, Tensor, infer_axes, read_dims, split_axes
from flexkv.errors import LayoutError
from flexkv.model import KVSpec, LayerGroup
from flexkv.protocols import Plane, Region

_INTEGERS = {1: {"uint8", "int8"}, 2: {"uint16", "int16"}, 4: {"uint32", "int32"}}
_MAX_LOOPS = 3  # of fx_plane
_MAX_SEGMENT_BYTES = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class _Part:
    """What one tensor holds: a layer, all layers (`layer` None), or one part of a layer."""

    tensor: Tensor
    layer: int | None
    part: int | None


def make_region(
    kv_caches: Any,
    spec: KVSpec,
    axes: str | None = None,
    *,
    address_of: Callable[[Any], int] | None = None,
) -> Region:
    """Describe the engine's KV memory as a Region.

    Args:
        kv_caches: {layer name: tensor} or a list, in layer order; one tensor over all layers (axis
            L); (K, V) tuples instead of tensors where parts are separate; or a ready Region. Arrays
            and torch tensors of any strides.
        axes: the tensors' dimensions as letters; one per layer group, with commas, where groups
            differ; None infers them where sizes leave only one reading.
        address_of: returns the address of a tensor; backends check the device here.

    Raises:
        LayoutError: shapes, dtypes, strides or counts do not fit `spec`, or several readings do.
    """
    if isinstance(kv_caches, Region):
        return kv_caches
    parts = _flatten(kv_caches, spec, address_of or tensor_address)
    named = split_axes(axes, len(spec.groups))
    planes: list[Plane] = []
    blocks: dict[int, str] = {}
    offsets = spec.layer_offsets()
    for item in parts:
        group = spec.group_of(item.layer or 0)
        _check_dtype(item.tensor, group)
        _check_overlap(item.tensor)
        sizes = _sizes(spec, group, item)
        where = spec.groups.index(group)
        found = named[where]
        if found is None:  # the first tensor of a group decides, the others must follow
            found = named[where] = infer_axes(item.tensor, sizes)
        dims = read_dims(item.tensor, found, sizes)
        blocks.setdefault(dims["B"][0], item.tensor.name)
        for layer in range(spec.layers) if item.layer is None else (item.layer,):
            shift = dims["L"][1] * layer if item.layer is None else 0
            planes += _layer_planes(item, layer, shift, dims, spec, offsets[layer])
    if len(blocks) > 1:
        several = ", ".join(f"{name} has {count}" for count, name in blocks.items())
        raise LayoutError(f"all layers must have the same number of blocks, but {several}")
    planes.sort(key=lambda plane: plane.offset)
    return Region(tuple(planes), next(iter(blocks)), spec.layers, owner=kv_caches)


def merge_planes(planes: Sequence[Plane]) -> tuple[Plane, ...]:
    """Join planes that follow each other on both sides: block-first engines become one segment.

    The result serves whole blocks only (a joined plane names the first of its layers).
    """
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if (
            last is not None
            and not last.loops
            and not plane.loops
            and last.block_stride == plane.block_stride
            and last.base + last.segment_bytes == plane.base
            and last.offset + last.segment_bytes == plane.offset
            and last.segment_bytes + plane.segment_bytes <= _MAX_SEGMENT_BYTES
        ):
            size = last.segment_bytes + plane.segment_bytes
            merged[-1] = Plane(last.layer, last.base, last.block_stride, (), size, last.offset)
        else:
            merged.append(plane)
    return tuple(merged)


def plane_extent(plane: Plane, blocks: int) -> tuple[int, int]:
    """Return the half-open range of addresses that `plane` reaches over all `blocks`."""
    steps = [(blocks, plane.block_stride), *plane.loops]
    low = sum(min(0, stride * (count - 1)) for count, stride in steps)
    high = sum(max(0, stride * (count - 1)) for count, stride in steps)
    return plane.base + low, plane.base + high + plane.segment_bytes


# --- tensors


def _flatten(kv_caches: Any, spec: KVSpec, address_of: Callable[[Any], int]) -> list[_Part]:
    if isinstance(kv_caches, Mapping):
        entries = [(str(name), value) for name, value in kv_caches.items()]
    elif hasattr(kv_caches, "shape"):
        entries = [("the tensor", kv_caches)]
    elif isinstance(kv_caches, Sequence):
        entries = [(f"layer {i}", value) for i, value in enumerate(kv_caches)]
    else:
        raise LayoutError(
            f"kv_caches is a {type(kv_caches).__name__}; give {{layer name: tensor}}, a list, or "
            "one tensor over all layers"
        )
    whole = len(entries) == 1 and hasattr(entries[0][1], "shape")
    if whole and (spec.layers > 1 or hasattr(kv_caches, "shape")):
        if len(spec.groups) > 1:
            raise LayoutError("one tensor over all layers cannot hold several layer groups")
        return [_Part(_describe(*entries[0], address_of), None, None)]
    if len(entries) != spec.layers:
        raise LayoutError(f"kv_caches has {len(entries)} layers, the KVSpec has {spec.layers}")
    parts: list[_Part] = []
    for layer, (name, value) in enumerate(entries):
        if hasattr(value, "shape"):
            parts.append(_Part(_describe(name, value, address_of), layer, None))
            continue
        wanted = spec.group_of(layer).parts
        if not isinstance(value, Sequence) or len(value) != wanted:
            raise LayoutError(f"{name}: expected a tensor, or a tuple of {wanted} (one per part)")
        for part, tensor in enumerate(value):
            described = _describe(f"{name} part {part}", tensor, address_of)
            parts.append(_Part(described, layer, part))
    return parts


def _describe(name: str, tensor: Any, address_of: Callable[[Any], int]) -> Tensor:
    address = address_of(tensor)
    shape = tuple(int(count) for count in tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if hasattr(tensor, "data_ptr"):
        itemsize = int(tensor.element_size())
        strides = tuple(int(stride) * itemsize for stride in tensor.stride())
    else:
        if tensor.__array_interface__["data"][1]:
            raise LayoutError(f"{name} is read-only; restored blocks could not be written to it")
        itemsize = int(tensor.itemsize)
        strides = tuple(int(stride) for stride in tensor.strides)
    if not all(shape):
        raise LayoutError(f"{name} of shape {shape} is empty")
    return Tensor(name, address, shape, strides, itemsize, dtype)


def tensor_address(tensor: Any) -> int:
    """Return the address of a torch tensor or an array.

    Raises:
        LayoutError: it is neither.
    """
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    if hasattr(tensor, "__array_interface__"):
        return int(tensor.__array_interface__["data"][0])
    raise LayoutError(f"a {type(tensor).__name__} is no tensor: it has no address")


def _check_dtype(tensor: Tensor, group: LayerGroup) -> None:
    """Accept the spec's dtype and integers of its size: bytes move, and numpy has no bfloat16."""
    size = group.itemsize_bytes
    if tensor.itemsize == size and tensor.dtype in {group.dtype, *_INTEGERS[size]}:
        return
    raise LayoutError(
        f"{tensor.name} has dtype {tensor.dtype}, the KVSpec says {group.dtype}; give that, or a "
        f"view as an integer of {size} byte(s)"
    )


def _check_overlap(tensor: Tensor) -> None:
    reach = tensor.itemsize
    for stride, count in sorted(
        (abs(s), c) for s, c in zip(tensor.strides, tensor.shape, strict=True)
    ):
        if count == 1:
            continue
        if stride < reach:
            raise LayoutError(
                f"{tensor.name} of shape {tensor.shape} and byte strides {tensor.strides} overlaps "
                "itself (expanded?); blocks need memory of their own"
            )
        reach += stride * (count - 1)


def _sizes(spec: KVSpec, group: LayerGroup, item: _Part) -> dict[str, int]:
    """Sizes that the letters must have in this tensor; B and T are free."""
    parts = group.parts if item.part is None else 1
    return {
        "L": spec.layers if item.layer is None else 1,
        "P": parts,
        "N": spec.tokens_per_block,
        "H": group.heads,
        "D": group.head_size,
        "C": parts * group.head_size,
    }


# --- planes


def _layer_planes(
    item: _Part, layer: int, shift: int, dims: Dims, spec: KVSpec, offset: int
) -> Iterator[Plane]:
    """Cut one layer into planes: as few loops and as long segments as both sides allow.

    A loop that the host side does not lay out densely (a part that is a tensor of its own, inside
    an order that mixes parts) or that is one too many becomes planes of its own.
    """
    group = spec.group_of(layer)
    full = {"P": group.parts, "N": spec.tokens_per_block, "H": group.heads, "D": group.head_size}
    host = group.itemsize_bytes
    loops: list[tuple[int, int, int]] = []  # count, stride on the device, stride in the host block
    for letter in reversed(spec.axes):
        count, stride = dims[letter]
        if letter == "P" and item.part is not None:
            offset += item.part * host
        if count > 1:
            loops.insert(0, (count, stride, host))
        host *= full[letter]
    loops = _joined(loops)
    segment = group.itemsize_bytes
    if loops and loops[-1][1:] == (segment, segment):
        segment *= loops.pop()[0]
    if segment > _MAX_SEGMENT_BYTES:
        raise LayoutError(
            f"{item.tensor.name}: a segment of {segment} bytes is too long for a copy"
        )
    dense, inner = segment, len(loops)
    while inner and len(loops) - inner < _MAX_LOOPS and loops[inner - 1][2] == dense:
        inner -= 1
        dense *= loops[inner][0]
    base = item.tensor.address + shift
    kept = tuple((count, stride) for count, stride, _ in loops[inner:])
    for index in itertools.product(*(range(count) for count, _, _ in loops[:inner])):
        device = sum(i * loop[1] for i, loop in zip(index, loops, strict=False))
        inside = sum(i * loop[2] for i, loop in zip(index, loops, strict=False))
        yield Plane(layer, base + device, dims["B"][1], kept, segment, offset + inside)


def _joined(loops: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join neighbours that step evenly on both sides."""
    joined: list[tuple[int, int, int]] = []
    for loop in loops:
        count, stride, host = loop
        if joined and joined[-1][1] == count * stride and joined[-1][2] == count * host:
            joined[-1] = (joined[-1][0] * count, stride, host)
        else:
            joined.append(loop)
    return joined
