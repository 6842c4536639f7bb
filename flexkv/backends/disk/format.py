"""What the disk tier's files look like: superblock, slot records, and where a slot lives.

`Geometry` (slot -> directory and local slot) - `Superblock` (`encode`, `decode`) - `RECORD`
(numpy layout of fx_record in records.h) - `seal`, `check` (a record's own check) -
`identity_text`, `differences` (for people).

A directory holds `flexkv.records` (a superblock of 4 KiB, then one record of 64 bytes per
slot), `flexkv.data` (the slots, `stride_bytes` each) and `flexkv.owner` (the owner's process
id, for messages only).
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.errors import FormatError
from flexkv.model import PAGE_BYTES, Identity, SlotIds

if TYPE_CHECKING:
    from flexkv._core import CData

RECORDS_NAME = "flexkv.records"
DATA_NAME = "flexkv.data"
OWNER_NAME = "flexkv.owner"

MAGIC = b"flexkvD\x1a"
DISK_FORMAT = 1
SUPERBLOCK_BYTES = PAGE_BYTES
RECORD_BYTES = 64

FORMATTING = 0  # the store is being made: nothing was committed yet
IN_USE = 1

EMPTY, GOOD, DAMAGED = 0, 1, 2  # what `check` says of a record

RECORD = np.dtype(
    [
        ("key", "<u8", 2),
        ("parent", "<u8", 2),
        ("sequence", "<u8"),
        ("depth", "<u4"),
        ("size", "<u4"),
        ("checksum", "<u8"),
        ("flags", "<u4"),
        ("check", "<u4"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

# magic, format, crc, identity digest, set id, index, directories, slots, stride, block bytes,
# state, text length
_HEADER = struct.Struct("<8sII32s16sIIQQQII")
_CRC_OFFSET = 12
_TEXT_OFFSET = 128


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where slots live: slot s is local slot s // directories of directory s % directories.

    This does not depend on `slots`, so a store may grow or shrink in place.
    """

    slots: int
    directories: int
    stride_bytes: int
    block_bytes: int

    def local_slots(self, index: int) -> int:
        """How many slots directory `index` holds."""
        return (self.slots - index + self.directories - 1) // self.directories

    def data_bytes(self, index: int) -> int:
        """Size of the data file of directory `index`."""
        return self.local_slots(index) * self.stride_bytes

    def records_bytes(self, index: int) -> int:
        """Size of the records file of directory `index`."""
        return SUPERBLOCK_BYTES + self.local_slots(index) * RECORD_BYTES

    def locate(self, slots: SlotIds) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Directory index (uint32) and local slot (uint64) of each slot."""
        directories = np.uint32(self.directories)
        return slots % directories, (slots // directories).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first 4 KiB of a records file: which store this is, whose, and which part of it."""

    digest: bytes
    identity: str
    set_id: bytes
    index: int
    geometry: Geometry
    state: int = IN_USE
    format_version: int = DISK_FORMAT

    @property
    def seed(self) -> int:
        """Seed of the checks of this directory's records; another store or directory has another
        one.
        """
        return (int.from_bytes(self.set_id[:8], "little") + self.index) & 0xFFFF_FFFF_FFFF_FFFF

    def encode(self) -> bytes:
        """Return the 4,096 bytes of this superblock."""
        text = self.identity.encode()
        room = SUPERBLOCK_BYTES - _TEXT_OFFSET
        text = text if len(text) <= room else b""  # only people read it; the digest decides
        fields = self.geometry
        header = _HEADER.pack(
            MAGIC,
            self.format_version,
            0,
            self.digest,
            self.set_id,
            self.index,
            fields.directories,
            fields.slots,
            fields.stride_bytes,
            fields.block_bytes,
            self.state,
            len(text),
        )
        block = bytearray((header.ljust(_TEXT_OFFSET, b"\0") + text).ljust(SUPERBLOCK_BYTES, b"\0"))
        struct.pack_into("<I", block, _CRC_OFFSET, zlib.crc32(block))
        return bytes(block)

    @classmethod
    def decode(cls, block: bytes) -> Superblock:
        """Read a superblock.

        Raises:
            FormatError: the bytes are not of flexkv, of another format version, or damaged.
        """
        if block[: len(MAGIC)] != MAGIC:
            raise FormatError("it does not start with the mark of a flexkv disk tier")
        if len(block) < SUPERBLOCK_BYTES:
            raise FormatError(f"its superblock is cut off after {len(block)} bytes")
        version = struct.unpack_from("<I", block, len(MAGIC))[0]
        if version != DISK_FORMAT:
            age = "an older" if version < DISK_FORMAT else "a newer"
            raise FormatError(f"it has {age} format, {version}; this flexkv reads {DISK_FORMAT}")
        (_, _, crc, digest, set_id, index, directories, slots, stride, size, state, length) = (
            _HEADER.unpack_from(block)
        )
        unsigned = bytearray(block[:SUPERBLOCK_BYTES])
        struct.pack_into("<I", unsigned, _CRC_OFFSET, 0)
        if zlib.crc32(unsigned) != crc:
            raise FormatError("its superblock is damaged (checksum)")
        text = block[_TEXT_OFFSET : _TEXT_OFFSET + length].decode(errors="replace")
        geometry = Geometry(slots, directories, stride, size)
        return cls(digest, text, set_id, index, geometry, state, version)


