"""A trace through the real data plane, one request after the other: `replay`.

A KVManager with a device, host memory and a disk directory serves what the simulator
(`flexkv.sim.serving.replay`) serves: a get and a put, behind each of them everything that follows
until nothing is under way. A block is a token whose id is the chained id of the trace, so that its
key names the same prefix; its bytes carry the id, and what a get brings is compared with it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from flexkv import FlexKVConfig, KVManager, plugins
from flexkv.errors import CapacityError, TransferError
from flexkv.model import PAGE_BYTES
from flexkv.sim.serving.replay import Progress, Served
from flexkv.traces import TraceRequest

_TIMED = "{}@trace"  # the policy of that name, told the time of the trace


def replay(
    config: FlexKVConfig, requests: Sequence[TraceRequest], progress: Progress = lambda *_: None
) -> list[Served]:
    """Serve the requests through a manager of this configuration; its directory must be empty.

    Raises:
        TransferError: a get brought other bytes than were put, or fewer blocks than it matched.
    """
    return anyio.run(_replay, config, requests, progress)


async def _replay(
    config: FlexKVConfig, requests: Sequence[TraceRequest], progress: Progress
) -> list[Served]:
    clock = _Clock()
    with _timed_policies(config, clock) as timed:
        device = _Device(config, max((len(r.block_ids) for r in requests), default=1))
        async with KVManager(timed) as kv:
            kv.register([device.memory], axes="PBNHD")
            plane = _Plane(kv, device)
            served = []
            for number, request in enumerate(requests):
                clock.now_s = request.timestamp_ms / 1e3
                served.append(await plane.serve(number, request))
                progress(number + 1, len(requests))
            return served


class _Clock:
    """The time of the trace."""

    now_s = 0.0


@contextmanager
def _timed_policies(config: FlexKVConfig, clock: _Clock) -> Iterator[FlexKVConfig]:
    """Enter the policies once more, under names of their own, with the trace's time for `now`."""
    names = {tier: config.policy_of(tier) for tier in ("host", "disk")}
    with ExitStack() as entered:
        for name in sorted(set(names.values())):
            policy = _timed(plugins.load(plugins.POLICIES, name), clock)
            entered.enter_context(plugins.register(plugins.POLICIES, _TIMED.format(name), policy))
        yield config.model_copy(
            update={f"{tier}_policy": _TIMED.format(name) for tier, name in names.items()}
        )


def _timed(policy: type, clock: _Clock) -> type:
    """Return the policy with every `now` replaced."""

    def replaced(method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            bound = signature.bind(*arguments, **keywords)
            bound.arguments["now"] = clock.now_s
            return method(*bound.args, **bound.kwargs)

        return call

    members = {
        name: replaced(method)
        for name, method in inspect.getmembers(policy, inspect.isfunction)
        if "now" in inspect.signature(method).parameters
    }
    return type(policy.__name__, (policy,), members)


class _Device:
    """The engine's KV memory: one layer, K and V, a token per block."""

    def __init__(self, config: FlexKVConfig, blocks: int) -> None:
        assert config.spec is not None
        half = config.spec.groups[0].head_size
        raw = np.zeros(2 * blocks * half + PAGE_BYTES, np.uint8)
        skip = -int(raw.__array_interface__["data"][0]) % PAGE_BYTES
        flat = raw[skip : skip + 2 * blocks * half]
        self.memory = flat.reshape(2, blocks, 1, 1, half)
        self._marks = flat.reshape(2, blocks, half)[0, :, :8].view(np.int64)[:, 0]

    def mark(self, ids: NDArray[np.int64], first: int = 0) -> None:
        """Write ids into blocks from `first` on, as the engine writes what it has computed."""
        self._marks[first : len(ids)] = ids[first:]

    def wipe(self, count: int) -> None:
        """Forget the first blocks."""
        self._marks[:count] = -1

    def check(self, ids: NDArray[np.int64]) -> None:
        """Raise TransferError when the first blocks do not carry these ids."""
        wrong = np.flatnonzero(self._marks[: len(ids)] != ids)
        if len(wrong):
            raise TransferError(f"block {int(wrong[0])} of {len(ids)} came back with other bytes")


class _Plane:
    """A manager, watched."""

    def __init__(self, kv: KVManager, device: _Device) -> None:
        self._kv, self._device = kv, device
        self._slots = np.arange(device.memory.shape[1], dtype=np.int64)
        self._moved, self._evicted = self._bytes(), self._leavers()

    def _bytes(self) -> dict[tuple[str, str], int]:
        counters = self._kv.telemetry.counters
        return {
            (key[1], key[2]): int(value)
            for key, value in counters.items()
            if key[0] == "transfer_bytes"
        }

    def _leavers(self) -> dict[str, int]:
        usage = self._kv.usage()
        return {name: tier["evicted"] for name, tier in usage.items() if "evicted" in tier}

    async def serve(self, number: int, request: TraceRequest) -> Served:
        """Serve one request to the end of all that follows from it."""
        ids = np.ascontiguousarray(request.block_ids, np.int64)
        served, kv, device = Served(number, len(ids)), self._kv, self._device
        device.wipe(len(ids))
        begun_s = time.monotonic()
        fetch = kv.get_async(ids, self._slots[: len(ids)])
        got = await fetch
        served.get_s = fetch.finished - begun_s
        served.matched, served.by_tier = got.matched, dict(got.by_tier)
        if got.loaded != got.matched:
            raise TransferError(f"request {number}: {got.loaded} of {got.matched} blocks came")
        device.check(ids[: got.loaded])
        settling_s = time.monotonic()
        await kv.flush()
        served.settle_s = time.monotonic() - settling_s
        device.mark(ids, got.loaded)
        begun_s = time.monotonic()
        store = kv.put_async(ids, self._slots[: len(ids)])
        try:
            served.stored = (await store).new
        except CapacityError:
            served.refused = True
        settling_s = time.monotonic()
        served.put_s = store.finished - begun_s
        await kv.flush()
        served.settle_s += time.monotonic() - settling_s
        moved, evicted = self._bytes(), self._leavers()
        served.moved_bytes = {edge: size - self._moved.get(edge, 0) for edge, size in moved.items()}
        served.evicted = {tier: count - self._evicted[tier] for tier, count in evicted.items()}
        self._moved, self._evicted = moved, evicted
        return served
