"""Requests that come together, in virtual time: `together` (store prompts one after the other, then
get sets of them, each set at once).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flexkv.config import FlexKVConfig
from flexkv.model import HOST, KeyArray
from flexkv.sim.clock import VirtualClock
from flexkv.sim.serving.cache import Moved, VirtualCache
from flexkv.sim.serving.replay import Costs
from flexkv.sim.serving.tasks import Task, Tasks


class Rounds(NamedTuple):
    """Slots in use by tier when everything was stored; per set its seconds, and what was moved."""

    resident: dict[str, int]
    seconds: list[float]
    moved: list[list[Moved]]


def together(
    config: FlexKVConfig,
    costs: Costs,
    stored: Iterable[KeyArray],
    sets: Iterable[Sequence[KeyArray]],
) -> Rounds:
    """Put prompts, then get sets of prompts; nothing is under way when the next one begins."""
    clock = VirtualClock()
    tasks = Tasks(clock)
    cache = VirtualCache(config, tasks, costs.legs(tasks))
    for keys in stored:
        tasks.spawn(cache.put(keys, Moved()))
        clock.run()
    rounds = Rounds(cache.resident(), [], [])

    def get(keys: KeyArray, moved: Moved, ends: list[float]) -> Task:
        yield from cache.get(keys, moved)
        near = moved.by_tier.get(HOST, 0)
        yield tasks.after(costs.get_s(near, moved.matched - near))
        ends.append(clock.now_s)

    for prompts in sets:
        begun_s, ends = clock.now_s, list[float]()
        moved = [Moved() for _ in prompts]
        for keys, one in zip(prompts, moved, strict=True):
            tasks.spawn(get(keys, one, ends))
        clock.run()
        rounds.seconds.append(max(ends) - begun_s)
        rounds.moved.append(moved)
    cache.check_idle()
    return rounds
