"""Many worlds, shared out to processes.

`tell_many` (seeds -> their outcomes, in the order of the seeds).
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from flexkv.testing.worlds.hardware import Violation
from flexkv.testing.worlds.story import write_story
from flexkv.testing.worlds.world import Outcome, tell

_SHARE = 25  # seeds that a process takes at a time


def tell_many(seeds: Iterable[int], processes: int) -> Iterator[tuple[int, Outcome]]:
    """Tell the stories of many seeds, one after the other or in several processes.

    In those, what is raised where nobody can catch it (in a destructor, say), and a warning, are
    violations too: nobody else would see them.
    """
    if processes <= 1:
        for seed in seeds:
            yield seed, tell(write_story(seed))
        return
    order = list(seeds)
    shares = [order[start : start + _SHARE] for start in range(0, len(order), _SHARE)]
    with multiprocessing.get_context("spawn").Pool(processes, _begin) as pool:
        for share in pool.imap(_tell_share, shares):
            yield from share


_unseen: list[str] = []  # what was raised in this process where nobody can catch it


def _begin() -> None:
    """Get a process ready: worlds are full of faults on purpose, so nothing is logged."""
    logging.getLogger("flexkv").setLevel(logging.CRITICAL + 1)
    warnings.simplefilter("error")

    def note(raised: Any) -> None:
        _unseen.append(f"{raised.exc_value!r} in {raised.object!r}")

    sys.unraisablehook = note


def _tell_share(seeds: list[int]) -> list[tuple[int, Outcome]]:
    told = [(seed, tell(write_story(seed))) for seed in seeds]
    gc.collect()
    if _unseen:
        violation = Violation("unseen", f"in one of the seeds {seeds}: {'; '.join(_unseen)}")
        told[-1] = (seeds[-1], replace(told[-1][1], violation=violation))
        _unseen.clear()
    return told
