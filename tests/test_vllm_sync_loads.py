"""Who may not read blocks of a load within a step, and what vLLM must forget when it has failed."""

from __future__ import annotations

import numpy as np

from flexkv.integration.vllm.requests import State, Work
from flexkv.integration.vllm.sync_loads import SyncLoads

SIZE = 4


class Pool:
    """vLLM's block pool: what it was told to forget."""

    def __init__(self) -> None:
        self.forgotten: set[int] = set()

    def evict_blocks(self, blocks: set[int]) -> None:
        self.forgotten |= blocks


def state(tokens: list[int], namespace: tuple[str, ...] = ()) -> State:
    return State(namespace, np.array(tokens, np.int32))


def loading(first_token: int = 4) -> tuple[SyncLoads, Pool, Work]:
    """A load of blocks 11 and 12 behind one block; the request has 10 to 13."""
    loads, pool = SyncLoads(SIZE), Pool()
    loads.pool = pool
    load = Work("a", [11, 12], True)
    loads.begin(load, state(list(range(16))), first_token, [10, 11, 12, 13])
    return loads, pool, load


def test_who_has_a_block_of_the_load_among_its_hits_waits() -> None:
    loads, _, load = loading()
    assert loads.take_awaited() == [(load.number, [11, 12])]
    same, other = state(list(range(16))), state([0, 1, 2, 3, *range(50, 62)])
    assert loads.concerns(same, 8)
    assert not loads.concerns(same, 4)  # what is before the load is good
    assert not loads.concerns(other, 12)
    assert not loads.concerns(state(list(range(16)), ("salt=x",)), 12)
    loads.outcome(())
    assert not loads.concerns(same, 8)


def test_what_failed_and_what_was_computed_from_it_is_forgotten() -> None:
    loads, pool, _ = loading()
    loads.outcome({12, 99})
    assert pool.forgotten == {12, 13}


def test_a_load_that_arrived_is_kept() -> None:
    loads, pool, _ = loading()
    loads.outcome({99})
    loads.outcome({12})  # that step is over
    assert not pool.forgotten
