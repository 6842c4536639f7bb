"""What every device backend must do with bytes; `DeviceBackendTests` is the whole set.

Subclass it in a test module and return a `DeviceHarness` from the fixture `harness`. The tests of
life and of processes come from `device_life` and `device_processes`.
"""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from flexkv.errors import InputError, LayoutError
from flexkv.model import NO_SLOT, KVSpec, LayerGroup
from flexkv.protocols import API_VERSION, BlockCopy, DeviceBackend, DeviceInfo
from flexkv.testing.device_bench import SENTINEL, SLOTS, DeviceBench, opened, same
from flexkv.testing.device_life import DeviceLifeTests
from flexkv.testing.device_processes import DeviceProcessTests
from flexkv.testing.guard import on_loop, refused, require
from flexkv.testing.harness import ONE_TENSOR, PER_LAYER, DeviceHarness

COPY = "DeviceBackend.copy"
REGION = "DeviceBackend.make_region"
PROBE = "DeviceBackend.probe"


class DeviceBackendTests(DeviceLifeTests, DeviceProcessTests):
    """All that a device backend must do. Override `harness`."""

    def test_it_has_the_verbs_of_the_door(self, harness: DeviceHarness) -> None:
        backend = harness.make()
        require(
            isinstance(backend, DeviceBackend) and backend.flexkv_api == API_VERSION,
            "DeviceBackend",
            f"{backend!r} must have flexkv_api = {API_VERSION} and every verb of DeviceBackend",
        )

    def test_probe_lists_devices_and_never_raises(self, harness: DeviceHarness) -> None:
        for _ in range(2):
            try:
                found = list(harness.make().probe())
            except Exception as error:
                require(False, PROBE, f"probe must never raise, but raised {error!r}")
            for info in found:
                good = isinstance(info, DeviceInfo) and info.name and info.memory_bytes >= 0
                require(good, PROBE, f"probe lists DeviceInfo with a name, not {info!r}")

    @pytest.mark.parametrize("order", ["PNHD", "HNPD"])
    @pytest.mark.parametrize("axes", PER_LAYER + ONE_TENSOR)
    @on_loop
    async def test_blocks_come_back_in_every_layout(
        self, harness: DeviceHarness, bench: DeviceBench, axes: str, order: str
    ) -> None:
        if axes not in harness.axes:
            pytest.skip(f"the harness does not list {axes}")
        spec = KVSpec.uniform(3, 4, 16, tokens_per_block=8, axes=order)
        await bench.round_trip(spec, axes, 30)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "uint8"])
    @on_loop
    async def test_blocks_come_back_in_every_dtype(
        self, harness: DeviceHarness, bench: DeviceBench, dtype: str
    ) -> None:
        if dtype not in harness.dtypes:
            pytest.skip(f"the harness does not list {dtype}")
        await bench.round_trip(
            KVSpec.uniform(2, 3, 24, dtype, tokens_per_block=16), bench.axes("PBNHD"), 12
        )

    @on_loop
    async def test_blocks_of_random_shapes_and_layouts_come_back(
        self, harness: DeviceHarness, bench: DeviceBench
    ) -> None:
        rng = bench.rng
        for _ in range(25):
            spec = KVSpec.uniform(
                rng.randint(1, 4),
                rng.randint(1, 5),
                rng.choice([1, 8, 24, 128]),
                rng.choice(list(harness.dtypes)),
                parts=rng.choice([1, 2]),
                tokens_per_block=rng.choice([1, 4, 16]),
                axes=rng.choice(["PNHD", "PHND", "NPHD", "HNPD"]),
            )
            await bench.round_trip(spec, rng.choice(list(harness.axes)), rng.randint(1, 30))

    @pytest.mark.parametrize("axes", ["BND", "TD", "BN1D", "LBND"])
    @on_loop
    async def test_latent_caches_come_back(
        self, harness: DeviceHarness, bench: DeviceBench, axes: str
    ) -> None:
        if axes not in harness.latent_axes:
            pytest.skip(f"the harness does not list {axes}")
        spec = KVSpec.uniform(3, 1, 576, "bfloat16", parts=1)
        await bench.round_trip(spec, axes, 20)

    @on_loop
    async def test_layer_groups_of_different_shapes_come_back(
        self, harness: DeviceHarness, bench: DeviceBench
    ) -> None:
        if not {"BHNC", "BND", "PBNHD"} <= {*harness.axes, *harness.latent_axes}:
            pytest.skip("the harness does not list BHNC, BND and PBNHD")
        groups = (
            LayerGroup((0, 3), heads=4, head_size=32, dtype="bfloat16"),
            LayerGroup((1,), heads=1, head_size=40, dtype="uint8", parts=1),
            LayerGroup((2, 4), heads=2, head_size=64, dtype="float32"),
        )
        await bench.round_trip(KVSpec(groups), "BHNC,BND,PBNHD", 20)

    @on_loop
    async def test_random_splits_and_permutations_keep_the_order(self, bench: DeviceBench) -> None:
        spec, rng = KVSpec.uniform(2, 2, 16, tokens_per_block=4), bench.rng
        async with opened(bench, spec, slots=12) as device:
            memory = device.memory(bench.axes("PBNHD"), 20)
            for _ in range(50):
                n = rng.randint(1, 12)
                blocks, slots = rng.sample(range(20), n), rng.sample(range(12), n)
                targets, before = rng.sample(range(20), n), memory.snapshot()
                cuts = sorted(rng.randint(0, n) for _ in range(2))
                for begin, end in zip([0, *cuts], [*cuts, n], strict=True):
                    await device.copy(blocks[begin:end], slots[begin:end], to_device=False)
                mixed = rng.sample(range(n), n)
                await device.copy(
                    [targets[i] for i in mixed], [slots[i] for i in mixed], to_device=True
                )
                expected = [data.copy() for data in before]
                for target, block in zip(targets, blocks, strict=True):
                    memory.place(expected, target, memory.block(before, block))
                require(
                    same(memory.snapshot(), expected),
                    COPY,
                    f"item i pairs device_blocks[i] with host_slots[i]: blocks {blocks} went "
                    f"through slots {slots} to blocks {targets} and came out otherwise",
                )

    @pytest.mark.parametrize("axes", ["PBNHD", "BLPNHD", "BPHND"])
    @on_loop
    async def test_layer_ranges_move_those_layers_only(
        self, harness: DeviceHarness, bench: DeviceBench, axes: str
    ) -> None:
        if not harness.layer_ranges or axes not in harness.axes:
            pytest.skip("the harness does not offer layer_ranges, or this layout")
        spec = KVSpec.uniform(5, 2, 16)
        size = spec.block_bytes // 5
        async with opened(bench, spec) as device:
            memory = device.memory(axes, 8)
            before = memory.snapshot()
            await device.copy([3, 6], [0, 1], to_device=False, layers=(1, 3))
            for slot, block in ((0, 3), (1, 6)):
                want = np.full(spec.block_bytes, SENTINEL, np.uint8)
                want[size : 3 * size] = memory.block(before, block)[size : 3 * size]
                require(
                    np.array_equal(device.bytes_of(slot), want),
                    COPY,
                    "layers=(1, 3) must move layers 1 and 2, to their place in the host block, and "
                    "nothing else",
                )
            await device.copy([3, 6], [0, 1], to_device=False, layers=(2, 2))
            expected = [data.copy() for data in before]
            for layer in range(5):
                await device.copy([3], [2], to_device=False, layers=(layer, layer + 1))
            for layer in reversed(range(5)):
                await device.copy([7], [2], to_device=True, layers=(layer, layer + 1))
            memory.place(expected, 7, memory.block(before, 3))
            require(
                same(memory.snapshot(), expected),
                COPY,
                "a block moved layer by layer must be the block moved as a whole",
            )
            for wrong in ((0, 6), (-1, 2), (3, 2)):
                with refused(InputError, COPY, f"layers={wrong} of 5 layers"):
                    await device.copy([3], [0], to_device=False, layers=wrong)

    @on_loop
    async def test_many_copies_at_once_all_land(self, bench: DeviceBench) -> None:
        spec = KVSpec.uniform(2, 4, 64)
        async with opened(bench, spec, slots=64) as device:
            memory = device.memory(bench.axes("PBNHD"), 64)
            before = memory.snapshot()
            wrong: list[int] = []

            async def copy(block: int) -> None:
                await device.copy([block], [63 - block], to_device=False)
                if not np.array_equal(device.bytes_of(63 - block), memory.block(before, block)):
                    wrong.append(block)

            async with anyio.create_task_group() as group:
                for block in range(64):
                    group.start_soon(copy, block)
            require(
                not wrong,
                COPY,
                f"of 64 copies at once, those of blocks {wrong} returned with other bytes than "
                "theirs in the slot: each returns when its own bytes have landed",
            )

    @on_loop
    async def test_an_empty_batch_is_nothing(self, bench: DeviceBench) -> None:
        async with opened(bench, KVSpec.uniform(1, 2, 16)) as device:
            memory = device.memory(bench.axes("PBNHD"), 4)
            before = memory.snapshot()
            for to_device in (False, True):
                await device.copy([], [], to_device=to_device)
            require(same(memory.snapshot(), before), COPY, "an empty batch moved bytes")

    @pytest.mark.parametrize(
        ("blocks", "slots", "what"),
        [
            ([0, 20], [0, 1], "device block 20 of 20"),
            ([0, 1], [0, SLOTS], f"host slot {SLOTS} of {SLOTS}"),
            ([0, NO_SLOT], [0, 1], "device block NO_SLOT"),
            ([0, 1], [NO_SLOT, 0], "host slot NO_SLOT"),
            ([0], [0, 1], "1 device block with 2 host slots"),
        ],
    )
    @pytest.mark.parametrize("to_device", [False, True])
    @on_loop
    async def test_ids_out_of_range_are_refused_before_anything_moves(
        self, bench: DeviceBench, blocks: list[int], slots: list[int], what: str, to_device: bool
    ) -> None:
        spec = KVSpec.uniform(2, 2, 16)
        async with opened(bench, spec) as device:
            memory = device.memory(bench.axes("PBNHD"), 20)
            before = memory.snapshot()
            with refused(InputError, COPY, what):
                await device.copy(blocks, slots, to_device=to_device)
            require(
                same(memory.snapshot(), before) and device.untouched(range(SLOTS)),
                COPY,
                f"a batch with {what} was refused, but moved bytes first",
            )

    @on_loop
    async def test_ids_that_are_no_block_numbers_are_refused(self, bench: DeviceBench) -> None:
        async with opened(bench, KVSpec.uniform(1, 2, 16)) as device:
            device.memory(bench.axes("PBNHD"), 5)
            good = np.array([0], np.uint32)
            for bad in (np.array([-1]), np.array([0.0]), np.array([[0]]), np.array([1 << 32])):
                with refused(InputError, COPY, f"device_blocks={bad!r}"):
                    await device.backend.copy(BlockCopy(device.region, bad, good, False))

    @on_loop
    async def test_a_region_larger_than_the_slots_is_refused(self, bench: DeviceBench) -> None:
        async with opened(bench, KVSpec.uniform(1, 2, 16)) as device:
            device.memory(bench.axes("PBNHD"), 4, spec=KVSpec.uniform(16, 8, 16))
            with refused(LayoutError, COPY, "a block of 64 KiB in slots of 4 KiB"):
                await device.copy([0], [0], to_device=False)

    @on_loop
    async def test_tensors_that_do_not_fit_the_spec_are_refused(self, bench: DeviceBench) -> None:
        async with opened(bench, KVSpec.uniform(2, 4, 16)) as device:
            axes = bench.axes("PBNHD")
            device.memory(axes, 4)
            for other, what in (
                (KVSpec.uniform(3, 4, 16), "2 layers for a spec of 3"),
                (KVSpec.uniform(2, 4, 24), "a head size of 16 for a spec of 24"),
                (KVSpec.uniform(2, 4, 16, "float32"), "bfloat16 for a spec of float32"),
            ):
                with refused(LayoutError, REGION, what):
                    device.harness.make_region(device.backend, device.kept[-1].tensors, other, axes)

    @on_loop
    async def test_a_region_is_never_taken_for_one_that_is_gone(self, bench: DeviceBench) -> None:
        """A cache by `id(region)` finds the old addresses when the id is given away again."""
        spec = KVSpec.uniform(1, 2, 16)
        async with opened(bench, spec) as device:
            memories = [device.memory(bench.axes("PBNHD"), 3) for _ in range(5)]
            wanted = [memory.block(memory.snapshot(), 2) for memory in memories]
            for turn in range(200):
                device.region = None
                device.register(memories[turn % 5])
                await device.copy([2], [0], to_device=False)
                require(
                    np.array_equal(device.bytes_of(0), wanted[turn % 5]),
                    COPY,
                    f"after {turn} other regions that are gone by now, block 2 of a new region "
                    "came with other bytes: what is remembered of a region must not outlive it",
                )
