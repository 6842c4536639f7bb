"""The portable base for accelerators that torch knows: cuda, npu, xpu, mlu, musa.

`TorchDeviceBackend`: a subclass names its module and is a device backend. Each direction has a
stream and a thread, which works first come, first served: it gathers blocks on the device into a
staging buffer, moves that through pinned memory, and waits for an event that blocks without the
GIL. Nothing is synchronized on the event loop.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from queue import SimpleQueue
from typing import Any, ClassVar

import anyio.to_thread
import numpy as np

from flexkv._core import ffi, lib
from flexkv.backends.device import CopyingDevice, Job
from flexkv.backends.layout import tensor_address
from flexkv.backends.packing import PackedRegion
from flexkv.backends.torch_planes import Staged, TorchRegion
from flexkv.completion import Ticket
from flexkv.errors import ClosedError, ConfigError, LayoutError
from flexkv.model import SlotIds
from flexkv.protocols import DeviceInfo, Region
from flexkv.telemetry import log

STAGING_BYTES = 32 << 20  # long enough for full bandwidth, short enough to overlap with the next


class TorchDeviceBackend(CopyingDevice):
    """Copies between tensors of an accelerator and the arena. Subclasses set `module` and `name`.

    Setting `staging_bytes`: device and pinned host memory per direction, twice (32 MiB).
    """

    module: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._staging_bytes = STAGING_BYTES
        self._threads: dict[bool, _Copier] = {}  # by direction: to the device?

    @classmethod
    def accelerator(cls) -> Any:
        """Return the module of torch, such as torch.npu; None without it, or without torch."""
        try:
            return getattr(import_module("torch"), cls.module, None)
        except ImportError:
            return None

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List the devices that torch counts; names and sizes would create contexts."""
        try:
            found = cls.accelerator()
            count = found.device_count() if found is not None else 0
        except Exception as error:  # a driver may fail in any way
            log.info("torch.no_device", module=cls.module, error=repr(error))
            return []
        return [DeviceInfo(f"{cls.module}:{number}") for number in range(count)]

    def configure(self, settings: dict[str, Any]) -> None:
        """Take `staging_bytes`; raises ConfigError when it is not a size."""
        size = settings.pop("staging_bytes", STAGING_BYTES)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"staging_bytes must be an integer >= 1, got {size!r}")
        self._staging_bytes = size

    async def open(self, services: Any) -> None:
        """Take the services; import torch, in a thread where it is not loaded yet.

        Raises:
            ConfigError: a setting is unknown or wrong, or torch has no such module.
        """
        await super().open(services)
        module = await anyio.to_thread.run_sync(self.accelerator)
        if module is None:
            self._services = None
            raise ConfigError(f"there is no torch.{self.module}: install a torch that has it")
        for to_device in (False, True):
            self._threads[to_device] = _Copier(module, self.name, self._staging_bytes)

    def address_of(self, tensor: Any) -> int:
        """Return the address of a tensor; raises LayoutError when it is on another device."""
        where = getattr(getattr(tensor, "device", None), "type", "cpu")
        if where != self.module:
            raise LayoutError(f"a tensor on device {where!r} is out of reach of {self.name}")
        return tensor_address(tensor)

    def pack(self, region: Region) -> PackedRegion:
        """Return the region with views of its tensors' memory."""
        return TorchRegion(region)

    def start(self, job: Job, ticket: Ticket) -> None:
        """Queue the copy behind those of its direction, and behind what the device computes now."""
        region = self.packed(job.region)
        assert isinstance(region, TorchRegion)
        thread = self._threads.get(job.to_device)
        if thread is None:
            raise ClosedError(f"the {self.name} backend is not open")
        thread.put(job, region, ticket)

    async def aclose(self) -> None:
        """Wait for copies in flight, whoever gave up on them, and let go. Twice is fine."""
        await super().aclose()
        threads, self._threads = self._threads, {}
        for thread in threads.values():
            await anyio.to_thread.run_sync(thread.close)


@dataclass(slots=True)
class _Work:
    """A job, and the event behind which it starts."""

    job: Job
    planes: Staged
    ready: Any
    address: Any


@dataclass(slots=True)
class _Stage:
    """A staging buffer on the device, its pinned twin, the event of its use, and what is in it."""

    event: Any
    device: Any = None
    pinned: Any = None
    blocks: SlotIds = field(default_factory=lambda: np.empty(0, np.uint32))
    slots: SlotIds | None = None  # None: not in use


