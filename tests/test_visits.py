"""Calls of other threads: `call` and `post` run in order on the loop's, `visit` in between."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from flexkv import BlockingKVManager, FlexKVConfig
from flexkv.errors import InputError
from flexkv.model import KVSpec

SPEC = KVSpec.uniform(1, 1, 64, "float32", tokens_per_block=16)


def opened() -> BlockingKVManager:
    return BlockingKVManager(
        FlexKVConfig(spec=SPEC, host_cache_bytes=64 * SPEC.stride_bytes, huge_pages=False)
    )


def test_a_visit_answers_as_a_call_does_and_its_plan_can_be_launched() -> None:
    with opened() as kv:
        cache = np.ones((8, 1, 16, 128), np.float32)
        kv.register([cache], axes="BHNC")
        tokens = np.arange(64, dtype=np.int32)
        kv.put(tokens, np.arange(64)).result()
        plan = kv.visit(kv.manager.get_match, tokens)
        assert plan.matched == 64
        cache[:] = 0
        assert kv.launch(plan, np.arange(64)).result().loaded == 64
        assert (cache[:4] == 1).all()
        kv.flush()
        assert kv.usage()["manager"]["pinned"] == 0


def test_visits_of_many_threads_and_calls_keep_out_of_each_others_way() -> None:
    with opened() as kv:
        tokens = np.arange(64, dtype=np.int32)
        errors: list[BaseException] = []

        def visit() -> None:
            try:
                for _ in range(200):
                    kv.visit(lambda: kv.manager.get_match(tokens).cancel())
                    kv.usage()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=visit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert errors == []
        assert kv.usage()["manager"]["plans"] == 0


def test_what_a_visit_raises_reaches_its_caller_and_the_loop_goes_on() -> None:
    with opened() as kv:
        with pytest.raises(InputError):
            kv.visit(kv.manager.get_match, [[1]])
        assert kv.usage()["manager"]["plans"] == 0


def test_posts_happen_in_order() -> None:
    with opened() as kv:
        seen: list[int] = []
        for number in range(100):
            kv.post(seen.append, number)
        kv.call(int)
        assert seen == list(range(100))


def test_a_visit_gets_in_between_the_turns_of_a_loop_that_never_rests() -> None:
    with opened() as kv:
        began, over = threading.Event(), threading.Event()

        async def bustle() -> None:
            began.set()
            while not over.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0)

        busy = threading.Thread(target=kv.run, args=(bustle,))
        busy.start()
        began.wait()
        visitor = threading.Thread(target=kv.visit, args=(int,), daemon=True)
        visitor.start()
        visitor.join(5)
        late = visitor.is_alive()
        over.set()
        busy.join(30)
        assert not late
