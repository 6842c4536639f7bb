"""What nodes write for each other: `NodeRecord`, and messages of changes (`pack`, `unpack`).

Everything is MessagePack by msgspec, versioned, and checked where it is read: `WireError` says what
is wrong with bytes that came from elsewhere; nothing is executed, and no length in a message
decides how much memory is taken. Integers in byte strings are little-endian.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flexkv.cluster.changes import Changes, Masks, parent_positions
from flexkv.cluster.delta import MEDIA, Delta
from flexkv.errors import FlexKVError
from flexkv.model import KeyArray

VERSION = 1
MAX_BLOCKS = 4096  # blocks that a message may name
_KEY_BYTES = 16
_ROOT, _OUTSIDE = 0, 0xFFFF_FFFF  # parents that are none, and parents that are not in the message
_MASKS = 1 << len(MEDIA)

Natural: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
U64: TypeAlias = Annotated[int, Meta(ge=0)]  # msgspec refuses more than 64 bits
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=128)]
Address: TypeAlias = Annotated[str, Meta(max_length=256)]
Blob: TypeAlias = Annotated[bytes, Meta(max_length=_KEY_BYTES * MAX_BLOCKS)]


class WireError(FlexKVError):
    """Bytes from another node, or from whoever can write to the server, are not a valid message."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself. Fields that a reader does not know are skipped, those that a
    writer did not know have defaults.

    `addresses` are by courier: {"tcp": "10.0.0.1:7411"}. `incarnation` names one life of the node,
    `epoch` is that of the last reset of the cluster that it has carried out, `identity` the digest
    of what makes bytes interchangeable. `generation` numbers its logs; `snapshot` is the position
    of the log that the snapshot of `chunks` pieces covers.
    """

    version: Annotated[int, Meta(ge=1, le=2**31)] = VERSION
    node: Name
    incarnation: U64
    epoch: Natural
    identity: Annotated[bytes, Meta(max_length=64)]
    addresses: Annotated[dict[Name, Address], Meta(max_length=8)]
    state: Literal["up", "draining"] = "up"
    blocks: Natural = 0
    generation: Natural = 0
    snapshot: Natural = 0
    chunks: Annotated[int, Meta(ge=0, le=1 << 20)] = 0


class _Message(msgspec.Struct, array_like=True, frozen=True):
    """Changes as they travel.

    `turns` are pairs (position, reference) for stored blocks whose parent is not the block right
    before: reference 0 = first block of a prompt, 2**32-1 = the next key of `outside`, else 1 + the
    position of the parent. Masks are runs: count * 256 + mask.
    """

    version: Annotated[int, Meta(ge=1, le=2**31)]
    epoch: Natural
    keys: Blob
    turns: Blob
    outside: Blob
    masks: Blob
    removed: Blob
    removed_masks: Blob


_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(NodeRecord)
_messages = msgspec.msgpack.Decoder(_Message)


def encode_record(record: NodeRecord) -> bytes:
    """Return the bytes of a record."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> NodeRecord:
    """Read a record.

    Raises:
        WireError: it is none, or of a version that is not ours.
    """
    record: NodeRecord = _decode(_records, data)
    if record.version != VERSION:
        raise WireError(f"a record of version {record.version}; this is version {VERSION}")
    return record


def pack(changes: Changes, epoch: int) -> bytes:
    """Return the message of at most MAX_BLOCKS stored and MAX_BLOCKS removed blocks."""
    assert max(len(changes.keys), len(changes.removed)) <= MAX_BLOCKS, "cut it before"
    keys, parents = changes.keys, changes.parents
    count = len(keys)
    at = parent_positions(keys, parents)
    turns = np.flatnonzero(at != np.arange(count) - 1)
    if count and at[0] < 0:
        turns = np.append(0, turns)  # the first one has nothing before it
    inside = at[turns] >= 0
    assert (at[turns] < turns).all(), "parents stand before children"
    root = ~parents[turns].any(axis=1)
    references = np.where(inside, at[turns] + 1, np.where(root, _ROOT, _OUTSIDE))
    message = _Message(
        VERSION,
        epoch,
        _bytes(keys, "<u8"),
        _bytes(np.stack([turns, references], axis=1), "<u4"),
        _bytes(parents[turns[~inside & ~root]], "<u8"),
        _bytes(_runs(changes.masks), "<u4"),
        _bytes(changes.removed, "<u8"),
        _bytes(_runs(changes.removed_masks), "<u4"),
    )
    return _encoder.encode(message)


