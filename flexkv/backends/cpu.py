"""The `cpu` device backend: host tensors are the device. The reference that every test uses.

`probe` - `export_region`, `import_region` (regions in shared memory) - `copy_now`
(small batches at once), `start` (larger ones on the crew's threads); the rest is `CopyingDevice`.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from flexkv._core import lib
from flexkv.backends import handles, layout
from flexkv.backends.device import CopyingDevice, Job
from flexkv.completion import Ticket
from flexkv.errors import LayoutError, TransferError
from flexkv.memory import find_shared, map_shared
from flexkv.protocols import DeviceInfo, Region, RegionHandle


class CpuBackend(CopyingDevice):
    """Copies between host tensors and the arena with the C copy engine.

    Setting `inline_bytes`: batches up to this many bytes are copied at once, on the event loop.
    """

    name: ClassVar[str] = "cpu"

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List the host as one device."""
        memory_bytes = 0
        with suppress(OSError, ValueError):
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
        return [DeviceInfo("cpu", memory_bytes, f"{_cpu_name()}, {cores} usable cores")]

    def address_of(self, tensor: Any) -> int:
        """Return the address of a tensor; raises LayoutError when it is not in host memory."""
        device = getattr(getattr(tensor, "device", None), "type", "cpu")
        if device != "cpu":
            raise LayoutError(f"a tensor on device {device!r} is out of reach of the cpu backend")
        return layout.tensor_address(tensor)

    def export_region(self, region: Region) -> RegionHandle:
        """Return a handle under which another process can open the region.

        The descriptors in it are new ones: whoever sends the handle closes them afterwards.

        Raises:
            LayoutError: part of the region is ordinary memory, which no other process can map.
        """
        return handles.export_region(region, self.name, _file_of)

    def import_region(self, handle: RegionHandle) -> Region:
        """Map the region of another process; the handle's descriptors may be closed afterwards.

        Raises:
            LayoutError: the handle is not one of this backend, or reaches outside its files.
        """
        return handles.import_region(handle, self.name, _map_file)

    def copy_now(self, job: Job) -> bool:
        """Copy up to `inline_bytes` on the event loop."""
        if job.size_bytes > self.inline_bytes:
            return False
        lib.fx_copy_blocks(*job.arguments())
        return True

    def start(self, job: Job, ticket: Ticket) -> None:
        """Copy on the crew's threads; raises TransferError when their queue is full."""
        crew = self.services.completions.crew
        error = lib.fx_crew_copy(crew, *job.arguments(), ticket.number)
        if error:
            why = "the crew's queue is full" if error == -errno.EAGAIN else os.strerror(-error)
            raise TransferError(f"a copy of {job.size_bytes} bytes was not started: {why}")


def _file_of(low: int, high: int) -> tuple[int, int]:
    found = find_shared(low, high - low)
    if found is None:
        raise LayoutError(
            "it is in ordinary memory of this process, which others cannot map; allocate the "
            "tensors in shared memory to export them (tensor.share_memory_(), a memfd)"
        )
    return found


def _map_file(fd: int) -> handles.Mapped:
    array = map_shared(fd)
    return handles.Mapped(int(array.__array_interface__["data"][0]), array.size, array)


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
