"""The worker's side of the ranks: a thread that copies between the engine's memory and the arena.

`RankAgent.start` (join, and join again whenever the connection ends) - `begin_step` (the engine
begins a step: copies held back for it may run) - `wait_loaded` (layer by layer) - `close`.

The thread runs an event loop with the device backend whose memory this is.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

from flexkv import plugins
from flexkv.completion import Completions
from flexkv.errors import FlexKVError, TransferError
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec
from flexkv.protocols import BlockCopy, DeviceBackend, Region, Services
from flexkv.ranks import wire
from flexkv.ranks.gates import Gate
from flexkv.ranks.loads import Loads
from flexkv.telemetry import log

_HELLO_S = 5.0


class RankAgent:
    """One worker's copies.

    Args:
        path: where the manager listens; it may begin to later.
        kv_caches, axes: the worker's KV memory, as for KVManager.register.
        spec: this rank's share of a block.
        device: the device plug-in for that memory; `settings` are its options.
        retry_ms: pause between attempts to join.

    Raises:
        LayoutError: the tensors do not match `spec`.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        ranks: int,
        kv_caches: Any,
        spec: KVSpec,
        axes: str | None = None,
        device: str = "cpu",
        settings: Mapping[str, Any] | None = None,
        retry_ms: int = 100,
    ) -> None:
        self.path, self.rank, self.ranks, self.spec = path, rank, ranks, spec
        self._backend_class = plugins.load(plugins.BACKENDS, device)
        self._settings = dict(settings or {})
        self.region: Region = self._backend_class().make_region(kv_caches, spec, axes)
        self.backend: DeviceBackend | None = None  # while the manager lets us in
        self.refused = ""  # why the manager does not want this worker, if so
        self._retry_s = retry_ms / 1e3
        self._gate = Gate(self.region.blocks, self._wake_up)
        self._loads = Loads(spec.layers)
        self._wake = -1
        self._closing = False
        self._thread: threading.Thread | None = None
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Begin to join, in a thread of its own."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="flexkv-agent", daemon=True)
        self._thread.start()

    @property
    def joined(self) -> bool:
        """Whether the manager has let this worker in, and still does."""
        connection = self._connection
        return connection is not None and not _ended(connection)

    # --- the engine's thread

    def begin_step(self, step: int, withdrawn: Collection[int] = ()) -> None:
        """Say that the engine begins `step`. Costs a microsecond when nothing waits for it.

        If the manager has turned this worker out, copies into its memory that still run are waited
        for: their blocks count as failed already and are about to be computed again. So are copies
        of `withdrawn` device blocks, which have changed hands; later ones are refused.
        """
        self._gate.begin(step, withdrawn)
        if self._gate.landing:
            connection = self._connection
            if connection is None or _ended(connection):
                self._gate.wait()

    def wait_loaded(
        self, number: int, blocks: int, layer: int | None, timeout_s: float
    ) -> tuple[int, ...] | None:
        """Wait until `layer` of load `number`, of so many blocks, has landed (None: every layer).

        Returns the device blocks that failed - none as long as more layers are to come - and None
        when that is not known. After None this worker has parted from the manager, so that no byte
        of the load can come.
        """
        failed = self._loads.wait(number, blocks, layer, timeout_s)
        if failed is None:
            connection = self._connection
            if connection is not None:
                with contextlib.suppress(OSError):  # it has ended in the meantime
                    connection.shutdown(socket.SHUT_RDWR)
            self._gate.wait()
        return failed

    def wait_over(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, as it does when the manager refuses this worker."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self, timeout_s: float = 5.0) -> None:
        """Part from the manager and end the thread. Twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing = True
        self._wake_up()
        thread.join(timeout_s)
        if not thread.is_alive():
            os.close(self._wake)

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # --- the thread

    def _run(self) -> None:
        try:
            anyio.run(self._main)
        except Exception as error:
            log.critical("agent.broken", rank=self.rank, error=repr(error), exc_info=error)
        finally:
            self._part()

    async def _main(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch_wakes, group.cancel_scope)
            while not self.refused:
                connection = await self._join()
                if connection is not None:
                    welcome, fd, link = connection
                    await self._live(welcome, fd, link)
                await anyio.sleep(self._retry_s)
            group.cancel_scope.cancel()

    async def _watch_wakes(self, scope: anyio.CancelScope) -> None:
        """Open the gate whenever the engine's thread says so."""
        while not self._closing:
            await anyio.wait_readable(self._wake)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._gate.reopen()
        scope.cancel()

    async def _join(self) -> tuple[wire.Welcome, int, socket.socket] | None:
        """Connect and introduce ourselves; None when nobody is there, or we are not wanted."""
        link = wire.packet_socket()
        try:
            link.connect(str(self.path))
            hello = wire.Hello(
                wire.PROTOCOL_VERSION,
                self.rank,
                self.ranks,
                self.spec.block_bytes,
                self.region.blocks,
                os.getpid(),
            )
            link.send(wire.pack(hello))
            with anyio.fail_after(_HELLO_S):
                await anyio.wait_readable(link)
            packet, fds, _, _ = socket.recv_fds(link, wire.MAX_PACKET_BYTES, 1)
            message = wire.unpack_for_worker(packet)
        except (OSError, TimeoutError, msgspec.DecodeError):  # tried again in a moment
            link.close()
            return None
        except BaseException:  # we are closed while nobody answers
            link.close()
            raise
        if isinstance(message, wire.Welcome) and message.version == wire.PROTOCOL_VERSION and fds:
            return message, fds[0], link
        for fd in fds:
            os.close(fd)
        link.close()
        if isinstance(message, wire.Refusal):
            self.refused = message.reason
            log.error("agent.refused", rank=self.rank, reason=message.reason)
        return None

    async def _live(self, welcome: wire.Welcome, fd: int, link: socket.socket) -> None:
        """Serve one connection to its end, then wait for every copy before it is closed."""
        try:
            arena = Arena.attach(fd, welcome.slots, welcome.stride_bytes)
        finally:
            os.close(fd)
        completions = Completions(tickets=1024)
        backend: DeviceBackend = self._backend_class()
        settings = {"inline_bytes": welcome.inline_bytes, **self._settings}
        try:
            await backend.open(Services(completions, arena, Identity("", spec=self.spec), settings))
            region = _shifted(self.region, welcome.offset_bytes)
            self.backend, self._connection = backend, link
            self._loads.joined(welcome.loads)
            log.info("agent.joined", rank=self.rank, ranks=self.ranks)
            async with anyio.create_task_group() as group:
                while packet := await _receive(link):
                    message = self._understand(packet)
                    if message is None:
                        break
                    if isinstance(message, wire.Move):
                        group.start_soon(self._move, link, backend, region, message)
                    elif isinstance(message, wire.Ping):
                        group.start_soon(_answer, link, wire.Pong(message.number))
                    elif isinstance(message, wire.Loaded):
                        self._loads.over(message.number, message.failed_blocks)
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await backend.aclose()
                lost = await completions.aclose()
            if not lost:
                arena.close()
            self._part()
            link.close()
            log.info("agent.parted", rank=self.rank)

    def _understand(self, packet: bytes) -> wire.ToWorker | None:
        try:
            return wire.unpack_for_worker(packet)
        except msgspec.DecodeError as error:
            log.error("agent.nonsense", rank=self.rank, error=repr(error))
            return None

    def _part(self) -> None:
        """Nothing of the last connection runs any more."""
        self.backend = self._connection = None
        self._gate.leave_all()
        self._loads.parted()

    async def _move(
        self, link: socket.socket, backend: DeviceBackend, region: Region, move: wire.Move
    ) -> None:
        blocks = wire.ids_from_bytes(move.device_blocks)
        slots = wire.ids_from_bytes(move.host_slots)
        error = ""
        if not await self._gate.enter(move.number, move.step, blocks, to_device=move.to_device):
            await _answer(link, wire.Moved(move.number, "its device blocks have changed hands"))
            return
        # Looked at when we are known to run: who turns us out and has the blocks computed again is
        # either seen here, or sees us in `begin_step`.
        if not (move.to_device and _ended(link)):
            try:
                await backend.copy(BlockCopy(region, blocks, slots, move.to_device, move.layers))
            except (FlexKVError, OSError) as failure:
                error = repr(failure)
            else:
                if move.load:
                    self._loads.landed(move.load, move.layers, len(blocks))
            await _answer(link, wire.Moved(move.number, error))
        self._gate.leave(move.number)  # a cancelled one runs on, until the connection is closed


async def _receive(link: socket.socket) -> bytes:
    """The next packet; nothing when the connection has ended, however."""
    while True:
        try:
            return link.recv(wire.MAX_PACKET_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(link)
        except OSError:
            return b""


async def _answer(link: socket.socket, message: wire.Moved | wire.Pong) -> None:
    packet = wire.pack(message)
    while True:
        try:
            link.send(packet)
        except BlockingIOError:
            await anyio.wait_writable(link)
        except OSError:  # the connection has ended: whoever reads it will see
            return
        else:
            return


def _ended(link: socket.socket) -> bool:
    """Whether the other end has said its last word."""
    poll = select.poll()
    try:
        poll.register(link, select.POLLRDHUP)
    except (OSError, ValueError):  # closed on our side
        return True
    return bool(poll.poll(0))


def _shifted(region: Region, offset: int) -> Region:
    """The region with its share at `offset` of the host block."""
    if not region.planes:
        raise TransferError("a region without planes cannot be copied")
    planes = tuple(replace(plane, offset=plane.offset + offset) for plane in region.planes)
    return replace(region, planes=planes)
