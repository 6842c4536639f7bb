"""What nodes say to each other about blocks: msgpack messages, each checked against its type.

Joining: `Challenge`, `Hello`, `Welcome` - asking: `Lease`, `Release` - answers: `Leased` (and the
blocks behind it, where they are to be read), `Released`, `Refusal` - `pack`, `unpack_for_owner`,
`unpack_for_reader` - `Handshake` (both sides prove that they know the deployment's secret, without
saying it). Numbers of blocks travel as little-endian bytes. Nothing is pickled. Fields are only
ever added at the end, with a default: a node of the next minor version is understood.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from flexkv.errors import TransferError
from flexkv.model import KeyArray

PROTOCOL_VERSION = 2
MAX_BLOCKS = 1024  # of one request
MAX_MESSAGE_BYTES = 1 << 16
NONCE_BYTES = 32
KEY_BYTES = 16

Name = Annotated[str, msgspec.Meta(max_length=256)]
Number = Annotated[int, msgspec.Meta(ge=0)]  # msgspec refuses more than 64 bits
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(max_length=32)]
Keys = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * MAX_BLOCKS)]
Bytes1 = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCKS)]
Bytes4 = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_BLOCKS)]
Bytes8 = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_BLOCKS)]
Tokens = Annotated[list[Number], msgspec.Meta(max_length=1024)]
Why = Literal["incarnation", "epoch", "busy"]


class ProtocolError(TransferError):
    """The other side said what no node says; the connection is given up."""


class Challenge(msgspec.Struct, tag="challenge", array_like=True):
    """The owner's first word, to anybody: nothing but a number never used before."""

    version: int
    nonce: Nonce


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The reader introduces itself. Blocks of another identity or size are not for it."""

    version: int
    node: Name
    identity: Nonce
    block_bytes: Number
    nonce: Nonce
    proof: Proof


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The reader is in. Offsets of leased blocks count from `base`, the arena's address there."""

    version: int
    node: Name
    incarnation: Number
    epoch: Number
    base: Number
    stride_bytes: Number
    proof: Proof


class Lease(msgspec.Struct, tag="lease", array_like=True):
    """Hold these blocks for me, within `deadline_ms`; with `read`, send them behind the answer,
    each with its checksum behind it, and take the lease back."""

    request: Number
    incarnation: Number
    epoch: Number
    keys: Keys
    deadline_ms: Number
    read: bool


class Leased(msgspec.Struct, tag="leased", array_like=True):
    """An IOStatus for each key; of those LANDED, which alone are on lease: arena slots. Token 0:
    there are none. Time counts from when it was asked."""

    request: Number
    token: Number
    ttl_ms: Number
    statuses: Bytes1
    slots: Bytes4


class Release(msgspec.Struct, tag="release", array_like=True):
    """These leases are not needed any more."""

    request: Number
    incarnation: Number
    epoch: Number
    tokens: Tokens


class Released(msgspec.Struct, tag="released", array_like=True):
    """Which of them were open until now; of a single one that was, the checksums of its blocks,
    bound to their keys."""

    request: Number
    released: Annotated[list[bool], msgspec.Meta(max_length=1024)]
    checksums: Bytes8


class Refusal(msgspec.Struct, tag="refusal", array_like=True):
    """No, and why: that is another incarnation's or epoch's, or there is no room now."""

    request: Number
    why: Why


ToOwner: TypeAlias = Hello | Lease | Release
ToReader: TypeAlias = Challenge | Welcome | Leased | Released | Refusal

_encoder = msgspec.msgpack.Encoder()
_for_owner: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)
_for_reader: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)


def pack(message: ToOwner | ToReader) -> bytes:
    """Encode a message."""
    return _encoder.encode(message)


def unpack_for_owner(packet: bytes | bytearray) -> ToOwner:
    """Decode what a reader sent.

    Raises:
        ProtocolError: it is none of its messages.
    """
    try:
        return _for_owner.decode(packet)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{len(packet)} bytes are no request: {error}") from error


def unpack_for_reader(packet: bytes | bytearray) -> ToReader:
    """Decode what an owner sent.

    Raises:
        ProtocolError: it is none of its messages.
    """
    try:
        return _for_reader.decode(packet)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{len(packet)} bytes are no answer: {error}") from error


def keys_to_bytes(keys: KeyArray) -> bytes:
    """Return keys as they travel."""
    return np.ascontiguousarray(keys, "<u8").tobytes()


def keys_from_bytes(data: bytes) -> KeyArray:
    """Return keys that have travelled, shape [blocks, 2].

    Raises:
        ProtocolError: they are no whole number of keys.
    """
    if len(data) % KEY_BYTES:
        raise ProtocolError(f"{len(data)} bytes are no whole number of keys")
    return np.frombuffer(data, "<u8").astype(np.uint64).reshape(-1, 2)


def numbers_from_bytes(data: bytes, kind: str, count: int) -> NDArray[np.unsignedinteger]:
    """Return `count` numbers that have travelled.

    Raises:
        ProtocolError: there are more or fewer.
    """
    if len(data) != count * np.dtype(kind).itemsize:
        raise ProtocolError(f"{len(data)} bytes are not {count} numbers of type {kind}")
    return np.frombuffer(data, kind).copy()


class Handshake:
    """Proofs of knowing `secret` (empty: nothing is proven, and whoever proves is turned away)."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @staticmethod
    def nonce() -> bytes:
        """Return a number never used before."""
        return secrets.token_bytes(NONCE_BYTES)

    def prove(self, side: Literal["owner", "reader"], *facts: bytes) -> bytes:
        """Return HMAC-SHA256 over what both sides have said."""
        if not self._secret:
            return b""
        words = (b"flexkv peer 1", side.encode(), *facts)
        said = b"".join(len(word).to_bytes(4, "little") + word for word in words)
        key = hashlib.sha256(b"flexkv peer\0" + self._secret).digest()
        return hmac.digest(key, said, "sha256")

    def holds(self, proof: bytes, side: Literal["owner", "reader"], *facts: bytes) -> bool:
        """Whether the other side has proven that it knows the secret."""
        return hmac.compare_digest(proof, self.prove(side, *facts))
