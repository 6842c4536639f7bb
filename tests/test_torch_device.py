"""The portable base for torch's accelerators, over a small module like torch.cuda."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from installed import install
from toy_accelerator import TOY, ToyBackend, ToyTensor

from flexkv import plugins
from flexkv.backends.torch_device import TorchDeviceBackend
from flexkv.completion import Completions
from flexkv.errors import ConfigError, LayoutError
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec
from flexkv.protocols import BlockCopy, Region, Services

pytestmark = pytest.mark.torch
SPEC = KVSpec.uniform(2, 2, 16, "float16", tokens_per_block=4)


@pytest.mark.timeout(300)
def test_the_kit_verifies_a_torch_device_by_name_from_anywhere(tmp_path: Path) -> None:
    """A package of a dozen lines, installed; its streams lag behind."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install(site, "toy", {"toy": "toy_accelerator:ToyBackend"}, {}, plugins.BACKENDS)
    install(site, "toy-kit", {"toy": "toy_accelerator:ToyHarness"}, {}, plugins.HARNESSES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--flexkv-verify", "toy"],
        env=os.environ | {"PYTHONPATH": f"{site}:{Path(__file__).parent}"},
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 40, done.stdout


def caches() -> list[torch.Tensor]:
    made = [torch.zeros(2, 8, 4, 2, 16, dtype=torch.float16) for _ in range(2)]
    return [tensor.as_subclass(ToyTensor) for tensor in made]


@contextlib.asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[tuple[ToyBackend, Arena]]:
    completions = Completions(crew_threads=1)
    arena = Arena(8, SPEC.stride_bytes, huge_pages=False)
    backend = ToyBackend()
    await backend.open(Services(completions, arena, Identity("m", spec=SPEC), settings))
    try:
        yield backend, arena
    finally:
        await backend.aclose()
        await completions.aclose()
        arena.close()


@pytest.mark.parametrize("staging_bytes", [1, 5000, 1 << 20])
async def test_batches_longer_than_the_staging_buffers_go_in_pieces(staging_bytes: int) -> None:
    """With room for one block each, both buffers are always in use."""
    async with opened(staging_bytes=staging_bytes) as (backend, _):
        tensors = caches()
        for tensor in tensors:
            tensor.as_subclass(torch.Tensor).random_(-9, 9)
        before = [tensor.as_subclass(torch.Tensor).clone() for tensor in tensors]
        region = backend.make_region(tensors, SPEC, "PBNHD")
        ids = np.arange(8, dtype=np.uint32)
        await backend.copy(BlockCopy(region, ids, ids[::-1].copy(), False))
        await backend.copy(BlockCopy(region, ids, ids, True))
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(tensor.as_subclass(torch.Tensor), old.flip(1))


async def test_what_the_device_computes_is_copied_when_it_is_computed() -> None:
    """A copy waits for the kernels that were queued before it."""
    async with opened() as (backend, arena):
        tensors = caches()
        region = backend.make_region(tensors, SPEC, "PBNHD")
        ids = np.arange(8, dtype=np.uint32)
        computing = threading.Event()
        TOY.current_stream().queue(computing.wait)
        with TOY.stream(TOY.current_stream()):
            for tensor in tensors:
                tensor.copy_(torch.full(tensor.shape, 5.0))
        copying = asyncio.ensure_future(backend.copy(BlockCopy(region, ids, ids, False)))
        await asyncio.wait([copying], timeout=0.2)
        assert not copying.done()
        computing.set()
        await copying
        for slot in range(8):
            assert (arena.view(slot)[: SPEC.block_bytes].view(np.float16) == 5).all()


def test_the_toy_defers_so_that_a_backend_cannot_cheat() -> None:
    target, stream = torch.zeros(4), TOY.Stream()
    with TOY.pause(), TOY.stream(stream):
        target.copy_(torch.ones(4))
        assert target.tolist() == [0.0] * 4
    stream.synchronize()
    assert target.tolist() == [1.0] * 4


def test_tensors_of_other_devices_are_refused() -> None:
    with pytest.raises(LayoutError, match="device 'cpu' is out of reach of toy"):
        ToyBackend().make_region([torch.zeros(2, 8, 4, 2, 16).half()] * 2, SPEC, "PBNHD")


def test_a_region_needs_its_tensors() -> None:
    backend = ToyBackend()
    region = backend.make_region(caches(), SPEC, "PBNHD")
    for owner, message in ((None, "needs its torch tensors"), (caches(), "lies in none")):
        with pytest.raises(LayoutError, match=message):
            backend.pack(Region(region.planes, region.blocks, owner=owner))


class Absent(TorchDeviceBackend):
    """A device that this torch does not know."""

    name = module = "no_such_device"


async def test_a_module_that_torch_lacks_is_told() -> None:
    assert Absent.probe() == []
    completions = Completions(crew_threads=1)
    arena = Arena(8, SPEC.stride_bytes, huge_pages=False)
    backend = Absent()
    with pytest.raises(ConfigError, match=r"no torch\.no_such_device"):
        await backend.open(Services(completions, arena, Identity("m", spec=SPEC)))
    await backend.aclose()
    await completions.aclose()
    arena.close()


@pytest.mark.parametrize("module", ["cuda", "xpu"])
def test_probe_of_a_real_module_counts_devices_and_does_not_raise(module: str) -> None:
    kind = type("Real", (TorchDeviceBackend,), {"name": module, "module": module})
    count = getattr(torch, module).device_count()
    assert [info.name for info in kind.probe()] == [f"{module}:{n}" for n in range(count)]
