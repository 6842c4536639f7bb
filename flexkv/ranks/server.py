"""The manager's side of the ranks: one thread that lets workers in, hears them out and counts them.

`RankServer.open` (start to listen) - `submit` (send a copy to every rank) - `tell_loaded` - `ready`
(every rank is here and answers) - `close`. A worker that dies is noticed by the end of its
connection; one that owes an answer and says nothing for `timeout_ms` is stalled and turned out.

When a worker is turned out, only our half of the connection ends. Loads into it fail at once, for
it will see the end before it uses them (`RankAgent.begin_step`). Copies out of it stay open until
its half ends too: only then can it no longer write to the arena.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from flexkv._core import ffi, lib
from flexkv.errors import ConfigError, TransferError
from flexkv.memory import Arena
from flexkv.ranks import wire
from flexkv.telemetry import log


@dataclass(eq=False, slots=True)
class _Link:
    """One connection: `due` is since when an answer is owed, `moves` are copies it has not done."""

    socket: socket.socket
    due: float
    rank: int = -1
    turned_out: bool = False
    pinged: float = 0.0
    moves: dict[int, tuple[int, bool]] = field(default_factory=dict)  # -> ticket, to_device
    backlog: deque[bytes] = field(default_factory=deque)


class RankServer:
    """Sends copies to the workers of one engine.

    `last_load` numbers the loads that workers wait for, the last of them.

    Args:
        path: where to listen; its directory should be private.
        ranks: workers that hold a share of every block.
        share_bytes: bytes of one rank's share.
        blocks: device blocks of each rank.
        timeout_ms: how long a worker may be silent while it owes an answer.
    """

    def __init__(
        self, path: Path, *, ranks: int, share_bytes: int, blocks: int, timeout_ms: int = 1000
    ) -> None:
        if ranks < 1 or share_bytes < 1 or blocks < 1 or timeout_ms < 1:
            raise ConfigError(
                f"ranks ({ranks}), share_bytes ({share_bytes}), blocks ({blocks}) and timeout_ms "
                f"({timeout_ms}) must be at least 1"
            )
        self.path, self.ranks = path, ranks
        self.share_bytes, self.blocks = share_bytes, blocks
        self.last_load = 0
        self.joined = 0  # workers let in so far, rejoining ones again
        self._timeout_s = timeout_ms / 1e3
        self._lock = threading.Lock()
        self._links: dict[int, _Link] = {}
        self._selector = selectors.DefaultSelector()
        self._number = 0
        self._stop = -1
        self._thread: threading.Thread | None = None
        self._arena: Arena | None = None
        self._inline_bytes = 0
        self.changed = threading.Condition(self._lock)

    def open(self, arena: Arena, inline_bytes: int) -> None:
        """Listen, and answer in a thread of its own.

        Raises:
            ConfigError: the path cannot be used, or shares do not fit the arena's slots.
        """
        if self.ranks * self.share_bytes > arena.stride_bytes:
            raise ConfigError(
                f"{self.ranks} shares of {self.share_bytes} bytes do not fit slots of "
                f"{arena.stride_bytes}"
            )
        self._arena, self._inline_bytes = arena, inline_bytes
        listener = wire.listen_at(self.path)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="flexkv-ranks", daemon=True
        )
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether every rank has joined and none is stalled."""
        return len(self._links) == self.ranks

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every rank has joined; False when that takes too long."""
        with self.changed:
            return self.changed.wait_for(lambda: self.ready, timeout_s)

    def submit(self, ticket: int, move: wire.Move) -> None:
        """Send a copy to every rank; each completes one part of `ticket`.

        `move.number` is filled in here.

        Raises:
            TransferError: a rank is missing, or the message is too long; nothing was sent.
        """
        with self._lock:
            if not self.ready:
                missing = sorted(set(range(self.ranks)) - set(self._links))
                raise TransferError(f"rank {missing[0]} of {self.ranks} is not here")
            self._number += 1
            move.number = self._number
            packet = wire.pack(move)
            now = time.monotonic()
            for link in self._links.values():
                if not link.moves:
                    link.due = now
                link.moves[move.number] = ticket, move.to_device
                self._send(link, packet)

    def tell_loaded(self, number: int, failed_blocks: tuple[int, ...]) -> None:
        """Tell every rank that a load is over, for workers that wait for it."""
        packet = wire.pack(wire.Loaded(number, failed_blocks))
        with self._lock:
            for link in self._links.values():
                self._send(link, packet)

    def close(self) -> None:
        """End all connections and the thread. Twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        os.eventfd_write(self._stop, 1)
        thread.join()
        os.close(self._stop)
        self.path.unlink(missing_ok=True)

    # --- everything below runs in the thread, or under the lock

    def _send(self, link: _Link, packet: bytes) -> None:
        """Send now, or when there is room. A broken connection is noticed by who reads it."""
        if not link.backlog:
            try:
                link.socket.send(packet)
            except BlockingIOError:
                self._selector.modify(
                    link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link
                )
            except OSError:
                return
            else:
                return
        link.backlog.append(packet)

    def _serve(self, listener: socket.socket) -> None:
        try:
            while True:
                for key, events in self._selector.select(self._timeout_s / 4):
                    if key.fileobj == self._stop:
                        return
                    if key.data is None:
                        self._accept(listener)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._flush(key.data)
                    if events & selectors.EVENT_READ:
                        self._read(key.data)
                self._look_after()
        except Exception as error:
            log.critical("ranks.broken", error=repr(error), exc_info=error)
        finally:
            listener.close()
            with self._lock:
                for key in list(self._selector.get_map().values()):
                    if isinstance(key.data, _Link):
                        self._drop(key.data, "the server was closed")
                self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            log.warning("ranks.accept_failed", error=repr(error))
            return
        connection.setblocking(False)
        if not wire.peer_is_us(connection):
            log.warning("ranks.stranger")
            connection.close()
            return
        link = _Link(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, link)

    def _flush(self, link: _Link) -> None:
        with self._lock:
            while link.backlog:
                try:
                    link.socket.send(link.backlog[0])
                except BlockingIOError:
                    return
                except OSError:
                    link.backlog.clear()
                    break
                link.backlog.popleft()
            self._selector.modify(link.socket, selectors.EVENT_READ, link)

    def _read(self, link: _Link) -> None:
        while True:
            try:
                packet = link.socket.recv(wire.MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            with self._lock:
                if not packet:
                    self._drop(link, "the worker's connection ended")
                    return
                link.due = time.monotonic()
                try:
                    message = wire.unpack_for_manager(packet)
                except msgspec.DecodeError as error:
                    self._drop(link, f"the worker sent nonsense: {error}")
                    return
                if isinstance(message, wire.Hello):
                    self._greet(link, message)
                elif isinstance(message, wire.Moved):
                    self._finish(link, message)

    def _finish(self, link: _Link, moved: wire.Moved) -> None:
        ticket, _ = link.moves.pop(moved.number, (0, False))
        if not ticket:  # it failed already, when the worker was turned out
            return
        if moved.error:
            log.warning("ranks.copy_failed", rank=link.rank, error=moved.error)
            lib.fx_fail(ffi.cast("void *", ticket), errno.EIO)
        else:
            lib.fx_complete(ffi.cast("void *", ticket))

    def _greet(self, link: _Link, hello: wire.Hello) -> None:
        """Let a worker in, or tell it why not."""
        reason = self._objection(hello)
        if reason or link.rank >= 0:
            log.error("ranks.refused", rank=hello.rank, reason=reason or "it said hello twice")
            self._send(link, wire.pack(wire.Refusal(reason or "you said hello twice")))
            self._drop(link, "refused")
            return
        before = self._links.get(hello.rank)
        if before is not None:
            self._turn_out(before, "it joined again")
        assert self._arena is not None
        welcome = wire.Welcome(
            wire.PROTOCOL_VERSION,
            self._arena.slots,
            self._arena.stride_bytes,
            hello.rank * self.share_bytes,
            self._inline_bytes,
            self.last_load,
        )
        try:
            socket.send_fds(link.socket, [wire.pack(welcome)], [self._arena.fd])
        except OSError as error:
            self._drop(link, f"the welcome could not be sent: {error}")
            return
        link.rank = hello.rank
        self._links[hello.rank] = link
        self.joined += 1
        log.info("ranks.joined", rank=hello.rank, ranks=self.ranks, pid=hello.pid)
        self.changed.notify_all()

    def _objection(self, hello: wire.Hello) -> str:
        wanted = {
            "version": wire.PROTOCOL_VERSION,
            "ranks": self.ranks,
            "share_bytes": self.share_bytes,
            "blocks": self.blocks,
        }
        for name, value in wanted.items():
            if getattr(hello, name) != value:
                return f"{name} is {getattr(hello, name)} there and {value} at the manager"
        return "" if 0 <= hello.rank < self.ranks else f"there is no rank {hello.rank}"

    def _look_after(self) -> None:
        """Ask those who owe us an answer whether they are still there; turn out who is not."""
        now = time.monotonic()
        with self._lock:
            for key in list(self._selector.get_map().values()):
                link = key.data
                if not isinstance(link, _Link) or link.turned_out:
                    continue
                if link.rank >= 0 and not link.moves:
                    continue
                quiet = now - link.due
                if quiet > self._timeout_s * 0.7:
                    if link.rank < 0:
                        self._drop(link, "it did not say hello")
                    else:
                        self._turn_out(link, f"it was silent for {quiet * 1e3:.0f} ms")
                elif link.rank >= 0 and link.pinged < link.due and quiet > self._timeout_s / 8:
                    link.pinged = now
                    self._send(link, wire.pack(wire.Ping(self._number)))

    def _turn_out(self, link: _Link, why: str) -> None:
        log.warning("ranks.turned_out", rank=link.rank, why=why, copies=len(link.moves))
        link.turned_out = True
        link.backlog.clear()
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
        try:
            link.socket.shutdown(socket.SHUT_WR)
        except OSError as error:  # its end came first and will be read next
            log.info("ranks.gone_already", rank=link.rank, error=repr(error))
        for number, (ticket, to_device) in list(link.moves.items()):
            if to_device:
                del link.moves[number]
                lib.fx_fail(ffi.cast("void *", ticket), errno.ETIMEDOUT)
        self.changed.notify_all()

    def _drop(self, link: _Link, why: str) -> None:
        """Forget a connection whose worker can touch the arena no more, or never could."""
        if link.rank >= 0:
            log.info("ranks.left", rank=link.rank, why=why, copies=len(link.moves))
        if self._links.get(link.rank) is link:
            del self._links[link.rank]
        for ticket, _ in link.moves.values():
            lib.fx_fail(ffi.cast("void *", ticket), errno.ECONNRESET)
        link.moves.clear()
        self._selector.unregister(link.socket)
        link.socket.close()
        self.changed.notify_all()
