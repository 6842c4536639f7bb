"""The `simulated` device backend: what an accelerator's backend does, over a device in software.

`SimulatedBackend`: one stream per engine and direction; the device's own thread completes tickets
in C. A completion that does not come is asked for after `timeout_ms`.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi as core_ffi
from flexkv._core import lib
from flexkv.backends import handles
from flexkv.backends.device import CopyingDevice, Job
from flexkv.backends.layout import plane_extent, tensor_address
from flexkv.backends.packing import PackedRegion
from flexkv.completion import Completions, Ticket
from flexkv.errors import ConfigError, LayoutError
from flexkv.model import KVSpec
from flexkv.protocols import DeviceInfo, Region, RegionHandle
from flexkv_simulated._native import ffi
from flexkv_simulated.device import Device, Kind, Model
from flexkv_simulated.memory import DeviceTensor, find, open_memory

_TYPES = {
    "device_blocks": np.uint32,
    "host_slots": np.uint32,
    "files": np.int32,
    "offsets": np.uint64,
    "keys": np.uint64,
    "checksums": np.uint64,
    "statuses": np.uint8,
}


class Batch:
    """A sim_batch (`native`) with the arrays it points to. The device copies all but `statuses`,
    so the batch must live as long as the ticket only when it has some.

    Args:
        planes: fx_plane[] at the addresses of the engines.
        arrays: by the names of the sim_batch.
    """

    def __init__(
        self, planes: Any, n_planes: int, block_bytes: int, **arrays: NDArray[Any]
    ) -> None:
        self.native = ffi.new("sim_batch *")
        self.native.planes = ffi.cast("void *", int(core_ffi.cast("uintptr_t", planes)))
        self.native.n_planes, self.native.block_bytes = n_planes, block_bytes
        self.native.count = len(arrays["device_blocks"])
        self._kept: list[Any] = [planes]
        for name, array in arrays.items():
            assert array.dtype == _TYPES[name]
            view = ffi.from_buffer(f"{array.dtype}_t[]", np.ascontiguousarray(array))
            setattr(self.native, name, view)
            self._kept.append(view)


class SimulatedBackend(CopyingDevice):
    """Copies between simulated device memory and the arena.

    Settings: the fields of `Model`; `streams` per direction (default: one per engine);
    `timeout_ms`, after which the device is asked about a completion that has not come;
    `host_tensors`, true to take tensors in host memory for the engine's (the times and faults are
    the device's, the memory is not); `exports`, false to refuse handles, as some memory must.
    `device` is the Device, while the backend is open.
    """

    name: ClassVar[str] = "simulated"
    device: Device

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[Kind, itertools.cycle[int]] = {}
        self._watched: dict[Ticket, tuple[int, int]] = {}
        self._over: set[Ticket] = set()  # whose work was over when the device was last asked
        self._looking = False
        self._host_tensors = True  # until `open` says otherwise; a region may be made before
        self._exports = True

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List one device: its memory is the machine's."""
        memory_bytes = 0
        with suppress(OSError, ValueError):
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [DeviceInfo("simulated", memory_bytes, "an accelerator in software")]

    def configure(self, settings: dict[str, Any]) -> None:
        """Take the model and the rest; raises ConfigError when a value is wrong."""
        self._timeout_ms = _count(settings, "timeout_ms", 1000)
        self._host_tensors = bool(settings.pop("host_tensors", False))
        self._exports = bool(settings.pop("exports", True))
        model = Model.read(settings)
        streams = _count(settings, "streams", model.engines)
        if settings:
            return  # `open` says which are unknown, before there are threads
        self.device = Device(model)
        kinds: tuple[Kind, ...] = ("to_device", "from_device", "storage")
        for kind in kinds:
            opened = [self.device.open_stream() for _ in range(streams)]
            self._streams[kind] = itertools.cycle(opened)

    def make_region(self, kv_caches: Any, spec: KVSpec, axes: str | None = None) -> Region:
        """Describe tensors of the device; the region keeps their memory.

        Raises:
            LayoutError: they do not match `spec`, or are not in the device's memory (told by the
                first copy when the region was made before `open`).
        """
        region = super().make_region(kv_caches, spec, axes)
        self.pack(region)
        return region

    def address_of(self, tensor: Any) -> int:
        """Return a tensor's address; raises LayoutError when the memory is not the device's."""
        if not isinstance(tensor, DeviceTensor) and not self._host_tensors:
            where = getattr(getattr(tensor, "device", None), "type", "cpu")
            raise LayoutError(f"a tensor on device {where!r} is not in simulated device memory")
        return tensor_address(tensor)

    def pack(self, region: Region) -> PackedRegion:
        """Return the region with the addresses that copy engines use."""
        if self._host_tensors:
            return PackedRegion(region)
        planes = []
        for plane in region.planes:
            memory = find(*plane_extent(plane, region.blocks))
            planes.append(replace(plane, base=plane.base + memory.shift))
        return PackedRegion(region, planes)

    def export_region(self, region: Region) -> RegionHandle:
        """Return a handle under which another process can open the region.

        The descriptors in it are new ones: whoever sends the handle closes them afterwards.

        Raises:
            LayoutError: the memory is not exportable.
        """
        if not self._exports:
            raise LayoutError("this device exports no memory (exports: false)")
        return handles.export_region(region, self.name, _file_of)

    def import_region(self, handle: RegionHandle) -> Region:
        """Map the region of another process; the handle's descriptors may be closed afterwards.

        Raises:
            LayoutError: the handle is not one of this backend, or reaches outside its files.
        """
        return handles.import_region(handle, self.name, _map_file)

    def start(self, job: Job, ticket: Ticket) -> None:
        """Queue the copy on the next stream of its direction."""
        batch = Batch(
            *(job.planes, job.n_planes, job.block_bytes),
            device_blocks=job.device_blocks,
            host_slots=job.host_slots,
        )
        batch.native.host_base, batch.native.host_stride = job.host_base, job.host_stride_bytes
        self.submit("to_device" if job.to_device else "from_device", batch, ticket)

    def submit(self, kind: Kind, batch: Batch, ticket: Ticket) -> None:
        """Queue a batch and look after its completion; raises TransferError when it is refused."""
        stream = next(self._streams[kind])
        number = self.device.submit(stream, kind, batch.native, ticket.number)
        self._watched[ticket] = (stream, number)
        self._look_again(self.services.completions)

    def _look_again(self, completions: Completions) -> None:
        """Ask the device about old tickets in a while: its threads tell nobody about work that was
        under way when the context broke, and completions may get lost.

        A ticket is settled only when no byte of its work can land any more, and when its word has
        not come although the work was over a while ago.
        """
        if self._looking or not self._watched:
            return
        self._looking = True

        def look() -> None:
            self._looking = False
            out = {t: event for t, event in self._watched.items() if t.done is None}
            over = {t for t, event in out.items() if self.device.query(*event) != errno.EINPROGRESS}
            for ticket in over & self._over:
                lib.fx_settle(ticket.number, self.device.withdraw(*out.pop(ticket)), 1)
            self._watched, self._over = out, over
            self._look_again(completions)

        completions.call_later(self._timeout_ms / 1000, look)

    async def aclose(self) -> None:
        """Wait for copies in flight, whoever gave up on them, and let go. Twice is fine."""
        await super().aclose()
        if self._streams:
            self.device.close()


def _count(settings: dict[str, Any], name: str, default: int) -> int:
    value = settings.pop(name, default)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer >= 1, got {value!r}")
    return value


def _file_of(low: int, high: int) -> tuple[int, int]:
    memory = find(low, high)
    return os.dup(memory.fd), low - memory.address


def _map_file(fd: int) -> handles.Mapped:
    memory = open_memory(fd)
    return handles.Mapped(memory.address, memory.size_bytes, memory)
