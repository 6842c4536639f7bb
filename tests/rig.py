"""The test rig: a small cache, device memory, blocks whose bytes tell what they are.

`open_rig`, `Rig.put`, `Rig.get`, `Rig.faults`, `check_idle`; `pattern` (the bytes of a block),
`committed_records` (what is on disk, whoever has it open). Block = 4 tokens, host 8 blocks, disk 32
blocks unless a test says otherwise.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv import FlexKVConfig, GetResult, KVManager, KVSpec, plugins
from flexkv.backends.disk import DiskBackend
from flexkv.backends.disk import format as disk_format
from flexkv.testing.faults import Faults, inject
from flexkv.transfer import Transfer

TOKENS_PER_BLOCK = 4
LAYERS, HEADS, HEAD_SIZE = (
    2,
    2,
    64,
)  # one block = 2 layers x 2 parts x 4 tokens x 2 heads x 64 x 2 B = 4 KiB
SPEC = KVSpec.uniform(LAYERS, HEADS, HEAD_SIZE, "float16", tokens_per_block=TOKENS_PER_BLOCK)
STRIDE = SPEC.stride_bytes


def pattern(tokens: Sequence[int], block: int, namespace: Any = None) -> NDArray[np.uint8]:
    """The bytes that block `block` of this prompt must hold: a function of the whole prefix."""
    prefix = np.asarray(tokens[: (block + 1) * TOKENS_PER_BLOCK], np.int64).tobytes()
    return _noise(prefix + repr(tuple(namespace or ())).encode())


@lru_cache(4096)
def _noise(name: bytes) -> NDArray[np.uint8]:
    seed = list(hashlib.sha256(name).digest())
    noise = np.random.default_rng(seed).integers(0, 255, SPEC.block_bytes, np.uint8, endpoint=True)
    noise.flags.writeable = False
    return noise


def prompt(name: int, blocks: int, *, shared: Sequence[int] = ()) -> list[int]:
    """Tokens of `blocks` blocks that are private to `name`, behind a shared prefix."""
    return [*shared, *(name * 1000 + i for i in range(blocks * TOKENS_PER_BLOCK - len(shared)))]


# where the engine's memory is; pytest's --device sets it
DEVICE = os.environ.get("FLEXKV_DEVICE", "cpu")


class Device:
    """Engine memory: per layer an array [part, block, token, head, element], as uint16 in the place
    of fp16; on other devices than the cpu reached by their back door.
    """

    def __init__(self, blocks: int = 64, device: str = DEVICE) -> None:
        shape = (2, blocks, TOKENS_PER_BLOCK, HEADS, HEAD_SIZE)
        self.blocks = blocks
        self.caches: dict[str, Any] = {
            f"layer.{i}": device_tensor(np.zeros(shape, np.uint16), device) for i in range(LAYERS)
        }

    def write(self, block: int, content: NDArray[np.uint8]) -> None:
        """Fill a block with `content` in host order."""
        parts = content.view(np.uint16).reshape(LAYERS, 2, TOKENS_PER_BLOCK, HEADS, HEAD_SIZE)
        for layer, cache in enumerate(self.caches.values()):
            poke(cache, parts[layer], np.s_[:, block])

    def read(self, block: int) -> NDArray[np.uint8]:
        """A block's bytes in host order."""
        caches = self.caches.values()
        return np.stack([peek(cache, np.s_[:, block]) for cache in caches]).view(np.uint8).ravel()

    def wipe(self, value: int = 0xDEAD) -> None:
        """Fill everything with a sentinel."""
        for cache in self.caches.values():
            poke(cache, value)

    def write_sentinel(self, block: int, value: int = 0xDEAD) -> None:
        """Fill a block with a sentinel."""
        for cache in self.caches.values():
            poke(cache, value, np.s_[:, block])

    def holds_sentinel(self, block: int, value: int = 0xDEAD) -> bool:
        """Whether a block still holds the sentinel."""
        return all(
            bool((peek(cache, np.s_[:, block]) == value).all()) for cache in self.caches.values()
        )

    def is_wiped(self, value: int = 0xDEAD) -> bool:
        """Whether everything still holds the sentinel."""
        return all(bool((peek(cache) == value).all()) for cache in self.caches.values())


def device_tensor(array: NDArray[Any], device: str = DEVICE) -> Any:
    """The array, in the memory of a device."""
    if device == "cpu":
        return array
    if device == "cuda_on_fake":
        import fake_cuda

        return fake_cuda.like(array)
    from flexkv_simulated import like

    return like(array)


def device_backend() -> Any:
    """The backend's class of the device that was chosen."""
    return plugins.load(plugins.BACKENDS, DEVICE)


def peek(tensor: Any, index: Any = ...) -> NDArray[Any]:
    """(A part of) the content of a tensor, wherever it is."""
    found: NDArray[Any] = tensor[index] if isinstance(tensor, np.ndarray) else tensor.peek(index)
    return found


def poke(tensor: Any, content: Any, index: Any = ...) -> None:
    """Write (a part of) a tensor, wherever it is."""
    if isinstance(tensor, np.ndarray):
        tensor[index] = content
    else:
        tensor.poke(content, index)


def slots_of(blocks: Sequence[int]) -> list[int]:
    """Token slots of device blocks."""
    return [b * TOKENS_PER_BLOCK + i for b in blocks for i in range(TOKENS_PER_BLOCK)]


