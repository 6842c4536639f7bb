"""A device backend and other processes: regions opened elsewhere, forks, handles that are none."""

from __future__ import annotations

import os
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from flexkv.errors import LayoutError
from flexkv.model import KVSpec
from flexkv.protocols import RegionHandle
from flexkv.testing.children import ChildError, in_child, in_fork
from flexkv.testing.device_bench import DeviceBench, DeviceKit, OpenDevice, opened, same
from flexkv.testing.guard import on_loop, refused, require
from flexkv.testing.harness import DeviceHarness, Origin

EXPORT = "DeviceBackend.export_region"
IMPORT = "DeviceBackend.import_region"
PROBE = "DeviceBackend.probe"

_SPEC = KVSpec.uniform(3, 2, 32)


class DeviceProcessTests(DeviceKit):
    """Handles and forks."""

    @on_loop
    async def test_another_process_opens_a_region_and_copies_in_it(
        self, harness: DeviceHarness, bench: DeviceBench
    ) -> None:
        async with opened(bench, _SPEC) as device:
            memory = device.memory(bench.axes("BPNHD"), 6, plain=True, shared=harness.exportable)
            if not harness.exportable:
                with refused(LayoutError, EXPORT, "export of memory that cannot be shared"):
                    device.backend.export_region(device.region)
                return
            before = memory.snapshot()
            handle = device.backend.export_region(device.region)
            try:
                work = partial(in_child, _save_and_restore, harness.origin, handle.data, _SPEC)
                await anyio.to_thread.run_sync(partial(work, fds=handle.fds))
            except ChildError as error:
                require(False, IMPORT, f"another process could not copy in the region: {error}")
            finally:
                _close(handle)
            expected = [data.copy() for data in before]
            memory.place(expected, 0, memory.block(before, 4))
            require(
                same(memory.snapshot(), expected),
                IMPORT,
                "another process moved block 4 to block 0 of the region, but it is not there, or "
                "other bytes changed",
            )

    @on_loop
    async def test_a_region_is_made_before_the_backend_is_open(self, bench: DeviceBench) -> None:
        """Worker processes register their memory before anybody asks them to copy."""
        async with opened(bench, _SPEC) as device:
            memory = device.memory(bench.axes("PBNHD"), 6)
            before, other = memory.snapshot(), bench.harness.make()
            device.region = device.harness.make_region(other, memory.tensors, _SPEC, memory.axes)
            await device.copy([4], [1], to_device=False)
            require(
                np.array_equal(device.bytes_of(1), memory.block(before, 4)),
                "DeviceBackend.make_region",
                "a region made by a backend that is not open must be good for one that is",
            )

    @on_loop
    async def test_handles_that_are_none_are_refused(
        self, harness: DeviceHarness, bench: DeviceBench
    ) -> None:
        async with opened(bench, _SPEC) as device:
            handles = [b"", b"{}", b"\x00" * 64, bench.rng.randbytes(200)]
            for data in handles:
                with refused(LayoutError, IMPORT, f"a handle of {len(data)} bytes of nonsense"):
                    device.backend.import_region(RegionHandle(data))
            if harness.exportable:
                device.memory(bench.axes("BPNHD"), 6, plain=True, shared=True)
                handle = device.backend.export_region(device.region)
                cut = RegionHandle(handle.data[: len(handle.data) // 2], handle.fds)
                with refused(LayoutError, IMPORT, "half of a handle"):
                    device.backend.import_region(cut)
                _close(handle)

    def test_probe_creates_no_context(self, harness: DeviceHarness) -> None:
        """After a probe, a fork can still use the device: contexts do not survive forks."""
        try:
            in_child(_fork_after_probe, harness.origin)
        except ChildError as error:
            require(
                False,
                PROBE,
                "after probe() in a process, a fork of it cannot use the device any more: probe "
                f"must not create a context, nor may import\n{error}",
            )

    @on_loop
    async def test_a_fork_that_ends_disturbs_nobody(self, bench: DeviceBench) -> None:
        async with opened(bench, _SPEC) as device:
            memory = device.memory(bench.axes("PBNHD"), 6)
            before = memory.snapshot()
            await device.copy([1], [1], to_device=False)
            in_fork(_nothing)
            await device.copy([4], [2], to_device=False)
            require(
                np.array_equal(device.bytes_of(2), memory.block(before, 4)),
                "DeviceBackend.copy",
                "after a fork of the process has ended, a copy brings other bytes",
            )


def _close(handle: RegionHandle) -> None:
    for fd in handle.fds:
        os.close(fd)


def _nothing() -> None:
    pass


def _bench(origin: Origin, place: str) -> DeviceBench:
    return DeviceBench(origin.make(), Path(place), random.Random(1), 30.0)


def _save_and_restore(origin: Origin, data: bytes, spec: KVSpec, fds: tuple[int, ...] = ()) -> None:
    """In another process: save block 4 of the region to slot 1, restore it to block 0."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as place:
            async with opened(_bench(origin, place), spec) as device:
                handle = RegionHandle(data, fds)
                device.region = device.backend.import_region(handle)
                _close(handle)
                await device.copy([4], [1], to_device=False)
                await device.copy([0], [1], to_device=True)

    anyio.run(main)


def _fork_after_probe(origin: Origin) -> None:
    origin.make().make().probe()
    in_fork(partial(_use, origin))


def _use(origin: Origin) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory() as place:
            bench = _bench(origin, place)
            async with opened(bench, _SPEC) as device:
                await _one_copy(bench, device)

    anyio.run(main)


async def _one_copy(bench: DeviceBench, device: OpenDevice) -> Any:
    memory = device.memory(bench.axes("PBNHD"), 6)
    before = memory.snapshot()
    await device.copy([4], [2], to_device=False)
    assert np.array_equal(device.bytes_of(2), memory.block(before, 4))
