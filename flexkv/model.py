"""The vocabulary: frozen values that every room shares, without behaviour beyond arithmetic on
themselves.

`KVSpec`, `LayerGroup` (what a block is made of) - `CacheGroup` (layers with blocks of their own) -
`Identity` (what makes bytes interchangeable) - `Span`, `Copy`, `TransferGraph` (what moves where) -
`TierState` (is a block readable in a tier).
"""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flexkv.errors import ConfigError

FORMAT_VERSION = 1
PAGE_BYTES = 4096
NO_SLOT = 0xFFFF_FFFF
NO_BLOCK = 0xFFFF_FFFF

BlockIds: TypeAlias = NDArray[np.uint32]  # entries of the index
SlotIds: TypeAlias = NDArray[np.uint32]  # block-sized places of a tier, or device block numbers
KeyArray: TypeAlias = NDArray[np.uint64]  # shape [blocks, 2]
BoolArray: TypeAlias = NDArray[np.bool_]
Statuses: TypeAlias = NDArray[np.uint8]  # one IOStatus per block

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


class TierState(enum.IntEnum):
    """Where a block stands in one tier."""

    ABSENT = 0
    LANDING = 1  # a slot is taken, bytes are on their way: present, not readable
    READY = 2  # bytes landed and were committed: readable


class IOStatus(enum.IntEnum):
    """What became of one block of a storage batch."""

    LANDED = 0
    FAILED = 1  # I/O error: the stored block may still be good
    DAMAGED = 2  # checksum, size or key is wrong: the stored block is lost
    MISSING = 3  # the store does not have it
    SKIPPED = 4  # not tried: cancelled, or an earlier leg of the block failed


# The same as plain ints: numpy takes five times as long to compare with an enum member.
ABSENT, LANDING, READY = (int(state) for state in TierState)
LANDED, FAILED, DAMAGED, MISSING, SKIPPED = (int(status) for status in IOStatus)


