"""The cpu backend: blocks come back byte for byte in any layout, nothing else is touched."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import kv_layouts
import numpy as np
import pytest
from loop_matrix import LOOPS, run_on
from numpy.typing import NDArray

from flexkv.backends.cpu import CpuBackend
from flexkv.backends.layout import plane_extent
from flexkv.completion import Completions
from flexkv.errors import ClosedError, ConfigError, InputError, LayoutError, TransferError
from flexkv.memory import Arena
from flexkv.model import NO_SLOT, Identity, KVSpec, LayerGroup
from flexkv.protocols import BlockCopy, DeviceBackend, Region, Services
from flexkv.testing.held_crew import held

SENTINEL = 0xA5


class Bench:
    """A backend with an arena of `slots` sentinel-filled slots."""

    def __init__(self, spec: KVSpec, slots: int = 24, **settings: Any) -> None:
        self.spec = spec
        self.completions = Completions(crew_threads=2)
        self.arena = Arena(slots, spec.stride_bytes)
        for slot in range(slots):
            self.arena.view(slot)[:] = SENTINEL
        self.backend = CpuBackend()
        self.services = Services(self.completions, self.arena, Identity("m", spec=spec), settings)

    async def move(
        self, region: Region, blocks: Any, slots: Any, to_device: bool, layers: Any = None
    ) -> None:
        blocks, slots = np.asarray(blocks, np.uint32), np.asarray(slots, np.uint32)
        await self.backend.copy(BlockCopy(region, blocks, slots, to_device, layers))

    def bytes_of(self, slot: int) -> NDArray[np.uint8]:
        return self.arena.view(slot)[: self.spec.block_bytes]


@contextlib.asynccontextmanager
async def opened(spec: KVSpec, slots: int = 24, **settings: Any) -> AsyncIterator[Bench]:
    bench = Bench(spec, slots, **settings)
    await bench.backend.open(bench.services)
    try:
        yield bench
    finally:
        await bench.backend.aclose()
        assert bench.completions.in_flight == 0
        await bench.completions.aclose()
        bench.arena.close()


class Model:
    """KV caches of one layout, and their blocks as numpy sees them."""

    def __init__(
        self, spec: KVSpec, axes: str, blocks: int, seed: int, *, plain: bool = False
    ) -> None:
        rng = random.Random(seed)
        self.spec, self.axes, self.blocks = spec, axes, blocks
        names = axes.split(",") * (len(spec.groups) if "," not in axes else 1)
        if "L" in axes:
            whole = kv_layouts.build(axes, spec, spec.groups[0], blocks, rng, plain=plain)
            self.kv: Any = whole
            split = kv_layouts.by_letters(whole, axes, spec.tokens_per_block, spec.groups[0].parts)
            self.views = [split[layer : layer + 1] for layer in range(spec.layers)]
            return
        self.kv, self.views = {}, []
        for layer in range(spec.layers):
            group = spec.group_of(layer)
            name = names[spec.groups.index(group)]
            tensor = kv_layouts.build(name, spec, group, blocks, rng, plain=plain)
            self.kv[f"layer.{layer}"] = tensor
            self.views.append(
                kv_layouts.by_letters(tensor, name, spec.tokens_per_block, group.parts)
            )

    def block(self, number: int) -> NDArray[np.uint8]:
        return kv_layouts.block_of(self.views, number, self.spec.axes)

    def all(self) -> list[NDArray[np.uint8]]:
        return [self.block(number) for number in range(self.blocks)]


async def check_round_trip(model: Model, seed: int, **settings: Any) -> None:
    """Save blocks to slots, restore them elsewhere; nothing else may change on either side."""
    rng = random.Random(seed)
    async with opened(model.spec, **settings) as bench:
        region = bench.backend.make_region(model.kv, model.spec, model.axes)
        before = model.all()
        n = rng.randint(1, min(model.blocks, 24))
        blocks, slots = rng.sample(range(model.blocks), n), rng.sample(range(24), n)
        await bench.move(region, blocks, slots, False)
        for block, slot in zip(blocks, slots, strict=True):
            assert np.array_equal(bench.bytes_of(slot), before[block])
        for slot in set(range(24)) - set(slots):
            assert (bench.arena.view(slot) == SENTINEL).all()
        for slot in range(24):  # behind the block's bytes, up to the page
            assert (bench.arena.view(slot)[model.spec.block_bytes :] == SENTINEL).all()
        assert all(map(np.array_equal, model.all(), before))
        targets = rng.sample(range(model.blocks), n)
        await bench.move(region, targets, slots, True)
        after = model.all()
        for block, target in zip(blocks, targets, strict=True):
            assert np.array_equal(after[target], before[block])
        for block in set(range(model.blocks)) - set(targets):
            assert np.array_equal(after[block], before[block])


@pytest.mark.parametrize("order", ["PNHD", "HNPD"])
@pytest.mark.parametrize("axes", kv_layouts.PER_LAYER + kv_layouts.ONE_TENSOR)
async def test_blocks_come_back_in_every_layout(axes: str, order: str) -> None:
    spec = KVSpec.uniform(3, 4, 16, tokens_per_block=8, axes=order)
    await check_round_trip(Model(spec, axes, 30, seed=1), seed=2)


@pytest.mark.parametrize("dtype", ["fp8", "uint8", "bf16", "fp32"])
async def test_blocks_come_back_in_every_item_size(dtype: str) -> None:
    spec = KVSpec.uniform(2, 3, 24, dtype, tokens_per_block=16)
    await check_round_trip(Model(spec, "PBNHD", 12, seed=3), seed=4)


async def test_random_shapes_and_layouts_come_back() -> None:
    rng = random.Random(7)
    for seed in range(25):
        parts = rng.choice([1, 2])
        spec = KVSpec.uniform(
            rng.randint(1, 4),
            rng.randint(1, 5),
            rng.choice([1, 8, 24, 128]),
            rng.choice(["fp8", "bf16", "fp32"]),
            parts=parts,
            tokens_per_block=rng.choice([1, 4, 16]),
            axes=rng.choice(["PNHD", "PHND", "NPHD", "HNPD"]),
        )
        axes = rng.choice(kv_layouts.PER_LAYER + kv_layouts.ONE_TENSOR)
        await check_round_trip(Model(spec, axes, rng.randint(1, 30), seed), seed)


async def test_latent_caches_come_back() -> None:
    latent = KVSpec.uniform(3, 1, 576, "bf16", parts=1)
    for axes in ("BND", "TD", "BN1D", "LBND"):
        await check_round_trip(Model(latent, axes, 20, seed=5), seed=6)


async def test_groups_of_different_heads_and_dtypes_come_back() -> None:
    spec = KVSpec(
        (
            LayerGroup((0, 3), heads=4, head_size=32, dtype="bf16"),
            LayerGroup((1,), heads=1, head_size=40, dtype="fp8", parts=1),
            LayerGroup((2, 4), heads=2, head_size=64, dtype="fp32"),
        )
    )
    await check_round_trip(Model(spec, "BHNC,BND,PBNHD", 20, seed=8), seed=9)


@pytest.mark.parametrize("cached", [0, 1, 3, 5])
@pytest.mark.parametrize("axes", ["PBNHD", "BLPNHD"])
async def test_a_prompt_put_in_two_pieces_comes_back_in_order(axes: str, cached: int) -> None:
    """Scenario D10: old slots and new ones, read into scattered device blocks."""
    spec = KVSpec.uniform(4, 2, 32)
    model = Model(spec, axes, 10, seed=10)
    async with opened(spec) as bench:
        region = bench.backend.make_region(model.kv, spec, axes)
        prompt, target = [7, 1, 9, 2, 4], [3, 0, 8, 5, 6]
        slots = [9, 2, 7, 1, 4]
        patterns = [model.block(block) for block in prompt]
        await bench.move(region, prompt[:cached], slots[:cached], False)
        await bench.move(region, prompt[cached:], slots[cached:], False)
        await bench.move(region, target, slots, True)
        for i, block in enumerate(target):
            assert np.array_equal(model.block(block), patterns[i])


@pytest.mark.parametrize("axes", ["PBNHD", "BLPNHD"])
async def test_random_splits_and_permutations_keep_the_order(axes: str) -> None:
    """Scenario D10, its property: 200 splits of a prompt over batches."""
    rng = random.Random(11)
    spec = KVSpec.uniform(2, 2, 16, tokens_per_block=4)
    model = Model(spec, axes, 20, seed=12)
    async with opened(spec, slots=12) as bench:
        region = bench.backend.make_region(model.kv, spec, axes)
        for _ in range(200):
            n = rng.randint(1, 12)
            blocks, slots = rng.sample(range(20), n), rng.sample(range(12), n)
            targets = rng.sample(range(20), n)
            patterns = [model.block(block) for block in blocks]
            cuts = sorted(rng.randint(0, n) for _ in range(2))
            for begin, end in zip([0, *cuts], [*cuts, n], strict=True):
                await bench.move(region, blocks[begin:end], slots[begin:end], False)
            mixed = rng.sample(range(n), n)
            await bench.move(region, [targets[i] for i in mixed], [slots[i] for i in mixed], True)
            assert all(np.array_equal(model.block(targets[i]), patterns[i]) for i in range(n))


@pytest.mark.parametrize("inline_bytes", [0, 1 << 30])
@pytest.mark.parametrize("axes", ["PBNHD", "BLPNHD", "BPHND"])
async def test_layer_ranges_move_those_layers_only(axes: str, inline_bytes: int) -> None:
    spec = KVSpec.uniform(5, 2, 16)
    model = Model(spec, axes, 8, seed=13)
    per_layer = spec.block_bytes // 5
    async with opened(spec, inline_bytes=inline_bytes) as bench:
        region = bench.backend.make_region(model.kv, spec, axes)
        await bench.move(region, [3, 6], [0, 1], False, (1, 3))
        for slot, block in ((0, 3), (1, 6)):
            got, want = bench.bytes_of(slot), model.block(block)
            assert np.array_equal(got[per_layer : 3 * per_layer], want[per_layer : 3 * per_layer])
            assert (got[:per_layer] == SENTINEL).all()
            assert (got[3 * per_layer :] == SENTINEL).all()
        await bench.move(region, [3, 6], [0, 1], False, (2, 2))  # an empty range is nothing
        for start in range(5):
            await bench.move(region, [3], [2], False, (start, start + 1))
        assert np.array_equal(bench.bytes_of(2), model.block(3))
        for wrong in ((0, 6), (-1, 2), (3, 2)):
            with pytest.raises(InputError, match="not within the region's 5 layers"):
                await bench.move(region, [3], [0], False, wrong)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_crew_moves_what_the_loop_moves(loop: str) -> None:
    spec = KVSpec.uniform(4, 8, 64)

    async def main() -> None:
        for inline_bytes in (0, 1 << 30):
            await check_round_trip(Model(spec, "PBNHD", 20, 14), 15, inline_bytes=inline_bytes)

    run_on(loop, main())


async def test_small_batches_stay_on_the_loop_and_large_ones_leave_it() -> None:
    spec = KVSpec.uniform(4, 8, 64)
    model = Model(spec, "PBNHD", 20, seed=16)
    async with opened(spec, inline_bytes=4 * spec.block_bytes) as bench:
        region = bench.backend.make_region(model.kv, spec, "PBNHD")
        await bench.move(region, range(4), range(4), False)
        assert bench.completions.wakeups == 0
        await bench.move(region, range(5), range(5), False)
        assert bench.completions.wakeups == 1
        await bench.move(region, [], [], False)
        assert bench.completions.wakeups == 1


async def test_a_copy_nobody_waits_for_still_lands_before_close_returns() -> None:
    spec = KVSpec.uniform(8, 8, 128)
    model = Model(spec, "PBNHD", 24, seed=17, plain=True)
    async with opened(spec, inline_bytes=0) as bench:
        region = bench.backend.make_region(model.kv, spec, "PBNHD")
        with held(bench.completions.crew):
            task = asyncio.create_task(bench.move(region, range(24), range(24), False))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert bench.completions.in_flight == 1
            del region
            closing = asyncio.create_task(bench.backend.aclose())
            await asyncio.sleep(0)
            assert not closing.done()
        await closing
        assert bench.completions.in_flight == 0
        for slot in range(24):
            assert np.array_equal(bench.bytes_of(slot), model.block(slot))
        await bench.backend.aclose()


async def test_many_copies_at_once_all_land() -> None:
    spec = KVSpec.uniform(2, 4, 64)
    model = Model(spec, "PBNHD", 64, seed=18)
    async with opened(spec, slots=64, inline_bytes=0) as bench:
        region = bench.backend.make_region(model.kv, spec, "PBNHD")
        await asyncio.gather(*(bench.move(region, [i], [63 - i], False) for i in range(64)))
        assert all(np.array_equal(bench.bytes_of(63 - i), model.block(i)) for i in range(64))


@pytest.mark.parametrize("inline_bytes", [0, 1 << 30])
@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ([0, 20], [0, 1], "device block 20 does not exist; there are 20"),
        ([0, 1], [0, 24], "host slot 24 does not exist; there are 24"),
        ([0, NO_SLOT], [0, 1], r"device block 4294967295 \(NO_SLOT\) does not exist"),
        ([0], [0, 1], "1 device blocks cannot pair with 2 host slots"),
    ],
)
async def test_ids_out_of_range_are_named_and_nothing_is_copied(
    inline_bytes: int, blocks: list[int], slots: list[int], message: str
) -> None:
    spec = KVSpec.uniform(2, 2, 16)
    model = Model(spec, "PBNHD", 20, seed=19)
    async with opened(spec, inline_bytes=inline_bytes) as bench:
        region = bench.backend.make_region(model.kv, spec, "PBNHD")
        with pytest.raises(InputError, match=message):
            await bench.move(region, blocks, slots, False)
        assert all((bench.arena.view(slot) == SENTINEL).all() for slot in range(24))


async def test_ids_that_are_no_block_numbers_are_refused() -> None:
    spec = KVSpec.uniform(1, 2, 16)
    model = Model(spec, "PBNHD", 5, seed=20)
    async with opened(spec) as bench:
        region = bench.backend.make_region(model.kv, spec, "PBNHD")
        good = np.array([0], np.uint32)
        for bad in (np.array([-1]), np.array([0.0]), np.array([[0]]), np.array([1 << 32])):
            with pytest.raises(InputError, match="device block"):
                await bench.backend.copy(BlockCopy(region, bad, good, False))


async def test_a_region_larger_than_the_slots_is_refused() -> None:
    small, large = KVSpec.uniform(1, 2, 16), KVSpec.uniform(16, 8, 16)
    async with opened(small) as bench:
        region = bench.backend.make_region(Model(large, "PBNHD", 4, 21).kv, large, "PBNHD")
        with pytest.raises(LayoutError, match="do not fit slots of 4096"):
            await bench.move(region, [0], [0], False)


async def test_a_closed_backend_says_so_and_a_full_queue_is_an_error() -> None:
    spec = KVSpec.uniform(8, 8, 128)
    model = Model(spec, "PBNHD", 24, seed=22, plain=True)
    bench = Bench(spec, inline_bytes=0)
    with pytest.raises(ClosedError, match="not open"):
        await bench.move(Region((), 1), [0], [0], False)
    await bench.backend.open(bench.services)
    region = bench.backend.make_region(model.kv, spec, "PBNHD")
    narrow = Completions(crew_threads=1, crew_queue=1)
    await bench.backend.open(
        Services(narrow, bench.arena, bench.services.identity, {"inline_bytes": 0})
    )
    with held(narrow.crew):
        tasks = [
            asyncio.create_task(bench.move(region, range(24), range(24), False)) for _ in range(4)
        ]
        await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if result is not None]
    assert len(refused) in (3, 4)  # 4: the semaphore itself was still queued
    assert all(isinstance(result, TransferError) for result in refused)
    assert "queue is full" in str(refused[0])
    await bench.backend.aclose()
    for completions in (narrow, bench.completions):
        assert await completions.aclose() == 0
    bench.arena.close()


@pytest.mark.parametrize("settings", [{"inline": 1}, {"inline_bytes": -1}, {"inline_bytes": "1"}])
async def test_unknown_settings_are_refused(settings: dict[str, Any]) -> None:
    bench = Bench(KVSpec.uniform(1, 1, 16), **settings)
    with pytest.raises(ConfigError, match="inline"):
        await bench.backend.open(bench.services)
    await bench.completions.aclose()
    bench.arena.close()


def test_it_is_a_device_backend_and_finds_the_host() -> None:
    assert isinstance(CpuBackend(), DeviceBackend)
    (device,) = CpuBackend.probe()
    assert device.name == "cpu"
    assert device.memory_bytes > 0


# --- regions in shared memory


def shared_caches(spec: KVSpec, blocks: int) -> tuple[Arena, Model]:
    """Caches of axes BPNHD that lie in one arena, a layer after the other."""
    model = Model(spec, "BPNHD", blocks, seed=23, plain=True)
    arena = Arena(spec.layers, blocks * spec.stride_bytes)
    for layer, (name, tensor) in enumerate(list(model.kv.items())):
        inside = arena.view(layer)[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
        inside[:] = tensor
        model.kv[name] = inside
        group = spec.group_of(layer)
        model.views[layer] = kv_layouts.by_letters(inside, "BPNHD", 16, group.parts)
    return arena, model


def test_shared_regions_open_at_other_addresses_with_the_same_bytes() -> None:
    spec = KVSpec.uniform(3, 2, 32)
    arena, model = shared_caches(spec, 6)
    backend = CpuBackend()
    region = backend.make_region(model.kv, spec, "BPNHD")
    files = set(os.listdir("/proc/self/fd"))
    handle = backend.export_region(region)
    assert len(handle.fds) == 1
    there = CpuBackend().import_region(handle)
    for fd in handle.fds:
        os.close(fd)
    assert len(set(os.listdir("/proc/self/fd")) - files) == 1  # the mapping's own
    assert there.blocks == 6
    for mine, theirs in zip(region.planes, there.planes, strict=True):
        assert mine.base != theirs.base
        low, high = plane_extent(theirs, there.blocks)
        base = int(there.owner[0].__array_interface__["data"][0])
        data = there.owner[0][low - base : high - base]
        own = list(model.kv.values())[mine.layer]
        assert data.tobytes() == own.tobytes()
    arena.close()


def _serve_copy(connection: Any) -> None:
    """Another process: open the region, save block 4 to slot 1, restore it to block 0."""
    from multiprocessing.reduction import recv_handle

    from flexkv.protocols import RegionHandle

    fd = recv_handle(connection)
    data, spec = connection.recv()

    async def main() -> None:
        async with opened(spec) as bench:
            region = bench.backend.import_region(RegionHandle(data, (fd,)))
            os.close(fd)
            await bench.move(region, [4], [1], False)
            await bench.move(region, [0], [1], True)

    asyncio.run(main())
    connection.send("done")


def test_another_process_copies_in_a_shared_region() -> None:
    from multiprocessing.reduction import send_handle

    spec = KVSpec.uniform(3, 2, 32)
    arena, model = shared_caches(spec, 6)
    backend = CpuBackend()
    handle = backend.export_region(backend.make_region(model.kv, spec, "BPNHD"))
    before = model.all()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_serve_copy, args=(there,))
    child.start()
    assert child.pid is not None
    send_handle(here, handle.fds[0], child.pid)
    here.send((handle.data, spec))
    assert here.recv() == "done"
    child.join()
    after = model.all()
    assert np.array_equal(after[0], before[4])
    assert all(np.array_equal(after[i], before[i]) for i in range(1, 6))
    for connection in (here, there):
        connection.close()
    os.close(handle.fds[0])
    child.close()
    arena.close()


def test_ordinary_memory_cannot_be_exported() -> None:
    spec = KVSpec.uniform(2, 2, 16)
    backend = CpuBackend()
    region = backend.make_region(Model(spec, "PBNHD", 4, 24).kv, spec, "PBNHD")
    with pytest.raises(LayoutError, match=r"ordinary memory of this process.*share_memory_"):
        backend.export_region(region)


def _bend(change: Callable[[bytes], bytes]) -> tuple[Any, Arena]:
    from flexkv.protocols import RegionHandle

    spec = KVSpec.uniform(1, 2, 32)
    arena, model = shared_caches(spec, 6)
    backend = CpuBackend()
    handle = backend.export_region(backend.make_region(model.kv, spec, "BPNHD"))
    return RegionHandle(change(handle.data), handle.fds), arena


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
    handle, arena = _bend(change)
    with pytest.raises(LayoutError, match="no handle of a cpu region"):
        CpuBackend().import_region(handle)
    for fd in handle.fds:
        os.close(fd)
    arena.close()


# --- torch


def _run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@pytest.mark.torch
def test_torch_blocks_come_back() -> None:
    torch = pytest.importorskip("torch")
    spec = KVSpec.uniform(2, 4, 32)

    async def main() -> None:
        kv = {str(i): torch.randn(2, 10, 16, 4, 32).bfloat16() for i in range(2)}
        want = {name: tensor.clone() for name, tensor in kv.items()}
        async with opened(spec) as bench:
            region = bench.backend.make_region(kv, spec, "PBNHD")
            await bench.move(region, [1, 7, 3], [5, 0, 9], False)
            for tensor in kv.values():
                tensor.zero_()
            await bench.move(region, [0, 1, 2], [5, 0, 9], True)
        for name, tensor in kv.items():
            assert torch.equal(tensor[:, :3], want[name][:, [1, 7, 3]])
            assert not tensor[:, 3:].any()

    _run(main())


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
