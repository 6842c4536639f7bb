"""The real `cuda` backend on the fake: which copies, in which order, and what is given back."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_rig import BLOCKS, SPEC, Bench, Kind, current_device, opened
from fake_cuda import ffi, like
from fake_cuda.backend import FakeCuda, FakeCuda120, FakeCuda128
from installed import install

from flexkv import plugins
from flexkv.backends.cuda.library import Paths
from flexkv.errors import CapacityError, ClosedError, ConfigError, LayoutError
from flexkv.protocols import Region

ALL = list(range(BLOCKS))
ROOT = Path(__file__).parent.parent
# settings by which the same batch becomes other copies
WAYS: dict[str, dict[str, Any]] = {
    "kernel": {},
    "engines": {"kernel_below_bytes": 0},
    "no kernel": {"kernel_blocks": 0},
    "small chunks": {"kernel_below_bytes": 0, "pin_chunk_bytes": 8192},
    "unpinned": {"pin": "never"},
}


def verify(site: Path, names: dict[str, str], *arguments: str) -> None:
    """Run the kit from a folder outside of the project, for classes of fake_cuda.backend."""
    elsewhere = site / "elsewhere"
    elsewhere.mkdir(parents=True)
    backends = {name: f"fake_cuda.backend:{kind}" for name, kind in names.items()}
    install(site, "fakes", backends, {}, plugins.BACKENDS)
    harness = dict.fromkeys(names, "fake_cuda.backend:FakeHarness")
    install(site, "fakes-kit", harness, {}, plugins.HARNESSES)
    chosen = [word for name in names for word in ("--flexkv-verify", name)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen, *arguments],
        env=os.environ | {"PYTHONPATH": f"{site}:{Path(__file__).parent}"},
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 4 * len(names), done.stdout


def test_the_kit_verifies_the_backend_on_a_fake(tmp_path: Path) -> None:
    verify(tmp_path, {"cuda_on_fake": "FakeCuda"})


def test_the_kit_verifies_every_way_to_copy(tmp_path: Path) -> None:
    """Copy engines and batches of CUDA 13, batches of 12.8, 2-D copies of 12.0, unpinned memory."""
    names = {
        "batches_13": "FakeCuda",
        "batches_12": "FakeCuda128",
        "calls": "FakeCuda120",
        "unpinned": "FakeCuda",
    }
    options = [f"{name}.{off}=0" for name in names for off in ("kernel_blocks", "jitter_us")]
    options.append("unpinned.pin=never")
    chosen = [word for option in options for word in ("--flexkv-option", option)]
    verify(tmp_path, names, *chosen, "-k", "random or ranges or of_different")


@pytest.mark.parametrize("kind", [FakeCuda, FakeCuda128, FakeCuda120])
@pytest.mark.parametrize("way", WAYS)
async def test_blocks_move_both_ways_by_any_copy(kind: Kind, way: str) -> None:
    async with opened(kind, **WAYS[way]) as bench:
        order = [3, 4, 5, 6, 15, 0, 9, 2]
        assert await bench.saves(order, range(1, 9))
        assert await bench.saves(ALL, ALL)
        expected = [bench.block(number) for number in ALL]
        await bench.copy([7, 8, 0], [2, 3, 15], to_device=True)
        expected[7], expected[8], expected[0] = expected[2], expected[3], expected[15]
        assert all(np.array_equal(bench.block(i), expected[i]) for i in ALL)
        await bench.copy([1], [9], to_device=True, layers=(1, 2))
        second = SPEC.block_bytes // 2
        assert np.array_equal(bench.block(1)[:second], expected[1][:second])
        assert np.array_equal(bench.block(1)[second:], expected[9][second:])


async def calls_of(bench: Bench, blocks: list[int], slots: list[int], *names: str) -> list[int]:
    """How often each function is called by one copy."""
    fake = bench.backend.fake()
    before = [fake.calls(name) for name in names]
    await bench.copy(blocks, slots, to_device=True)
    return [fake.calls(name) - count for name, count in zip(names, before, strict=True)]


COPIES = ("cuLaunchKernel", "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpyBatchAsync")


async def test_copies_are_chosen_by_layout_and_size() -> None:
    scattered = [0, 3, 9, 1, 14, 7, 12, 5, 10]
    async with opened() as bench:
        assert await calls_of(bench, ALL, ALL, *COPIES) == [1, 0, 0, 0]
    async with opened(kernel_below_bytes=0) as bench:  # a run: one 2-D copy per plane
        assert await calls_of(bench, ALL, ALL, *COPIES) == [0, 0, 4, 0]
        assert await calls_of(bench, [5], [9], *COPIES) == [0, 0, 2, 0]
        assert await calls_of(bench, scattered, ALL[:9], *COPIES) == [0, 0, 0, 1]
    async with opened(FakeCuda120, kernel_below_bytes=0) as bench:
        assert await calls_of(bench, scattered, ALL[:9], *COPIES) == [1, 0, 0, 0]
    async with opened(FakeCuda120, kernel_blocks=0) as bench:
        assert await calls_of(bench, scattered, ALL[:9], *COPIES) == [0, 0, 18, 0]


async def test_neighbours_on_both_sides_are_one_contiguous_copy() -> None:
    """Block-first memory whose blocks are as large as slots."""
    async with opened(kernel_below_bytes=4096) as bench:
        assert SPEC.stride_bytes == SPEC.block_bytes
        whole = like(np.zeros((BLOCKS, 2, 2, 4, 2, 64), np.uint16))
        bench.region = bench.backend.make_region(whole, SPEC, "BLPNHD")
        for slot in ALL:
            bench.arena.view(slot)[:] = slot + 1
        assert await calls_of(bench, ALL, ALL, *COPIES) == [0, 1, 0, 0]
        assert [int(whole.peek(np.s_[b]).view(np.uint8).max()) for b in ALL] == [b + 1 for b in ALL]


@pytest.mark.parametrize("way", WAYS)
async def test_a_batch_calls_back_once_and_knows_its_device(way: str) -> None:
    async with opened(device=1, **WAYS[way]) as bench:
        fake = bench.backend.fake()
        counted = ("cudaLaunchHostFunc", "cudaStreamWaitEvent")
        assert await calls_of(bench, [2, 9, 4], [1, 2, 3], *counted) == [1, 1]
        assert current_device(fake) == 0


async def test_several_gpus_are_served_at_once() -> None:
    async with opened() as bench:
        other = Bench(bench.backend, bench.arena, 1)
        one, two = list(range(8)), list(range(8, 16))
        both = await asyncio.gather(bench.saves(one, one), other.saves(two, two))
        assert both == [True, True]
        mixed = Region(bench.region.planes[:1] + other.region.planes[1:], BLOCKS, 2)
        with pytest.raises(LayoutError, match=r"a region lies on one GPU, this one on \[0, 1\]"):
            await bench.copy([0], [0], to_device=True, region=mixed)


async def test_a_copy_waits_for_what_the_engine_has_queued() -> None:
    async with opened() as bench:
        fake, computed = bench.backend.fake(), threading.Event()
        kernel = ffi.callback("void(void *)", lambda _: computed.wait(30) and None)
        stream = fake.lib.fake_engine_stream()
        bench.backend.follow(0, int(ffi.cast("uintptr_t", stream)))
        fake.lib.cudaLaunchHostFunc(stream, kernel, ffi.NULL)
        copying = asyncio.ensure_future(bench.copy([1], [1], to_device=False))
        await asyncio.wait([copying], timeout=0.1)
        assert not copying.done()
        computed.set()
        await copying
        fake.lib.cudaStreamDestroy(stream)


async def test_more_batches_than_pieces_for_the_kernel_are_copied_otherwise() -> None:
    async with opened() as bench:
        fake = bench.backend.fake()
        with fake.held():
            copies = [
                asyncio.ensure_future(bench.copy([n % 16], [n % 16], to_device=False))
                for n in range(80)
            ]
            await asyncio.sleep(0)
        await asyncio.gather(*copies)
        assert all(np.array_equal(bench.slot(n), bench.block(n)) for n in ALL)
        assert await calls_of(bench, [1], [1], *COPIES) == [1, 0, 0, 0]


async def test_few_thread_blocks_leave_the_gpu_to_the_engine() -> None:
    async with opened(kernel_blocks=3) as bench:
        before = bench.backend.fake().lib.fake_most_blocks()
        assert await bench.saves(ALL, ALL)
        assert bench.backend.fake().lib.fake_most_blocks() <= max(before, 3)


async def test_memory_that_cannot_be_pinned_is_used_as_it_is_unless_it_must_be() -> None:
    with FakeCuda.fake().trouble() as fake:
        fake.inject("cudaHostRegister", error=2, skip=1)
        async with opened(pin_chunk_bytes=16384) as bench:
            assert fake.living()["registrations"] == 0
            assert await bench.saves([4, 5, 9], [0, 1, 2])
        fake.inject("cudaHostRegister", error=2, skip=1)
        with pytest.raises(CapacityError, match=r"cannot pin 65536 bytes .* \(1 chunks of 16384"):
            async with opened(pin_chunk_bytes=16384, pin="always"):
                raise AssertionError("it opens")


async def test_an_arena_is_pinned_once_for_two_backends() -> None:
    async with opened() as bench:
        fake, second = bench.backend.fake(), FakeCuda()
        before = fake.living()["registrations"]
        await second.open(bench.backend.services)
        assert fake.living()["registrations"] == before + 1  # its own scratch memory
        await bench.backend.aclose()
        bench.backend = second
        bench.region = second.make_region(bench.caches, SPEC, "PBNHD")
        assert await bench.saves([1], [1])
        await second.aclose()


@pytest.mark.parametrize(
    "setting", [{"kernel_blocks": -1}, {"timeout_ms": 0}, {"pin": "maybe"}, {"kernel_blocks": True}]
)
async def test_settings_that_make_no_sense_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        async with opened(**setting):
            raise AssertionError("it opens")


def test_probe_lists_gpus_and_never_raises() -> None:
    assert [(info.name, info.detail) for info in FakeCuda.probe()] == [
        ("cuda:0", "Fake GPU 0"),
        ("cuda:1", "Fake GPU 1"),
    ]
    assert Absent.probe() == []


class Absent(FakeCuda):
    """A machine without any of it."""

    @classmethod
    def paths(cls) -> Paths:
        return Paths("/none/libcudart.so", "/none/libcuda.so", "/none/libnvidia-ml.so")


async def test_a_machine_without_cuda_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no CUDA runtime 12 or 13: .*none.*option cudart"):
        async with opened(Absent):
            raise AssertionError("it opens")
    runtime = str(FakeCuda.fake().path)
    with pytest.raises(ConfigError, match="there is no NVIDIA driver"):
        async with opened(Absent, cudart=runtime):
            raise AssertionError("it opens")
    with pytest.raises(ClosedError):
        FakeCuda().export_region(Region((), 0))


async def test_host_tensors_and_host_addresses_are_refused() -> None:
    async with opened() as bench:
        with pytest.raises(LayoutError, match="out of reach of cuda"):
            bench.backend.make_region([np.zeros((2, 4, 4, 2, 64), np.uint16)] * 2, SPEC, "PBNHD")
        from flexkv.backends.cpu import CpuBackend

        host = CpuBackend().make_region([np.zeros((2, 4, 4, 2, 64), np.uint16)] * 2, SPEC, "PBNHD")
        with pytest.raises(LayoutError, match="is not memory of a GPU"):
            await bench.copy([0], [0], to_device=True, region=host)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_kernel_compiles_for_three_architectures_and_its_ptx_is_current(tmp_path: Path) -> None:
    made = tmp_path / "move.ptx"
    subprocess.run([ROOT / "scripts" / "make_ptx.sh", made], check=True, timeout=100)
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True)
    if "release 13.0," not in version.stdout:
        pytest.skip("compiled; the text is that of nvcc 13.0, and this is another one")
    assert made.read_text() == (ROOT / "flexkv/backends/cuda/move.ptx").read_text()
