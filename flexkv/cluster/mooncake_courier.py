"""Blocks between nodes by Mooncake's Transfer Engine: `MooncakeCourier`, one-sided batched reads.

`lend` (let others read our arena), `watch` (and again, whenever the engine for that has ended) -
`fetch` - `aclose`.
Engines run in children (see `flexkv.backends.remote.mooncake_process`): one that lends, and some
that fetch, one batch each at a time. A fetch that is given up ends with its child, so that no byte
lands later; the next one has another child.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from numpy.typing import NDArray

from flexkv.backends.remote.mooncake_process import MooncakeProcess, require
from flexkv.cluster.peerlink import Grant
from flexkv.errors import ConfigError
from flexkv.memory import Arena
from flexkv.model import FAILED, LANDED, SlotIds, Statuses
from flexkv.telemetry import log

_START_S = 30.0  # for our own engine
_RESTART_S, _LONGEST_S = 0.2, 30.0  # between attempts to have another one


class CourierSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What may be set for the Transfer Engine.

    `host` is this machine's name for the others (what nodes are listed under, if empty). Bytes move
    by `protocol` (tcp, rdma, ...) over `devices` (names, comma-separated; empty: all). `metadata`
    is P2PHANDSHAKE or the URL of Mooncake's metadata server, `environment` Mooncake's own variables
    (MC_...). `fetches` batches come at the same time, each within `timeout_ms`. With `verbose`,
    Mooncake's log goes to stderr.
    """

    host: str = ""
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    environment: dict[str, str] = {}
    fetches: int = 2
    timeout_ms: int = 2000
    verbose: bool = False

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> CourierSettings:
        """Check options.

        Raises:
            ConfigError: one is unknown, of the wrong type or out of range, or Mooncake is missing.
        """
        try:
            made = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"courier mooncake: {error}") from error
        for name in ("fetches", "timeout_ms"):
            if getattr(made, name) < 1:
                raise ConfigError(f"courier mooncake: {name} must be >= 1")
        require()
        return made

    def setup(self, block_bytes: int) -> dict[str, Any]:
        """What a child is told."""
        names = ("host", "protocol", "devices", "metadata", "environment", "verbose")
        told = {name: getattr(self, name) for name in names}
        told["host"] = self.host or "127.0.0.1"
        return told | {"kind": "engine", "block_bytes": block_bytes}


class MooncakeCourier:
    """Pulls blocks that are on lease from other nodes' arenas into ours.

    Args:
        arena: ours; all of it is registered with the engines.
        block_bytes: of one block; the rest of a slot does not travel.
        options: see `CourierSettings`.

    Raises:
        ConfigError: options cannot be used.
    """

    name: ClassVar[str] = "mooncake"

    def __init__(
        self, arena: Arena, block_bytes: int, options: Mapping[str, Any] | None = None
    ) -> None:
        settings = CourierSettings.read(options or {})
        self._host = settings.host
        self._arena, self._timeout_s = arena, settings.timeout_ms / 1e3
        setup = settings.setup(block_bytes)
        self._lending = MooncakeProcess(setup, [arena], 1)
        self._fetching = [MooncakeProcess(setup, [arena], 1) for _ in range(settings.fetches)]
        self._idle = list(self._fetching)
        self.restarts = 0  # of the engine that lends, so far
        self._room = anyio.Semaphore(settings.fetches)
        self._threads = anyio.CapacityLimiter(settings.fetches)

    @property
    def lending_pid(self) -> int | None:
        """Of the process whose engine others read from."""
        return self._lending.pid

    async def lend(self, host: str) -> str:
        """See `flexkv.cluster.fetching.Courier`.

        Raises:
            ConfigError: the engine does not start; says why.
        """
        for process in (self._lending, *self._fetching):
            process.setup["host"] = self._host or host
        for process in (self._lending, self._fetching[0]):
            await anyio.to_thread.run_sync(process.start)
        try:
            return await self._where()
        except OSError as error:
            await self.aclose()
            raise ConfigError(f"courier mooncake: no engine: {error}") from error

    async def watch(self, moved: Callable[[str], None]) -> None:
        """See `flexkv.cluster.fetching.Courier`. Where processes cannot be watched: do nothing."""
        while True:
            try:
                await self._ended()
            except OSError as error:
                log.warning("peer.engine_unwatched", error=str(error))
                return
            why = await anyio.to_thread.run_sync(self._lending.forget)
            wait_s = _RESTART_S
            log.warning("peer.engine_ended", why=why)
            moved("")
            while True:
                try:
                    place = await self._where()
                except OSError as error:
                    log.debug("peer.engine_waits", error=str(error), wait_s=wait_s)
                    await anyio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _LONGEST_S)
                else:
                    break
            self.restarts += 1
            log.info("peer.engine_back", place=place)
            moved(place)

    async def _where(self) -> str:
        """Start the engine that lends, if there is none, and return its address.

        Raises:
            OSError: it does not start.
        """
        work = partial(self._lending.call, 0, _START_S, "where")
        session, base = await anyio.to_thread.run_sync(work)
        return f"{session}/{base:x}"

    async def _ended(self) -> None:
        """Wait until the engine that lends has ended."""
        watched = self._lending.watched()
        if watched is None:
            return
        try:
            await anyio.wait_readable(watched)
        finally:
            os.close(watched)

    async def fetch(
        self, address: str, grant: Grant, offsets: NDArray[np.uint64], slots: SlotIds
    ) -> Statuses:
        """Fill arena `slots` from byte `offsets` of the arena at `address`: all of them, or none.

        See `flexkv.cluster.fetching.Courier`.
        """
        session, base = parse(address)
        sources = [base + offset for offset in offsets.tolist()]
        targets = [slot * self._arena.stride_bytes for slot in slots.tolist()]
        async with self._room:
            process = self._idle.pop()
            try:
                code = await self._call(process, session, sources, targets)
            finally:
                self._idle.append(process)
        return np.full(len(slots), FAILED if code else LANDED, np.uint8)

    async def _call(self, process: MooncakeProcess, *words: Any) -> int:
        """Fetch in a thread; whoever gives up waits until the child is gone, which is soon."""
        process.mend()
        work = partial(process.call, 0, self._timeout_s, "fetch", *words)
        code, done = -1, anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(_guard, process, done)
            try:
                code = await anyio.to_thread.run_sync(work, limiter=self._threads)
            except OSError as error:
                log.debug("peer.mooncake", session=words[0], error=str(error))
            finally:
                done.set()
        return code

    async def aclose(self) -> None:
        """End the engines."""
        with anyio.CancelScope(shield=True):
            for process in (self._lending, *self._fetching):
                await anyio.to_thread.run_sync(process.close)


async def _guard(process: MooncakeProcess, done: anyio.Event) -> None:
    """End the call of `process` when this is cancelled before it is `done`."""
    try:
        await done.wait()
    finally:
        if not done.is_set():
            process.cut()


def parse(address: str) -> tuple[str, int]:
    """Take "host:port/base" apart: the session, and where its arena begins there.

    Raises:
        ConfigError: it is not of that form.
    """
    session, _, base = address.rpartition("/")
    try:
        if ":" in session:
            return session, int(base, 16)
    except ValueError:
        pass
    raise ConfigError(f"{address[:80]!r} is not of the form host:port/base")