class _Copier:
    """A stream and the thread that feeds it and waits for it."""

    def __init__(self, module: Any, name: str, staging_bytes: int) -> None:
        self._module, self._staging_bytes = module, staging_bytes
        self._stream = module.Stream()
        self._stages = [_Stage(module.Event(blocking=True)) for _ in range(2)]
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"flexkv-{name}", daemon=True)
        self._thread.start()

    def put(self, job: Job, region: TorchRegion, ticket: Ticket) -> None:
        """Queue a job."""
        ready = self._module.Event()
        ready.record(self._module.current_stream())
        planes = Staged(region.views(job.layers))
        self._queue.put(_Work(job, planes, ready, ticket.address))

    def close(self) -> None:
        """End the thread when the queue is empty."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                self._copy(work)
            except Exception as error:  # of the driver: whatever it is, these bytes are not good
                log.warning("copy.failed", blocks=len(work.job.device_blocks), error=repr(error))
                self._calm()
                lib.fx_fail(work.address, errno.EIO)
            else:
                lib.fx_complete(work.address)
            del work  # what it keeps alive must not wait for the next job

    def _copy(self, work: _Work) -> None:
        """Copy in pieces; while one is on its way, the other buffer is filled or emptied."""
        job, planes = work.job, work.planes
        step = planes.blocks_in(self._staging_bytes)
        self._stream.wait_event(work.ready)
        for at, stage in zip(range(0, len(job.host_slots), step), itertools.cycle(self._stages)):
            self._finish(stage, work)
            stage.blocks = job.device_blocks[at : at + step]
            stage.slots = job.host_slots[at : at + step]
            self._make_room(stage, planes.size_bytes(len(stage.blocks)), planes)
            if job.to_device:
                self._through_host(stage, work)
            self._launch(stage, work)
        for stage in self._stages:
            self._finish(stage, work)

    def _launch(self, stage: _Stage, work: _Work) -> None:
        """Queue what the device does with one piece."""
        planes, count = work.planes, len(stage.blocks)
        size = planes.size_bytes(count)
        with self._module.stream(self._stream):
            ids = planes.ids(stage.blocks)
            if work.job.to_device:
                stage.device[:size].copy_(stage.pinned[:size], non_blocking=True)
                planes.scatter(stage.device, ids)
            else:
                planes.gather(stage.device, ids)
                stage.pinned[:size].copy_(stage.device[:size], non_blocking=True)
            stage.event.record(self._stream)

    def _finish(self, stage: _Stage, work: _Work) -> None:
        """Wait for a buffer's use to end; bring what came from the device to the arena."""
        if stage.slots is None:
            return
        stage.event.synchronize()
        if not work.job.to_device:
            self._through_host(stage, work)
        stage.slots = None

    def _through_host(self, stage: _Stage, work: _Work) -> None:
        """Copy one piece between pinned memory and the arena."""
        job, count = work.job, len(stage.blocks)
        rows = np.arange(count, dtype=np.uint32)
        native = work.planes.native(stage.pinned.data_ptr(), count)
        slots = np.ascontiguousarray(stage.slots)
        lib.fx_copy_blocks(
            native,
            len(native),
            job.host_base,
            job.host_stride_bytes,
            ffi.from_buffer("uint32_t[]", slots),
            ffi.from_buffer("uint32_t[]", rows),
            count,
            int(job.to_device),
        )

    def _make_room(self, stage: _Stage, size_bytes: int, planes: Staged) -> None:
        if stage.device is None or len(stage.device) < size_bytes:
            size = max(size_bytes, self._staging_bytes)
            stage.device, stage.pinned = planes.buffer(size), _pinned(size)

    def _calm(self) -> None:
        """After a failure: nothing may land any more when it is told."""
        for stage in self._stages:
            stage.slots = None
        try:
            self._stream.synchronize()
        except Exception as error:  # a context that is broken does nothing any more
            log.warning("stream.broken", error=repr(error))


def _pinned(size_bytes: int) -> Any:
    """Host memory that the device reaches by itself, plain memory where there is none."""
    torch = import_module("torch")
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.info("torch.unpinned", size_bytes=size_bytes, error=str(error).splitlines()[0])
        return torch.empty(size_bytes, dtype=torch.uint8)
