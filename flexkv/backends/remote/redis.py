"""Blocks as values in Redis or Valkey: `RedisStore`, for clusters that have one anyway.

`RespClient` reads replies straight into the arena: a client that returns bytes objects copies every
value twice and reaches half the speed of the protocol. What is not bytes (URLs, finding the master
behind Sentinels) is redis-py's. RESP: https://redis.io/docs/latest/develop/reference/protocol-spec
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from flexkv.backends.remote.couriers import Client
from flexkv.backends.remote.settings import RemoteSettings, hidden, secret
from flexkv.backends.remote.store import RemoteStore
from flexkv.backends.remote.urls import places, tls_options
from flexkv.errors import ConfigError
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING, Statuses

_SOCKET_BYTES = 4 << 20  # what the kernel may hold for us while we are elsewhere
_SHORT_BYTES = 128  # an answer's first line, and the head behind it


class ReplyError(OSError):
    """The server said something that is no answer to the question; the connection is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings(RemoteSettings):
    """What may be set for Redis.

    `url` is redis://[user:password@]host:port/db, rediss:// with TLS, unix://path, or
    sentinel://host:port,host:port/service. A password may come from `password_file` instead.
    Values expire after `ttl_s` (0: never).
    """

    url: str = hidden("redis://127.0.0.1:6379/0")
    username: str = ""
    password: str = hidden()
    password_file: str = ""
    ttl_s: int = 0

    def check(self) -> None:
        """See RemoteSettings.check."""
        RemoteSettings.check(self)
        if not isinstance(self.ttl_s, int) or self.ttl_s < 0:
            raise ConfigError(
                f"remote store: ttl_s must be a whole number >= 0, got {self.ttl_s!r}"
            )
        self.places()
        secret(self.password, self.password_file)

    def places(self) -> dict[str, Any]:
        """Return what `url` says: host, port, db, path, username, password, sentinels, service.

        Raises:
            ConfigError: it is none that Redis knows. Its text is not shown: it may hold a password.
        """
        found = places(self.url, "remote store")
        if "nodes" in found:
            raise ConfigError(
                "remote store: a url of kind 'cluster' is not supported for values; "
                "give redis://, rediss://, unix://, sentinel:// or sentinels://"
            )
        return found


class RedisStore(RemoteStore):
    """Values in Redis or Valkey, one for each block. Settings: see `RedisSettings`."""

    name: ClassVar[str] = "redis"
    settings_type = RedisSettings
    settings: RedisSettings

    def connect(self) -> Client:
        """Make a client."""
        return RespClient(self.settings)


