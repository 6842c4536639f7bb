"""`python -m flexkv.testing.worlds`: many worlds with a bar, or the story of one.

`--worlds N` tells the stories of N seeds from `--first` on, shared out to `--processes` (one a
core), and sums up; `--seed S` tells one, `--story` shows all that happens in it. A seed that fails
is shrunk to a short story.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from flexkv.testing.worlds import Outcome, explain, search, tell, write_story

_SHOWN = 3  # failing seeds that are shrunk and shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the number of seeds that failed, at most 100."""
    parser = argparse.ArgumentParser(prog="python -m flexkv.testing.worlds", description=__doc__)
    parser.add_argument("--worlds", type=int, default=2000, help="seeds to try (2000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores, help="that share it (a core each)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--story", action="store_true", help="with --seed: show all that happens")
    given = parser.parse_args(arguments)
    # worlds are full of faults on purpose
    logging.getLogger("flexkv").setLevel(logging.CRITICAL + 1)
    console = Console(soft_wrap=True, highlight=False)
    if given.seed is not None:
        return _tell_one(console, given.seed, given.story)
    return _search(console, given.first, given.worlds, given.processes)


def _tell_one(console: Console, seed: int, whole: bool) -> int:
    outcome = tell(write_story(seed), keep=whole)
    for line in outcome.lines:
        console.print(line, markup=False)
    if outcome.violation is None:
        if not whole:
            console.print(write_story(seed).describe(), markup=False)
        console.print(f"seed {seed}: all is well, trace {outcome.trace:08x}")
        return 0
    console.print(f"seed {seed}: {outcome.violation}, trace {outcome.trace:08x}", markup=False)
    if not whole:
        _show(console, seed)
    return 1


def _show(console: Console, seed: int) -> None:
    story, outcome = explain(seed)
    console.print(f"\nshortest story of seed {seed} that fails so:", markup=False)
    console.print(story.describe(), markup=False)
    console.print("what happens:")
    for line in outcome.lines:
        console.print(line, markup=False)


def _search(console: Console, first: int, count: int, processes: int) -> int:
    begun = time.perf_counter()
    turns = events = 0
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("worlds", total=count)

        def each(seed: int, outcome: Outcome) -> None:
            nonlocal turns, events
            turns, events = turns + outcome.turns, events + outcome.events
            progress.advance(bar)

        failed = search(range(first, first + count), each, processes=processes)
    elapsed_s = time.perf_counter() - begun
    console.print(
        f"{count} worlds, seeds {first} to {first + count - 1}: {len(failed)} violations; "
        f"{count / elapsed_s:.0f} worlds/s, {turns} turns checked, {events} events"
    )
    for seed, outcome in failed.items():
        console.print(f"seed {seed}: {outcome.violation}", markup=False)
    for seed in list(failed)[:_SHOWN]:
        _show(console, seed)
    return min(100, len(failed))


if __name__ == "__main__":
    sys.exit(main())
