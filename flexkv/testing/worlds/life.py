"""One life of a manager in a world: from opening it to closing it, or to a crash.

`Life.open`, `close`, `crash`, `on_disk` - `make_config` (settings of a story -> configuration).
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np

from flexkv import FlexKVConfig, KVManager, plugins
from flexkv.backends.disk.table import SlotTable
from flexkv.encodedstore import EncodedStore
from flexkv.model import DISK
from flexkv.protocols import Services
from flexkv.testing.worlds.chance import Chance, mix
from flexkv.testing.worlds.codec import CODECS, work_in_virtual_time
from flexkv.testing.worlds.device import SPEC, Memory, WorldDevice
from flexkv.testing.worlds.disk import Crash, Platter, WorldDisk
from flexkv.testing.worlds.hardware import Hardware, Journal
from flexkv.testing.worlds.remote import Server, WorldRemote
from flexkv.testing.worlds.users import Users
from flexkv.testing.worlds.watch import Contents, Key, Watch


@lru_cache(1)
def _common() -> FlexKVConfig:
    """What is the same in all worlds."""
    return FlexKVConfig(
        model="world",
        spec=SPEC,
        device="world-device",
        disk_backend="world-disk",
        disk_dirs=["world"],
        remote_backend="world-remote",
        remote_cache_bytes=SPEC.stride_bytes,
        transfer_timeout_ms=2000,
        plan_ttl_ms=200,
        settle_timeout_ms=60_000,
        huge_pages=False,
        prefault=False,
        crew_threads=1,
    )


def make_config(settings: tuple[tuple[str, Any], ...]) -> FlexKVConfig:
    """The configuration of a world: everything small, so that everything is short of room."""
    given, stride = dict(settings), SPEC.stride_bytes
    own = {
        "host_cache_bytes": given["host"] * stride,
        "disk_cache_bytes": given["disk"] * disk_stride(settings),
        "disk_codec": given["codec"] or None,
        "disk_codec_bytes": given["encoding"] * disk_stride(settings),
        "remote_backend": "world-remote" if given["remote"] else "",
        "remote_cache_bytes": given["remote"] * stride,
        "spill": given["spill"],
        "eviction_policy": given["policy"],
        "evict_ratio": given["evict_ratio"],
        "retain_share": given["retain_share"],
        "chunk_bytes": given["chunk"] * stride,
        "staging_bytes": given["staging"] * stride,
        "max_in_flight_gets": given["in_flight"],
        "max_in_flight_puts": given["in_flight"],
        "max_in_flight_prefetches": given["in_flight"],
        "tickets": given["tickets"],
        "spill_queue_blocks": given["queue"],
        "close_timeout_ms": given["close_ms"],
    }
    return _common().model_copy(update=own)  # reading settings costs more than opening a manager


def disk_stride(settings: tuple[tuple[str, Any], ...]) -> int:
    """Bytes of a slot on disk."""
    return SPEC.stride_bytes // 2 if dict(settings)["codec"] else SPEC.stride_bytes


class Life(Users):
    """A manager, its hardware and its users."""

    def __init__(
        self,
        seed: int,
        number: int,
        settings: tuple[tuple[str, Any], ...],
        platter: Platter | None,
        server: Server,
        journal: Journal,
        *,
        perfect: bool,
        expected: set[Key] | None,
    ) -> None:
        super().__init__(journal, perfect=perfect)
        self.config = make_config(settings)
        self.platter = platter or Platter(max(1, dict(settings)["disk"]), disk_stride(settings))
        self.server = server
        self.chance = Chance(mix(seed, number))
        self._table: SlotTable | None = None
        self._share = dict(settings)["share"]
        self._expected = expected

    async def open(self) -> None:
        """Open a manager on the platter."""
        device = type("Device", (WorldDevice,), {"begin": staticmethod(self._begin_device)})
        disk = type("Disk", (WorldDisk,), {"begin": staticmethod(self._begin_disk)})
        remote = type("Remote", (WorldRemote,), {"begin": staticmethod(self._begin_remote)})
        with (
            plugins.register(plugins.BACKENDS, "world-device", device),
            plugins.register(plugins.BACKENDS, "world-disk", disk),
            plugins.register(plugins.BACKENDS, "world-remote", remote),
            ExitStack() as codecs,
        ):
            for name, codec in CODECS.items():
                codecs.enter_context(plugins.register(plugins.CODECS, name, codec))
            self.kv = await KVManager(self.config).__aenter__()
        self.kv.register(self.memory.caches, axes="PBNHD")
        stack = self.kv._host.stack()
        store = stack.engine.stores.get(DISK)
        if isinstance(store, EncodedStore):
            work_in_virtual_time(store, self.hardware, self._share)
        self.contents = Contents(stack.keyring)
        self.watch = Watch(self.kv, self.hardware, self.contents, self.journal)
        self._table = self.watch.table if DISK in stack.engine.stores else None
        found = self.on_disk()
        self.journal.write("opened, disk holds", len(found))
        if self._expected is not None and found != self._expected:
            gone, new = len(self._expected - found), len(found - self._expected)
            self.journal.accuse("restart", f"{gone} blocks are gone, {new} came from nowhere")

    def on_disk(self) -> set[Key]:
        """Keys of the blocks that the disk tier has committed; also after it was closed."""
        if self._table is None:
            return set()
        keys = self._table.keys[np.flatnonzero(self._table.sequences)].tolist()
        return {(key[0], key[1]) for key in keys}

    def _begin_device(self, services: Services) -> tuple[Hardware, Memory]:
        self.hardware = Hardware(services, self.chance, self.journal)
        return self.hardware, self.memory

    def _begin_disk(self, services: Services) -> tuple[Hardware, Platter]:
        return self.hardware, self.platter

    def _begin_remote(self, services: Services) -> tuple[Hardware, Server]:
        return self.hardware, self.server

    async def close(self) -> Platter:
        """Close the manager in order; returns what its disk holds then."""
        self.watch = None
        await self.patiently("close", self.kv.aclose())
        await self._end()
        return self.platter

    async def _end(self) -> None:
        await self.end_users()
        self.hardware.arena.close()  # it stays open when hardware has not answered

    async def crash(self, how: Crash) -> Platter:
        """Take what is on disk now; then let the process, which does not matter any more, die."""
        self.watch = None
        self.perfect &= how == "kill"
        for batch in list(self.hardware.in_flight):
            onto_disk = any(cell in ("disk", "record") for cell, _ in batch.writes)
            if onto_disk and self.hardware.chance(2, "crash lands", batch.number):
                batch.land()
        platter = self.platter.crash(how, self.chance.bits("crash"))
        self.hardware.faults.clear()
        host = self.kv._task
        assert host is not None
        host.cancel()
        await self.patiently("death", asyncio.wait([host]))
        await self._end()
        return platter
