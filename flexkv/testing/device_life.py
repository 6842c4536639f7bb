"""How a device backend lives: opening, copies in flight, giving up, failing, closing."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from flexkv.errors import ClosedError, ConfigError, FlexKVError, TransferError
from flexkv.model import KVSpec
from flexkv.protocols import BlockCopy
from flexkv.testing.device_bench import DeviceBench, DeviceKit, OpenDevice, opened, same
from flexkv.testing.guard import (
    give_up,
    leaves_nothing,
    longest_stall,
    no_blocking_calls,
    on_loop,
    refused,
    require,
    within,
)
from flexkv.testing.harness import DeviceHarness
from flexkv.testing.kv_memory import KvMemory

COPY = "DeviceBackend.copy"
OPEN = "DeviceBackend.open"
CLOSE = "DeviceBackend.aclose"

LARGE = KVSpec.uniform(8, 8, 128)  # 512 KiB per block
_PROMPTLY_S = 1.0
_GRACE_S = 0.05  # in which bytes would land that come late


class DeviceLifeTests(DeviceKit):
    """Opening, giving up, failing and closing."""

    @on_loop
    async def test_a_backend_that_is_not_open_says_so(self, bench: DeviceBench) -> None:
        spec = KVSpec.uniform(1, 2, 16)
        async with opened(bench, spec) as device:
            device.memory(bench.axes("PBNHD"), 4)
            one = np.zeros(1, np.uint32)
            batch = BlockCopy(device.region, one, one, False)
            with refused(ClosedError, COPY, "a copy by a backend that was never opened"):
                await bench.harness.make().copy(batch)
            await device.backend.aclose()
            with refused(ClosedError, COPY, "a copy by a backend that is closed"):
                await device.backend.copy(batch)

    @on_loop
    async def test_closing_twice_or_unopened_is_fine(self, bench: DeviceBench) -> None:
        what = "aclose does not end"
        await within(bench.limit_s, bench.harness.make().aclose(), CLOSE, f"{what} when not open")
        async with opened(bench, KVSpec.uniform(1, 2, 16)) as device:
            await within(bench.limit_s, device.backend.aclose(), CLOSE, what)
            await within(bench.limit_s, device.backend.aclose(), CLOSE, f"a second {what}")

    @on_loop
    async def test_unknown_settings_are_refused(self, bench: DeviceBench) -> None:
        with refused(ConfigError, OPEN, "a setting that the backend does not know"):
            async with opened(bench, KVSpec.uniform(1, 2, 16), no_such_setting=1):
                pass

    @on_loop
    async def test_opening_and_closing_leaves_nothing_behind(self, bench: DeviceBench) -> None:
        async def once() -> None:
            async with opened(bench, KVSpec.uniform(1, 2, 16)) as device:
                device.memory(bench.axes("PBNHD"), 4)
                await device.copy([1], [2], to_device=False)

        await leaves_nothing(once, CLOSE)

    @pytest.mark.parametrize("to_device", [False, True])
    @on_loop
    async def test_a_copy_returns_only_when_its_bytes_have_landed(
        self, bench: DeviceBench, to_device: bool
    ) -> None:
        """Large copies and small ones at once, each looked at the moment that it returns."""
        async with opened(bench, LARGE) as device:
            memory = device.memory(bench.axes("PBNHD"), 24, plain=True)
            before, late = memory.snapshot(), list[int]()
            wanted = [memory.block(before, 23 - n if to_device else n) for n in range(24)]

            async def copy(blocks: list[int]) -> None:
                if to_device:
                    for block in blocks:
                        device.bytes_of(block)[:] = wanted[block]
                await device.copy(blocks, blocks, to_device=to_device)
                now = memory.snapshot() if to_device else []
                for block in reversed(blocks):  # the last ones land last
                    got = memory.block(now, block) if to_device else device.bytes_of(block)
                    if not np.array_equal(got, wanted[block]):
                        late.append(block)

            for _ in range(5):
                await copy(list(range(24)))
                device.wipe()
                if to_device:
                    memory.fill(device.rng)
            async with anyio.create_task_group() as group:
                for blocks in (list(range(16)), [16], list(range(17, 22)), [22], [23]):
                    group.start_soon(copy, blocks)
            require(
                not late,
                COPY,
                f"copy returned before the bytes of blocks {late} had landed",
            )

    @on_loop
    async def test_a_copy_waits_for_hardware_that_stands_still(self, bench: DeviceBench) -> None:
        async with opened(bench, LARGE) as device:
            memory = device.memory(bench.axes("PBNHD"), 24, plain=True)
            before, over = memory.snapshot(), anyio.Event()

            async def copy() -> None:
                await device.copy(range(24), range(24), to_device=False)
                over.set()

            async with anyio.create_task_group() as group:
                with _held(device):
                    group.start_soon(copy)
                    await anyio.sleep(_GRACE_S)
                    require(
                        not over.is_set(),
                        COPY,
                        "the hardware stands still, but copy has returned: nothing landed",
                    )
                await within(bench.limit_s, over.wait(), COPY, "the copy does not end")
            require(
                all(np.array_equal(device.bytes_of(n), memory.block(before, n)) for n in range(24)),
                COPY,
                "copy returned before all bytes had landed",
            )

    @on_loop
    async def test_giving_up_takes_effect_at_once_and_close_waits(self, bench: DeviceBench) -> None:
        """A deadline passes while the hardware stands still: the caller goes, the copy stays."""
        async with opened(bench, LARGE) as device:
            memory = device.memory(bench.axes("PBNHD"), 24, plain=True)
            before, closed = memory.snapshot(), anyio.Event()

            async def close() -> None:
                await device.backend.aclose()
                closed.set()

            async with anyio.create_task_group() as group:
                with _held(device):
                    await give_up(_copy_all(device, False), _GRACE_S, _PROMPTLY_S, COPY)
                    group.start_soon(close)
                    await anyio.sleep(_GRACE_S)
                    require(
                        not closed.is_set(),
                        CLOSE,
                        "aclose returned while a copy that its caller gave up on was in flight: "
                        "its memory would be given away",
                    )
                await within(bench.limit_s, closed.wait(), CLOSE, "aclose does not end")
            await _nothing_lands_any_more(device, memory)
            require(same(memory.snapshot(), before), COPY, "device -> host changed the device")

    @pytest.mark.parametrize("to_device", [False, True])
    @on_loop
    async def test_no_byte_lands_after_close_whoever_gave_up(
        self, bench: DeviceBench, to_device: bool
    ) -> None:
        async with opened(bench, LARGE) as device:
            memory = device.memory(bench.axes("PBNHD"), 24, plain=True)
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(_copy_all, device, to_device)
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
            await within(bench.limit_s, device.backend.aclose(), CLOSE, "aclose does not end")
            await _nothing_lands_any_more(device, memory)

    @on_loop
    async def test_close_while_copies_are_in_flight_waits_for_them(
        self, bench: DeviceBench
    ) -> None:
        async with opened(bench, LARGE) as device:
            memory = device.memory(bench.axes("PBNHD"), 24, plain=True)
            before, returned = memory.snapshot(), []

            async def copy(block: int) -> None:
                with contextlib.suppress(FlexKVError):  # refused because it closes: fine
                    await device.copy([block], [block], to_device=False)
                    returned.append(block)

            async with anyio.create_task_group() as group:
                for block in range(24):
                    group.start_soon(copy, block)
                await anyio.lowlevel.checkpoint()
                await within(bench.limit_s, device.backend.aclose(), CLOSE, "aclose does not end")
                saved = {block: device.bytes_of(block).copy() for block in range(24)}
            wrong = [n for n in returned if not np.array_equal(saved[n], memory.block(before, n))]
            require(
                not wrong,
                CLOSE,
                f"copies of blocks {wrong} returned well, but when aclose returned their bytes had "
                "not landed",
            )
            await _nothing_lands_any_more(device, memory)

    @pytest.mark.parametrize("to_device", [False, True])
    @on_loop
    async def test_a_copy_that_fails_says_so_and_the_next_one_works(
        self, bench: DeviceBench, to_device: bool
    ) -> None:
        async with opened(bench, LARGE) as device:
            memory = device.memory(bench.axes("PBNHD"), 8, plain=True)
            failing = bench.harness.fail(device.backend, device.services)
            with failing, refused(TransferError, COPY, "a copy that the hardware failed"):
                await device.copy(range(8), range(8), to_device=to_device)
            memory.fill(device.rng)
            before = memory.snapshot()
            await device.copy([5], [3], to_device=False)
            require(
                np.array_equal(device.bytes_of(3), memory.block(before, 5)),
                COPY,
                "the copy after one that failed brought other bytes",
            )

    @on_loop
    async def test_a_completion_that_never_comes_ends_in_time(self, bench: DeviceBench) -> None:
        """The bytes may have landed or not; nobody waits for ever, and no ticket stays out."""
        async with opened(bench, LARGE) as device:
            memory = device.memory(bench.axes("PBNHD"), 8, plain=True)
            before = memory.snapshot()
            with bench.harness.lose(device.backend, device.services):
                copying = device.copy(range(8), range(8), to_device=False)
                with contextlib.suppress(TransferError):
                    await within(bench.limit_s, copying, COPY, "a copy waits for ever")
                    landed = [
                        np.array_equal(device.bytes_of(n), memory.block(before, n))
                        for n in range(8)
                    ]
                    what = "no completion came and no byte, but copy returned as if all was well"
                    require(all(landed), COPY, what)

    @pytest.mark.parametrize("to_device", [False, True])
    @on_loop
    async def test_large_copies_do_not_keep_the_loop_from_running(
        self, bench: DeviceBench, to_device: bool
    ) -> None:
        async with opened(bench, LARGE, slots=128) as device:
            device.memory(bench.axes("PBNHD"), 128, plain=True)

            async def work() -> None:
                await device.copy(range(128), range(128), to_device=to_device)

            stall_ms = await longest_stall(work)
            require(
                not stall_ms,
                COPY,
                f"a copy of 64 MiB keeps the event loop from running for {stall_ms:.1f} ms, most "
                "of its duration: wait for a ticket instead of the hardware",
            )

    @on_loop
    async def test_nothing_blocking_is_called_on_the_loop(
        self, harness: DeviceHarness, bench: DeviceBench
    ) -> None:
        async with opened(bench, LARGE) as device:
            device.memory(bench.axes("PBNHD"), 24, plain=True)
            with no_blocking_calls(harness.plugin, COPY):
                for to_device in (False, True):
                    await device.copy(range(24), range(24), to_device=to_device)
                    await device.copy([1], [2], to_device=to_device)
                await device.backend.aclose()


def _held(device: OpenDevice) -> Any:
    return device.harness.hold(device.backend, device.services)


async def _copy_all(device: OpenDevice, to_device: bool) -> None:
    await device.copy(range(24), range(24), to_device=to_device)


async def _nothing_lands_any_more(device: OpenDevice, memory: KvMemory) -> None:
    device.wipe()
    before = memory.snapshot()
    await anyio.sleep(_GRACE_S)
    require(
        device.untouched(range(device.services.arena.slots)),
        CLOSE,
        "bytes landed in host slots after aclose returned: they belong to somebody else by then",
    )
    require(
        same(memory.snapshot(), before),
        CLOSE,
        "bytes landed on the device after aclose returned: they belong to somebody else by then",
    )
