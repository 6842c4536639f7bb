"""Device memory of one process in another one: cudaIpc handles of whole allocations.

`export_region` (region -> RegionHandle) - `import_region` (and back, checked; `Opened` closes what
was opened).
"""

from __future__ import annotations

import json
import weakref
from typing import Any, NamedTuple

from flexkv.backends import layout
from flexkv.backends.cuda.library import Cuda, CudaError, ffi
from flexkv.errors import LayoutError
from flexkv.protocols import Plane, Region, RegionHandle

_FORMAT = 1
_LAZY_PEER_ACCESS = 1


class _Allocation(NamedTuple):
    base: int
    size_bytes: int
    handle: bytes


class Opened:
    """An allocation of another process: `base` here. Closed once, with the last region on it or by
    `close`.
    """

    def __init__(self, cuda: Cuda, device: int, handle: bytes, size_bytes: int) -> None:
        value, place = ffi.new("cudaIpcMemHandle_t *"), ffi.new("uintptr_t *")
        ffi.memmove(value, handle, 64)
        with cuda.on(device):
            cuda.call("cudaIpcOpenMemHandle", place, value[0], _LAZY_PEER_ACCESS)
        self.base, self.size_bytes = int(place[0]), size_bytes
        self.close = weakref.finalize(self, _close, cuda, device, self.base)


def _close(cuda: Cuda, device: int, base: int) -> None:
    with cuda.on(device, to_release=True):
        cuda.runtime.cudaIpcCloseMemHandle(base)


def export_region(cuda: Cuda, region: Region, device: int) -> RegionHandle:
    """Return a handle under which another process can open the region's memory.

    Raises:
        LayoutError: the driver does not share this memory: expandable segments of torch's
            allocator, for example.
    """
    found: list[_Allocation] = []
    planes = []
    with cuda.on(device):
        for plane in region.planes:
            low, high = layout.plane_extent(plane, region.blocks)
            number = _position(found, low, high)
            if number is None:
                found.append(_allocation(cuda, low, high, plane.layer))
                number = len(found) - 1
            steps = (plane.block_stride, plane.loops, plane.segment_bytes, plane.offset)
            planes.append((plane.layer, number, plane.base - found[number].base, *steps))
        bus = ffi.new("char[32]")
        cuda.call("cudaDeviceGetPCIBusId", bus, 32, device)
    memory = [(one.handle.hex(), one.size_bytes) for one in found]
    text = {
        **{"format": _FORMAT, "device": "cuda", "bus": ffi.string(bus).decode()},
        **{"blocks": region.blocks, "memory": memory, "planes": planes},
    }
    return RegionHandle(json.dumps(text).encode())


def _position(found: list[_Allocation], low: int, high: int) -> int | None:
    for number, one in enumerate(found):
        if one.base <= low and high <= one.base + one.size_bytes:
            return number
    return None


def _allocation(cuda: Cuda, low: int, high: int, layer: int) -> _Allocation:
    base, size = ffi.new("uintptr_t *"), ffi.new("size_t *")
    handle = ffi.new("cudaIpcMemHandle_t *")
    try:
        cuda.check("cuMemGetAddressRange", cuda.driver.cuMemGetAddressRange_v2(base, size, low))
        cuda.call("cudaIpcGetMemHandle", handle, base[0])
    except CudaError as error:
        raise LayoutError(
            f"layer {layer}: the driver shares no handle of this memory ({error}); memory that is "
            "mapped in pieces (expandable_segments of torch's allocator) cannot be exported"
        ) from error
    if high > base[0] + size[0]:
        raise LayoutError(f"layer {layer} lies in more than one allocation")
    return _Allocation(int(base[0]), int(size[0]), bytes(ffi.buffer(handle)))


def import_region(cuda: Cuda, handle: RegionHandle) -> Region:
    """Open the region of another process; its `owner` holds what was opened.

    Raises:
        LayoutError: the handle is not one of ours, reaches outside its memory, or the driver
            refuses it (its process is gone, or is this one).
    """
    try:
        text = json.loads(handle.data)
        if (text["format"], text["device"]) != (_FORMAT, "cuda"):
            raise ValueError(f"format {text['format']} of {text['device']}")
        device = _device(cuda, text["bus"])
        opened = []
        for name, size in text["memory"]:
            content = bytes.fromhex(name)
            if len(content) != 64:
                raise ValueError(f"a handle of {len(content)} bytes")
            opened.append(Opened(cuda, device, content, int(size)))
        planes = [_plane(plane, opened, text["blocks"]) for plane in text["planes"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LayoutError(f"this is no handle of a cuda region: {error}") from error
    except CudaError as error:
        raise LayoutError(f"the region of another process cannot be opened: {error}") from error
    layers = max((plane.layer for plane in planes), default=-1) + 1
    return Region(tuple(planes), text["blocks"], layers, tuple(opened))


def _device(cuda: Cuda, bus: str) -> int:
    number = ffi.new("int *")
    cuda.call("cudaDeviceGetByPCIBusId", number, bus.encode())
    return int(number[0])


def _plane(row: Any, opened: list[Opened], blocks: int) -> Plane:
    layer, number, position, block_stride, loops, segment, offset = row
    memory = opened[number]
    steps = tuple((int(count), int(stride)) for count, stride in loops)
    plane = Plane(layer, memory.base + position, block_stride, steps, segment, offset)
    low, high = layout.plane_extent(plane, blocks)
    if low < memory.base or high > memory.base + memory.size_bytes:
        raise ValueError(f"layer {layer} reaches outside its memory")
    return plane
