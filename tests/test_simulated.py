"""The simulated accelerator: memory, streams, its model of time, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from flexkv_simulated import Device, Model, allocate, like
from flexkv_simulated.backend import SimulatedBackend

from flexkv._core import ffi, lib
from flexkv.completion import Completions
from flexkv.errors import ConfigError, LayoutError, TransferError
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec
from flexkv.protocols import BlockCopy, DeviceBackend, Services

SPEC = KVSpec.uniform(2, 2, 64, "float16", tokens_per_block=4)
BLOCKS = 8
ALL = np.arange(BLOCKS, dtype=np.uint32)


class Bench:
    """A backend with an arena of 8 slots and tensors of 8 blocks."""

    def __init__(self, completions: Completions, settings: dict[str, Any]) -> None:
        self.completions = completions
        self.arena = Arena(BLOCKS, SPEC.stride_bytes, huge_pages=False)
        self.backend = SimulatedBackend()
        self.services = Services(completions, self.arena, Identity("m", spec=SPEC), settings)
        random = np.random.default_rng(1)
        shape = (BLOCKS, 2, 4, 2, 64)
        self.arrays = [random.integers(1, 1 << 16, shape, np.uint16) for _ in range(2)]
        self.tensors = [like(array) for array in self.arrays]

    @property
    def device(self) -> Device:
        return self.backend.device

    async def copy(self, *, to_device: bool = False, blocks: Any = ALL) -> None:
        await self.backend.copy(BlockCopy(self.region, blocks, blocks, to_device))

    def slot(self, number: int) -> Any:
        return self.arena.view(number)[: SPEC.block_bytes]

    def landed(self) -> list[int]:
        """Slots that hold their block."""
        blocks = [np.stack([array[n] for array in self.arrays]) for n in range(BLOCKS)]
        return [n for n in range(BLOCKS) if np.array_equal(self.slot(n), _flat(blocks[n]))]


def _flat(block: Any) -> Any:
    return block.view(np.uint8).reshape(-1)


@contextlib.asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Bench]:
    bench = Bench(Completions(crew_threads=1), {"timeout_ms": 30} | settings)
    await bench.backend.open(bench.services)
    bench.region = bench.backend.make_region(bench.tensors, SPEC, "BPNHD")
    try:
        yield bench
    finally:
        await bench.backend.aclose()
        assert bench.completions.in_flight == 0
        assert bench.completions.stale == 0
        await bench.completions.aclose()
        bench.arena.close()


# --- memory


@pytest.mark.parametrize("how", ["ctypes.string_at(address, 1)", "int(view[0])", "view.fill(1)"])
def test_the_host_cannot_touch_device_memory(how: str) -> None:
    program = (
        "import ctypes, numpy as np\n"
        "from flexkv_simulated import allocate\n"
        "tensor = allocate((64,), 'uint8'); tensor.poke(7)\n"
        "assert tensor.peek().tolist() == [7] * 64\n"
        "address = tensor.data_ptr()\n"
        "view = np.ctypeslib.as_array((ctypes.c_uint8 * 64).from_address(address))\n"
        f"{how}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV


def test_numpy_refuses_a_device_tensor() -> None:
    tensor = allocate((4, 4), "bfloat16")
    for use in (np.asarray, np.array, np.sum, lambda x: np.zeros(4) + x):
        with pytest.raises(TypeError, match="is no array"):
            use(tensor)
    with pytest.raises(TypeError):
        memoryview(tensor)  # type: ignore[arg-type]


def test_tensors_keep_shapes_strides_and_content() -> None:
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)[:, ::2].transpose(2, 0, 1)
    tensor = like(array)
    assert np.array_equal(tensor.peek(), array)
    assert (tensor.shape, tensor.stride()) == (array.shape, tuple(s // 4 for s in array.strides))
    assert tensor.stride() == (1, 20, 10)
    tensor.poke(0, np.s_[:, 1])
    assert tensor.peek(np.s_[:, 1]).any() is np.False_
    assert np.array_equal(tensor.peek(np.s_[:, 0]), array[:, 0])
    assert allocate((2, 3), "float16", order=(1, 0)).stride() == (1, 2)


async def test_host_memory_is_not_the_devices() -> None:
    async with opened() as bench:
        with pytest.raises(LayoutError, match="not in simulated device memory"):
            bench.backend.make_region(bench.arrays, SPEC, "BPNHD")


async def test_host_tensors_may_stand_in_for_device_memory() -> None:
    async with opened(host_tensors=True) as bench:
        bench.region = bench.backend.make_region(bench.arrays, SPEC, "BPNHD")
        await bench.copy()
        assert bench.landed() == list(range(BLOCKS))


@pytest.mark.parametrize("allowed", [True, False])
async def test_host_tensors_of_a_region_made_before_open_are_looked_at_by_copies(
    allowed: bool,
) -> None:
    refused = pytest.raises(LayoutError, match="not memory of")
    async with opened(host_tensors=allowed) as bench:
        bench.region = SimulatedBackend().make_region(bench.arrays, SPEC, "BPNHD")
        with contextlib.nullcontext() if allowed else refused:
            await bench.copy()
        assert bench.landed() == (list(range(BLOCKS)) if allowed else [])


async def test_export_can_be_refused() -> None:
    async with opened(exports=False) as bench:
        with pytest.raises(LayoutError, match="exports no memory"):
            bench.backend.export_region(bench.region)


# --- time


def test_time_follows_the_formula() -> None:
    """One engine per direction, two streams: every moment of the model can be told from others."""
    rate, latency_ns = 1 << 30, 50_000
    device = Device(Model(latency_us=latency_ns / 1000, to_device_bytes_per_s=rate))
    streams = [device.open_stream(), device.open_stream()]
    last = {}
    for _ in range(10):
        for stream in streams:
            last[stream] = device.compute(stream, 30 if stream else 70)
    assert all(device.synchronize(stream, number) == 0 for stream, number in last.items())
    over_ns = time.monotonic_ns()
    records = device.history()
    device.close()
    assert len(records) == 20
    free = 0
    ready = dict.fromkeys(streams, 0)
    for record in records:
        stream = int(record["stream"])
        assert record["ready_ns"] == ready[stream]
        assert record["start_ns"] == max(record["submitted_ns"], ready[stream], free)
        assert record["finish_ns"] - record["start_ns"] == (30_000 if stream else 70_000)
        free = ready[stream] = int(record["finish_ns"])
    assert over_ns >= free


def test_work_is_over_at_its_finish_and_not_when_its_bytes_have_landed() -> None:
    device = Device()
    stream = device.open_stream()
    assert device.synchronize(stream, device.compute(stream, 30_000)) == 0
    assert time.monotonic_ns() >= device.history()[-1]["finish_ns"]
    device.close()


async def test_copies_take_latency_and_bandwidth_and_land_before_they_are_told() -> None:
    rates = {"to_device_bytes_per_s": 1 << 28, "from_device_bytes_per_s": 1 << 27}
    async with opened(latency_us=100, **rates) as bench:
        for to_device, rate in ((False, 1 << 27), (True, 1 << 28)):
            for count in (1, 3, 8):
                await bench.copy(to_device=to_device, blocks=ALL[:count])
                told = time.monotonic_ns()
                record = bench.device.history()[-1]
                size_bytes = count * SPEC.block_bytes
                assert (record["kind"], record["size_bytes"]) == (1 - to_device, size_bytes)
                cost_ns = record["finish_ns"] - record["start_ns"]
                assert cost_ns == 100_000 + size_bytes * 1_000_000_000 // rate
                assert told >= record["finish_ns"]
                assert told >= record["landed_ns"]


async def test_engines_are_as_many_as_the_model_says() -> None:
    async with opened(engines=3, streams=8, latency_us=500) as bench:
        await asyncio.gather(*(bench.copy() for _ in range(24)))
        spans = bench.device.history()
        moments = sorted(spans["start_ns"].tolist())
        busy = [((spans["start_ns"] <= t) & (t < spans["finish_ns"])).sum() for t in moments]
        assert max(busy) == 3


def test_streams_share_an_engine_in_turn() -> None:
    device = Device(Model(latency_us=0))
    streams = [device.open_stream() for _ in range(16)]
    device.pause()
    last = [[device.compute(stream, 20) for _ in range(8)][-1] for stream in streams]
    device.pause(False)
    assert [device.synchronize(s, n) for s, n in zip(streams, last, strict=True)] == [0] * 16
    order = device.history()["stream"].tolist()
    device.close()
    assert order == streams * 8


# --- streams and events


async def test_jitter_lets_streams_overtake_each_other_but_not_themselves() -> None:
    async with opened(engines=4, streams=4, jitter_us=3000, seed=7) as bench:
        over: list[int] = []

        async def one(number: int) -> None:
            await bench.copy(blocks=ALL[number : number + 1])
            over.append(number)

        await asyncio.gather(*(one(number) for number in range(8)))
        assert sorted(over) == list(range(8))
        assert over != sorted(over)
        for stream in range(4):  # copies 0 and 4 went to the first stream, 1 and 5 to the next
            assert over.index(stream) < over.index(stream + 4)
        assert bench.landed() == list(range(8))


def test_a_stream_waits_for_an_event_of_another() -> None:
    device = Device()
    first, second = device.open_stream(), device.open_stream()
    device.pause()
    event = device.compute(first, 100)
    device.wait(second, first, event)
    last = device.compute(second, 1)
    assert device.synchronize(second, last, timeout_ms=20) == errno.EINPROGRESS
    device.pause(False)
    assert device.synchronize(second, last) == 0
    slow, fast = device.history()
    device.close()
    assert fast["start_ns"] >= slow["finish_ns"]


async def test_host_functions_are_called_in_stream_order_from_a_foreign_thread() -> None:
    completions = Completions(crew_threads=1)
    device = Device()
    stream = device.open_stream()
    tickets = [completions.ticket() for _ in range(3)]
    device.pause()
    device.compute(stream, 10)
    complete = ffi.addressof(lib, "fx_complete")
    for ticket in tickets:
        device.host_function(stream, complete, ticket.address)
    last = device.compute(stream, 10)
    assert device.synchronize(stream, last, timeout_ms=10) == errno.EINPROGRESS
    assert [ticket.done for ticket in tickets] == [None] * 3
    device.pause(False)
    for ticket in tickets:
        assert (await ticket).failed == 0
    assert device.synchronize(stream, last) == 0
    device.close()
    await completions.aclose()


# --- faults


async def test_a_refused_copy_fails_at_once_and_moves_nothing() -> None:
    async with opened() as bench:
        bench.device.inject("refused", "to_device")
        bench.device.inject("refused", "any")
        bench.device.clear_faults()
        bench.device.inject("refused", "from_device", skip=1)
        await bench.copy(blocks=ALL[:1])
        with pytest.raises(TransferError, match="refuses: EIO"):
            await bench.copy()
        assert bench.landed() == [0]
        await bench.copy()
        assert bench.landed() == list(range(BLOCKS))


async def test_a_failed_copy_has_moved_a_part() -> None:
    async with opened() as bench:
        bench.device.inject("failed", "from_device", blocks=3)
        with pytest.raises(TransferError, match="Input/output error"):
            await bench.copy()
        assert bench.landed() == [0, 1, 2]
        await bench.copy()
        assert bench.landed() == list(range(BLOCKS))


async def test_a_sticky_error_fails_everything_until_the_reset() -> None:
    async with opened(engines=2, streams=2) as bench:
        bench.device.inject("sticky", "from_device", skip=1)
        results = await asyncio.gather(*(bench.copy() for _ in range(6)), return_exceptions=True)
        assert sum(isinstance(result, TransferError) for result in results) >= 5 - 1
        assert bench.device.error == errno.EIO
        with pytest.raises(TransferError, match="lost its context"):
            await bench.copy(to_device=True)
        bench.device.reset()
        await bench.copy(to_device=True)
        assert bench.device.error == 0


async def test_a_lost_completion_is_asked_for() -> None:
    async with opened() as bench:
        bench.device.inject("lost")
        await bench.copy()
        assert bench.landed() == list(range(BLOCKS))


async def test_a_late_completion_is_no_failure() -> None:
    """The device says, when asked, that the work is done: nobody need wait for its word."""
    async with opened(timeout_ms=10_000) as bench:
        bench.device.inject("late", late_us=20_000)
        await bench.copy()
        told = time.monotonic_ns()
        assert told >= bench.device.history()[-1]["finish_ns"] + 20_000_000


async def test_slow_work_is_waited_for_however_often_it_is_asked_for() -> None:
    async with opened(timeout_ms=5) as bench:
        bench.device.inject("slow", late_us=40_000)
        await bench.copy()
        record = bench.device.history()[-1]
        assert record["finish_ns"] - record["start_ns"] > 40_000_000
        assert bench.landed() == list(range(BLOCKS))


def test_a_reset_cuts_short_what_is_under_way_and_fails_what_is_queued() -> None:
    device = Device()
    stream = device.open_stream()
    running, queued = device.compute(stream, 3_600_000_000), device.compute(stream, 1)
    assert device.query(stream, running) == errno.EINPROGRESS
    device.reset()
    assert (device.query(stream, running), device.query(stream, queued)) == (errno.EIO, errno.EIO)
    again = device.compute(stream, 1)
    assert device.synchronize(stream, again) == 0
    device.close()


def test_a_device_closes_with_work_queued() -> None:
    device = Device()
    stream = device.open_stream()
    device.pause()
    for _ in range(10):
        device.compute(stream, 1000)
    device.close()
    device.close()


# --- the door


def test_it_is_a_device_that_probes_without_a_context() -> None:
    assert isinstance(SimulatedBackend(), DeviceBackend)
    assert [info.name for info in SimulatedBackend.probe()] == ["simulated"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": 1}, "no setting 'engine'"),
        ({"engines": 0}, "engines must be 1 to 16"),
        ({"latency_us": -1}, "latency_us must be a number >= 0"),
        ({"streams": 0}, "streams must be an integer >= 1"),
        ({"timeout_ms": "1"}, "timeout_ms must be an integer >= 1"),
    ],
)
async def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    bench = Bench(Completions(crew_threads=1), settings)
    with pytest.raises(ConfigError, match=message):
        await bench.backend.open(bench.services)
    await bench.backend.aclose()
    await bench.completions.aclose()


def test_unknown_faults_are_refused() -> None:
    device = Device()
    with pytest.raises(ConfigError, match="refused, failed, sticky"):
        device.inject("broken")
    device.close()
