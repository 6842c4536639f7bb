"""The doors: what a device backend, a storage backend, an eviction policy and a codec must do, and
nothing else.

`DeviceBackend` - `StorageBackend` - `LocatableStorage`, `DirectStorage` (past the host) -
`EvictionPolicy` - `Codec`; `Services` is what the manager hands to a backend, `BlockCopy` and
`BlockIO` are the batches, `as_statuses` checks an answer. `API_VERSION` is checked when a plug-in
is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flexkv.model import BlockIds, BoolArray, Identity, KeyArray, KVSpec, SlotIds, Statuses

if TYPE_CHECKING:
    from flexkv.completion import Completions
    from flexkv.memory import Arena

API_VERSION = 1


@dataclass(frozen=True, slots=True)
class Services:
    """What a backend may use: completions, the host arena, the identity of what is stored.

    `settings` are the backend's own options, `capacity_blocks` the slots it must hold (0: no
    limit). Stores that say `any_block_bytes = True` may get encoded blocks of `block_bytes` each.
    """

    completions: Completions
    arena: Arena
    identity: Identity
    settings: Mapping[str, Any] = field(default_factory=dict)
    capacity_blocks: int = 0
    block_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device a backend found: its name for people and its memory in bytes (0 if unknown)."""

    name: str
    memory_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's share of a device block: up to three loops over segments of contiguous bytes (see
    copy.h).
    """

    layer: int
    base: int
    block_stride: int
    loops: tuple[tuple[int, int], ...]  # (count, stride in bytes), outermost first
    segment_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Region:
    """Registered device memory: planes in order of their offset in the host block. `layers` of them
    can be copied apart (0: none). `owner` keeps it alive.
    """

    planes: tuple[Plane, ...]
    blocks: int
    layers: int = 0
    owner: Any = None


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """A region as another process can open it: opaque bytes plus file descriptors to send along."""

    data: bytes
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A batch between device and host: item i pairs device block `device_blocks[i]` with arena slot
    `host_slots[i]`. `layers` is a half-open range, None for all; `tag` is the transfer's, see Plan.
    """

    region: Region
    device_blocks: SlotIds
    host_slots: SlotIds
    to_device: bool
    layers: tuple[int, int] | None = None
    tag: Any = None

    def __len__(self) -> int:
        return len(self.device_blocks)


@dataclass(frozen=True, slots=True)
class Extents:
    """Where a store keeps the blocks of a batch: `size_bytes` bytes at `offsets[i]` of the open
    file `files[i]`, a multiple of 4096 each. XXH3-64 of the block's own `block_bytes`, seeded by
    its key (fx_checksum_blocks), must be `checksums[i]`. What is not `held` the store lacks.
    """

    held: BoolArray
    files: NDArray[np.int32]
    offsets: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    size_bytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class BlockIO:
    """A batch between host and store: item i pairs arena slot `host_slots[i]` with slot
    `store_slots[i]` (slot addressing) and key `keys[i]`. `parents` and `depths` describe the chain
    and are given with writes; `extents` are given to devices, which have no `host_slots`.
    """

    host_slots: SlotIds
    store_slots: SlotIds
    keys: KeyArray
    parents: KeyArray | None = None
    depths: NDArray[np.uint32] | None = None
    extents: Extents | None = None

    def __len__(self) -> int:
        return len(self.store_slots)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a reopened store holds: aligned arrays, one row per committed block."""

    keys: KeyArray
    parents: KeyArray
    depths: NDArray[np.uint32]
    slots: SlotIds


@runtime_checkable
class DeviceBackend(Protocol):
    """One accelerator family. Five duties and no others: discover, export, import, copy, close."""

    flexkv_api: ClassVar[int]

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]:
        """List usable devices. Never raises, never creates a context."""
        ...

    async def open(self, services: Services) -> None:
        """Take the services; register the arena for fast copies where the device wants that."""
        ...

    def make_region(self, kv_caches: Any, spec: KVSpec, axes: str | None) -> Region:
        """Describe the engine's KV memory. Raises LayoutError when it does not match `spec`."""
        ...

    def export_region(self, region: Region) -> RegionHandle: ...

    def import_region(self, handle: RegionHandle) -> Region: ...

    async def copy(self, batch: BlockCopy) -> None:
        """Copy the batch; return when all bytes have landed, raise TransferError if not."""
        ...

    async def aclose(self) -> None:
        """Release everything; wait for what is in flight. Calling it twice is fine."""
        ...


@runtime_checkable
class StorageBackend(Protocol):
    """A place for blocks below host memory, addressed by slot (we choose where) or by key (the
    store does).
    """

    flexkv_api: ClassVar[int]
    addressing: ClassVar[Literal["slot", "key"]]
    alignment_bytes: int

    @classmethod
    def probe(cls) -> Sequence[DeviceInfo]: ...

    async def open(self, services: Services) -> Recovered | None:
        """Open or create the store; return what a previous life committed, if anything."""
        ...

    async def read(self, batch: BlockIO) -> Statuses:
        """Fill the arena slots; one IOStatus per block. LANDED means landed and verified."""
        ...

    async def write(self, batch: BlockIO) -> Statuses:
        """Store the arena slots and commit them; one IOStatus per block."""
        ...

    async def discard(self, batch: BlockIO) -> Statuses:
        """Forget the blocks: after this they are not found again, not even after a restart.

        A key of zeros, in stores addressed by slot, stands for whatever the slot holds.
        """
        ...

    async def aclose(self) -> None: ...


