"""Where the bytes of a block lie in an engine's KV tensors: strides and names of axes -> Region.

`make_region` (tensors + spec -> Region) - `merge_planes` (fewer, longer segments for copies of whole
blocks) - `plane_extent` (which addresses a plane reaches).

Axes are letters, one per dimension: L layer, B block, P part (K, V), N token in block, H head,
D element, C = P and D fused (K then V), T = B and N fused (a pool of single tokens), 1 = ignored.
"PBNHD", "BPNHD", "BHNC", "BND" (one part, one head), "LBPNHD", "THD", "1HTD" are all in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexkv.errors import LayoutError
from flexkv.model import KVSpec, LayerGroup
from flexkv.protocols import Plane, Region

_SPELLED = {"L": "layer", "B": "block", "P": "part", "N": "token", "H": "head", "D": "element"}
_INTEGERS = {1: {"uint8", "int8"}, 2: {"uint16", "int16"}, 4: {"uint32", "int32"}}
_MAX_LOOPS = 3  # of fx_plane
_MAX_SEGMENT_BYTES = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as address arithmetic; strides in bytes."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str


@dataclass(frozen=True, slots=True)
class _Part:
    """What one tensor holds: a layer, all layers (`layer` None), or one part of a layer."""

    tensor: _Tensor
    layer: int | None
    part: int | None


# letter of L, B, P, N, H, D -> (count, stride in bytes)
_Dims = dict[str, tuple[int, int]]


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
    parts = _flatten(kv_caches, spec, address_of or _address)
    named = _axes_per_group(axes, spec)
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
            found = named[where] = _infer_axes(item.tensor, sizes)
        dims = _read_dims(item.tensor, found, sizes)
        blocks.setdefault(dims["B"][0], item.tensor.name)
        for layer in range(spec.layers) if item.layer is None else (item.layer,):
            shift = dims["L"][1] * layer if item.layer is None else 0
            planes += _layer_planes(item, layer, shift, dims, spec, offsets[layer])
    if len(blocks) > 1:
        several = ", ".join(f"{name} has {count}" for count, name in blocks.items())
        raise LayoutError(f"all layers must have the same number of blocks, but {several}")
    planes.sort(key=lambda plane: plane.offset)
    return Region(tuple(planes), next(iter(blocks)), owner=kv_caches)


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


def _describe(name: str, tensor: Any, address_of: Callable[[Any], int]) -> _Tensor:
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
    return _Tensor(name, address, shape, strides, itemsize, dtype)


def _address(tensor: Any) -> int:
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    if hasattr(tensor, "__array_interface__"):
        return int(tensor.__array_interface__["data"][0])
    raise LayoutError(f"a {type(tensor).__name__} is no tensor: it has no address")


def _check_dtype(tensor: _Tensor, group: LayerGroup) -> None:
    """Accept the spec's dtype, and integers of its size: bytes are what moves (numpy has no bf16)."""
    size = group.itemsize_bytes
    if tensor.itemsize == size and tensor.dtype in {group.dtype, *_INTEGERS[size]}:
        return
    raise LayoutError(
        f"{tensor.name} has dtype {tensor.dtype}, the KVSpec says {group.dtype}; give that, or a "
        f"view as an integer of {size} byte(s)"
    )


def _check_overlap(tensor: _Tensor) -> None:
    reach = tensor.itemsize
    for stride, count in sorted((abs(s), c) for s, c in zip(tensor.strides, tensor.shape, strict=True)):
        if count == 1:
            continue
        if stride < reach:
            raise LayoutError(
                f"{tensor.name} of shape {tensor.shape} and byte strides {tensor.strides} overlaps "
                "itself (expanded?); blocks need memory of their own"
            )
        reach += stride * (count - 1)


# --- axes


def _axes_per_group(axes: str | None, spec: KVSpec) -> list[str | None]:
    if axes is None:
        return [None] * len(spec.groups)
    named: list[str | None] = [text.strip().upper() for text in axes.split(",")]
    if len(named) == 1:
        named *= len(spec.groups)
    if len(named) != len(spec.groups):
        raise LayoutError(
            f"axes {axes!r} names {len(named)} layouts for {len(spec.groups)} layer groups"
        )
    for text in named:
        assert text is not None
        letters = text.replace("1", "")
        wrong = (
            set(letters) - set("LBPNHDCT")
            or len(set(letters)) != len(letters)
            or ("B" in letters) == ("T" in letters)
            or ("T" in letters and "N" in letters)
            or ("C" in letters and ("P" in letters or "D" in letters))
        )
        if wrong:
            raise LayoutError(
                f"axes {text!r}: use each of L B P N H D at most once, with B (or T for B and N "
                "fused), C for P and D fused, 1 for a dimension to ignore"
            )
    return named


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


