"""One connection between two nodes: framed messages, and blocks straight between socket and arena.

`listen_at`, `connect_to` - `Wire`: `send` (a message, and views behind it), `receive` (a message),
`receive_into` (views), `close`. The socket does not block. What is large moves in a thread, for as
long as it flows; where it stalls, no thread is held: the loop waits for the socket. Time limits are
the caller's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import anyio
import anyio.to_thread

from flexkv.cluster.peerwire import MAX_MESSAGE_BYTES, ProtocolError
from flexkv.errors import ConfigError

_FRAME = struct.Struct("<4sI")  # magic, bytes of the message
_MAGIC = b"FXP1"
_SOCKET_BYTES = 4 << 20
# an idle connection to a machine that has vanished ends after a minute
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_INLINE_BYTES = 128 << 10  # moved on the loop: some 30 us
_STINT_BYTES = 16 << 20  # moved in a thread before the loop looks at its clock again
_PATIENCE_MS = 5  # that a thread waits for a socket before the loop does
_MOST_VIEWS = 128  # of one call: what it can move is limited by the socket anyway

Move: TypeAlias = Callable[[list[memoryview]], int]


def _uninterested(moved: int) -> None:
    """Take no notice of progress."""


class Wire:
    """A connected socket. Used by one task at a time; `threads` limits who moves bytes at once."""

    def __init__(self, connection: socket.socket, threads: anyio.CapacityLimiter) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket, self._threads = connection, threads
        self.closed = False

    @property
    def peer(self) -> str:
        """Who is at the other end, for logs."""
        with contextlib.suppress(OSError):
            return "{}:{}".format(*self._socket.getpeername()[:2])
        return "nobody"

    async def send(
        self, message: bytes | Callable[[], bytes], views: Sequence[memoryview] = ()
    ) -> None:
        """Send a message and what follows it, copying nothing together. A message that is work to
        make is made where the views move.

        Raises:
            OSError: the connection is broken.
        """
        moving = [view for view in views if len(view)]

        def begin() -> None:
            packet = message() if callable(message) else message
            moving.insert(0, memoryview(_FRAME.pack(_MAGIC, len(packet)) + packet))

        await self._move(moving, self._send, anyio.wait_writable, begin=begin)

    async def receive(self) -> bytearray:
        """Receive one message.

        Raises:
            OSError: the connection is broken.
            EOFError: the other side has ended it between two messages.
            ProtocolError: it is no message, or a part of one.
        """
        head = bytearray(_FRAME.size)
        got = await self.receive_into([memoryview(head)])
        if got == 0:
            raise EOFError("the other side has closed the connection")
        if got < len(head):
            raise ProtocolError(f"the connection ended after {got} bytes of a message")
        magic, size = _FRAME.unpack(head)
        if magic != _MAGIC or not 0 < size <= MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{magic!r} with {size} bytes is not the beginning of a message")
        body = bytearray(size)
        got = await self.receive_into([memoryview(body)])
        if got < size:
            raise ProtocolError(f"the connection ended after {got} of {size} bytes of a message")
        return body

    async def receive_into(
        self, views: Sequence[memoryview], progress: Callable[[int], None] = _uninterested
    ) -> int:
        """Fill views, in order; returns the bytes received: fewer only where the other side ended.

        `progress` is told how many bytes there are, where they move: in a thread when many do.
        """
        moving = [view for view in views if len(view)]
        return await self._move(moving, self._receive, anyio.wait_readable, progress)

    def cut(self) -> None:
        """End the connection for both sides, whatever its task is doing: that one closes it."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connection up, by the task that uses it. Twice is fine."""
        if not self.closed:
            self.closed = True
            self.cut()
            self._socket.close()

    # --- inside

    def _send(self, views: list[memoryview]) -> int:
        return self._socket.sendmsg(views[:_MOST_VIEWS], [], socket.MSG_NOSIGNAL)

    def _receive(self, views: list[memoryview]) -> int:
        return self._socket.recvmsg_into(views[:_MOST_VIEWS])[0]

    async def _move(
        self,
        views: list[memoryview],
        call: Move,
        wait: Callable[[socket.socket], Awaitable[None]],
        progress: Callable[[int], None] = _uninterested,
        begin: Callable[[], None] | None = None,
    ) -> int:
        """Move views until all is moved or the other side ended; returns the bytes moved."""
        patience_ms = _PATIENCE_MS if sum(map(len, views)) > _INLINE_BYTES else 0
        events = select.POLLOUT if wait is anyio.wait_writable else select.POLLIN
        stint = _Stint(self._socket, views, call, events, patience_ms, progress, begin)
        while True:
            if patience_ms:
                await anyio.to_thread.run_sync(stint.run, limiter=self._threads)
            else:
                stint.run()
            if stint.error is not None:
                raise stint.error
            if stint.ended or not views:
                return stint.moved
            await wait(self._socket)


@dataclass(slots=True)
class _Stint:
    """Moves bytes until the socket stalls, perhaps in a thread; takes from `views` what is done."""

    connection: socket.socket
    views: list[memoryview]
    call: Move
    events: int
    patience_ms: int
    progress: Callable[[int], None]
    begin: Callable[[], None] | None
    moved: int = 0
    ended: bool = False
    error: OSError | None = None

    def run(self) -> None:
        """Move what can be moved now."""
        begin, self.begin = self.begin, None
        if begin is not None:
            begin()
        until = self.moved + _STINT_BYTES
        try:
            while self.views and self.moved < until:
                try:
                    now = self.call(self.views)
                except BlockingIOError:
                    if self.patience_ms and _is_ready(
                        self.connection, self.events, self.patience_ms
                    ):
                        continue
                    return
                if not now:
                    self.ended = True
                    return
                self._advance(now)
                self.progress(self.moved)
        except OSError as error:
            self.error = error

    def _advance(self, now: int) -> None:
        self.moved += now
        views, done = self.views, 0
        while done < len(views) and now >= len(views[done]):
            now -= len(views[done])
            done += 1
        del views[:done]
        if now:
            views[0] = views[0][now:]


def _is_ready(connection: socket.socket, events: int, patience_ms: int) -> bool:
    poll = select.poll()
    poll.register(connection, events)
    return bool(poll.poll(patience_ms))


def parse(address: str) -> tuple[str, int]:
    """Take "host:port" or "[host]:port" apart.

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address[:80]!r} is not of the form host:port")
    return host, int(port)


def written(host: str, port: int) -> str:
    """Write an address as `parse` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_at(host: str, port: int) -> socket.socket:
    """Listen; port 0 takes any that is free.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {error}") from error
    _widen(made)  # what it accepts inherits that
    made.setblocking(False)
    return made


async def connect_to(address: str, threads: anyio.CapacityLimiter) -> Wire:
    """Connect to "host:port".

    Raises:
        OSError: nobody answers there.
        ConfigError: it is no address.
    """
    places = await anyio.getaddrinfo(*parse(address), type=socket.SOCK_STREAM)
    family, kind, number, _, place = places[0]
    made = socket.socket(family, kind | socket.SOCK_CLOEXEC, number)
    try:
        made.setblocking(False)
        _widen(made)
        if error := made.connect_ex(place):
            if error != errno.EINPROGRESS:
                raise OSError(error, os.strerror(error))
            await anyio.wait_writable(made)
            if error := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
        return Wire(made, threads)
    except BaseException:
        made.close()
        raise


def _widen(made: socket.socket) -> None:
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
