"""The `cuda` device backend.

`probe` - `follow` (the engine's stream) - `export_region`, `import_region` - `start` (chooses the
copies, queues them behind the engine's work, and one host function that completes the ticket); the
rest is `CopyingDevice`. Nothing is ever synchronized with.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import anyio.to_thread

from flexkv.backends.cuda import sharing
from flexkv.backends.cuda.choice import Choice, CudaRegion, Shape, choose
from flexkv.backends.cuda.lanes import (
    Kernel,
    Lane,
    Launch,
    Watch,
    blocks_of_piece,
    device_region,
    queue_batches,
    queue_calls,
)
from flexkv.backends.cuda.library import Cuda, CudaError, Paths, devices, ffi
from flexkv.backends.cuda.pins import Pins, Scratch, chunk_slots
from flexkv.backends.device import CopyingDevice, Job
from flexkv.backends.layout import tensor_address
from flexkv.backends.packing import PackedRegion
from flexkv.completion import Ticket
from flexkv.errors import CapacityError, ClosedError, ConfigError, LayoutError
from flexkv.protocols import DeviceInfo, Region, RegionHandle, Services
from flexkv.telemetry import log

_NAMES = {"cudart": "", "libcuda": ""}
_NUMBERS = {
    "kernel_below_bytes": 32 << 10,
    "kernel_blocks": 8,
    "pin_chunk_bytes": 1 << 30,
    "timeout_ms": 1000,
}
_PIN = ("auto", "always", "never")
_DEVICE_MEMORY = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged


class CudaBackend(CopyingDevice):
    """Copies between the memory of NVIDIA GPUs and the arena.

    Settings: `cudart` and `libcuda`, files to load instead of those that are found;
    `kernel_below_bytes`, segments smaller than this are copied by a kernel (32 KiB);
    `kernel_blocks`, its thread blocks (8; 0: no kernel); `pin`: "auto" (work unpinned when the
    system refuses), "always", "never"; `pin_chunk_bytes`, of one registration (1 GiB);
    `timeout_ms`, after which the device is asked about a completion that has not come.
    """

    name: ClassVar[str] = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self._options: dict[str, Any] = _NAMES | _NUMBERS | {"pin": "auto"}
        self._cuda: Cuda | None = None
        self._lanes: dict[tuple[int, bool], Lane] = {}
        self._engine: dict[int, int] = {}
        self._chunk_slots = 0  # 0: the arena is not pinned
        self._opened: weakref.WeakSet[sharing.Opened] = weakref.WeakSet()
        self._release = contextlib.ExitStack()
        self._kernel: Kernel | None = None

    @classmethod
    def paths(cls) -> Paths:
        """Which libraries to load where no setting says so."""
        return Paths()

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List the GPUs, by NVML: the runtime would make what does not survive a fork."""
        try:
            return devices(cls.paths().nvml)
        except OSError as error:
            log.info("cuda.no_device", error=str(error))
            return []

    def configure(self, settings: dict[str, Any]) -> None:
        """Take the settings; raises ConfigError when a value is wrong."""
        for name, default in _NUMBERS.items():
            value = settings.pop(name, default)
            if type(value) is not int or value < (name in ("pin_chunk_bytes", "timeout_ms")):
                raise ConfigError(f"{name} must be a whole number, got {value!r}")
            self._options[name] = value
        for name in _NAMES:
            self._options[name] = str(settings.pop(name, ""))
        self._options["pin"] = pin = settings.pop("pin", "auto")
        if pin not in _PIN:
            raise ConfigError(f"pin must be one of {', '.join(_PIN)}, got {pin!r}")

    async def open(self, services: Services) -> None:
        """Load the libraries and pin the arena, in a thread.

        Raises:
            ConfigError: a setting is unknown or wrong, or there is no CUDA here.
            CapacityError: the arena cannot be pinned, and `pin` is "always".
        """
        await super().open(services)
        try:
            await anyio.to_thread.run_sync(self._prepare, services)
        except BaseException:
            self._services = None
            self._close()
            raise
        self._watch = Watch(services.completions, self._options["timeout_ms"])

    def _prepare(self, services: Services) -> None:
        found = self.paths()
        names = (self._options["cudart"] or found.runtime, self._options["libcuda"] or found.driver)
        try:
            self._cuda = cuda = Cuda(Paths(*names))
            with cuda.on(0):
                self._pin(cuda, services)
                self._load_kernel(cuda)
        except CudaError as error:
            raise ConfigError(f"CUDA cannot be used here: {error}") from error
        self._launcher = ThreadPoolExecutor(1, f"flexkv-{self.name}")
        self._release.callback(self._launcher.shutdown)

    def _pin(self, cuda: Cuda, services: Services) -> None:
        arena, stride = services.arena, services.arena.stride_bytes
        if self._options["pin"] == "never":
            return
        slots = chunk_slots(stride, self._options["pin_chunk_bytes"])
        place = (arena.address(0), arena.size_bytes)
        try:
            Pins.take(cuda, *place, slots * stride)
        except CapacityError as error:
            if self._options["pin"] == "always":
                raise
            log.warning("cuda.unpinned", error=str(error))
            return
        self._release.callback(Pins.give_back, cuda, *place)
        self._chunk_slots = slots

    def _load_kernel(self, cuda: Cuda) -> None:
        """Have the driver compile the kernel; without it, copies are made by copy engines."""
        if not self._chunk_slots or not self._options["kernel_blocks"]:
            return
        try:
            self._scratch = Scratch(cuda)
            self._release.callback(self._scratch.close)
            if not self._scratch.reaches():
                log.info("cuda.no_kernel", error="pinned memory has other addresses on the device")
                return
            code = (Path(__file__).parent / "move.ptx").read_bytes() + b"\0"
            library, kernel = ffi.new("uintptr_t *"), ffi.new("uintptr_t *")
            nothing = (ffi.NULL, ffi.NULL, 0) * 2
            source = ffi.from_buffer(code)
            cuda.check("cuInit", cuda.driver.cuInit(0))
            cuda.check(
                "cuLibraryLoadData", cuda.driver.cuLibraryLoadData(library, source, *nothing)
            )
            self._release.callback(cuda.driver.cuLibraryUnload, library[0])
            code_of = cuda.driver.cuLibraryGetKernel(kernel, library[0], b"flexkv_move")
            cuda.check("cuLibraryGetKernel", code_of)
        except (CudaError, AttributeError) as error:
            log.warning("cuda.no_kernel", error=str(error))
            return
        self._kernel = Kernel(int(kernel[0]), self._options["kernel_blocks"])

    @property
    def cuda(self) -> Cuda:
        """The libraries; raises ClosedError when the backend is not open."""
        if self._cuda is None:
            raise ClosedError(f"the {self.name} backend is not open")
        return self._cuda

    def follow(self, device: int, stream: int) -> None:
        """Have copies of a device wait for what is in this cudaStream_t when they are started.

        Without it that is torch's current stream, where torch uses CUDA, else the default stream.
        """
        self._engine[device] = stream

    def _engine_stream(self, device: int) -> int:
        if device in self._engine:
            return self._engine[device]
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.current_stream(device).cuda_stream)

    # --- regions

    def address_of(self, tensor: Any) -> int:
        """Return the address of a tensor; raises LayoutError when it is on no GPU."""
        where = getattr(getattr(tensor, "device", None), "type", "cpu")
        if where != "cuda":
            raise LayoutError(f"a tensor on device {where!r} is out of reach of {self.name}")
        return tensor_address(tensor)

    def pack(self, region: Region) -> PackedRegion:
        """Return the region with the device that its memory is on.

        Raises:
            LayoutError: it is on none, or on several.
        """
        cuda, found, owners = self.cuda, ffi.new("cudaPointerAttributes *"), set()
        for plane in region.planes:
            cuda.call("cudaPointerGetAttributes", found, plane.base)
            if found.type not in _DEVICE_MEMORY:
                raise LayoutError(f"layer {plane.layer} at {plane.base:#x} is not memory of a GPU")
            owners.add(int(found.device))
        if len(owners) != 1:
            raise LayoutError(f"a region lies on one GPU, this one on {sorted(owners)}")
        return CudaRegion(region, owners.pop())

    def export_region(self, region: Region) -> RegionHandle:
        """Return a handle under which another process can open the region (see `sharing`).

        Raises:
            LayoutError: the driver does not share this memory.
            ClosedError: the backend is not open.
        """
        device = device_region(self.packed(region)).device
        return sharing.export_region(self.cuda, region, device)

    def import_region(self, handle: RegionHandle) -> Region:
        """Open the region of another process; it is closed with the last region on it, or by
        `aclose`.

        Raises:
            LayoutError: the handle is not one of this backend, or the driver refuses it.
            ClosedError: the backend is not open.
        """
        region = sharing.import_region(self.cuda, handle)
        self._opened.update(region.owner)
        return region

    # --- copies

    def start(self, job: Job, ticket: Ticket) -> None:
        """Queue the copy behind what the engine has queued."""
        self._reclaim()
        region = device_region(self.packed(job.region))
        shape, cuda = region.shape(job), self.cuda
        pieces: list[int] = []
        choice = self._choose(job, shape, pieces)
        with cuda.on(region.device):
            lane = self._lane(region.device, job.to_device)
            ready = lane.event()
            try:
                done = lane.event()
                cuda.call("cudaEventRecord", ready, self._engine_stream(region.device))
            except CudaError:
                lane.spare(ready)
                for piece in pieces:
                    self._scratch.give(piece)
                raise
            launch = Launch(lane, ticket, ready, done, pieces)
            copy = self._copies(choice, lane, job, shape, pieces)
            if choice.now:
                launch.queue(copy)
            else:
                self._launcher.submit(self._queue_there, launch, copy)
        self._watch.add(launch)

    def _choose(self, job: Job, shape: Shape, pieces: list[int]) -> Choice:
        """Choose, and take the pieces that the kernel needs; without enough, choose without it."""
        kernel = self._kernel is not None and blocks_of_piece(shape) > 0
        while True:
            choice = choose(
                *(job, shape),
                kernel=kernel,
                batches=self.cuda.batches,
                below_bytes=self._options["kernel_below_bytes"],
                chunk_slots=self._chunk_slots,
            )
            if choice.kind != "kernel":
                return choice
            for _ in range(-(-len(job.device_blocks) // blocks_of_piece(shape))):
                piece = self._scratch.take()
                if piece is None:
                    break
                pieces.append(piece)
            else:
                return choice
            while pieces:
                self._scratch.give(pieces.pop())
            kernel = False

    def _copies(
        self, choice: Choice, lane: Lane, job: Job, shape: Shape, pieces: list[int]
    ) -> Callable[[], None]:
        if choice.kind == "kernel":
            assert self._kernel is not None
            kernel = self._kernel
            return lambda: kernel.queue(lane, job, shape, self._scratch, pieces)
        if choice.kind == "batch":
            return lambda: queue_batches(lane, job, shape)
        return lambda: queue_calls(lane, job, shape, self._chunk_slots, choice)

    @staticmethod
    def _queue_there(launch: Launch, copy: Callable[[], None]) -> None:
        """In the launching thread: what would keep the loop too long."""
        try:
            with launch.lane.cuda.on(launch.lane.device):
                launch.queue(copy)
        except CudaError as error:  # of cudaSetDevice: nothing was queued
            log.warning("cuda.copy_failed", error=str(error), device=launch.lane.device)
            launch.tried = launch.silent = True

    def _lane(self, device: int, to_device: bool) -> Lane:
        lane = self._lanes.get((device, to_device))
        if lane is None:
            lane = self._lanes[device, to_device] = Lane(self.cuda, device)
        return lane

    def _reclaim(self) -> None:
        for launch in self._watch.finished():
            launch.lane.spare(launch.ready, launch.done)
            for piece in launch.pieces:
                self._scratch.give(piece)

    async def aclose(self) -> None:
        """Wait for copies in flight, whoever gave up on them, and release everything. Twice is
        fine.
        """
        await super().aclose()
        if self._cuda is not None:
            await anyio.to_thread.run_sync(self._close)

    def _close(self) -> None:
        """Release what was taken; a context that is lost answers errors, and that is all."""
        for lane in self._lanes.values():
            lane.close()
        for opened in list(self._opened):
            opened.close()
        self._lanes.clear()
        self._release.close()
        self._chunk_slots, self._kernel, self._cuda = 0, None, None
