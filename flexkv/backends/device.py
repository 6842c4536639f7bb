"""What device backends share: a batch is checked at the door, started, and awaited by its ticket.

`CopyingDevice`: `open`, `make_region`, `copy`, `aclose` are here; a device adds `probe`, `start`
(`Job` -> hardware) and what it knows about addresses, settings and handles.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from flexkv._core import ffi
from flexkv.backends import layout
from flexkv.backends.packing import PackedRegion, checked_ids
from flexkv.completion import Done, Ticket
from flexkv.errors import ClosedError, ConfigError, InputError, LayoutError, TransferError
from flexkv.model import KVSpec, SlotIds
from flexkv.protocols import API_VERSION, BlockCopy, DeviceInfo, Region, RegionHandle, Services

if TYPE_CHECKING:
    from flexkv._core import CData

Arguments: TypeAlias = "tuple[CData, int, int, int, CData, CData, int, int]"
# A copy of 1 MiB takes about 0.1 ms: less than handing it over and being woken again costs.
INLINE_BYTES = 1 << 20
_REGIONS_KEPT = 16  # engines register once; regions of old ones are forgotten


@dataclass(slots=True)
class Job:
    """A checked batch: `planes` (fx_plane[], addresses as `pack` gives them), and which blocks pair
    with which slots. `block_bytes` counts the chosen layers only.
    """

    region: Region
    planes: CData
    n_planes: int
    block_bytes: int
    host_base: int
    host_stride_bytes: int
    host_slots: SlotIds
    device_blocks: SlotIds
    to_device: bool
    layers: tuple[int, int] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes to move."""
        return self.block_bytes * len(self.device_blocks)

    def arguments(self) -> Arguments:
        """The batch as fx_copy_blocks and fx_crew_copy take it."""
        return (
            self.planes,
            self.n_planes,
            self.host_base,
            self.host_stride_bytes,
            ffi.from_buffer("uint32_t[]", self.host_slots),
            ffi.from_buffer("uint32_t[]", self.device_blocks),
            len(self.device_blocks),
            int(self.to_device),
        )


