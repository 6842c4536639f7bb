"""Cancelling those who listen, and transfers themselves, at every step of every kind of transfer:
nothing leaks, nothing is lost, nothing lands late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from loop_matrix import LOOPS, run_on
from rig import TOKENS_PER_BLOCK, Rig, check_books, pattern, prompt, slots_of
from stepping import Steps, open_stepping

from flexkv import PutResult
from flexkv.transfer import Transfer

BLOCKS = 6
TARGETS = list(range(40, 40 + BLOCKS))
SENTINEL = 0xBEEF


@dataclass(frozen=True)
class Scenario:
    """A kind of transfer: what must be there before, and how it starts."""

    name: str
    prepare: Callable[[Rig, int], Awaitable[object]]
    start: Callable[[Rig, int], Transfer]
    settings: dict[str, Any] = field(default_factory=dict)


async def _nothing(rig: Rig, name: int) -> None:
    pass


async def _in_host(rig: Rig, name: int) -> None:
    await rig.put(prompt(name, BLOCKS))
    rig.device.wipe(SENTINEL)


async def _in_disk_only(rig: Rig, name: int) -> None:
    """Put a prompt, and push it out of the host by another."""
    await rig.put(prompt(name, BLOCKS), durable=False)
    await rig.kv.flush()
    await rig.put(prompt(name + 1, 8), durable=False)
    await rig.kv.flush()
    rig.device.wipe(SENTINEL)


def _put(rig: Rig, name: int) -> Transfer:
    return rig.start_put(prompt(name, BLOCKS))


def _get(rig: Rig, name: int) -> Transfer:
    return rig.kv.get_async(prompt(name, BLOCKS), slots_of(TARGETS))


def _get_through_staging(rig: Rig, name: int) -> Transfer:
    held = rig.kv.get_match(prompt(name + 1, 8))  # no host slot can be had
    assert held.matched == 32
    transfer = _get(rig, name)
    held.cancel()
    return transfer


def _prefetch(rig: Rig, name: int) -> Transfer:
    return rig.kv.prefetch_async(prompt(name, BLOCKS))


SCENARIOS = [
    Scenario("put", _nothing, _put),
    Scenario("put_saving_victims", _in_disk_only, _put, {"spill": "on_evict"}),
    Scenario("get_from_host", _in_host, _get),
    Scenario("get_from_disk", _in_disk_only, _get),
    Scenario("get_through_staging", _in_disk_only, _get_through_staging),
    Scenario("get_saving_victims", _in_disk_only, _get, {"spill": "on_evict"}),
    Scenario("prefetch", _in_disk_only, _prefetch),
]
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
each_loop = pytest.mark.parametrize("loop", LOOPS)


# ways to lose a listener. Each starts listening, calls `reached` (which returns once the transfer
# stands at the step), loses the listener and returns when it is gone.

Reached = Callable[[asyncio.Future[Any]], Awaitable[bool]]


async def _listen(transfer: Transfer) -> Any:
    return await transfer


async def native_cancel(transfer: Transfer, reached: Reached) -> None:
    listener = asyncio.ensure_future(_listen(transfer))
    if await reached(listener):
        listener.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await listener


async def asyncio_timeout(transfer: Transfer, reached: Reached) -> None:
    loop = asyncio.get_running_loop()

    async def listen() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as scope:
                scopes.append(scope)
                await transfer

    scopes: list[asyncio.Timeout] = []
    listener = asyncio.ensure_future(listen())
    if await reached(listener):
        scopes[0].reschedule(loop.time())
    await listener


async def wait_for(transfer: Transfer, reached: Reached) -> None:
    listener = asyncio.ensure_future(_listen(transfer))
    if await reached(listener):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(listener, 0.001)
    else:
        await listener


async def anyio_scope(transfer: Transfer, reached: Reached) -> None:
    scope = anyio.CancelScope()

    async def listen() -> None:
        with scope:
            await transfer

    listener = asyncio.ensure_future(listen())
    if await reached(listener):
        scope.cancel()
    await listener


async def anyio_deadline(transfer: Transfer, reached: Reached) -> None:
    scope = anyio.CancelScope()

    async def listen() -> None:
        with scope:
            await transfer

    listener = asyncio.ensure_future(listen())
    if await reached(listener):
        scope.deadline = anyio.current_time()
    await listener


async def failing_sibling(transfer: Transfer, reached: Reached) -> None:
    async def fail() -> None:
        await reached(asyncio.ensure_future(transfer.quiesced()))
        raise ZeroDivisionError

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_listen(transfer))
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await both()


async def failing_gather(transfer: Transfer, reached: Reached) -> None:
    async def fail() -> None:
        await reached(asyncio.ensure_future(transfer.quiesced()))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.gather(transfer, transfer, fail())


WAYS = [
    native_cancel,
    asyncio_timeout,
    wait_for,
    anyio_scope,
    anyio_deadline,
    failing_sibling,
    failing_gather,
]


Act = Callable[[Rig, Steps, Transfer, Reached], Awaitable[None]]


async def at_every_step(path: Path, scenario: Scenario, act: Act, *, most: int = 100) -> int:
    """Run `act` on a fresh transfer with step 0, 1, ... held, until one has no such step.

    Returns how many steps there were. `act` gets `reached`: wait until the transfer stands at the
    step (True) or some future is over (False).
    """
    async with open_stepping(path, disk=64, **scenario.settings) as (rig, steps):
        for step in range(most):
            steps.arm()
            name = 10 + 2 * step
            await scenario.prepare(rig, name)
            steps.arm(step)
            transfer = scenario.start(rig, name)
            await act(rig, steps, transfer, steps.reached_or_done)
            held = steps.reached.is_set()
            steps.release()
            await transfer.quiesced()
            await rig.kv.flush()
            check_books(rig.kv)
            if not held:
                return step
    return most


async def check_content(rig: Rig, name: int) -> int:
    """Whatever is found of a prompt is right; returns how many blocks are."""
    result = await rig.get(prompt(name, BLOCKS), blocks=TARGETS)
    return result.loaded // TOKENS_PER_BLOCK


def check_result(rig: Rig, scenario: Scenario, transfer: Transfer) -> None:
    """The transfer did all of its work."""
    result = transfer.result()
    assert not result.cancelled
    if isinstance(result, PutResult):
        assert (result.stored, result.new) == (BLOCKS * TOKENS_PER_BLOCK, BLOCKS * TOKENS_PER_BLOCK)
        return
    assert (result.loaded, result.timed_out) == (result.matched, False)


# listeners


@each_loop
@each_scenario
def test_a_cancelled_listener_changes_nothing(
    tmp_path: Path, scenario: Scenario, loop: str
) -> None:
    async def act(rig: Rig, steps: Steps, transfer: Transfer, reached: Reached) -> None:
        await native_cancel(transfer, reached)
        if steps.reached.is_set():
            assert not transfer.done or "write" in steps.held, steps.names  # a spill's step
        again = asyncio.ensure_future(_listen(transfer))
        steps.release()
        assert await again is transfer.result()
        check_result(rig, scenario, transfer)

    steps = run_on(loop, at_every_step(tmp_path, scenario, act))
    assert steps >= 2


@each_loop
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("step", ["before read", "after scatter"])
def test_every_way_to_stop_listening_is_harmless(
    tmp_path: Path, way: Any, step: str, loop: str
) -> None:
    async def main() -> None:
        async with open_stepping(tmp_path) as (rig, steps):
            await _in_disk_only(rig, 10)
            steps.arm(step)
            transfer = _get(rig, 10)
            await way(transfer, steps.reached_or_done)
            assert steps.reached.is_set()
            assert not transfer.done
            steps.release()
            result = await transfer
            rig.check(prompt(10, BLOCKS), result, TARGETS, sentinel=SENTINEL)
            assert result.loaded == BLOCKS * TOKENS_PER_BLOCK
            await transfer.quiesced()

    run_on(loop, main())


@each_loop
def test_a_cancelled_wait_for_durability_changes_nothing(tmp_path: Path, loop: str) -> None:
    async def act(rig: Rig, steps: Steps, transfer: Transfer, reached: Reached) -> None:
        listener = asyncio.ensure_future(transfer.durable())
        if await reached(listener):
            listener.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listener
        steps.release()
        result = await transfer.durable()
        assert result.stored == BLOCKS * TOKENS_PER_BLOCK

    steps = run_on(loop, at_every_step(tmp_path, SCENARIOS[0], act))
    assert steps >= 4


# the transfer itself


@each_loop
@each_scenario
def test_nothing_lands_after_a_cancelled_transfer_has_quiesced(
    tmp_path: Path, scenario: Scenario, loop: str
) -> None:
    async def act(rig: Rig, steps: Steps, transfer: Transfer, reached: Reached) -> None:
        name = transfer_name(steps)
        over = asyncio.ensure_future(transfer.quiesced())
        if await reached(over):
            transfer.cancel()
            transfer.cancel()
        steps.release()
        await over
        assert transfer.done
        result = transfer.result()
        if transfer.kind == "get":
            good = set(TARGETS) - set(result.failed_device_blocks.tolist())
            for i, block in enumerate(TARGETS):
                if block in good:
                    assert np.array_equal(rig.device.read(block), pattern(prompt(name, BLOCKS), i))
        rig.device.wipe(SENTINEL)
        await rig.kv.flush()
        assert rig.device.is_wiped(SENTINEL), "a byte landed in memory that was given back"
        await check_content(rig, name)

    names = iter(range(10, 1000, 2))

    def transfer_name(steps: Steps) -> int:
        return next(names)

    run_on(loop, at_every_step(tmp_path, scenario, act))


@each_loop
def test_a_cancel_that_races_completion_releases_once(tmp_path: Path, loop: str) -> None:
    async def main() -> None:
        async with open_stepping(tmp_path) as (rig, _):
            await rig.put(prompt(1, BLOCKS))
            for turn in range(200):
                transfer = _get(rig, 1)
                for _ in range(turn % 12):
                    await tick()
                transfer.cancel()
                result = await transfer
                await transfer.quiesced()
                transfer.cancel()
                assert result.loaded <= result.matched == BLOCKS * TOKENS_PER_BLOCK
                assert rig.kv.usage()["manager"]["pinned"] == 0
            check_books(rig.kv)
            assert await check_content(rig, 1) == BLOCKS

    run_on(loop, main())


async def tick() -> None:
    """Let the loop turn once."""
    turned = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turned.set_result, None)
    await turned
