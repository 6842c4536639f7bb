"""What manager and workers say to each other: one msgpack message per packet of a Unix socket.

`Hello`, `Welcome`, `Refusal` (joining) - `Move`, `Moved` (copies) - `Loaded` (a whole load is over)
- `Ping`, `Pong` (who is quiet while something is due is stalled) - `pack`, `unpack` - `listen_at`,
`connect_to` (packet sockets that keep message borders) - `private_path`.

Nothing is pickled, every message is checked against its type, and nothing longer than
`MAX_PACKET_BYTES` is read. The socket is of mode 0600 and peers of another user are turned away.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from flexkv.errors import ConfigError, TransferError
from flexkv.model import SlotIds

PROTOCOL_VERSION = 1
MAX_PACKET_BYTES = 1 << 20
_UCRED = struct.Struct("3i")  # pid, uid, gid


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """A worker introduces itself: which rank of how many, bytes of its share of a block, blocks."""

    version: int
    rank: int
    ranks: int
    share_bytes: int
    blocks: int
    pid: int


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The worker is in. The arena's descriptor comes along; its share of a slot starts at
    `offset_bytes`. `loads` is the number of the last load before."""

    version: int
    slots: int
    stride_bytes: int
    offset_bytes: int
    inline_bytes: int
    loads: int = 0


class Refusal(msgspec.Struct, tag="refusal", array_like=True):
    """The worker cannot join, and trying again will not help."""

    reason: str


class Move(msgspec.Struct, tag="move", array_like=True):
    """Copy these blocks once the engine has begun `step`; somebody may wait for `load`, which they
    belong to. Ids are little-endian uint32."""

    number: int
    step: int
    to_device: bool
    device_blocks: bytes
    host_slots: bytes
    layers: tuple[int, int] | None = None
    load: int = 0


class Moved(msgspec.Struct, tag="moved", array_like=True):
    """Copy `number` is over; `error` is empty when all bytes have landed."""

    number: int
    error: str = ""


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """Load `number` is over on all ranks; these device blocks must not be read."""

    number: int
    failed_blocks: tuple[int, ...] = ()


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """Are you there?"""

    number: int


class Pong(msgspec.Struct, tag="pong", array_like=True):
    """I am."""

    number: int


ToWorker: TypeAlias = Welcome | Refusal | Move | Loaded | Ping
ToManager: TypeAlias = Hello | Moved | Pong

_encoder = msgspec.msgpack.Encoder()
_for_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_for_manager: msgspec.msgpack.Decoder[ToManager] = msgspec.msgpack.Decoder(ToManager)


def pack(message: ToWorker | ToManager) -> bytes:
    """Encode a message.

    Raises:
        TransferError: it is too long for one packet.
    """
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise TransferError(
            f"a message of {len(packet)} bytes is too long for workers; lower chunk_bytes"
        )
    return packet


def unpack_for_worker(packet: bytes) -> ToWorker:
    """Decode what the manager sent; msgspec.DecodeError if it is not one of its messages."""
    return _for_worker.decode(packet)


def unpack_for_manager(packet: bytes) -> ToManager:
    """Decode what a worker sent; msgspec.DecodeError if it is not one of its messages."""
    return _for_manager.decode(packet)


def ids_to_bytes(ids: SlotIds) -> bytes:
    """Return block or slot numbers as they travel."""
    return np.ascontiguousarray(ids, "<u4").tobytes()


def ids_from_bytes(data: bytes) -> SlotIds:
    """Return block or slot numbers that have travelled."""
    return np.frombuffer(data, "<u4")


def packet_socket() -> socket.socket:
    """Return an unconnected, non-blocking packet socket with room for long messages."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, option, 2 * MAX_PACKET_BYTES)
    made.setblocking(False)
    return made


def listen_at(path: Path) -> socket.socket:
    """Listen at `path`, readable and writable for this user only; a leftover socket is replaced.

    Raises:
        ConfigError: the path is too long, taken by something that answers or is no socket.
    """
    made = packet_socket()
    try:
        if path.exists():
            _remove_leftover(path)
        before = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
        made.listen(64)
    except (OSError, ConfigError) as error:
        made.close()
        raise ConfigError(f"cannot listen at {path}: {error}") from error
    return made


def _remove_leftover(path: Path) -> None:
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError("it exists and is not a socket")
    with packet_socket() as probe:
        try:
            probe.connect(str(path))
        except OSError:  # nobody listens: its owner is gone
            path.unlink(missing_ok=True)
            return
    raise ConfigError("another process listens there")


def peer_is_us(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    user: int = _UCRED.unpack(raw)[1]
    return user == os.geteuid()


def private_path(name: str, runtime_directory: str | None = None) -> Path:
    """Return where the socket of the engine `name` lies, in a directory of mode 0700 of our own.

    Args:
        runtime_directory: where such directories belong ($XDG_RUNTIME_DIR); None: the directory
            for temporary files.

    Raises:
        ConfigError: the directory belongs to somebody else or lets others in.
    """
    base = Path(runtime_directory or tempfile.gettempdir())
    directory = base / f"flexkv-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} must be a directory of mode 0700 that belongs to this user; "
            "remove it or name another socket"
        )
    return directory / f"{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}.sock"
