"""A simulated server of blocks below the real remote tier: it lives longer than any manager.

`Server` (what it holds, by name) - `WorldRemote` (the remote tier without threads; its names,
heads, checksums and breaker are the real ones).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import anyio

from flexkv.backends.remote.couriers import Client, Couriers, Parcel
from flexkv.backends.remote.store import RemoteStore
from flexkv.model import DAMAGED, LANDED, MISSING, KeyArray, Statuses
from flexkv.protocols import Recovered, Services
from flexkv.testing.worlds.hardware import Cell, Hardware

CLOSE_S = 30.0


class Server:
    """Blocks by name: head and body, as they were sent."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes, bytes]] = {}


class _Line:
    """A connection to the server; `fault` is what happens to the next call."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.fault = ""
        self.failing = 0  # the fault begins with this block

    def read(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        for at, (name, head, body) in enumerate(zip(names, heads, bodies, strict=True)):
            fault = self.fault if at >= self.failing else ""
            if fault == "hangup":
                body[: len(body) // 2] = bytes(len(body) // 2)
                raise ConnectionResetError("the server hung up")
            found = self._server.blocks.get(name)
            if fault == "expired":
                self._server.blocks.pop(name, None)
                found = None
            if found is None:
                statuses[at] = MISSING
                continue
            head[:], body[:] = found
            if fault == "flip":
                body[7] ^= 0x10
            statuses[at] = DAMAGED if fault == "short" else LANDED

    def write(
        self,
        names: Sequence[bytes],
        heads: Sequence[memoryview],
        bodies: Sequence[memoryview],
        statuses: Statuses,
    ) -> None:
        for at, (name, head, body) in enumerate(zip(names, heads, bodies, strict=True)):
            fault = self.fault if at >= self.failing else ""
            if fault == "hangup":
                raise ConnectionResetError("the server hung up")
            if fault == "full":
                continue
            if fault != "lost":
                content = bytearray(body)
                content[3] ^= fault == "flip"
                self._server.blocks[name] = (bytes(head), bytes(content))
            statuses[at] = LANDED

    def discard(self, names: Sequence[bytes], statuses: Statuses) -> None:
        if self.fault == "hangup":
            raise ConnectionResetError("the server hung up")
        for at, name in enumerate(names):
            statuses[at] = MISSING if self._server.blocks.pop(name, None) is None else LANDED

    def close(self) -> None:
        """Nothing is open."""


class _Carriage(Couriers):
    """Couriers that take virtual time, and no threads."""

    def __init__(
        self,
        count: int,
        hardware: Hardware,
        server: Server,
        work: Callable[[Client, Parcel], None],
    ) -> None:
        self._count, self._hardware, self._line, self._work = count, hardware, _Line(server), work
        self._flying = 0
        self._idle = anyio.Event()

    def __len__(self) -> int:
        return self._count

    def put(self, parcel: Parcel) -> None:
        hardware, place = self._hardware, f"remote {parcel.verb}"
        fault = hardware.fault(place)
        failing = hardware.chance(len(parcel), f"{place} fails")

        def land() -> None:
            self._line.fault, self._line.failing = fault, failing
            self._flying -= 1
            if not self._flying:
                self._idle.set()
            try:
                self._work(self._line, parcel)
            except OSError as error:
                parcel.error = str(error)

        self._flying += 1
        self._idle = anyio.Event()
        host: list[Cell] = [("host", slot) for slot in parcel.slots.tolist()]
        reads, writes = (host, []) if parcel.verb == "write" else ([], host)
        if parcel.verb == "discard":
            reads = writes = []
        for _, slot in writes:
            hardware.arena.view(slot)[:] = 0xEE
        hardware.fly(place, reads, writes, land, parcel.address, fault=fault)

    async def landed(self) -> None:
        """Wait until nothing is in flight, but not for what never lands."""
        with anyio.move_on_after(CLOSE_S):
            while self._flying:
                await self._idle.wait()


class WorldRemote(RemoteStore):
    """The remote tier on a simulated server. `begin` gives hardware and server of a life."""

    name: ClassVar[str] = "world"
    begin: Callable[[Services], tuple[Hardware, Server]]

    async def open(self, services: Services) -> Recovered | None:
        """Take the services; the server is there already."""
        self._hardware, self._server = type(self).begin(services)
        return await super().open(services)

    def hire(self, count: int) -> Couriers:
        """Take couriers of this world."""
        self._carriage = _Carriage(count, self._hardware, self._server, self._carry)
        return self._carriage

    async def dismiss(self) -> None:
        """Wait for what is in flight."""
        await self._carriage.landed()

    def lacks(self, keys: KeyArray) -> int:
        """How many of `keys` the server does not have."""
        return sum(name not in self._server.blocks for name in self.names(keys))
