"""What is the cpu backend's own; what every device backend must do is in test_kit.py."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexkv.backends.cpu import CpuBackend
from flexkv.backends.layout import plane_extent
from flexkv.errors import ConfigError, InputError, LayoutError, TransferError
from flexkv.model import NO_SLOT, KVSpec
from flexkv.protocols import RegionHandle
from flexkv.testing.built_in import CpuHarness
from flexkv.testing.device_bench import SLOTS, DeviceBench, opened
from flexkv.testing.harness import CREW_QUEUE
from flexkv.testing.held_crew import full
from flexkv.testing.kv_memory import KvMemory


@pytest.fixture
def bench(tmp_path: Path) -> DeviceBench:
    return DeviceBench(CpuHarness(CpuBackend), tmp_path, random.Random(1), 10.0)


@pytest.mark.parametrize("cached", [0, 1, 3, 5])
@pytest.mark.parametrize("axes", ["PBNHD", "BLPNHD"])
async def test_a_prompt_put_in_two_pieces_comes_back_in_order(
    bench: DeviceBench, axes: str, cached: int
) -> None:
    """Scenario D10: old slots and new ones, read into scattered device blocks."""
    async with opened(bench, KVSpec.uniform(4, 2, 32)) as device:
        memory = device.memory(axes, 10)
        prompt, target = [7, 1, 9, 2, 4], [3, 0, 8, 5, 6]
        slots, before = [9, 2, 7, 1, 4], memory.snapshot()
        await device.copy(prompt[:cached], slots[:cached], to_device=False)
        await device.copy(prompt[cached:], slots[cached:], to_device=False)
        await device.copy(target, slots, to_device=True)
        after = memory.snapshot()
        for block, source in zip(target, prompt, strict=True):
            assert np.array_equal(memory.block(after, block), memory.block(before, source))


async def test_small_batches_stay_on_the_loop_and_large_ones_leave_it(bench: DeviceBench) -> None:
    spec = KVSpec.uniform(4, 8, 64)
    async with opened(bench, spec, inline_bytes=4 * spec.block_bytes) as device:
        device.memory("PBNHD", 20)
        completions = device.services.completions
        await device.copy(range(4), range(4), to_device=False)
        assert completions.wakeups == 0
        await device.copy(range(5), range(5), to_device=False)
        assert completions.wakeups == 1
        await device.copy([], [], to_device=False)
        assert completions.wakeups == 1


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ([0, 20], [0, 1], "device block 20 does not exist; there are 20"),
        ([0, 1], [0, SLOTS], f"host slot {SLOTS} does not exist; there are {SLOTS}"),
        ([0, NO_SLOT], [0, 1], r"device block 4294967295 \(NO_SLOT\) does not exist"),
        ([0], [0, 1], "1 device blocks cannot pair with 2 host slots"),
    ],
)
async def test_ids_out_of_range_are_named(
    bench: DeviceBench, blocks: list[int], slots: list[int], message: str
) -> None:
    async with opened(bench, KVSpec.uniform(2, 2, 16)) as device:
        device.memory("PBNHD", 20)
        with pytest.raises(InputError, match=message):
            await device.copy(blocks, slots, to_device=False)


async def test_a_full_queue_is_an_error(bench: DeviceBench) -> None:
    async with opened(bench, KVSpec.uniform(1, 2, 16), inline_bytes=0) as device:
        device.memory("PBNHD", 4)
        no_room = full(device.services.completions.crew, CREW_QUEUE)
        with no_room, pytest.raises(TransferError, match="the crew's queue is full"):
            await device.copy([0], [0], to_device=False)


@pytest.mark.parametrize("value", [-1, "1"])
async def test_wrong_settings_are_named(bench: DeviceBench, value: Any) -> None:
    with pytest.raises(ConfigError, match="inline_bytes"):
        async with opened(bench, KVSpec.uniform(1, 1, 16), inline_bytes=value):
            pass


def test_it_finds_the_host() -> None:
    (device,) = CpuBackend.probe()
    assert device.name == "cpu"
    assert device.memory_bytes > 0


# --- regions in shared memory


def shared_caches(spec: KVSpec) -> KvMemory:
    """Caches of 6 blocks and axes BPNHD in shared memory."""
    harness, rng = CpuHarness(CpuBackend), random.Random(2)
    return KvMemory(harness, spec, "BPNHD", 6, rng, plain=True, shared=True)


def test_shared_regions_open_at_other_addresses_with_the_same_bytes() -> None:
    spec = KVSpec.uniform(3, 2, 32)
    memory, backend = shared_caches(spec), CpuBackend()
    region = backend.make_region(memory.tensors, spec, "BPNHD")
    files = set(os.listdir("/proc/self/fd"))
    handle = backend.export_region(region)
    assert len(handle.fds) == 3
    there = CpuBackend().import_region(handle)
    for fd in handle.fds:
        os.close(fd)
    assert len(set(os.listdir("/proc/self/fd")) - files) == 3  # the mappings' own
    assert there.blocks == 6
    for mine, theirs in zip(region.planes, there.planes, strict=True):
        assert mine.base != theirs.base
        low, high = plane_extent(theirs, there.blocks)
        file = there.owner[mine.layer]
        base = int(file.__array_interface__["data"][0])
        own = list(memory.tensors.values())[mine.layer]
        assert file[low - base : high - base].tobytes() == own.tobytes()


def test_ordinary_memory_cannot_be_exported() -> None:
    spec = KVSpec.uniform(2, 2, 16)
    backend, rng = CpuBackend(), random.Random(3)
    memory = KvMemory(CpuHarness(CpuBackend), spec, "PBNHD", 4, rng)
    region = backend.make_region(memory.tensors, spec, "PBNHD")
    with pytest.raises(LayoutError, match=r"ordinary memory of this process.*share_memory_"):
        backend.export_region(region)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"{}",
        lambda data: data.replace(b'"format": 1', b'"format": 2'),
        lambda data: data.replace(b'"blocks": 6', b'"blocks": 600000'),
        lambda data: data.replace(b"[[0, 0, 0", b"[[0, 1, 0"),
        lambda data: data.replace(b"[[0, 0, 0", b"[[0, 0, -4096"),
    ],
)
def test_foreign_or_damaged_handles_are_refused(change: Callable[[bytes], bytes]) -> None:
    spec = KVSpec.uniform(1, 2, 32)
    backend, memory = CpuBackend(), shared_caches(spec)
    handle = backend.export_region(backend.make_region(memory.tensors, spec, "BPNHD"))
    with pytest.raises(LayoutError, match="no handle of a cpu region"):
        CpuBackend().import_region(RegionHandle(change(handle.data), handle.fds))
    for fd in handle.fds:
        os.close(fd)


# --- torch


@pytest.mark.torch
async def test_torch_blocks_come_back(bench: DeviceBench) -> None:
    torch = pytest.importorskip("torch")
    spec = KVSpec.uniform(2, 4, 32)
    kv = {str(i): torch.randn(2, 10, 16, 4, 32).bfloat16() for i in range(2)}
    want = {name: tensor.clone() for name, tensor in kv.items()}
    async with opened(bench, spec) as device:
        device.region = device.backend.make_region(kv, spec, "PBNHD")
        await device.copy([1, 7, 3], [5, 0, 9], to_device=False)
        for tensor in kv.values():
            tensor.zero_()
        await device.copy([0, 1, 2], [5, 0, 9], to_device=True)
    for name, tensor in kv.items():
        assert torch.equal(tensor[:, :3], want[name][:, [1, 7, 3]])
        assert not tensor[:, 3:].any()


@pytest.mark.torch
def test_torch_tensors_elsewhere_or_unshared_are_refused_and_shared_ones_exported() -> None:
    torch = pytest.importorskip("torch")
    spec = KVSpec.uniform(1, 4, 32)
    backend = CpuBackend()
    with pytest.raises(LayoutError, match="device 'meta' is out of reach"):
        backend.make_region([torch.empty(10, 2, 16, 4, 32, device="meta")], spec)
    tensor = torch.zeros(10, 2, 16, 4, 32, dtype=torch.bfloat16).share_memory_()
    handle = backend.export_region(backend.make_region([tensor], spec))
    there = backend.import_region(handle)
    tensor[3, 1, 0, 0, 0] = 1.0
    start = there.planes[0].base - int(there.owner[0].__array_interface__["data"][0])
    data = there.owner[0][start : start + tensor.nbytes].view(np.uint16).reshape(tensor.shape)
    assert data[3, 1, 0, 0, 0] == 0x3F80
    for fd in handle.fds:
        os.close(fd)
