"""A process for test_disk_recovery: forks children that use a disk tier until they are killed.

Reads one job per line from stdin (JSON), forks, says ["pid", n], waits for the child's end and
says ["dead"]. The child says ["begun", kind, slots, numbers] before and ["done", ...] after
each batch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from disk_rig import LANDED, Rig

_parent = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # log lines are not for the parent


def say(*words: Any) -> None:
    """One line, in one write: it is whole or absent, whenever we are killed."""
    os.write(_parent, (json.dumps(words) + "\n").encode())


async def use(job: dict[str, Any]) -> None:
    """Write and discard random blocks for ever; what is in a slot is not written elsewhere."""
    slots = job["slots"]
    random = np.random.default_rng(job["seed"])
    fresh = itertools.count(1000 * (1 + job["seed"]) + 100)
    paths = [Path(path) for path in job["paths"]]
    async with Rig(paths, slots, host_slots=slots, engine=job.get("engine", "auto")) as rig:
        if job["mode"] == "one":
            say("begun", "write", [6], [6])
            await rig.put([6])
            await asyncio.Event().wait()
        held = {slot: number for number, slot in rig.found.items()}
        while True:
            batch = random.choice(slots, int(random.integers(1, slots // 2)), replace=False)
            places = [int(slot) for slot in batch]
            if random.random() < 0.3:
                places = [slot for slot in places if slot in held]
                numbers = [held.pop(slot) for slot in places]
                say("begun", "discard", places, numbers)
                assert await rig.drop(numbers, places) == [LANDED] * len(places)
                say("done", "discard", places, numbers)
            else:
                numbers = [next(fresh) for _ in places]
                say("begun", "write", places, numbers)
                assert await rig.put(numbers, places) == [LANDED] * len(places)
                held.update(zip(places, numbers, strict=True))
                say("done", "write", places, numbers)


def main() -> None:
    """Serve jobs until stdin ends."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(use(json.loads(line)))
            os._exit(1)
        say("pid", child)
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main()
