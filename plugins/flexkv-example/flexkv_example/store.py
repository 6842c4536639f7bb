"""A store with one file per slot: key, parent, depth and checksum, then the block."""

from __future__ import annotations

import hashlib
from pathlib import Path

import anyio.to_thread
import numpy as np

from flexkv.errors import ClosedError, ConfigError, InputError
from flexkv.model import DAMAGED, FAILED, LANDED, MISSING
from flexkv.protocols import DeviceInfo, Recovered

HEAD = np.dtype([("key", "<u8", 2), ("parent", "<u8", 2), ("depth", "<u4"), ("sum", "V16")])


# what every store is given; of these only `directories` means something here
COMMON = {"directories", "engine", "queue_depth", "in_flight_bytes", "threads", "on_mismatch"}


class FolderStore:
    """Addressed by slot. Setting `directories`: the first of them is used."""

    flexkv_api = 1
    addressing = "slot"
    alignment_bytes = 1
    folder = None

    @classmethod
    def probe(cls):
        return [DeviceInfo("folder")]

    async def open(self, services):
        """Open the folder; return what is in it."""
        if not services.settings.get("directories") or set(services.settings) - COMMON:
            raise ConfigError(f"the example store takes `directories`, not {services.settings}")
        self.capacity = services.capacity_blocks
        self.folder = Path(services.settings["directories"][0], services.identity.digest().hex())
        self.folder.mkdir(parents=True, exist_ok=True)
        self.arena, self.size = services.arena, services.identity.spec.block_bytes
        found = {int(path.name): path.read_bytes() for path in self.folder.iterdir()}
        whole = HEAD.itemsize + self.size
        found = {slot: data for slot, data in found.items() if len(data) == whole}
        if not found:
            return None
        heads = np.array([np.frombuffer(data, HEAD, 1)[0] for data in found.values()], HEAD)
        slots = np.array(list(found), np.uint32)
        fields = (np.ascontiguousarray(heads[name]) for name in ("key", "parent", "depth"))
        return Recovered(*fields, slots)

    async def read(self, batch):
        return await self._each(batch, self._read)

    async def write(self, batch):
        return await self._each(batch, self._write)

    async def discard(self, batch):
        return await self._each(batch, self._discard)

    async def aclose(self):
        self.folder = None

    async def _each(self, batch, verb):
        """Do `verb` for every block, in a thread: the event loop must not wait for files."""

        folder = self.folder
        if folder is None:
            raise ClosedError("the example store is not open")
        if len(batch) and batch.store_slots.max() >= self.capacity:
            raise InputError(f"slot {batch.store_slots.max()}: there are {self.capacity}")

        def work():
            for i in range(len(batch)):
                try:
                    statuses[i] = verb(batch, i, folder / str(batch.store_slots[i]))
                except FileNotFoundError:
                    statuses[i] = MISSING
                except OSError:  # what is not told to be LANDED is not used
                    statuses[i] = FAILED

        statuses = np.full(len(batch), FAILED, np.uint8)
        await anyio.to_thread.run_sync(work)
        return statuses

    def _read(self, batch, i, path):
        data = path.read_bytes()
        if len(data) != HEAD.itemsize + self.size:
            return DAMAGED
        head, block = np.frombuffer(data, HEAD, 1)[0], data[HEAD.itemsize :]
        if head["key"].tobytes() != batch.keys[i].tobytes():
            return MISSING
        if head["sum"].tobytes() != self._sum(batch.keys[i], block):
            path.unlink()
            return DAMAGED
        self.arena.view(batch.host_slots[i])[: self.size] = np.frombuffer(block, np.uint8)
        return LANDED

    def _write(self, batch, i, path):
        block = self.arena.view(batch.host_slots[i])[: self.size].tobytes()
        head = (batch.keys[i], batch.parents[i], batch.depths[i], self._sum(batch.keys[i], block))
        path.write_bytes(np.array(head, HEAD).tobytes() + block)
        return LANDED

    def _discard(self, batch, i, path):
        key = np.fromfile(path, HEAD, 1)["key"][0]
        if batch.keys[i].any() and (key != batch.keys[i]).any():  # zeros: whatever is there
            return MISSING
        path.unlink()
        return LANDED

    def _sum(self, key, block):
        """Bound to the name as well as to the content: a block never answers for another."""
        return hashlib.blake2b(block, digest_size=16, key=key.tobytes()).digest()