def pointer(kind: str, array: NDArray[Any]) -> CData:
    """The memory of a contiguous `array` as a C array of `kind`; keeps the array alive.

    Of the array itself, never of `array.data`: a memoryview that is exported while the garbage
    collector clears a cycle around it crashes the interpreter.
    """
    return ffi.from_buffer(f"{kind}[]", array)


def is_ours(block: bytes) -> bool:
    """Whether a records file was made by flexkv, in whatever version and shape."""
    return block[: len(MAGIC)] == MAGIC


def seal(records: NDArray[np.void], slots: SlotIds, seeds: NDArray[np.uint64]) -> None:
    """Fill in `check` of `records` (dtype RECORD), which belong into the local slots `slots` of
    directories with these `seeds`.
    """
    lib.fx_records_seal(
        pointer("fx_record", records),
        pointer("uint32_t", np.ascontiguousarray(slots, np.uint32)),
        pointer("uint64_t", np.ascontiguousarray(seeds, np.uint64)),
        len(records),
    )


def check(records: NDArray[np.void], first: int, seed: int) -> NDArray[np.uint8]:
    """Tell EMPTY, GOOD or DAMAGED for each record of the local slots from `first` on."""
    states = np.zeros(len(records), np.uint8)
    if len(records):
        lib.fx_records_check(
            pointer("fx_record", records),
            first,
            len(records),
            seed,
            pointer("uint8_t", states),
        )
    return states


@lru_cache(64)
def identity_text(identity: Identity) -> str:
    """The identity as JSON for people; runs of layers are shortened to "0-31"."""
    return json.dumps(_shorten(identity.describe()), separators=(",", ":"))


def differences(ours: str, theirs: str) -> list[str]:
    """Say what differs between two identity texts, one phrase per field."""
    try:
        here, there = _flatten(json.loads(ours)), _flatten(json.loads(theirs))
    except ValueError:
        return ["the identity differs"]
    names = [*here, *(name for name in there if name not in here)]
    return [
        f"{name} is {there.get(name)!r} on disk and {here.get(name)!r} here"
        for name in names
        if here.get(name) != there.get(name)
    ]


def _shorten(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shorten(item) for key, item in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    items = list(value)
    if len(items) > 2 and all(isinstance(item, int) for item in items):
        if items == list(range(items[0], items[0] + len(items))):
            return f"{items[0]}-{items[-1]}"
        return ",".join(map(str, items))
    return [_shorten(item) for item in items]


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = {str(number): item for number, item in enumerate(value)}.items()
    else:
        return {name: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat.update(_flatten(item, f"{name}.{key}" if name else key))
    return flat
