"""Regions that live in files (shared host memory, exported device memory), as handles for others.

`export_region` (region -> RegionHandle with descriptors) - `import_region` (and back, checked).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from flexkv.backends import layout
from flexkv.errors import LayoutError
from flexkv.protocols import Plane, Region, RegionHandle

_FORMAT = 1


class Mapped(NamedTuple):
    """A file of another process in this one: where it begins, its size, what keeps it mapped."""

    base: int
    size_bytes: int
    owner: Any


def export_region(
    region: Region, device: str, file_of: Callable[[int, int], tuple[int, int]]
) -> RegionHandle:
    """Return a handle under which another process can open the region.

    Args:
        device: name of the kind of memory, which the importer must ask for.
        file_of: a half-open range of addresses -> (a new descriptor, the position in its file);
            raises LayoutError when no other process can map it.

    The descriptors in the handle are new ones: whoever sends it closes them afterwards.
    """
    fds: dict[tuple[int, int], int] = {}
    planes = []
    try:
        for plane in region.planes:
            low, high = layout.plane_extent(plane, region.blocks)
            try:
                fd, position = file_of(low, high)
            except LayoutError as error:
                raise LayoutError(f"layer {plane.layer}: {error}") from error
            status = os.fstat(fd)
            kept = fds.setdefault((status.st_dev, status.st_ino), fd)
            if kept != fd:
                os.close(fd)
            place = (list(fds.values()).index(kept), position + plane.base - low)
            steps = (plane.block_stride, plane.loops, plane.segment_bytes)
            planes.append((plane.layer, *place, *steps, plane.offset))
    except BaseException:
        for fd in fds.values():
            os.close(fd)
        raise
    text = {"format": _FORMAT, "device": device, "blocks": region.blocks, "planes": planes}
    return RegionHandle(json.dumps(text).encode(), tuple(fds.values()))


def import_region(handle: RegionHandle, device: str, map_file: Callable[[int], Mapped]) -> Region:
    """Map the region of another process; the handle's descriptors may be closed afterwards.

    Raises:
        LayoutError: the handle is not one of ours, or reaches outside its files.
    """
    try:
        text = json.loads(handle.data)
        if (text["format"], text["device"]) != (_FORMAT, device):
            raise ValueError(f"format {text['format']} of {text['device']}")
        files = [map_file(fd) for fd in handle.fds]
        planes = []
        for layer, file, position, block_stride, loops, segment, offset in text["planes"]:
            steps = tuple((int(count), int(stride)) for count, stride in loops)
            mapped = files[file]
            plane = Plane(layer, mapped.base + position, block_stride, steps, segment, offset)
            low, high = layout.plane_extent(plane, text["blocks"])
            if low < mapped.base or high > mapped.base + mapped.size_bytes:
                raise ValueError(f"layer {layer} reaches outside its file")
            planes.append(plane)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LayoutError(f"this is no handle of a {device} region: {error}") from error
    layers = max((plane.layer for plane in planes), default=-1) + 1
    owner = tuple(mapped.owner for mapped in files)
    return Region(tuple(planes), text["blocks"], layers, owner)