def canonical_dtype(name: Any) -> str:
    """Return the canonical name of a KV dtype ("torch.bfloat16", "bf16", ... -> "bfloat16").

    Raises:
        ConfigError: the dtype is not one of bf16, fp16, fp32, fp8 (e4m3fn, e5m2), uint8, int8.
    """
    text = str(name).removeprefix("torch.").lower()
    text = _DTYPE_ALIASES.get(text, text)
    if text not in DTYPE_BYTES:
        raise ConfigError(
            f"KV dtype {name!r} is not supported; use one of {', '.join(DTYPE_BYTES)}"
        )
    return text


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose share of a block looks the same.

    `layers` are positions in the registered caches, `parts` is 2 for K and V (MHA, GQA) and 1 for
    one latent (MLA), `heads` are KV heads of this rank, `head_size` is in elements.
    """

    layers: tuple[int, ...]
    heads: int
    head_size: int
    dtype: str = "bfloat16"
    parts: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(int(layer) for layer in self.layers))
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        if not self.layers or len(set(self.layers)) != len(self.layers) or min(self.layers) < 0:
            raise ConfigError(
                f"LayerGroup.layers must be distinct positions >= 0, got {self.layers}"
            )
        for name in ("heads", "head_size", "parts"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"LayerGroup.{name} must be at least 1, got {getattr(self, name)}"
                )

    @property
    def itemsize_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def layer_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one layer of this group in one block."""
        return self.parts * tokens_per_block * self.heads * self.head_size * self.itemsize_bytes


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one block holds: layer groups, tokens per block and the order of its axes.

    `axes` is the order of a layer's bytes inside a block in host memory and on disk: P part (K, V),
    N token, H head, D element; "PNHD" by default. Blocks of equal bytes but other axes are not
    interchangeable. Choose the engine's own order ("PHND" for HND caches, "HNPD" for K|V fused per
    token) and copies move long segments.
    """

    groups: tuple[LayerGroup, ...]
    tokens_per_block: int = 16
    axes: str = "PNHD"

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise ConfigError("KVSpec needs at least one LayerGroup")
        if self.tokens_per_block < 1:
            raise ConfigError(f"tokens_per_block must be at least 1, got {self.tokens_per_block}")
        if sorted(self.axes) != sorted("PNHD") or not self.axes.endswith("D"):
            raise ConfigError(
                f'axes must be an order of "PNHD" that ends with D, got {self.axes!r}'
            )
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != list(range(len(layers))):
            raise ConfigError(f"layer groups must cover layers 0..n-1 once each, got {layers}")

    @classmethod
    def uniform(
        cls,
        layers: int,
        heads: int,
        head_size: int,
        dtype: Any = "bfloat16",
        *,
        parts: int = 2,
        tokens_per_block: int = 16,
        axes: str = "PNHD",
    ) -> KVSpec:
        """Describe a model whose layers are all alike."""
        group = LayerGroup(tuple(range(layers)), heads, head_size, canonical_dtype(dtype), parts)
        return cls((group,), tokens_per_block, axes)

    @property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def group_of(self, layer: int) -> LayerGroup:
        """The group that holds `layer`."""
        return next(group for group in self.groups if layer in group.layers)

    def layer_offsets(self) -> list[int]:
        """Byte offset of each layer inside a block, layers in ascending order."""
        offsets, position = [], 0
        for layer in range(self.layers):
            offsets.append(position)
            position += self.group_of(layer).layer_bytes(self.tokens_per_block)
        return offsets

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of this rank."""
        return sum(len(g.layers) * g.layer_bytes(self.tokens_per_block) for g in self.groups)

    @property
    def stride_bytes(self) -> int:
        """Bytes from slot to slot in the arena and on disk: block_bytes rounded up to a page."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a hybrid model whose blocks are kept apart from those of other layers.

    Blocks of different groups never stand for each other; `label` names what is in this one. Its
    layers look at the `window_tokens` tokens before the next one, 0: at all of them.
    """

    label: str = ""
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.window_tokens < 0:
            raise ConfigError(
                f"CacheGroup.window_tokens must be at least 0, got {self.window_tokens}"
            )


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes cached bytes interchangeable; two caches share blocks only if it is equal."""

    model: str
    revision: str = ""
    spec: KVSpec = field(default_factory=lambda: KVSpec.uniform(1, 1, 1))
    rank: str = "tp0/1,pp0/1"
    codec: str = "none"
    key_hash: str = "xxh3"
    format_version: int = FORMAT_VERSION

    def describe(self) -> dict[str, Any]:
        """The identity as plain data, in a fixed order."""
        return asdict(self)

    def digest(self) -> bytes:
        """32 bytes that differ whenever any field differs."""
        return _digest(self)


@lru_cache(64)  # a process has few identities, and asks often
def _digest(identity: Identity) -> bytes:
    text = json.dumps(identity.describe(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class Span:
    """Block-sized places: `place` is "device" or the name of a tier; `ids` are its slots, in block
    order.
    """

    place: str
    ids: SlotIds


@dataclass(frozen=True, slots=True)
class Copy:
    """A node of the graph: move blocks from `source` to `target` once the ops in `after` are done.

    `positions` numbers the blocks within the graph, so that the failure of a block in one op is
    known to the ops that depend on it. `landing` is a number under which other graphs may wait for
    this op, `joins` are the landings of other graphs that this op waits for. `layers` is a
    half-open range of the device's `of_layers` layers, None for all; a block has arrived with the
    last of them.
    """

    source: Span
    target: Span
    positions: NDArray[np.int64]
    after: tuple[int, ...] = ()
    landing: int = 0
    joins: tuple[int, ...] = ()
    layers: tuple[int, int] | None = None
    of_layers: int = 0

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_last(self) -> bool:
        """Whether its blocks are whole after it, ops that it comes after having moved the rest."""
        return self.layers is None or self.layers[1] == self.of_layers

    def size_bytes(self, block_bytes: int) -> int:
        """Bytes that it moves of each block; those of all ranges add up to `block_bytes`."""
        if self.layers is None:
            return block_bytes
        first, stop = self.layers
        return block_bytes * stop // self.of_layers - block_bytes * first // self.of_layers


@dataclass(frozen=True, slots=True)
class TransferGraph:
    """Ops of one request in an order in which each comes behind those it waits for.

    `blocks` and `keys` are what the ops' positions number. `goal` is the place that counts as
    arrival; `arrived` are the positions that are there already. Lower `priority` goes first. Graphs
    that write to stores carry the
    chain: each block's parent key (zeros for a first block) and depth.
    """

    ops: tuple[Copy, ...]
    blocks: BlockIds
    keys: KeyArray
    arrived: BoolArray
    goal: str
    priority: int
    parents: KeyArray | None = None
    depths: NDArray[np.uint32] | None = None

    def chains(self) -> list[list[int]]:
        """Return numbers of ops: one that waits for the last of a chain alone, continues it.

        A chain has one worker, so that none sits idle with the second leg of a block whose first
        one is still on its way.
        """
        chains: list[list[int]] = []
        ends: dict[int, list[int]] = {}  # the last op of each chain
        for number, copy in enumerate(self.ops):
            chain = ends.pop(copy.after[0], None) if len(copy.after) == 1 else None
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(number)
            ends[number] = chain
        return chains


DEVICE, HOST, DISK, PEER, REMOTE = "device", "host", "disk", "peer", "remote"

PRIORITY_GET, PRIORITY_PUT, PRIORITY_PREFETCH, PRIORITY_SPILL = range(4)
