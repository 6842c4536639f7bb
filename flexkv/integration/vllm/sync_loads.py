"""Loads within a step: what must not be read while they are under way, or when they have failed.

`SyncLoads.begin` (a load is part of the step being scheduled) - `take_awaited` (for the workers) -
`concerns` (would this request read such blocks?) - `outcome` (the step is over).

vLLM enters the blocks of such a load into its prefix cache when it hands them out, and leaves them
there when the load fails, for their request to compute them again. Until then - it may take several
steps, or never come when the request is aborted - others would read what never arrived.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexkv.integration.vllm.requests import State, Work


@dataclass(frozen=True, slots=True)
class _Load:
    """A load of this step: its request, where it begins, all blocks of the request from there."""

    state: State
    first_token: int
    blocks: list[int]


class SyncLoads:
    """The loads of the step that is scheduled or runs. `pool` is vLLM's block pool, once known."""

    def __init__(self, size: int) -> None:
        self.pool: Any = None
        self._size = size
        self._number = 0
        self._awaited: list[tuple[int, list[int]]] = []
        self._loads: list[_Load] = []

    def begin(self, load: Work, state: State, first_token: int, blocks: list[int]) -> None:
        """Number a load, which the workers will wait for; `blocks` are all its request has."""
        self._number += 1
        load.number, load.silent = self._number, True
        self._awaited.append((load.number, load.blocks))
        self._loads.append(_Load(state, first_token, blocks[first_token // self._size :]))

    def take_awaited(self) -> list[tuple[int, list[int]]]:
        """Return number and blocks of the loads that a step has to wait for."""
        awaited, self._awaited = self._awaited, []
        return awaited

    def concerns(self, state: State, computed: int) -> bool:
        """Whether the first `computed` tokens of a request are, in part, what a load brings."""
        for load in self._loads:
            shared = load.first_token + self._size
            if (
                computed >= shared
                and state.namespace == load.state.namespace
                and np.array_equal(state.tokens[:shared], load.state.tokens[:shared])
            ):
                return True
        return False

    def outcome(self, failed_blocks: Collection[int]) -> None:
        """The step is over: have vLLM forget what did not arrive and what was computed from it."""
        failed = set(failed_blocks)
        for load in self._loads if failed else ():
            bad = [i for i, block in enumerate(load.blocks) if block in failed]
            if bad:
                self.pool.evict_blocks(set(load.blocks[bad[0] :]))
        self._loads = []
