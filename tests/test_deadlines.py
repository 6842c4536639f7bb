"""Whoever waits for hardware that never answers is told so in time, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, open_rig, prompt, slots_of
from stepping import open_stepping

from flexkv import StalledError

LIMITS: dict[str, Any] = {"settle_timeout_ms": 400, "transfer_timeout_ms": 200}


def device_of(rig: Rig) -> Any:
    return rig.kv._stack.device.device


async def test_a_device_that_stands_still_ends_every_wait_in_time(tmp_path: Path) -> None:
    options = {"device_backend": "simulated", "device_options": {"timeout_ms": 5}}
    async with open_rig(tmp_path, **options, **LIMITS) as rig:
        await rig.put(prompt(1, 2))
        device_of(rig).pause()
        put = rig.start_put(prompt(2, 2))
        get = rig.kv.get_async(prompt(1, 2), slots_of([8, 9]))
        waits: list[Callable[[], Awaitable[Any]]] = [put.quiesced, get.quiesced, rig.kv.flush]
        for wait in (*waits, rig.kv.reset):
            with pytest.raises(StalledError, match="400 ms: hardware is slow or does not answer"):
                await wait()
        assert (await get).timed_out
        assert rig.kv.usage()["manager"]["transfers"] == 2, "both may still touch their slots"
        device_of(rig).pause(False)
        for wait in waits:
            await wait()
        assert (await rig.get(prompt(1, 2))).loaded == 8, "the reset that failed forgot something"
        await rig.kv.reset()
        assert (await rig.get(prompt(1, 2))).loaded == 0
        await rig.put(prompt(3, 8))


async def test_a_wait_may_have_a_limit_of_its_own(tmp_path: Path) -> None:
    async with open_stepping(tmp_path, transfer_timeout_ms=20) as (rig, steps):
        steps.arm("before gather")
        put = rig.start_put(prompt(1, 2))
        with pytest.raises(TimeoutError, match=r"Transfer put matched=8 .* after 10 ms"):
            await put.quiesced(timeout_ms=10)
        steps.release()
        await put.quiesced(timeout_ms=float("inf"))
        await put.quiesced(timeout_ms=0)  # it is over


async def test_a_store_that_writes_nothing_ends_every_wait_in_time(tmp_path: Path) -> None:
    async with open_rig(tmp_path, settle_timeout_ms=400) as rig:
        gate = rig.faults().hold("write")
        put = rig.start_put(prompt(1, 2))
        await put
        for wait in (put.durable, rig.kv.flush, rig.kv.reset):
            with pytest.raises(StalledError, match="after 400 ms"):
                await wait()
        assert (await rig.get(prompt(1, 2))).loaded == 8
        gate.open()
        await put.durable()


async def test_a_store_that_does_not_forget_ends_a_reset_in_time(tmp_path: Path) -> None:
    async with open_rig(tmp_path, settle_timeout_ms=400) as rig:
        await rig.put(prompt(1, 4))
        gate = rig.faults().hold("record")
        for wait in (rig.kv.reset, rig.kv.flush, rig.kv.reset):
            with pytest.raises(StalledError):
                await wait()
        assert (await rig.get(prompt(1, 4))).loaded == 0
        assert rig.kv.usage()["disk"]["free"] == 0, "slots are free only when they are forgotten"
        gate.open()
        await rig.kv.reset()
        assert rig.kv.usage()["disk"]["free"] == 32
        await rig.put(prompt(2, 8))
