"""Whatever the driver does: a miss or a typed error in time, nothing wrong, nothing left behind."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from cuda_rig import opened
from fake_cuda import ALWAYS
from fake_cuda.backend import FakeCuda
from rig import open_rig, prompt

from flexkv import plugins
from flexkv.errors import CapacityError, ConfigError, FlexKVError, TransferError

BLOCKS, SLOTS = [0, 3, 9, 1, 14, 7, 12, 5, 10], list(range(9))
LIMIT_S = 20
ENGINES: dict[str, Any] = {"kernel_blocks": 0, "pin_chunk_bytes": 16384}


class Fault(NamedTuple):
    """What is injected, under which settings; `lands`: the copy is good all the same."""

    name: str
    kind: str
    error: int = 1
    settings: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    skip: int = 0
    amount: int = 0
    lands: bool = False


FAULTS = {
    "the kernel is not launched": Fault("cuLaunchKernel", "refused", 701),
    "the kernel reads where nothing is": Fault("kernel", "failed", 700, amount=2),
    "a batch of copies fails": Fault("copy", "failed", 719, ENGINES, amount=5),
    "a part of a batch is queued": Fault("batch", "partial", 1, ENGINES, amount=3),
    "a batch is refused": Fault("cudaMemcpyBatchAsync", "refused", 1, ENGINES),
    "the context is lost while batches are queued": Fault(
        "cudaMemcpyBatchAsync", "context", 719, ENGINES
    ),
    "the callback never comes": Fault("callback", "lost", lands=True),
    "the callback comes late": Fault("callback", "slow", amount=200_000, lands=True),
    "the callback is refused": Fault("cudaLaunchHostFunc", "refused", lands=True),
    "the context is lost before the callback": Fault("cudaLaunchHostFunc", "context", 719),
    "the stream does not wait": Fault("cudaStreamWaitEvent", "refused"),
    "the engine's event is not recorded": Fault("cudaEventRecord", "refused"),
    "the end of the copies is not recorded": Fault("cudaEventRecord", "refused", skip=1),
    "the context is lost at the end of the copies": Fault(
        "cudaEventRecord", "context", 719, skip=1
    ),
    "there are no events": Fault("cudaEventCreateWithFlags", "refused", 2),
    "there are no streams": Fault("cudaStreamCreateWithPriority", "refused", 2),
    "there is no device": Fault("cudaSetDevice", "refused", 100),
    "copies take long": Fault("kernel", "slow", amount=150_000, lands=True),
}


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("name", FAULTS)
async def test_a_copy_lands_or_fails_in_time(name: str, to_device: bool) -> None:
    fault = FAULTS[name]
    async with opened(timeout_ms=40, **fault.settings) as bench:
        blocks = [bench.block(number) for number in range(16)]
        if to_device:
            for slot in SLOTS:
                bench.slot(slot)[:] = slot + 1
        with bench.backend.fake().trouble() as fake:
            inject(fault)
            with anyio.fail_after(LIMIT_S):
                try:
                    await bench.copy(BLOCKS, SLOTS, to_device=to_device)
                except TransferError:
                    assert not fault.lands
                else:
                    assert fault.lands
            assert not any(array_changed(bench.block(n), blocks[n]) for n in {2, 4, 15})
        if fault.lands:
            for block, slot in zip(BLOCKS, SLOTS, strict=True):
                assert np.array_equal(bench.block(block), bench.slot(slot))
        assert await bench.saves([4, 2, 15], [12, 13, 9]), fake.violations()


def inject(fault: Fault) -> None:
    FakeCuda.fake().inject(
        *(fault.name, fault.kind, fault.error), skip=fault.skip, amount=fault.amount
    )


def array_changed(now: Any, before: Any) -> bool:
    """Whether a block that was not in the batch is another one."""
    return not np.array_equal(now, before)


@pytest.mark.parametrize("name", FAULTS)
async def test_a_manager_takes_it_for_a_miss(name: str, tmp_path: Path) -> None:
    """What is loaded is right; what is not is a miss, or a put's typed error; then it works."""
    fault = FAULTS[name]
    options = {"timeout_ms": 40, **fault.settings}
    device = {"device_backend": "cuda_on_fake", "device_options": options}
    with plugins.register(plugins.BACKENDS, "cuda_on_fake", FakeCuda):
        async with open_rig(tmp_path, **device) as rig:  # type: ignore[arg-type]
            await rig.put(prompt(1, 3))
            with FakeCuda.fake().trouble(), anyio.fail_after(LIMIT_S):
                inject(fault)
                got = await rig.get(prompt(1, 3), blocks=[20, 9, 33])
                assert got.loaded in (0, 4, 8, 12)
                inject(fault)
                with nullcontext() if fault.lands else suppress(FlexKVError):
                    await rig.put(prompt(2, 3))
            assert await works(rig)