class CopyingDevice:
    """Base of device backends; `name` is what messages call the device.

    Setting of all of them: `inline_bytes`, what may be copied on the event loop (1 MiB), where the
    device can do that.
    """

    flexkv_api: ClassVar[int] = API_VERSION
    name: ClassVar[str]

    def __init__(self) -> None:
        self.inline_bytes = INLINE_BYTES
        self._services: Services | None = None
        self._packed: dict[int, PackedRegion] = {}
        self._tickets: set[Ticket] = set()

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List usable devices. Never raises, never creates a context."""
        raise NotImplementedError

    def start(self, job: Job, ticket: Ticket) -> None:
        """Start the hardware, which completes or fails `ticket`.

        Raises:
            TransferError: nothing was started.
        """
        raise NotImplementedError

    def configure(self, settings: dict[str, Any]) -> None:
        """Take the device's own settings out of `settings`; what stays is unknown."""

    def address_of(self, tensor: Any) -> int:
        """Return the address of a tensor; raises LayoutError when it is out of reach."""
        return layout.tensor_address(tensor)

    def pack(self, region: Region) -> PackedRegion:
        """Return a region as `start` wants it."""
        return PackedRegion(region)

    def copy_now(self, job: Job) -> bool:
        """Copy a small batch (up to `inline_bytes`) at once; False: it is to be started."""
        return False

    @property
    def services(self) -> Services:
        """What the backend was opened with; raises ClosedError when it is not open."""
        if self._services is None:
            raise ClosedError(f"the {self.name} backend is not open")
        return self._services

    async def open(self, services: Services) -> None:
        """Take the services.

        Raises:
            ConfigError: a setting is unknown or wrong.
        """
        settings = dict(services.settings)
        inline = settings.pop("inline_bytes", INLINE_BYTES)
        if not isinstance(inline, int) or inline < 0:
            raise ConfigError(f"inline_bytes must be an integer >= 0, got {inline!r}")
        self.inline_bytes = inline
        self.configure(settings)
        if settings:
            raise ConfigError(f"the {self.name} backend has no setting {sorted(settings)[0]!r}")
        self._services = services

    def make_region(self, kv_caches: Any, spec: KVSpec, axes: str | None = None) -> Region:
        """Describe tensors of this device (see `layout.make_region`).

        Raises:
            LayoutError: they do not match `spec`, or are out of reach.
        """
        return layout.make_region(kv_caches, spec, axes, address_of=self.address_of)

    def export_region(self, region: Region) -> RegionHandle:
        """Refuse, where a device does not say how.

        Raises:
            LayoutError: always.
        """
        raise LayoutError(f"memory of the {self.name} backend cannot be shared with others")

    def import_region(self, handle: RegionHandle) -> Region:
        """Refuse, where a device does not say how.

        Raises:
            LayoutError: always.
        """
        raise LayoutError(f"the {self.name} backend opens no memory of other processes")

    async def copy(self, batch: BlockCopy) -> None:
        """Copy the batch; return when all bytes have landed.

        Cancelling the caller does not stop the copy: `aclose` waits for it.

        Raises:
            InputError: a block or slot does not exist, or the lists differ in length.
            LayoutError: a block of the region is larger than a slot of the arena.
            TransferError: the copy could not be started, or failed.
            ClosedError: the backend is not open.
        """
        job = self.check(batch)
        if not job.size_bytes or self.copy_now(job):
            return
        completions, arena = self.services.completions, self.services.arena
        ticket = completions.ticket(keep=(batch.region, arena))
        try:
            self.start(job, ticket)
        except BaseException:
            completions.fail(ticket, errno.ECANCELED)
            await self.settled(ticket)
            raise
        done = await self.settled(ticket)
        if done.failed:
            raise TransferError(
                f"a copy of {len(batch)} blocks ({job.size_bytes} bytes) failed: "
                f"{os.strerror(done.error)}"
            )

    async def settled(self, ticket: Ticket) -> Done:
        """Wait for a ticket; when the caller gives up, `aclose` waits for it."""
        self._tickets.add(ticket)
        try:
            done = await ticket
        except BaseException:  # the hardware goes on without us
            self._tickets = {other for other in self._tickets if other.done is None}
            raise
        self._tickets.discard(ticket)
        return done

    def check(self, batch: BlockCopy) -> Job:
        """Return the batch as a job; raises as `copy`."""
        arena = self.services.arena
        packed = self.packed(batch.region)
        blocks = checked_ids(batch.device_blocks, batch.region.blocks, "device block")
        slots = checked_ids(batch.host_slots, arena.slots, "host slot")
        if len(blocks) != len(slots):
            raise InputError(
                f"{len(blocks)} device blocks cannot pair with {len(slots)} host slots"
            )
        chosen = packed.select(batch.layers)
        place = (arena.address(0), arena.stride_bytes)
        pairs = (slots, blocks)
        return Job(batch.region, *chosen, *place, *pairs, batch.to_device, batch.layers)

    def packed(self, region: Region) -> PackedRegion:
        """Return a region as C takes it, packed once.

        Raises:
            LayoutError: a block of it is larger than a slot of the arena.
        """
        packed = self._packed.get(id(region))
        if packed is None:
            if len(self._packed) >= _REGIONS_KEPT:
                self._packed.pop(next(iter(self._packed)))
            packed = self._packed[id(region)] = self.pack(region)
        stride_bytes = self.services.arena.stride_bytes
        if packed.end_bytes > stride_bytes:
            raise LayoutError(
                f"blocks of {packed.end_bytes} bytes do not fit slots of {stride_bytes}"
            )
        return packed

    async def aclose(self) -> None:
        """Wait for copies in flight, whoever gave up on them, and let go. Twice is fine."""
        self._services = None
        for ticket in list(self._tickets):
            await ticket
        self._tickets.clear()
        self._packed.clear()
