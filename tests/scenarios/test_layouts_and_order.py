"""D10: block i is block i, whatever slots it passes through, and whichever tier lacked it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeRemote, plugged
from numpy.typing import NDArray
from rig import (
    HEAD_SIZE,
    HEADS,
    LAYERS,
    TOKENS_PER_BLOCK,
    Rig,
    device_tensor,
    open_rig,
    pattern,
    peek,
    poke,
    prompt,
    slots_of,
)

from flexkv import KVSpec
from flexkv.model import SlotIds
from flexkv.pool import SlotPool


class ShuffledPool(SlotPool):
    """Hands out the slots of a script, and then free ones at random."""

    def __init__(self, capacity: int, script: Sequence[int] = (), seed: int = 0) -> None:
        super().__init__(capacity)
        self.script = list(script)
        self.out: set[int] = set()
        self.random = np.random.default_rng(seed)

    def take(self, count: int) -> SlotIds:
        if self.script:
            chosen, self.script = self.script[:count], self.script[count:]
        else:
            free = [slot for slot in range(self.capacity) if slot not in self.out]
            chosen = self.random.permutation(free)[:count].tolist()
        slots = np.array(chosen, np.uint32)
        assert len(slots) == count
        self.out |= set(chosen)
        super().reserve(slots)
        return slots

    def give(self, slots: SlotIds) -> None:
        self.out -= set(slots.tolist())
        super().give(slots)


def shuffle(rig: Rig, script: Sequence[int] = (), seed: int = 0) -> None:
    """Let host slots be handed out in an order that means nothing."""
    host = rig.kv._stack.ledger.host
    assert host.free == host.capacity
    host.pool = ShuffledPool(host.capacity, script, seed)


@pytest.mark.parametrize("lacking", ["disk", "remote"])
@pytest.mark.parametrize("cached", [0, 1, 3, 5])
async def test_d10_blocks_the_store_lacked_come_back_in_order(
    tmp_path: Path, cached: int, lacking: str
) -> None:
    tokens = prompt(1, 5)
    with plugged(FakeRemote) as remote:
        settings: dict[str, Any] = {"disk_backend": remote} if lacking == "remote" else {}
        async with open_rig(tmp_path, host=16, **settings) as rig:
            shuffle(rig, [9, 2, 7, 1, 4])
            faults = rig.store.faults if lacking == "remote" else rig.faults()
            faults.add("write", "failed" if lacking == "remote" else "EIO")
            await rig.put(tokens[: cached * TOKENS_PER_BLOCK], durable=False)
            await rig.kv.flush()
            assert rig.kv.usage()["disk"]["resident"] == 0
            faults.clear()
            await rig.put(tokens)
            assert rig.kv.usage()["disk"]["resident"] == 5
            await rig.push_out()
            result = await rig.get(tokens, blocks=[3, 0, 8, 5, 6])
            assert (result.loaded, result.by_tier) == (20, {"host": 0, "disk": 5})


class AnyDevice:
    """Engine memory in any layout; see flexkv.backends.layout for the letters."""

    def __init__(self, axes: str, blocks: int) -> None:
        sizes = {
            "L": LAYERS,
            "B": blocks,
            "P": 2,
            "N": TOKENS_PER_BLOCK,
            "H": HEADS,
            "D": HEAD_SIZE,
            "C": 2 * HEAD_SIZE,
            "T": blocks * TOKENS_PER_BLOCK,
        }
        shape = [sizes[letter] for letter in axes]
        count = 1 if "L" in axes else LAYERS
        self.caches = [np.zeros(shape, np.uint16) for _ in range(count)]
        letters = axes.replace("T", "BN").replace("C", "PD")
        order = [letters.index(letter) for letter in letters if letter == "L"]
        order += [letters.index(letter) for letter in "BPNHD"]
        views = [
            cache.reshape([sizes[letter] for letter in letters]).transpose(order)
            for cache in self.caches
        ]
        self.layers: list[NDArray[np.uint16]] = list(views[0]) if "L" in axes else views
        self.tensors = [device_tensor(cache) for cache in self.caches]  # on the cpu: the same

    @property
    def registered(self) -> Any:
        """What the engine would register."""
        return self.tensors[0] if len(self.tensors) == 1 else self.tensors

    def push(self) -> None:
        """Write what the arrays hold to the device."""
        for tensor, cache in zip(self.tensors, self.caches, strict=True):
            poke(tensor, cache)

    def write(self, block: int, content: NDArray[np.uint8]) -> None:
        parts = content.view(np.uint16).reshape(LAYERS, 2, TOKENS_PER_BLOCK, HEADS, HEAD_SIZE)
        for layer, values in zip(self.layers, parts, strict=True):
            layer[block] = values
        self.push()

    def read(self, block: int) -> NDArray[np.uint8]:
        for tensor, cache in zip(self.tensors, self.caches, strict=True):
            cache[:] = peek(tensor)
        return np.stack([layer[block] for layer in self.layers]).view(np.uint8).reshape(-1)

    def wipe(self) -> None:
        for cache in self.caches:
            cache[:] = 0xDEAD
        self.push()


LAYOUTS = ["PBNHD", "BPNHD", "PBHND", "BPHND", "BNHC", "BHNC", "PTHD", "TPHD", "LBPNHD", "BLPHND"]
BLOCKS = 24


async def one_split(rig: Rig, device: AnyDevice, name: int, random: np.random.Generator) -> None:
    """Put a prompt in two parts from random device blocks, get it (or its rest) into others."""
    count = int(random.integers(1, 13))
    tokens = prompt(name, count)
    sources = random.permutation(BLOCKS)[:count].tolist()
    for i, block in enumerate(sources):
        device.write(block, pattern(tokens, i))
    split = int(random.integers(0, count + 1))
    for part in (split, count):
        mapping = slots_of(sources[:part])
        transfer = rig.kv.put_async(tokens[: part * TOKENS_PER_BLOCK], mapping)
        await transfer
        if random.random() < 0.5:
            await transfer.durable()
    await rig.kv.flush()
    device.wipe()
    if random.random() < 0.7:  # from the store, or some of it
        await rig.kv.prefetch_async(prompt(9000, 12))
        await rig.kv.prefetch_async(prompt(9001, int(random.integers(1, 5))))
    skipped = int(random.integers(0, count))
    targets = random.permutation(BLOCKS)[: count - skipped].tolist()
    plan = rig.kv.get_match(tokens, computed_tokens=skipped * TOKENS_PER_BLOCK)
    assert plan.matched == (count - skipped) * TOKENS_PER_BLOCK
    result = await rig.kv.launch(plan, slots_of(targets))
    assert result.loaded == plan.matched
    for i, block in enumerate(targets):
        assert np.array_equal(device.read(block), pattern(tokens, skipped + i))
    rest = set(range(BLOCKS)) - set(targets)
    assert all((device.read(block).view(np.uint16) == 0xDEAD).all() for block in rest)


@pytest.mark.parametrize("axes", ["PNHD", "PHND", "HNPD", "NHPD"])
async def test_d10_any_split_any_slots_any_layout(tmp_path: Path, axes: str) -> None:
    """50 random splits and permutations for each order of a block's bytes on the host."""
    spec = KVSpec.uniform(LAYERS, HEADS, HEAD_SIZE, "float16", tokens_per_block=4, axes=axes)
    random = np.random.default_rng(len(axes) + sum(map(ord, axes)))
    async with open_rig(tmp_path, host=16, disk=96, spec=spec) as rig:
        shuffle(rig, seed=int(random.integers(1 << 30)))
        for name in (9000, 9001):
            await rig.put(prompt(name, 12))
        for name in range(50):
            layout = LAYOUTS[name % len(LAYOUTS)]
            device = AnyDevice(layout, BLOCKS)
            rig.kv.register(device.registered, axes=layout)
            await one_split(rig, device, 1 + name, random)
        assert rig.count("transfer_blocks", source="disk", target="host") > 50
