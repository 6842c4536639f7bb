"""The `cpu` device backend: host tensors are the device. The reference that every test uses.

`probe` - `open` - `make_region` - `export_region`, `import_region` (regions in shared memory) -
`copy` (small batches at once, larger ones on the crew's threads) - `aclose`.
"""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from flexkv._core import ffi, lib
from flexkv.backends import layout
from flexkv.backends.packing import PackedRegion, checked_ids
from flexkv.completion import Ticket
from flexkv.errors import ClosedError, ConfigError, InputError, LayoutError, TransferError
from flexkv.memory import find_shared, map_shared
from flexkv.model import KVSpec
from flexkv.protocols import (
    API_VERSION,
    BlockCopy,
    DeviceInfo,
    Plane,
    Region,
    RegionHandle,
    Services,
)

# A copy of 1 MiB takes about 0.1 ms: less than handing it over and being woken again costs.
INLINE_BYTES = 1 << 20
_HANDLE_FORMAT = 1


class CpuBackend:
    """Copies between host tensors and the arena with the C copy engine.

    Setting `inline_bytes`: batches up to this many bytes are copied at once, on the event loop.
    """

    flexkv_api: ClassVar[int] = API_VERSION

    def __init__(self) -> None:
        self._services: Services | None = None
        self._inline_bytes = INLINE_BYTES
        self._packed: dict[int, PackedRegion] = {}
        self._tickets: set[Ticket] = set()

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List the host as one device."""
        memory_bytes = 0
        with suppress(OSError, ValueError):
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
        return [DeviceInfo("cpu", memory_bytes, f"{_cpu_name()}, {cores} usable cores")]

    async def open(self, services: Services) -> None:
        """Take the services.

        Raises:
            ConfigError: a setting is unknown or not a size.
        """
        settings = dict(services.settings)
        inline = settings.pop("inline_bytes", INLINE_BYTES)
        if settings:
            raise ConfigError(f"the cpu backend has no setting {sorted(settings)[0]!r}")
        if not isinstance(inline, int) or inline < 0:
            raise ConfigError(f"inline_bytes must be an integer >= 0, got {inline!r}")
        self._inline_bytes = inline
        self._services = services

    def make_region(self, kv_caches: Any, spec: KVSpec, axes: str | None = None) -> Region:
        """Describe host tensors (see `layout.make_region`).

        Raises:
            LayoutError: they do not match `spec`, or are not in host memory.
        """
        return layout.make_region(kv_caches, spec, axes, address_of=_host_address)

    def export_region(self, region: Region) -> RegionHandle:
        """Return a handle under which another process can open the region.

        The descriptors in it are new ones: whoever sends the handle closes them afterwards.

        Raises:
            LayoutError: part of the region is ordinary memory, which no other process can map.
        """
        fds: dict[tuple[int, int], int] = {}
        planes = []
        try:
            for plane in region.planes:
                low, high = layout.plane_extent(plane, region.blocks)
                found = find_shared(low, high - low)
                if found is None:
                    raise LayoutError(
                        f"layer {plane.layer} is in ordinary memory of this process, which others "
                        "cannot map; allocate the tensors in shared memory to export them "
                        "(tensor.share_memory_(), a memfd)"
                    )
                fd, position = found
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
        text = {"format": _HANDLE_FORMAT, "blocks": region.blocks, "planes": planes}
        return RegionHandle(json.dumps(text).encode(), tuple(fds.values()))

    def import_region(self, handle: RegionHandle) -> Region:
        """Map the region of another process; the handle's descriptors may be closed afterwards.

        Raises:
            LayoutError: the handle is not one of this backend, or reaches outside its files.
        """
        try:
            text = json.loads(handle.data)
            if text["format"] != _HANDLE_FORMAT:
                raise ValueError(f"format {text['format']}")
            files = [map_shared(fd) for fd in handle.fds]
            bases = [int(file.__array_interface__["data"][0]) for file in files]
            planes = []
            for layer, file, position, block_stride, loops, segment, offset in text["planes"]:
                steps = tuple((int(count), int(stride)) for count, stride in loops)
                base = bases[file] + position
                plane = Plane(layer, base, block_stride, steps, segment, offset)
                low, high = layout.plane_extent(plane, text["blocks"])
                if low < bases[file] or high > bases[file] + files[file].size:
                    raise ValueError(f"layer {layer} reaches outside its file")
                planes.append(plane)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise LayoutError(f"this is no handle of a cpu region: {error}") from error
        layers = max((plane.layer for plane in planes), default=-1) + 1
        return Region(tuple(planes), text["blocks"], layers, owner=tuple(files))

    async def copy(self, batch: BlockCopy) -> None:
        """Copy the batch; return when all bytes have landed.

        Cancelling the caller does not stop the copy: `aclose` waits for it.

        Raises:
            InputError: a block or slot does not exist, or the lists differ in length.
            LayoutError: a block of the region is larger than a slot of the arena.
            TransferError: the copy could not be queued.
            ClosedError: the backend is not open.
        """
        if self._services is None:
            raise ClosedError("the cpu backend is not open")
        arena, completions = self._services.arena, self._services.completions
        packed = self._pack(batch.region)
        if packed.end_bytes > arena.stride_bytes:
            raise LayoutError(
                f"blocks of {packed.end_bytes} bytes do not fit slots of {arena.stride_bytes}"
            )
        blocks = checked_ids(batch.device_blocks, batch.region.blocks, "device block")
        slots = checked_ids(batch.host_slots, arena.slots, "host slot")
        if len(blocks) != len(slots):
            raise InputError(
                f"{len(blocks)} device blocks cannot pair with {len(slots)} host slots"
            )
        planes, count, block_bytes = packed.select(batch.layers)
        size_bytes = block_bytes * len(blocks)
        if not size_bytes:
            return
        arguments = (
            *(planes, count, arena.address(0), arena.stride_bytes),
            ffi.from_buffer("uint32_t[]", slots),
            ffi.from_buffer("uint32_t[]", blocks),
            *(len(blocks), int(batch.to_device)),
        )
        if size_bytes <= self._inline_bytes:
            lib.fx_copy_blocks(*arguments)
            return
        ticket = completions.ticket(keep=(batch.region, arena))
        error = lib.fx_crew_copy(completions.crew, *arguments, ticket.number)
        if error:
            completions.fail(ticket, error)
        self._tickets.add(ticket)
        try:
            done = await ticket
        except BaseException:  # the copy goes on without us
            self._tickets = {other for other in self._tickets if other.done is None}
            raise
        self._tickets.discard(ticket)
        if done.failed:
            why = (
                "the crew's queue is full"
                if done.error == errno.EAGAIN
                else os.strerror(done.error)
            )
            raise TransferError(
                f"a copy of {len(blocks)} blocks ({size_bytes} bytes) failed: {why}"
            )

    async def aclose(self) -> None:
        """Wait for copies in flight, whoever gave up on them, and let go. Twice is fine."""
        self._services = None
        for ticket in list(self._tickets):
            await ticket
        self._tickets.clear()
        self._packed.clear()

    def _pack(self, region: Region) -> PackedRegion:
        packed = self._packed.get(id(region))
        if packed is None:
            if len(self._packed) >= 16:  # engines register once; forget regions of old ones
                self._packed.pop(next(iter(self._packed)))
            packed = self._packed[id(region)] = PackedRegion(region)
        return packed


def _host_address(tensor: Any) -> int:
    device = getattr(getattr(tensor, "device", None), "type", "cpu")
    if device != "cpu":
        raise LayoutError(f"a tensor on device {device!r} is out of reach of the cpu backend")
    return layout.tensor_address(tensor)


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
