"""Worlds: whole managers on simulated hardware in virtual time, made up and replayed by a seed.

`write_story` (seed -> Story) - `tell` (Story -> Outcome) - `explain` (a seed that fails -> the
shortest story that fails the same way) - `search` (many seeds -> those that fail). Real manager,
engine, background loops, planner, index, ledger and disk tier run on one virtual loop; device and
disk are simulated, with their own latencies, faults, crashes and lost writes, and with real bytes.
After every turn of the loop the books, pins, slots and bytes are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flexkv.testing.worlds.crowd import tell_many
from flexkv.testing.worlds.shrink import shrink
from flexkv.testing.worlds.story import Story, write_story
from flexkv.testing.worlds.world import Outcome, tell

__all__ = ["Outcome", "Story", "explain", "search", "shrink", "tell", "write_story"]


def search(
    seeds: Iterable[int],
    each: Callable[[int, Outcome], None] = lambda seed, outcome: None,
    *,
    processes: int = 1,
) -> dict[int, Outcome]:
    """Tell the stories of many seeds; return the outcomes of those that violate something.

    Args:
        each: called after every world.
        processes: that share the work; with 1 it is done here.
    """
    failed = {}
    for seed, outcome in tell_many(seeds, processes):
        if outcome.violation is not None:
            failed[seed] = outcome
        each(seed, outcome)
    return failed


def explain(seed: int) -> tuple[Story, Outcome]:
    """Return the shortest story found that fails as `seed` does, and what happens in it; the whole
    story when the seed does not fail.
    """
    story = write_story(seed)
    violation = tell(story).violation
    if violation is not None:
        kind = violation.kind

        def fails(candidate: Story) -> bool:
            found = tell(candidate).violation
            return found is not None and found.kind == kind

        story = shrink(story, fails)
    return story, tell(story, keep=True)
