"""Device memory of another process, by cudaIpc handles, on the fake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest
from cuda_rig import SPEC, Bench, opened
from fake_cuda.backend import FakeCuda

from flexkv.errors import LayoutError, TransferError
from flexkv.protocols import RegionHandle

Process = subprocess.Popen[str]


@pytest.fixture
def exporter() -> Iterator[Process]:
    """A process that has exported a region; it is killed at the end."""
    child = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "cuda_child.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        yield child
        child.kill()


def say(child: Process, line: str = "") -> str:
    """What the process answers."""
    assert child.stdin is not None
    assert child.stdout is not None
    if line:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    return child.stdout.readline().strip()


async def test_a_region_is_exported_imported_and_copied_until_its_process_dies(
    exporter: Process,
) -> None:
    handle = RegionHandle(bytes.fromhex(say(exporter)))
    async with opened(timeout_ms=50) as bench:
        fake = bench.backend.fake()
        region = bench.backend.import_region(handle)
        assert bench.backend.import_region(handle).planes == region.planes
        await bench.copy([3, 9], [0, 1], to_device=False, region=region)
        assert [int(bench.slot(slot).max()) for slot in (0, 1)] == [3, 9]
        await bench.copy([0, 1], [1, 0], to_device=True, region=region)
        assert say(exporter, "look").split()[:4] == ["9", "3", "2", "3"]

        exporter.kill()
        exporter.wait()
        with fake.trouble():
            for to_device in (True, False):
                with anyio.fail_after(10), pytest.raises(TransferError):
                    await bench.copy([5], [0], to_device=to_device, region=region)
            assert [int(bench.slot(slot).max()) for slot in (0, 1)] == [3, 9]
        with pytest.raises(LayoutError, match="cannot be opened"):
            bench.backend.import_region(handle_of_the_dead(handle))
        assert await bench.saves([4], [2])


def handle_of_the_dead(handle: RegionHandle) -> RegionHandle:
    """The handle, under another number: as of memory that is not open here yet."""
    import json

    text = json.loads(handle.data)
    (name, size), *rest = text["memory"]
    content = bytearray.fromhex(name)
    content[16:24] = (1 << 40).to_bytes(8, "little")
    text["memory"] = [(content.hex(), size), *rest]
    return RegionHandle(json.dumps(text).encode())


async def test_what_was_imported_is_closed_with_the_last_region_or_the_backend(
    exporter: Process,
) -> None:
    handle = RegionHandle(bytes.fromhex(say(exporter)))
    fake = FakeCuda.fake()
    async with opened() as bench:
        regions = [bench.backend.import_region(handle) for _ in range(2)]
        assert fake.living()["imports"] == SPEC.layers  # one allocation for each
        del regions[0]
        assert fake.living()["imports"] == SPEC.layers
        del regions[0]
        assert fake.living()["imports"] == 0
        kept = bench.backend.import_region(handle)
        assert len(kept.planes) == SPEC.layers
    assert fake.living()["imports"] == 0


@pytest.mark.parametrize("call", ["cudaIpcGetMemHandle", "cuMemGetAddressRange_v2"])
async def test_memory_that_the_driver_does_not_share_is_refused(call: str) -> None:
    async with opened() as bench:
        with bench.backend.fake().trouble() as fake:
            fake.inject(call, error=1)
            with pytest.raises(LayoutError, match=r"layer 0: .*expandable_segments"):
                bench.backend.export_region(bench.region)


async def test_opening_is_refused_with_what_the_driver_says(exporter: Process) -> None:
    handle = RegionHandle(bytes.fromhex(say(exporter)))
    async with opened() as bench:
        with bench.backend.fake().trouble() as fake:
            fake.inject("cudaIpcOpenMemHandle", error=201, skip=1)  # the second of two
            with pytest.raises(LayoutError, match=r"cannot be opened: cudaIpcOpenMemHandle"):
                bench.backend.import_region(handle)
        assert fake.living()["imports"] == 0
        own = bench.backend.export_region(bench.region)
        with pytest.raises(LayoutError, match="cannot be opened"):
            bench.backend.import_region(own)


async def test_a_handle_that_reaches_outside_its_memory_is_refused(exporter: Process) -> None:
    data = bytes.fromhex(say(exporter)).replace(b'"blocks": 16', b'"blocks": 99')
    async with opened() as bench:
        with pytest.raises(LayoutError, match="reaches outside its memory"):
            bench.backend.import_region(RegionHandle(data))
        assert bench.backend.fake().living()["imports"] == 0


async def test_regions_of_a_layer_range_of_another_process_are_copied(exporter: Process) -> None:
    handle = RegionHandle(bytes.fromhex(say(exporter)))
    async with opened() as bench:
        region, half = bench.backend.import_region(handle), SPEC.block_bytes // 2
        check_layers(bench, half, 0)
        await bench.copy([7], [0], to_device=False, region=region, layers=(1, 2))
        check_layers(bench, half, 7)


def check_layers(bench: Bench, half: int, second: int) -> None:
    """The first layer in slot 0 is empty, the second holds a number."""
    expected = np.repeat(np.array([0, second], np.uint8), half)
    assert np.array_equal(bench.slot(0), expected)