class Rig:
    """A manager with its device and the bookkeeping that tests need."""

    def __init__(self, kv: KVManager, device: Device) -> None:
        self.kv, self.device = kv, device
        self.closed = False  # set by tests that close or break the manager themselves
        kv.register(device.caches, axes="PBNHD")

    @property
    def store(self) -> Any:
        """The backend of the disk tier."""
        return self.kv._stack.engine.stores["disk"]

    def faults(self) -> Faults:
        """Put a layer of faults below the disk tier."""
        return inject(self.store, self.kv._stack.arena)

    def count(self, name: str, **labels: str) -> int:
        """A counter of the manager."""
        return int(self.kv.telemetry.value(name, **labels))

    async def push_out(self, name: int = 900) -> None:
        """Push everything else out of host memory: fill it with blocks of `name`."""
        await self.put(prompt(name, self.kv.usage()["host"]["capacity"]))

    def start_put(self, tokens: Sequence[int], namespace: Any = None, first: int = 0) -> Transfer:
        """Write a prompt's blocks to device blocks first.. and start a put of them."""
        count = len(tokens) // TOKENS_PER_BLOCK
        for i in range(count):
            self.device.write(first + i, pattern(tokens, i, namespace))
        mapping = slots_of(range(first, first + count))
        return self.kv.put_async(tokens, mapping, namespace=namespace)

    async def put(
        self, tokens: Sequence[int], namespace: Any = None, *, durable: bool = True
    ) -> None:
        """Put a prompt; with `durable`, wait until the lowest tier has it."""
        transfer = self.start_put(tokens, namespace)
        await transfer
        if durable:
            await transfer.durable()

    async def get(
        self, tokens: Sequence[int], namespace: Any = None, *, blocks: Sequence[int] | None = None
    ) -> GetResult:
        """Get a prompt into wiped device blocks; check that every loaded block holds the right
        bytes and that no other block was touched.
        """
        count = len(tokens) // TOKENS_PER_BLOCK
        targets = list(range(count)) if blocks is None else list(blocks)
        self.device.wipe()
        result: GetResult = await self.kv.get_async(tokens, slots_of(targets), namespace=namespace)
        self.check(tokens, result, targets, namespace)
        return result

    def check(
        self,
        tokens: Sequence[int],
        result: GetResult,
        targets: Sequence[int],
        namespace: Any = None,
        *,
        sentinel: int = 0xDEAD,
    ) -> None:
        """Check every loaded block against its pattern, and that unrelated device blocks are
        untouched.
        """
        loaded = result.loaded // TOKENS_PER_BLOCK
        for i, block in enumerate(targets[:loaded]):
            self.compare(block, tokens, i, namespace)
        wiped = np.full(SPEC.block_bytes // 2, sentinel, np.uint16).view(np.uint8)
        for block in set(range(self.device.blocks)) - set(targets):
            assert np.array_equal(self.device.read(block), wiped), (
                f"device block {block} was touched"
            )

    def compare(
        self, device_block: int, tokens: Sequence[int], block: int, namespace: Any = None
    ) -> None:
        """Check that a device block holds block `block` of a prompt."""
        assert np.array_equal(self.device.read(device_block), pattern(tokens, block, namespace)), (
            f"block {block} is wrong"
        )

    async def check_idle(self) -> None:
        """Nothing is pinned, planned, in flight or out of the books."""
        await self.kv.flush()
        check_books(self.kv)


def check_books(kv: KVManager) -> None:
    """used + free = capacity in every tier, no pins, plans, transfers or tickets."""
    usage = kv.usage()
    manager = usage.pop("manager")
    idle = {name: manager[name] for name in ("plans", "transfers", "pinned", "tickets", "spilling")}
    assert idle == dict.fromkeys(idle, 0)
    for name, tier in usage.items():
        assert tier["resident"] + tier["free"] == tier["capacity"], (name, tier)
    store = kv._stack.engine.stores.get("disk")
    if isinstance(store, DiskBackend):
        assert store.used_blocks == usage["disk"]["resident"], "blocks outside the index"
    for lane in kv._stack.engine.lanes.values():
        assert (lane.in_flight, lane.waiting) == (0, 0), lane.name
    kv._stack.index.check_integrity()


def committed_records(root: Path) -> int:
    """Committed blocks below `root`, counted in the files themselves."""
    total = 0
    for path in root.rglob(disk_format.RECORDS_NAME):
        content = path.read_bytes()
        superblock = disk_format.Superblock.decode(content[: disk_format.SUPERBLOCK_BYTES])
        records = np.frombuffer(
            bytearray(content[disk_format.SUPERBLOCK_BYTES :]), disk_format.RECORD
        )
        states = disk_format.check(records, 0, superblock.seed)
        total += int(np.count_nonzero(states == disk_format.GOOD))
    return total


@asynccontextmanager
async def open_rig(
    path: Path | None = None,
    *,
    host: int = 8,
    disk: int = 32,
    dirs: int = 1,
    device: int = 64,
    device_backend: str = DEVICE,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Open a manager on `path` (no disk tier without one), and check its books when the test is
    through.
    """
    config: dict[str, Any] = {
        "model": "test-model",
        "spec": SPEC,
        "device": device_backend,
        "host_cache_bytes": host * STRIDE,
        "huge_pages": False,
        "staging_bytes": 4 * STRIDE,
        "chunk_bytes": 2 * STRIDE,
        "evict_ratio": 0.0,
        "evict_start_threshold": 1.0,
        "close_timeout_ms": 5000,
    }
    if path is not None:
        config |= {
            "disk_cache_bytes": disk * STRIDE,
            "disk_dirs": [path / f"d{i}" for i in range(dirs)],
        }
    async with KVManager(FlexKVConfig.load(**(config | settings))) as kv:
        apart = device_backend.startswith(("simulated", "cuda"))
        rig = Rig(kv, Device(device, device_backend if apart else DEVICE))
        yield rig
        if not rig.closed and not kv._host.closed.is_set():
            await rig.check_idle()
