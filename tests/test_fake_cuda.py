"""The fake CUDA is strict: what a real device would not forgive, it does not either."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_cuda import FakeTensor, fake, ffi, like


def run(source: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, beside the fake."""
    return subprocess.run(
        [sys.executable, "-c", source],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_host_cannot_touch_device_memory() -> None:
    done = run(
        "import numpy as np, fake_cuda; t = fake_cuda.like(np.ones(8))\n"
        "fake_cuda.ffi.cast('char *', t.data_ptr())[0]"
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"]
)
def test_whatever_waits_ends_the_process_by_name(name: str) -> None:
    done = run("import ctypes, fake_cuda; ctypes.CDLL(str(fake_cuda.build()))." + name + "(None)")
    assert done.returncode == -signal.SIGABRT
    assert f"{name} was called" in done.stderr


def test_tensors_have_the_content_strides_and_device_of_their_arrays() -> None:
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[::-1, 1::2]
    tensor = like(array, device=1)
    assert isinstance(tensor, FakeTensor)
    assert tensor.device.index == 1
    assert tensor.stride() == (-6, 2)
    assert np.array_equal(tensor.peek(), array)
    tensor.poke(7, np.s_[0])
    assert tensor.peek().tolist() == [[7, 7, 7], *array[1:].tolist()]


def test_streams_and_memory_of_another_device_are_told() -> None:
    with fake().current(1):
        stream, event = fake().lib.fake_engine_stream(), ffi.new("void **")
        fake().lib.cudaEventCreateWithFlags(event, 2)
    assert fake().lib.cudaEventRecord(event[0], stream) == 400
    assert "device 1, while device 0 is current" in fake().violations()[0]
    assert fake().violations() == []
    fake().lib.cudaEventDestroy(event[0])
    fake().lib.cudaStreamDestroy(stream)


def test_what_lives_is_counted() -> None:
    before = fake().living()["memory"]
    tensor = like(np.ones(8))
    assert fake().living()["memory"] == before + 1
    tensor.memory.free()
    assert fake().living()["memory"] == before
