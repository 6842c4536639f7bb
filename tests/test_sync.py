"""The blocking face: several threads, time-outs, exceptions across the thread boundary, closing."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rig import SPEC, STRIDE, Device, pattern, prompt, slots_of
from stepping import Steps, registered

from flexkv import (
    BlockingKVManager,
    CapacityError,
    ClosedError,
    ConfigError,
    FlexKVConfig,
    InputError,
    KVManager,
)
from flexkv.errors import FlexKVError
from flexkv.sync import BlockingTransfer


def config(path: Path | None, **more: Any) -> FlexKVConfig:
    settings: dict[str, Any] = {
        "model": "test-model",
        "spec": SPEC,
        "host_cache_bytes": 64 * STRIDE,
        "huge_pages": False,
    }
    if path is not None:
        settings |= {"disk_cache_bytes": 128 * STRIDE, "disk_dirs": [path / "d0"]}
    return FlexKVConfig.load(**(settings | more))


@contextmanager
def opened(path: Path | None, **more: Any) -> Iterator[tuple[BlockingKVManager, Device]]:
    device = Device(256)
    with BlockingKVManager(config(path, **more)) as kv:
        kv.register(device.caches, axes="PBNHD")
        yield kv, device


def put(kv: BlockingKVManager, device: Device, name: int, first: int = 0) -> BlockingTransfer:
    tokens = prompt(name, 4)
    for i in range(4):
        device.write(first + i, pattern(tokens, i))
    return kv.put(tokens, slots_of(range(first, first + 4)))


def test_calls_of_all_kinds_are_made_in_the_order_in_which_they_are_asked_for() -> None:
    """A flush that follows a posted put covers it."""
    made: list[str] = []

    async def note(what: str) -> None:
        made.append(what)

    with opened(None) as (kv, _):
        for turn in range(200):  # the loop is asleep, or not, when they come
            kv.post(made.append, f"post {turn}")
            kv.run(note, f"run {turn}")
            kv.post(made.append, f"late {turn}")
            kv.call(made.append, f"call {turn}")
    kinds = ("post", "run", "late", "call")
    assert made == [f"{kind} {turn}" for turn in range(200) for kind in kinds]


def test_calls_see_the_context_of_their_caller() -> None:
    who = contextvars.ContextVar("who", default="nobody")
    seen: list[str] = []

    async def look() -> None:
        seen.append(who.get())

    with opened(None) as (kv, _):
        who.set("me")
        kv.call(lambda: seen.append(who.get()))
        kv.post(lambda: seen.append(who.get()))
        kv.run(look)
    assert seen == ["me"] * 3


def test_a_round_trip_without_a_loop(tmp_path: Path) -> None:
    with opened(tmp_path) as (kv, device):
        stored = put(kv, device, 1)
        assert stored.durable(timeout_ms=5000).stored == 16
        device.wipe()
        plan = kv.get_match(prompt(1, 4), leave_tokens=1)
        assert plan.matched == 12
        kv.cancel_plan(plan)
        plan = kv.get_match(prompt(1, 4))
        got = kv.launch(plan, slots_of([9, 8, 7, 6]))
        assert got.matched == 16
        assert got.result().loaded == 16
        assert got.done
        got.quiesced()
        for i, block in enumerate([9, 8, 7, 6]):
            assert np.array_equal(device.read(block), pattern(prompt(1, 4), i))
        assert kv.prefetch(prompt(1, 4)).result().loaded == 16
        cancelled = kv.get(prompt(1, 4), slots_of(range(4)))
        cancelled.cancel()
        cancelled.result()
        assert kv.wait([stored, got], timeout_ms=100) == [stored, got]
        assert kv.remove(prompt(1, 4)) == 16
        kv.flush()
        kv.reset()
        assert kv.usage()["manager"]["pinned"] == 0


def test_many_threads_share_one_manager(tmp_path: Path) -> None:
    with opened(tmp_path) as (kv, device):

        def work(number: int) -> None:
            first = 8 * number
            for turn in range(10):
                name = 100 * number + turn
                put(kv, device, name, first).result()
                result = kv.get(prompt(name, 4), slots_of(range(first + 4, first + 8))).result()
                for i in range(result.loaded // 4):  # type: ignore[union-attr]
                    assert np.array_equal(device.read(first + 4 + i), pattern(prompt(name, 4), i))

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, number) for number in range(8)]:
                done.result(30)
        kv.flush()
        usage = kv.usage()
        assert usage["manager"]["pinned"] == usage["manager"]["transfers"] == 0


def test_a_wait_that_is_too_long_ends_and_the_transfer_goes_on(tmp_path: Path) -> None:
    steps = Steps()
    with registered(steps), opened(tmp_path, device="stepping") as (kv, device):
        kv.call(steps.arm, "before gather")
        stored = put(kv, device, 1)
        with pytest.raises(TimeoutError):
            stored.result(timeout_ms=10)
        with pytest.raises(TimeoutError):
            stored.durable(timeout_ms=10)
        assert kv.wait([stored], timeout_ms=10) == []
        assert not stored.done
        kv.call(steps.release)
        assert stored.result().stored == 16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda kv: kv.get([-1, 2, 3, 4], [0, 1, 2, 3]), InputError),
        (lambda kv: kv.put([1, 2, 3, 4], [1, 2, 3, 4]), InputError),
        (lambda kv: kv.put_match(prompt(1, 65)), CapacityError),
        (lambda kv: kv.put(prompt(1, 65), slots_of(range(65))).result(), CapacityError),
    ],
)
def test_errors_keep_their_type_across_threads(
    call: Callable[[BlockingKVManager], Any], error: type[Exception]
) -> None:
    with opened(None) as (kv, _), pytest.raises(error):
        call(kv)


def test_an_open_that_fails_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError), BlockingKVManager(FlexKVConfig()):
        pass
    assert threading.active_count() <= before
    assert not [t for t in threading.enumerate() if t.name == "flexkv-loop"]


def test_closing_twice_and_calling_afterwards(tmp_path: Path) -> None:
    kv = BlockingKVManager(config(tmp_path))
    kv.close()
    with pytest.raises(ClosedError):
        kv.usage()
    with kv:
        kv.usage()
        kv.close()
        kv.close()
    with pytest.raises(ClosedError):
        kv.usage()
    with pytest.raises(ClosedError), kv:
        pass


def test_closing_from_several_threads_at_once(tmp_path: Path) -> None:
    kv = BlockingKVManager(config(tmp_path)).__enter__()
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(kv.close) for _ in range(8)]:
            done.result(30)
    assert not [t for t in threading.enumerate() if t.name == "flexkv-loop"]


def test_calls_that_race_closing_end(tmp_path: Path) -> None:
    """Threads that hammer a manager while it is closed: every call returns or raises ours."""
    for _ in range(5):
        with opened(None) as (kv, device):
            going = threading.Barrier(5)

            def work(number: int, going: threading.Barrier = going) -> int:
                going.wait(10)
                calls = 0
                try:
                    while True:
                        put(kv, device, number, 8 * number).result()
                        kv.flush()
                        calls += 1
                except FlexKVError:
                    return calls

            with ThreadPoolExecutor(4) as pool:
                working = [pool.submit(work, number) for number in range(4)]
                going.wait(10)
                kv.usage()
                kv.close()
                for done in working:
                    done.result(30)


def test_a_waiter_is_told_when_closing_gives_up(tmp_path: Path) -> None:
    steps = Steps()
    with registered(steps), ThreadPoolExecutor(3) as pool:
        with opened(tmp_path, disk_backend="stepping-disk", close_timeout_ms=50) as (kv, device):
            kv.call(steps.arm, "before write")
            stored = put(kv, device, 1)
            stored.result()
            waiting = [pool.submit(stored.durable), pool.submit(kv.flush), pool.submit(kv.reset)]
            kv.run(steps.reached.wait)
        for waiter in waiting:
            with pytest.raises(FlexKVError):
                waiter.result(30)


async def test_a_manager_used_from_another_thread_says_so(tmp_path: Path) -> None:
    async with KVManager(config(None)) as kv:
        with ThreadPoolExecutor(1) as pool:
            wrong = pool.submit(kv.get_match, [1, 2, 3, 4])
            with pytest.raises(FlexKVError, match="BlockingKVManager"):
                wrong.result(10)