def unpack(data: bytes, epoch: int, *, cleared: bool = False) -> Delta:
    """Read a message.

    Raises:
        WireError: it is none, or of another version or epoch.
    """
    message: _Message = _decode(_messages, data)
    if message.version != VERSION or message.epoch != epoch:
        raise WireError(
            f"a message of version {message.version} and epoch {message.epoch}; "
            f"expected {VERSION} and {epoch}"
        )
    keys, removed = _keys(message.keys), _keys(message.removed)
    parents = _parents(keys, message)
    stored, media = _spread(_unrun(message.masks, len(keys)))
    gone, gone_media = _spread(_unrun(message.removed_masks, len(removed)))
    return Delta(keys[stored], parents[stored], media, removed[gone], gone_media, cleared)


def cut(delta: Delta, most: int) -> list[Delta]:
    """Cut a delta into pieces of at most `most` stored or removed holdings."""
    if len(delta) <= most:
        return [delta]
    none = slice(0, 0)
    pieces = [(slice(at, at + most), none) for at in range(0, len(delta.stored_keys), most)]
    pieces += [(none, slice(at, at + most)) for at in range(0, len(delta.removed_keys), most)]
    return [
        Delta(
            delta.stored_keys[came],
            delta.stored_parents[came],
            delta.stored_media[came],
            delta.removed_keys[went],
            delta.removed_media[went],
            delta.cleared and number == 0,
        )
        for number, (came, went) in enumerate(pieces)
    ]


def _decode(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error


def _bytes(values: NDArray[Any], kind: str) -> bytes:
    return values.astype(kind, copy=False).tobytes()


def _numbers(data: bytes, kind: str, each: int) -> NDArray[Any]:
    """Numbers in rows of `each`."""
    values = np.dtype(kind)
    if len(data) % (values.itemsize * each):
        raise WireError(f"{len(data)} bytes are no rows of {each} numbers of {values.itemsize}")
    return np.frombuffer(data, values).reshape(-1, each)


def _keys(data: bytes) -> KeyArray:
    return _numbers(data, "<u8", 2).astype(np.uint64, copy=False)


def _parents(keys: KeyArray, message: _Message) -> KeyArray:
    turns = _numbers(message.turns, "<u4", 2).astype(np.int64)
    outside = _keys(message.outside)
    at, references = turns[:, 0], turns[:, 1]
    beyond = references == _OUTSIDE
    inside = ~beyond & (references != _ROOT)
    if (
        (len(at) and (at[-1] >= len(keys) or (at[1:] <= at[:-1]).any()))
        or (len(keys) and (not len(at) or at[0] != 0))
        or (references[inside] > at[inside]).any()
        or np.count_nonzero(beyond) != len(outside)
    ):
        raise WireError("parents of blocks do not fit the blocks")
    parents = np.zeros_like(keys)
    parents[1:] = keys[:-1]
    parents[at] = 0
    parents[at[inside]] = keys[references[inside] - 1]
    parents[at[beyond]] = outside
    return parents


def _runs(masks: Masks) -> NDArray[np.int64]:
    if not len(masks):
        return np.empty(0, np.int64)
    starts = np.flatnonzero(np.append(True, masks[1:] != masks[:-1]))
    counts = np.diff(np.append(starts, len(masks)))
    return np.asarray(counts * 256 + masks[starts], np.int64)


def _unrun(data: bytes, count: int) -> Masks:
    runs = _numbers(data, "<u4", 1)[:, 0]
    counts, masks = (runs >> 8).astype(np.int64), (runs & 255).astype(np.uint8)
    if counts.sum() != count or not counts.all() or ((masks == 0) | (masks >= _MASKS)).any():
        raise WireError(f"media of blocks do not fit {count} blocks")
    return np.repeat(masks, counts)


def _spread(masks: Masks) -> tuple[NDArray[np.int64], Masks]:
    """Turn masks into holdings: positions of blocks, once for each medium, and the media."""
    bits = (masks[:, None] >> np.arange(len(MEDIA), dtype=np.uint8)) & 1
    rows, media = np.nonzero(bits)
    return rows, media.astype(np.uint8)
