"""The vLLM connector under random schedules, driven in vLLM's order of calls without vLLM.

Every step checks that the bytes a request reads are its own; every schedule ends with nothing
leaked: no block, no pin, no transfer, no state of a request.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_modules
from vllm_engine import FakeEngine
from vllm_rig import Load, opened, options_of, running, side

from flexkv.errors import BrokenManagerError


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[Any]:
    with vllm_modules.installed() as module:
        yield module


@pytest.fixture
def connector(vllm: Any) -> type:
    from flexkv.integration.vllm.connector import FlexKVConnector

    return FlexKVConnector


def choose(vllm: Any, seed: int, **fixed: Any) -> tuple[random.Random, dict[str, Any]]:
    """The dice and the engine of a seed."""
    dice = random.Random(seed)
    options = options_of(dice) | fixed
    vllm.__version__ = f"0.{options['minor']}.0"
    return dice, options


def some_class(connector: type, options: dict[str, Any]) -> type:
    """Vary the way in; what needs the calls that only one of them gets goes that way."""
    special = options["save_every_tokens"] or options["load"] == "sync"
    by_module = special or options["blocks"] > 50
    return connector if by_module else vllm_modules.FlexKVConnectorV1


@pytest.mark.parametrize("seed", range(40))
def test_any_schedule_reads_its_own_bytes_and_leaves_nothing(
    vllm: Any, connector: type, seed: int
) -> None:
    dice, options = choose(vllm, seed)
    with running(connector, dice, dice.choice((0.0, 0.0, 0.1, 0.4)), **options) as engine:
        load = Load(engine, dice)
        load.run(dice.randrange(60, 300))
        engine.settle()
        load.check()


@pytest.mark.parametrize("seed", range(12))
def test_the_built_in_class_reads_its_own_bytes_and_leaves_nothing(vllm: Any, seed: int) -> None:
    dice, options = choose(vllm, 1000 + seed, save_every_tokens=0, load="async")
    failing = dice.choice((0.0, 0.2))
    with running(vllm_modules.FlexKVConnectorV1, dice, failing, **options) as engine:
        load = Load(engine, dice)
        load.run(dice.randrange(60, 300))
        engine.settle()
        load.check()


@pytest.mark.parametrize("seed", range(10))
def test_workers_may_lose_the_manager_at_any_time_and_join_again(
    vllm: Any, connector: type, seed: int
) -> None:
    dice, options = choose(vllm, 2000 + seed)
    with running(connector, dice, **options) as engine:
        load = Load(engine, dice)
        load.run(dice.randrange(60, 300), cuts=0.03)
        engine.settle()
        load.check()
        assert side(engine)._server.wait_ready(5)


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_may_be_shut_down_in_any_state(vllm: Any, connector: type, seed: int) -> None:
    dice, options = choose(vllm, 3000 + seed)
    kind = some_class(connector, options)
    with opened(kind, dice, 0.1, close_timeout_ms=1000, **options) as engine:
        Load(engine, dice).run(dice.randrange(1, 100))
        begun = time.monotonic()
        if dice.random() < 0.3:  # the other way round
            engine.connector.shutdown()
    assert time.monotonic() - begun < 5


def test_a_prompt_is_found_again_after_a_reset(vllm: Any, connector: type) -> None:
    for minor in (19, 25, 32):
        dice, options = choose(vllm, 1, minor=minor, host_cache_bytes=1 << 20, min_load_tokens=0)
        with running(connector, dice, **options) as engine:
            prompt = [dice.randrange(50) for _ in range(40)]
            for number in range(3):
                engine.add(f"r{number}", prompt, 4)
                engine.settle()
                assert engine.reset()
            assert engine.counts["loaded"] > 0


# --- hints of requests


def reload_after_others(
    connector: type, dice: random.Random, hint: Any, options: dict[str, Any]
) -> int:
    """How many tokens of a conversation of 36 come back after 12 other requests of 40."""
    settings = {"host_cache_bytes": 128 << 10, "load": "async", "min_load_tokens": 0}
    with running(connector, dice, **(options | settings)) as engine:
        prompt = [dice.randrange(50) for _ in range(28)]
        first = engine.add("first", prompt, 9, parameters=hint)
        engine.settle()
        talk = list(first.all_token_ids[:36])
        for number in range(12):
            engine.add(f"r{number}", [dice.randrange(50) for _ in range(32)], 8)
            engine.settle()
        assert engine.reset()
        before = engine.counts["loaded"]
        engine.add("again", [*talk, *range(8)], 2)
        engine.settle()
        return int(engine.counts["loaded"] - before)


def test_a_hint_keeps_a_request_longer(vllm: Any, connector: type) -> None:
    for minor in (19, 28, 32):
        loaded = []
        for hint in (None, {"flexkv": {"priority": 90}}, {"flexkv": {"steps": 2}}):
            dice, options = choose(vllm, 1, minor=minor, ranks=1, save="finish", depth=1)
            options = {name: options[name] for name in options if "disk" not in name}
            loaded.append(reload_after_others(connector, dice, hint, options))
        # a bias, no lock: what others' puts still hold when room is needed may cost hinted blocks
        assert loaded[0] < min(loaded[1:]), loaded


def test_hints_that_make_no_sense_are_logged_and_the_request_is_served(
    vllm: Any, connector: type, caplog: Any
) -> None:
    dice, options = choose(vllm, 2, minor=32)
    wrong = ({"priority": 200}, {"priority": "high"}, {"colour": 1}, "soon", {"ttl_s": -1})
    with running(connector, dice, **options) as engine:
        load = Load(engine, dice)
        for number, hint in enumerate(wrong):
            prompt = [dice.randrange(50) for _ in range(20)]
            load.asked[f"w{number}"] = engine.add(
                f"w{number}", prompt, 3, parameters={"flexkv": hint, "do_remote_prefill": False}
            )
        engine.settle()
        load.check()
    assert sum("vllm.hint_ignored" in line for line in caplog.messages) >= len(wrong)


# --- when flexkv itself fails


def check_degraded(engine: FakeEngine, load: Load, caplog: Any) -> None:
    """vLLM has computed everything by itself, nothing is held, and one line says why."""
    engine.settle()
    load.check()
    assert not any(engine.pool.users)
    assert not engine.requests
    assert engine.reset()
    lost = [record for record in caplog.records if "vllm.lost" in record.getMessage()]
    assert len(lost) == 1


class Unreliable:
    """Stands before an object; one of its calls, after `calls` good ones, raises, and all later."""

    def __init__(self, inner: Any, left: list[int], error: Exception, names: str) -> None:
        self._inner, self._left, self._error, self._names = inner, left, error, names.split()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names:
            return value

        def call(*arguments: Any, **keywords: Any) -> Any:
            self._left[0] -= 1
            if self._left[0] < 0:
                raise self._error
            return value(*arguments, **keywords)

        return call


@pytest.mark.parametrize("seed", range(16))
def test_no_failure_of_the_manager_gets_past_the_connector(
    vllm: Any, connector: type, seed: int, caplog: Any
) -> None:
    dice, options = choose(vllm, 4000 + seed)
    kind = some_class(connector, options)
    error = dice.choice((RuntimeError("a bug"), BrokenManagerError("broken"), OSError(5, "io")))
    with opened(kind, dice, close_timeout_ms=500, **options) as engine:
        load, scheduler = Load(engine, dice), side(engine)
        left = [dice.randrange(60)]
        scheduler.kv = Unreliable(scheduler.kv, left, error, "visit post call run")
        load.run(dice.randrange(60, 200))
        left[0] = 0
        load.add()
        check_degraded(engine, load, caplog)


@pytest.mark.parametrize("seed", range(6))
def test_work_that_fails_on_the_managers_thread_is_computed(
    vllm: Any, connector: type, seed: int
) -> None:
    dice, options = choose(vllm, 5000 + seed)
    with running(connector, dice, **options) as engine:
        load, scheduler = Load(engine, dice), side(engine)
        manager, left = scheduler.kv.manager, [dice.randrange(30)]
        unreliable = Unreliable(manager, left, RuntimeError("a bug"), "launch put_match")
        scheduler._carrier._manager = unreliable
        load.run(dice.randrange(60, 200))
        engine.settle()
        load.check()


@pytest.mark.parametrize("seed", range(6))
def test_a_broken_manager_costs_only_the_hits(
    vllm: Any, connector: type, seed: int, caplog: Any
) -> None:
    dice, options = choose(vllm, 6000 + seed)
    with opened(connector, dice, **options) as engine:
        load, scheduler = Load(engine, dice), side(engine)
        load.run(dice.randrange(20, 100))
        scheduler.kv.post(scheduler.kv.manager._host._break, RuntimeError("a bug"))
        load.run(dice.randrange(20, 100))
        load.add()
        check_degraded(engine, load, caplog)


# a loop that is stopped under its tasks leaves some that never began, and Python says so
@pytest.mark.filterwarnings("ignore:coroutine 'Carriers._run' was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("ends", [False, True], ids=["blocked", "ended"])
@pytest.mark.parametrize("seed", range(3))
def test_a_manager_that_does_not_answer_costs_only_the_hits(
    vllm: Any, connector: type, seed: int, ends: bool
) -> None:
    dice, options = choose(vllm, 7000 + seed, load="async", close_timeout_ms=500)
    options |= {"engine_wait_ms": 300, "match_timeout_ms": 50}
    with opened(connector, dice, **options) as engine:
        load, scheduler = Load(engine, dice), side(engine)
        load.run(dice.randrange(20, 100))
        stay = threading.Event()
        scheduler.kv.post(leave if ends else stay.wait)
        load.run(dice.randrange(20, 100))
        engine.settle()
        load.check()
        assert not any(engine.pool.users)
        assert engine.reset()
        stay.set()


def leave() -> None:
    """End the loop, and with it its thread."""
    asyncio.get_running_loop().stop()


def test_a_manager_that_was_busy_for_a_while_is_asked_again(vllm: Any, connector: type) -> None:
    dice, options = choose(vllm, 7, minor=32, load="async", host_cache_bytes=1 << 20)
    options |= {"match_timeout_ms": 50, "save_every_tokens": 0, "min_load_tokens": 0}
    prompt = [dice.randrange(50) for _ in range(40)]
    busy, stay = threading.Event(), threading.Event()

    def hold_up() -> None:
        busy.set()
        stay.wait()

    with running(connector, dice, **options) as engine:
        engine.add("first", prompt, 4)
        engine.settle()
        assert engine.reset()
        side(engine).kv.post(hold_up)
        busy.wait()
        try:
            second = engine.add("second", prompt, 4)
            while not second.output_token_ids:
                engine.step()
            assert not engine.counts["loaded"]
        finally:
            stay.set()
        engine.settle()
        side(engine).kv.call(int)
        assert engine.reset()
        engine.add("third", prompt, 4)
        engine.settle()
        assert engine.counts["loaded"]