class RespClient:
    """One connection that moves values between a socket and given memory."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._timeout_s = settings.timeout_ms / 1e3
        self._expiry = b""
        if settings.ttl_s:
            self._expiry = _words(b"EX", b"%d" % settings.ttl_s)
        self._socket: socket.socket | None = None
        self._waits = 0  # the flag that makes one call of the kernel wait for all bytes
        self._early = memoryview(b"")  # bytes that came with a first line, not used yet

    # --- the verbs of Client

    def read(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        """GET all names at once; values go where they belong."""
        with self._talk() as connection:
            connection.sendall(b"".join(command(b"GET", name) for name in names))
            for number, (head, body) in enumerate(zip(heads, bodies, strict=True)):
                size = self._bulk_size()
                if size == -1:
                    statuses[number] = MISSING
                elif size == len(head) + len(body):
                    self._fill(head)
                    self._fill(body)
                    self._fill(memoryview(bytearray(2)))
                    statuses[number] = LANDED
                else:
                    self._skip(size + 2)
                    statuses[number] = DAMAGED

    def write(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        """SET all names, then take the answers."""
        with self._talk() as connection:
            count = 5 if self._expiry else 3
            for name, head, body in zip(names, heads, bodies, strict=True):
                size = len(head) + len(body)
                begin = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (count, len(name), name, size)
                _send(connection, [begin, head, body, b"\r\n" + self._expiry])
            for number in range(len(names)):
                line = self._line()
                statuses[number] = LANDED if line == b"+OK" else FAILED
                if line != b"+OK":
                    self._object(line)

    def discard(self, names: Sequence[bytes], statuses: Statuses) -> None:
        """UNLINK each name."""
        with self._talk() as connection:
            connection.sendall(b"".join(command(b"UNLINK", name) for name in names))
            for number in range(len(names)):
                line = self._line()
                if line not in (b":0", b":1"):
                    self._object(line)
                statuses[number] = LANDED if line == b":1" else MISSING

    def close(self) -> None:
        """Give the connection up."""
        self._early = memoryview(b"")
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- the conversation

    @contextlib.contextmanager
    def _talk(self) -> Any:
        """Lend the connection; one that broke in the middle of a conversation is given up."""
        try:
            if self._socket is None:
                self._socket = self._open()
            yield self._socket
        except BlockingIOError:  # what the kernel says when its limit of time is over
            self.close()
            raise TimeoutError(f"no answer within {self._timeout_s} s") from None
        except BaseException:
            self.close()
            raise

    def _line(self) -> bytes:
        """The next line, without its end."""
        text = bytearray()
        while True:
            if not len(self._early):
                assert self._socket is not None
                received = self._socket.recv(_SHORT_BYTES)
                if not received:
                    raise ReplyError("the server closed the connection")
                self._early = memoryview(received)
            found = bytes(self._early).find(b"\n")
            taken = len(self._early) if found < 0 else found + 1
            text += self._early[:taken]
            self._early = self._early[taken:]
            if found >= 0:
                return bytes(text).rstrip(b"\r\n")
            if len(text) > 1024:
                raise ReplyError("an answer's first line does not end")

    def _bulk_size(self) -> int:
        line = self._line()
        if not line.startswith(b"$"):
            self._object(line)
        try:
            size = int(line[1:])
        except ValueError:
            size = -2
        if not -1 <= size <= 512 << 20:  # Redis' own limit of a value
            raise ReplyError(f"a value of {line[1:]!r} bytes was announced")
        return size

    def _object(self, line: bytes) -> None:
        raise ReplyError(f"the server said {line[:200].decode('ascii', 'replace')!r}")

    def _fill(self, view: memoryview) -> None:
        """Fill `view` with what comes next."""
        at = min(len(view), len(self._early))
        if at:
            view[:at] = self._early[:at]
            self._early = self._early[at:]
        assert self._socket is not None
        while at < len(view):
            received = self._socket.recv_into(view[at:], 0, self._waits)
            if received == 0:
                raise ReplyError("the server closed the connection in the middle of a value")
            at += received

    def _skip(self, count: int) -> None:
        waste = memoryview(bytearray(min(count, 1 << 16)))
        while count > 0:
            part = waste[: min(count, len(waste))]
            self._fill(part)
            count -= len(part)

    # --- the connection

    def _open(self) -> socket.socket:
        settings = self._settings
        places = settings.places()
        password = secret(settings.password, settings.password_file) or places.get("password") or ""
        username = settings.username or places.get("username") or ""
        connection = self._reach(places, password)
        try:
            if places["tls"]:
                context = ssl.create_default_context(cafile=places.get("ssl_ca_certs"))
                if "ssl_certfile" in places:
                    context.load_cert_chain(places["ssl_certfile"], places.get("ssl_keyfile"))
                connection.settimeout(self._timeout_s)
                name = places.get("host") or connection.getpeername()[0]
                connection = context.wrap_socket(connection, server_hostname=name)
                self._waits = 0
            else:
                _limit(connection, self._timeout_s)
                self._waits = socket.MSG_WAITALL
            self._early, self._socket = memoryview(b""), connection
            if password:
                self._command(
                    *(
                        (b"AUTH", username.encode(), password.encode())
                        if username
                        else (b"AUTH", password.encode())
                    )
                )
            if places.get("db"):
                self._command(b"SELECT", b"%d" % places["db"])
        except BaseException:
            connection.close()
            self._socket = None
            raise
        return connection

    def _reach(self, places: dict[str, Any], password: str) -> socket.socket:
        if "path" in places:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._timeout_s)
            connection.connect(places["path"])
            return connection
        host, port = places.get("host", "127.0.0.1"), places.get("port", 6379)
        if "sentinels" in places:
            try:
                more = tls_options(places) | {"ssl": True} if places["tls"] else {}
                watch: Any = Sentinel(  # type: ignore[no-untyped-call]
                    places["sentinels"], socket_timeout=self._timeout_s, **more
                )
                host, port = watch.discover_master(places["service"])
            except RedisError as error:
                raise ReplyError(f"no master of {places['service']!r}: {error}") from error
        connection = socket.create_connection((host, port), self._timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        return connection

    def _command(self, *words: bytes) -> None:
        assert self._socket is not None
        self._socket.sendall(command(*words))
        line = self._line()
        if line != b"+OK":
            self._object(line)


def command(*words: bytes) -> bytes:
    """Return a command as the protocol writes it."""
    return b"*%d\r\n" % len(words) + _words(*words)


def _words(*words: bytes) -> bytes:
    return b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _limit(connection: socket.socket, timeout_s: float) -> None:
    """Have calls of the kernel itself end in time, so that one of them may wait for all bytes."""
    connection.settimeout(None)
    whole = int(timeout_s)
    limit = struct.pack("ll", whole, int((timeout_s - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _send(connection: socket.socket, parts: list[bytes | memoryview]) -> None:
    """Send parts as they lie, without joining them."""
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            connection.sendall(part)
        return
    left = sum(len(part) for part in parts)
    while True:
        sent = connection.sendmsg(parts)
        left -= sent
        if not left:
            return
        while sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        parts[0] = memoryview(parts[0])[sent:]