async def works(rig: Any) -> bool:
    """Whether a prompt goes through the cache."""
    await rig.put(prompt(3, 2))
    return (await rig.get(prompt(3, 2))).loaded == 8


async def test_every_copy_fails_while_the_context_is_lost_and_close_ends() -> None:
    async with opened(timeout_ms=40) as bench:
        with bench.backend.fake().trouble() as fake, anyio.fail_after(LIMIT_S):
            fake.inject("kernel", "failed", 719)
            copies = [bench.copy([n], [n], to_device=n % 2 == 0) for n in range(12)]
            answers = await asyncio.gather(*copies, return_exceptions=True)
            failed = [answer for answer in answers if isinstance(answer, TransferError)]
            assert failed
            assert len(failed) + answers.count(None) == 12
            with pytest.raises(TransferError):
                await bench.copy([1], [1], to_device=True)
            await bench.backend.aclose()


async def test_streams_overtake_each_other_and_every_block_lands() -> None:
    async with opened(jitter_us=2000) as bench:
        with bench.backend.fake().trouble() as fake:
            fake.inject("kernel", "slow", amount=60_000)
            down = asyncio.ensure_future(bench.copy([1, 2], [1, 2], to_device=False))
            await asyncio.sleep(0)
            bench.slot(9)[:] = 7
            await bench.copy([5], [9], to_device=True)
            assert (bench.block(5) == 7).all()
            await down
            assert np.array_equal(bench.slot(2), bench.block(2))


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuInit"])
async def test_without_the_kernel_copies_are_made_by_engines(call: str) -> None:
    with FakeCuda.fake().trouble() as fake:
        fake.inject(call, error=218)
        async with opened() as bench:
            before = fake.calls("cuLaunchKernel")
            assert await bench.saves(BLOCKS, SLOTS)
            assert fake.calls("cuLaunchKernel") == before


async def test_scratch_memory_that_cannot_be_pinned_costs_the_kernel_only() -> None:
    with FakeCuda.fake().trouble() as fake:
        fake.inject("cudaHostRegister", error=2, skip=1)
        async with opened() as bench:
            assert await bench.saves(BLOCKS, SLOTS)


@pytest.mark.parametrize("call", ["cudaRuntimeGetVersion", "cudaGetDeviceCount", "cudaSetDevice"])
async def test_a_driver_that_does_not_start_is_a_typed_error(call: str) -> None:
    with FakeCuda.fake().trouble() as fake:
        fake.inject(call, error=804)
        with pytest.raises(ConfigError, match=f"CUDA cannot be used here: {call}"):
            async with opened():
                raise AssertionError("it opens")


async def test_no_pinned_memory_at_all_is_a_typed_error_where_it_must_be() -> None:
    with FakeCuda.fake().trouble() as fake:
        fake.inject("cudaHostRegister", error=2, times=ALWAYS)
        with pytest.raises(CapacityError, match="lower the host tier's size"):
            async with opened(pin="always"):
                raise AssertionError("it opens")