def _read_dims(tensor: _Tensor, axes: str, sizes: dict[str, int]) -> _Dims:
    """Pair letters with dimensions, split the fused ones, check sizes."""
    if len(axes) != len(tensor.shape):
        raise LayoutError(
            f"{tensor.name} of shape {tensor.shape} has {len(tensor.shape)} dimensions, axes "
            f"{axes!r} name {len(axes)}"
        )
    dims: _Dims = {}
    for letter, count, stride in zip(axes, tensor.shape, tensor.strides, strict=True):
        wanted = 1 if letter == "1" else sizes.get(letter, count)
        if count != wanted:
            raise LayoutError(
                f"{tensor.name} of shape {tensor.shape}: axis {letter} of {axes!r} has size "
                f"{count}, the KVSpec says {wanted}"
            )
        if letter == "T":
            tokens = sizes["N"]
            if count < tokens:
                raise LayoutError(f"{tensor.name}: {count} tokens are less than a block of {tokens}")
            dims["B"] = (count // tokens, tokens * stride)
            dims["N"] = (tokens, stride)
        elif letter == "C":
            dims["P"] = (sizes["P"], sizes["D"] * stride)
            dims["D"] = (sizes["D"], stride)
        elif letter != "1":
            dims[letter] = (count, stride)
    for letter, spelled in _SPELLED.items():
        if letter not in dims and sizes.get(letter, 1) > 1:
            raise LayoutError(
                f"{tensor.name} of shape {tensor.shape}: axes {axes!r} lack {letter} ({spelled}), "
                f"of which there are {sizes[letter]}"
            )
        dims.setdefault(letter, (1, 0))
    return dims


def _infer_axes(tensor: _Tensor, sizes: dict[str, int]) -> str:
    """Return the only reading of the tensor's dimensions that the sizes allow."""
    readings: dict[tuple[Any, ...], str] = {}
    for axes in _candidates(tensor.shape, sizes, ""):
        dims = _read_dims(tensor, axes, sizes)
        effect = tuple(dims[letter] if dims[letter][0] > 1 else None for letter in _SPELLED)
        readings.setdefault(effect, axes)  # letters of size 1 may trade places: same bytes
    wanted = {letter: sizes[letter] for letter in "LPNHD" if sizes[letter] > 1}
    if not readings:
        raise LayoutError(
            f"{tensor.name} of shape {tensor.shape} does not match the KVSpec (a dimension for "
            f"blocks and {wanted}, P and D possibly fused); check the spec or declare axes"
        )
    if len(readings) > 1:
        several = ", ".join(sorted(readings.values()))
        raise LayoutError(
            f"{tensor.name} of shape {tensor.shape} can be read as {several}; declare axes"
        )
    return next(iter(readings.values()))


def _candidates(shape: tuple[int, ...], sizes: dict[str, int], taken: str) -> Iterator[str]:
    if len(taken) == len(shape):
        have = set(taken) | ({"B", "N"} if "T" in taken else set())
        have |= {"P", "D"} if "C" in taken else set()
        if "B" in have and all(letter in have or sizes[letter] == 1 for letter in "LPNHD"):
            yield taken
        return
    count = shape[len(taken)]
    options = [letter for letter in "LPNHD" if sizes[letter] == count]
    options += ["C"] if sizes["P"] > 1 and sizes["C"] == count else []
    options += ["B", "T"] if sizes["N"] > 1 and count >= sizes["N"] else ["B"]
    options += ["1"] if count == 1 else []
    clashes = {"C": "CPD", "P": "PC", "D": "DC", "T": "TBN", "B": "BT", "N": "NT", "1": ""}
    for letter in options:
        if not set(clashes.get(letter, letter)) & set(taken):
            yield from _candidates(shape, sizes, taken + letter)


# --- planes


def _layer_planes(
    item: _Part, layer: int, shift: int, dims: _Dims, spec: KVSpec, offset: int
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
        raise LayoutError(f"{item.tensor.name}: a segment of {segment} bytes is too long for a copy")
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
