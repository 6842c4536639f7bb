"""A module like torch.cuda, for machines without a device: `Toy` has streams, events, and tensors.

What runs inside `with toy.stream(s)` and writes to memory (`copy_`, `index_select(out=)`,
`index_copy_`) happens later, on the stream's thread, after a random while. Tensors are those of the
cpu with another device's tag. `pause` keeps all streams; `broken` makes waiting raise, as after an
error of a context.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexkv.backends.torch_device import TorchDeviceBackend
from flexkv.testing import DeviceHarness

_LATER = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.index_copy_.default,
    torch.ops.aten.index_select.out,
}


class ToyTensor(torch.Tensor):
    """A tensor that says it lies on the toy."""

    device = SimpleNamespace(type="toy", index=0)  # type: ignore[assignment]


class Toy:
    """The module: `Stream`, `Event`, `stream`, `current_stream`, `device_count`."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.broken = False
        self._default: Stream | None = None

    def Stream(self) -> Stream:
        return Stream(self)

    def Event(self, blocking: bool = False) -> Event:
        return Event(self)

    def device_count(self) -> int:
        return 1

    def current_stream(self) -> Stream:
        if self._default is None:
            self._default = Stream(self)
        return self._default

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with _Deferred(stream):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the streams while inside."""
        self.goes_on.clear()
        try:
            yield
        finally:
            self.goes_on.set()


class Stream:
    """What is queued happens in order, on a thread that lives while there is something to do."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self._random = toy, random.Random(3)
        self._queue: list[Callable[[], object]] = []
        self._lock, self._runs = threading.Lock(), False

    def queue(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._queue.append(work)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, daemon=True, name="toy-stream").start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._runs = False
                    return
                work = self._queue.pop(0)
            self.toy.goes_on.wait()
            if self._random.random() < 0.1:
                threading.Event().wait(self._random.random() * 5e-3)
            work()

    def wait_event(self, event: Event) -> None:
        happened = event.happened
        self.queue(happened.wait)

    def synchronize(self) -> None:
        over = threading.Event()
        self.queue(over.set)
        over.wait()


class Event:
    """Happens when the stream comes to where it was recorded last."""

    def __init__(self, toy: Toy) -> None:
        self.toy, self.happened = toy, threading.Event()

    def record(self, stream: Stream) -> None:
        self.happened = threading.Event()
        stream.queue(self.happened.set)

    def synchronize(self) -> None:
        self.happened.wait()
        if self.toy.broken:
            raise RuntimeError("toy error: an illegal memory access was encountered")


class _Deferred(TorchDispatchMode):
    """Sends what writes to memory to a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.target = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LATER:
            return func(*args, **kwargs)
        self.target.queue(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])


TOY = Toy()


class ToyBackend(TorchDeviceBackend):
    """All that a backend of a new torch device is."""

    name: ClassVar[str] = "toy"
    module: ClassVar[str] = "toy"

    @classmethod
    def accelerator(cls) -> Any:
        return TOY  # where others have torch.toy


class ToyHarness(DeviceHarness):
    """Memory is torch's."""

    exportable = False

    def settings(self, place: Path) -> dict[str, Any]:
        return {"staging_bytes": 3 << 20} | self.options

    def allocate(self, size_bytes: int, *, shared: bool = False) -> Any:
        return torch.zeros(size_bytes, dtype=torch.uint8).as_subclass(ToyTensor)

    def tensor(self, memory: Any, layout: Any) -> Any:
        dtype = getattr(torch, layout.dtype)
        size = torch.empty(0, dtype=dtype).element_size()
        words = memory[: layout.size_bytes // size * size].view(dtype)
        strides = [stride // size for stride in layout.strides_bytes]
        return words.as_strided(layout.shape, strides, layout.offset_bytes // size)

    def read_back(self, memory: Any) -> Any:
        return memory.as_subclass(torch.Tensor).numpy().copy()

    def write_raw(self, memory: Any, data: Any) -> None:
        memory.as_subclass(torch.Tensor).numpy()[:] = np.asarray(data)

    def hold(self, backend: Any, services: Any) -> Any:
        return TOY.pause()

    @contextmanager
    def fail(self, backend: Any, services: Any) -> Iterator[None]:
        TOY.broken = True
        try:
            yield
        finally:
            TOY.broken = False
