"""Replays a trace through the brain: one tier, requests one at a time in the order of the trace.

`replay` (Columns, policy, capacity -> Replay). Each request is matched, then put: what is there is
touched, the rest is inserted, others leave for it, and its own blocks are pinned meanwhile. A path
longer than the tier is put as far as it fits. Hits are blocks that were matched: a block counts
only if all before it are there. Policies that see whole prompts are told the length of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexkv.brain import Brain, build_brain
from flexkv.groups import GroupKeys
from flexkv.model import HOST
from flexkv.sim.columns import Columns

Progress = Callable[[int], None]  # told how many block accesses are done
_OFTEN = 256  # requests from one report to the next


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of it: blocks matched for each request, and what moved in and out."""

    capacity_blocks: int
    matched: NDArray[np.int64]
    inserted_blocks: int
    evicted_blocks: int


def _silent(done: int) -> None:
    """Tell nobody."""


def replay(
    trace: Columns,
    policy: str,
    capacity_blocks: int,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = _silent,
) -> Replay:
    """Run a whole trace against an empty tier of `capacity_blocks` >= 1.

    Raises:
        PluginError, ConfigError: the policy is unknown, or refuses its settings.
    """
    brain = build_brain(
        {HOST: capacity_blocks},
        lambda tier: policy,
        settings,
        tokens_per_block=trace.tokens_per_block,
        spill="never",
    )
    matched = np.zeros(len(trace.times), np.int64)
    inserted, ends = 0, trace.ends.tolist()
    answers = trace.output_tokens.tolist()
    for number, now in enumerate(trace.times.tolist()):
        start, end = ends[number], ends[number + 1]
        keys = trace.keys[trace.ids[start : min(end, start + capacity_blocks)]]
        if len(keys):
            matched[number] = len(brain.index.match(keys))
            inserted += _put(brain, keys, now, answers[number])
        if number % _OFTEN == 0:
            progress(end)
    progress(trace.accesses)
    host = brain.ledger.host
    _conserve(brain, inserted)
    return Replay(capacity_blocks, matched, inserted, host.evicted_blocks)


def _put(brain: Brain, keys: NDArray[np.uint64], now: float, output_tokens: int) -> int:
    """Put a path whose bytes land at once; returns how many blocks were new."""
    planner, ledger = brain.planner, brain.ledger
    plan = planner.plan_put([GroupKeys(keys)], now, output_tokens)
    if len(plan.positions):
        device = np.arange(len(plan.blocks), dtype=np.uint32)  # any: nothing is there to be copied
        graph = planner.launch_put(plan, device)
        for op in graph.ops:
            ledger.commit(graph, op, op.positions, np.zeros(len(op), np.uint8), now)
    planner.release(plan.blocks)
    return len(plan.positions)


def _conserve(brain: Brain, inserted: int) -> None:
    """AssertionError unless what came in is there or has left, and nothing is pinned."""
    host = brain.ledger.host
    resident = brain.index.resident(host.number)
    assert resident == host.capacity - host.free <= host.capacity, "slots and residents differ"
    assert resident == inserted - host.evicted_blocks, "blocks got lost or appeared from nowhere"
    assert brain.index.pinned == 0, "a replay ends without pins"
