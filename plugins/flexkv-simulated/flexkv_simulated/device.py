"""The accelerator, seen from Python.

`Model` (how fast) - `Device` (streams, work, faults, history).

Time follows one formula, whose moments are those of the model and not of a busy machine:
start = max(submitted, stream ready, engine free); finish = start + latency + bytes / bandwidth
(+ jitter). The engine is taken from start to finish, and no completion is told before its finish.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from flexkv._core import ffi as core_ffi
from flexkv._core import lib as core
from flexkv.errors import ConfigError, TransferError
from flexkv_simulated._native import ffi, lib

Kind = Literal["to_device", "from_device", "storage", "compute"]
KINDS: dict[str, int] = {"to_device": 0, "from_device": 1, "storage": 2, "compute": 3, "any": 4}
FAULTS = {"refused": 0, "failed": 1, "sticky": 2, "lost": 3, "late": 4, "slow": 5}
HISTORY = np.dtype(
    [
        (name, np.uint64)
        for name in (
            *("kind", "stream", "number", "size_bytes"),
            *("submitted_ns", "ready_ns", "start_ns", "finish_ns", "landed_ns"),
        )
    ]
)
_FOREVER = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Model:
    """How fast the device is. Rates in bytes per second (0: no time at all), times in us.

    `engines` are the copy engines of each direction, `jitter_us` how much longer a piece of work
    may take at random, by `seed`.
    """

    engines: int = 1
    to_device_bytes_per_s: int = 4 << 30
    from_device_bytes_per_s: int = 4 << 30
    storage_bytes_per_s: int = 1 << 30
    latency_us: float = 10.0
    jitter_us: float = 0.0
    seed: int = 0

    @classmethod
    def read(cls, settings: dict[str, Any]) -> Model:
        """Take the model's fields out of a backend's settings.

        Raises:
            ConfigError: one of them is no number, is negative, or there is no engine.
        """
        given = {f.name: settings.pop(f.name) for f in fields(cls) if f.name in settings}
        for name, value in given.items():
            if not isinstance(value, int | float) or value < 0:
                raise ConfigError(f"{name} must be a number >= 0, got {value!r}")
        made = replace(cls(), **given)
        if not 1 <= made.engines <= 16:
            raise ConfigError(f"engines must be 1 to 16, got {made.engines}")
        return made

    def native(self) -> Any:
        """The sim_model of these numbers."""
        latency, jitter = int(self.latency_us * 1000), int(self.jitter_us * 1000)
        rates = [self.to_device_bytes_per_s, self.from_device_bytes_per_s, self.storage_bytes_per_s]
        made = ffi.new("sim_model *")
        made.engines = [self.engines] * 3 + [1]
        made.latency_ns = [latency] * 3 + [0]
        made.bytes_per_s = [int(rate) for rate in rates] + [0]
        made.jitter_ns, made.seed = jitter, int(self.seed)
        return made


class Device:
    """One simulated accelerator: engines and streams in C threads.

    Numbers of work count from 1 in each stream: a pair (stream, number) is an event.
    """

    def __init__(self, model: Model | None = None) -> None:
        self.model = model or Model()
        calls = ffi.new("sim_calls *")
        calls.landed = _function("void(*)(void *)", "fx_complete")
        calls.failed = _function("void(*)(void *, int)", "fx_fail")
        calls.copy_blocks = _function(ffi.typeof(calls.copy_blocks), "fx_copy_blocks")
        calls.checksum = _function(ffi.typeof(calls.checksum), "fx_checksum_blocks")
        calls.plane_bytes = core_ffi.sizeof("fx_plane")
        made = lib.sim_open(self.model.native(), calls)
        if made == ffi.NULL:
            raise TransferError(f"no simulated device: {os.strerror(ffi.errno)}")
        self._native: Any = made

    def open_stream(self) -> int:
        """Make a stream: what is queued in it happens in order. At most 64.

        Raises:
            TransferError: there are no more.
        """
        return int(self._checked(lib.sim_stream_open(self._native)))

    def submit(self, stream: int, kind: Kind, batch: Any, ticket_number: int) -> int:
        """Queue a sim_batch and the completion of its ticket; return the number of the work.

        Raises:
            TransferError: the device refuses.
        """
        ticket = ffi.cast("void *", ticket_number)
        return self._checked(lib.sim_submit(self._native, stream, KINDS[kind], batch, ticket))

    def compute(self, stream: int, duration_us: float, ticket_number: int = 0) -> int:
        """Queue a kernel that takes so long; return the number of the work.

        Raises:
            TransferError: the device refuses.
        """
        ticket, duration = ffi.cast("void *", ticket_number), int(duration_us * 1000)
        return self._checked(lib.sim_compute(self._native, stream, duration, ticket))

    def host_function(self, stream: int, function: Any, argument: Any) -> int:
        """Have a thread of the device call the C function `void (*)(void *)` in stream order.

        Raises:
            TransferError: the device refuses.
        """
        call = ffi.cast("void(*)(void *)", int(core_ffi.cast("uintptr_t", function)))
        value = ffi.cast("void *", int(core_ffi.cast("uintptr_t", argument)))
        return self._checked(lib.sim_host_function(self._native, stream, call, value))

    def wait(self, stream: int, other: int, number: int) -> int:
        """Hold `stream` until work `number` of the stream `other` is done.

        Raises:
            TransferError: the device refuses.
        """
        return self._checked(lib.sim_wait(self._native, stream, other, number))

    def query(self, stream: int, number: int) -> int:
        """Return 0 when the work is done, EINPROGRESS while bytes may land, else its errno."""
        return -int(lib.sim_query(self._native, stream, number))

    def withdraw(self, stream: int, number: int) -> int:
        """Do what `query` does; of work that is over, let the completion not be told any more."""
        return -int(lib.sim_withdraw(self._native, stream, number))

    def synchronize(self, stream: int, number: int, timeout_ms: int = 10_000) -> int:
        """Do what `query` does, but block up to `timeout_ms` for the work."""
        return -int(lib.sim_synchronize(self._native, stream, number, timeout_ms))

    def pause(self, paused: bool = True) -> None:
        """Let the engines take no more work, or (False) go on."""
        lib.sim_pause(self._native, int(paused))

    @property
    def error(self) -> int:
        """The sticky error, 0 while there is none."""
        return int(lib.sim_error(self._native))

    def reset(self) -> None:
        """Drop all work, wait for the engines, forget a sticky error."""
        lib.sim_reset(self._native)

    def inject(
        self,
        fault: str,
        on: str = "any",
        *,
        skip: int = 0,
        times: int | None = 1,
        blocks: int = 0,
        late_us: float = 0,
    ) -> None:
        """Let `times` pieces of work (None: all), after the first `skip`, go wrong.

        "refused": submitting fails; "failed": `blocks` blocks are moved, then it fails; "sticky":
        the same, no completion comes, and everything fails until `reset`; "lost": done, but nobody
        is told; "late": told `late_us` later; "slow": takes `late_us` longer, so that other streams
        overtake it. `on` is a `Kind`, or "any".

        Raises:
            ConfigError: a word is unknown, or too many faults are in force.
        """
        if fault not in FAULTS or on not in KINDS:
            raise ConfigError(f"faults are {', '.join(FAULTS)}; on {', '.join(KINDS)}")
        amount = int(late_us * 1000) if fault in ("late", "slow") else blocks
        count = _FOREVER if times is None else times
        if lib.sim_fault(self._native, FAULTS[fault], KINDS[on], skip, count, amount):
            raise ConfigError("at most 16 faults can be in force")

    def clear_faults(self) -> None:
        """Take back the faults that have not happened."""
        lib.sim_clear_faults(self._native)

    def history(self) -> NDArray[np.void]:
        """Return the last 4,096 pieces of work, oldest first: see HISTORY. Times in ns of
        CLOCK_MONOTONIC; `landed_ns` is of the clock, the others are of the model."""
        records = np.zeros(4096, HISTORY)
        native = ffi.cast("sim_record *", ffi.from_buffer(records))
        return records[: lib.sim_history(self._native, native, len(records))]

    def close(self) -> None:
        """Drop what is queued and stop the threads. Twice is fine."""
        native, self._native = self._native, ffi.NULL
        if native != ffi.NULL:
            lib.sim_close(native)

    def _checked(self, answer: int) -> int:
        if answer < 0:
            what = "has lost its context" if self.error else "refuses"
            raise TransferError(f"the simulated device {what}: {errno.errorcode[-answer]}")
        return int(answer)


def _function(kind: Any, name: str) -> Any:
    """A function of flexkv's C core, as ours takes it."""
    address = core_ffi.cast("uintptr_t", core_ffi.addressof(core, name))
    return ffi.cast(kind, int(address))
