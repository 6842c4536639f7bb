"""Backends that stop at a chosen step: the real ones, with a point before and after each operation.

`Steps` (counts points; holds whoever comes to point `hold_at`) - `registered` (the plug-ins
"stepping" and "stepping-disk", all of one `Steps`) - `open_stepping` (a rig on them).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rig import Rig, device_backend, open_rig

from flexkv import plugins
from flexkv.backends.disk import DiskBackend
from flexkv.model import Statuses
from flexkv.protocols import BlockCopy, BlockIO, Recovered, Services


class Steps:
    """Points passed since `arm`; the operation that comes to point `hold_at` waits for
    `release`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.held = ""
        self._hold_at: int | str | None = None
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    def arm(self, hold_at: int | str | None = None) -> None:
        """Count from 0 again; stop the operation at this point (number, or every one of a
        name)."""
        self.release()
        self.names, self.held, self._hold_at = [], "", hold_at
        self.reached.clear()
        self._open = asyncio.Event()

    def release(self) -> None:
        """Let everybody through, now and later."""
        self._open.set()

    async def point(self, name: str) -> None:
        """One step of a backend."""
        here, self.names = len(self.names), [*self.names, name]
        if self._hold_at in (here, name):
            self.held = name
            self.reached.set()
            await self._open.wait()

    async def reached_or_done(self, done: asyncio.Future[Any]) -> bool:
        """Whether the armed point is reached before `done` is over."""
        reached = asyncio.ensure_future(self.reached.wait())
        await asyncio.wait([reached, done], return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        return self.reached.is_set()


class SteppingDevice(device_backend()):  # type: ignore[misc]
    """The chosen device, stopping before and after each copy."""

    steps: Steps

    async def copy(self, batch: BlockCopy) -> None:
        name = "scatter" if batch.to_device else "gather"
        await self.steps.point(f"before {name}")
        await super().copy(batch)
        await self.steps.point(f"after {name}")


class SteppingDisk(DiskBackend):
    """The disk tier, stopping before and after each batch."""

    steps: Steps

    async def open(self, services: Services) -> Recovered | None:
        await self.steps.point("before open")
        found = await super().open(services)
        await self.steps.point("after open")
        return found

    async def read(self, batch: BlockIO) -> Statuses:
        await self.steps.point("before read")
        statuses = await super().read(batch)
        await self.steps.point("after read")
        return statuses

    async def write(self, batch: BlockIO) -> Statuses:
        await self.steps.point("before write")
        statuses = await super().write(batch)
        await self.steps.point("after write")
        return statuses


@contextmanager
def registered(steps: Steps) -> Iterator[None]:
    """Offer both plug-ins, stopping as `steps` says."""
    device = type("Device", (SteppingDevice,), {"steps": steps})
    disk = type("Disk", (SteppingDisk,), {"steps": steps})
    with (
        plugins.register(plugins.BACKENDS, "stepping", device),
        plugins.register(plugins.BACKENDS, "stepping-disk", disk),
    ):
        yield


@asynccontextmanager
async def open_stepping(
    path: Path | None = None, **settings: Any
) -> AsyncIterator[tuple[Rig, Steps]]:
    """A rig whose copies all go to the crew's threads and whose backends stop at steps."""
    steps = Steps()
    with registered(steps):
        defaults: dict[str, Any] = {
            "device_backend": "stepping",
            "disk_backend": "stepping-disk",
            "inline_copy_bytes": 0,
        }
        async with open_rig(path, **(defaults | settings)) as rig:
            try:
                yield rig, steps
            finally:
                steps.arm()
