"""One connection between two nodes: framed messages, and blocks straight between socket and arena.

`listen_at`, `connect_to` - `Wire`: `send`, `receive` (a message), `send_blocks`, `receive_blocks`
(a passage, see `flexkv.cluster.blocks`), `cut`, `close`. The socket does not block. Blocks move in
a thread, for as long as they flow; where they stall, no thread is held: the loop waits for the
socket. Time limits are the caller's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import anyio
import anyio.lowlevel
import anyio.to_thread

from flexkv.cluster.blocks import Passage
from flexkv.cluster.peerwire import MAX_MESSAGE_BYTES, ProtocolError
from flexkv.errors import ConfigError

_FRAME = struct.Struct("<4sI")  # magic, bytes of the message
_MAGIC = b"FXP1"
_SOCKET_BYTES = 4 << 20
# an idle connection to a machine that has vanished ends after a minute
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
_INLINE_BYTES = (1 << 20) + 4096  # blocks that move on the loop: a thread would take longer
_INLINE_STINT_BYTES = 516 << 10  # and these before others have their turn: some 200 us
_STINT_BYTES = 32 << 20  # moved in a thread before the loop looks at its clock again
_PATIENCE_MS = 5  # that a thread waits for a socket before the loop does


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

    async def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the connection is broken.
        """
        left = memoryview(_FRAME.pack(_MAGIC, len(message)) + message)
        while len(left):
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)

    async def receive(self) -> bytearray:
        """Receive one message.

        Raises:
            OSError: the connection is broken.
            EOFError: the other side has ended it between two messages.
            ProtocolError: it is no message, or a part of one.
        """
        head = bytearray(_FRAME.size)
        got = await self._fill(head)
        if got == 0:
            raise EOFError("the other side has closed the connection")
        if got < len(head):
            raise ProtocolError(f"the connection ended after {got} bytes of a message")
        magic, size = _FRAME.unpack(head)
        if magic != _MAGIC or not 0 < size <= MAX_MESSAGE_BYTES:
            raise ProtocolError(f"{magic!r} with {size} bytes is not the beginning of a message")
        body = bytearray(size)
        got = await self._fill(body)
        if got < size:
            raise ProtocolError(f"the connection ended after {got} of {size} bytes of a message")
        return body

    async def send_blocks(self, passage: Passage) -> None:
        """Send blocks.

        Raises:
            OSError: the connection is broken.
        """
        await self._pass("send", passage, anyio.wait_writable)

    async def receive_blocks(self, passage: Passage) -> None:
        """Receive blocks: all of them, unless the other side ends before.

        Raises:
            OSError: the connection is broken.
        """
        await self._pass("receive", passage, anyio.wait_readable)

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

    async def _fill(self, room: bytearray) -> int:
        """Receive as many bytes as fit; returns how many: fewer only where the other side ended."""
        got, views = 0, memoryview(room)
        while got < len(room):
            try:
                now = self._socket.recv_into(views[got:])
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            if not now:
                break
            got += now
        return got

    async def _pass(
        self,
        verb: Literal["send", "receive"],
        passage: Passage,
        wait: Callable[[socket.socket], Awaitable[None]],
    ) -> None:
        """Move blocks until all are moved or the other side ended."""
        few = passage.size_bytes <= _INLINE_BYTES
        limits = (_INLINE_STINT_BYTES, 0) if few else (_STINT_BYTES, _PATIENCE_MS)
        stint = partial(passage.move, verb, self._socket.fileno(), *limits)
        while True:
            if few:
                code = stint()
            else:
                code = await anyio.to_thread.run_sync(stint, limiter=self._threads)
            if code == 1 or code == -errno.ENODATA:
                return
            if code == -errno.EAGAIN:
                await wait(self._socket)
            elif code:
                raise OSError(-code, os.strerror(-code))
            elif few:
                await anyio.lowlevel.checkpoint()


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