def as_statuses(answer: Any, count: int) -> Statuses:
    """What a backend answered, if it is what the protocol asks for.

    Raises:
        TypeError: it is not one IOStatus per block.
    """
    if not isinstance(answer, np.ndarray) or answer.shape != (count,):
        raise TypeError(f"a backend must answer one status for each of {count} blocks: {answer!r}")
    return answer


@runtime_checkable
class LocatableStorage(Protocol):
    """Optional capability of a store: it says where its blocks lie, for devices that read them."""

    def locate(self, batch: BlockIO) -> AbstractContextManager[BlockIO]:
        """Lend the batch with its `extents`; they stay as they are until the context is left."""
        ...


@runtime_checkable
class DirectStorage(Protocol):
    """Optional capability of a device backend: storage -> device without the host, for blocks that
    find no room there. Without it they pass through staging memory.
    """

    async def read_into(self, batch: BlockIO, region: Region, device_blocks: SlotIds) -> Statuses:
        """Fill the device blocks from `batch.extents`; one IOStatus per block.

        LANDED means landed and verified, FAILED that the store could not be read; SKIPPED that the
        device failed, and the store is not to blame.
        """
        ...


class LeafOrder(Protocol):
    """What the index offers to policies that rank blocks by one number: the smallest rank leaves
    first.

    Only blocks without children in the tier are candidates; when one leaves, its parent takes its
    place. Ties are broken by the order in which ranks were set.
    """

    def rank(self, blocks: BlockIds, value: float) -> None:
        """Give all `blocks` the same rank."""
        ...

    def rank_each(self, blocks: BlockIds, values: NDArray[np.float64]) -> None: ...

    def ranks(self, blocks: BlockIds) -> NDArray[np.float64]: ...

    def take(self, count: int) -> BlockIds:
        """Up to `count` evictable blocks, lowest rank first, leaves before their parents. Changes
        nothing.
        """
        ...


def _all_first(blocks: BlockIds) -> NDArray[np.uint32]:
    """Take every block for the first of its prompt."""
    return np.zeros(len(blocks), np.uint32)


def _numbers_as_keys(blocks: BlockIds) -> KeyArray:
    """Know blocks by their number alone."""
    return np.stack((blocks, np.zeros_like(blocks)), 1).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is opened with: its tier, the slots there, the largest block number + 1, and
    the ranked leaf order.

    `depths` says how many blocks stand before each in its prompt; `keys` what a block is called,
    also while it is being `removed`: its number may be another block's afterwards.
    """

    tier: str
    capacity_blocks: int
    max_blocks: int
    order: LeafOrder
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_block: int = 1
    depths: Callable[[BlockIds], NDArray[np.uint32]] = _all_first
    keys: Callable[[BlockIds], KeyArray] = _numbers_as_keys


@runtime_checkable
class EvictionPolicy(Protocol):
    """Says which blocks of one tier leave first. Synchronous, arrays not scalars, no I/O, no clock.

    `now` is in seconds and never goes back. `blocks` come in prompt order (ancestors first). The
    index vetoes pinned blocks and blocks with children whatever the policy answers.
    """

    flexkv_api: ClassVar[int]

    def open(self, context: PolicyContext) -> None: ...

    def inserted(self, blocks: BlockIds, now: float) -> None: ...

    def touched(self, blocks: BlockIds, now: float) -> None: ...

    def removed(self, blocks: BlockIds) -> None: ...

    def victims(self, count: int, evictable: Callable[[BlockIds], BoolArray]) -> BlockIds:
        """Up to `count` blocks to evict now, in order. May return fewer; is asked again while more
        are needed.
        """
        ...


@runtime_checkable
class Codec(Protocol):
    """Encodes batches of blocks for a tier; `lossy` codecs are tagged and part of the identity.

    Decoded blocks have shape [blocks, spec.block_bytes], encoded ones [blocks,
    encoded_bytes(spec)]; rows are contiguous, the blocks of a batch are independent of each other.
    Threads call at once. An optional `revision` (1 if absent) is raised when encoded bytes change.
    """

    flexkv_api: ClassVar[int]
    lossy: ClassVar[bool]

    def encoded_bytes(self, spec: KVSpec) -> int:
        """Bytes of one encoded block, scales included. Depends on `spec` alone."""
        ...

    def encode(self, spec: KVSpec, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        """Fill every byte of `target`; the same block always gives the same bytes."""
        ...

    def decode(self, spec: KVSpec, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        """Fill `target`: with the bytes that were encoded, unless the codec is lossy."""
        ...
