"""Agents whose turn is known ahead: what hints of steps to execution do for the hit rate.

`workload` (a seeded run of agents between other requests) - `serve` (it, through a KVManager on
this machine) - `main` (a table, or `--json`). A round is a random order of all agents. Each has a
prompt of its own behind a system prompt that all share, adds a part that never comes again, and
runs once a round. Between the runs strangers pass through. The host holds less than the agents
need.

    python examples/agents_retain.py --rounds 40
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexkv import FlexKVConfig, KVManager, KVSpec

SIZE = 16  # tokens of a block
SPEC = KVSpec.uniform(layers=2, heads=2, head_size=16, dtype="float16", tokens_per_block=SIZE)
SYSTEM, OWN, SUFFIX, STRANGER = 16, 24, 4, 12  # blocks


@dataclass(frozen=True)
class Step:
    """One request: its tokens, how many of them could be known, and what is known of the agents'
    next runs: (prompt, steps to it).
    """

    tokens: list[int]
    known_tokens: int
    ahead: list[tuple[list[int], int]] = field(default_factory=list)


def fresh(blocks: int, counter: list[int]) -> list[int]:
    """Tokens that nobody has had."""
    counter[0] += blocks * SIZE
    return list(range(counter[0] - blocks * SIZE, counter[0]))


def workload(*, agents: int, rounds: int, strangers: int, seed: int) -> Iterator[Step]:
    """Rounds of agents in random order, known a round ahead, with strangers between them."""
    chance, counter = random.Random(seed), [0]
    system = fresh(SYSTEM, counter)
    prompts = [system + fresh(OWN, counter) for _ in range(agents)]
    orders = [chance.sample(range(agents), agents) for _ in range(rounds + 1)]
    for this, following in itertools.pairwise(orders):
        for place, agent in enumerate(this):
            coming = [*this[place + 1 :], *following]
            ahead = [(prompts[other], coming.index(other) + 1) for other in range(agents)]
            tokens = prompts[agent] + fresh(SUFFIX, counter)
            yield Step(tokens, len(prompts[agent]), ahead)
            for _ in range(strangers):
                yield Step(fresh(STRANGER, counter), 0)


async def serve(steps: list[Step], *, host_blocks: int, hints: bool, **settings: Any) -> float:
    """Serve all requests one after the other; return which share of the tokens that could be known,
    in percent, came from the cache.
    """
    longest = max(len(step.tokens) for step in steps) // SIZE
    memory = [np.zeros((2, longest, SIZE, 2, 16), np.float16) for _ in range(2)]
    slots = np.arange(longest * SIZE)
    host_bytes = host_blocks * SPEC.stride_bytes
    known = found = 0
    async with KVManager(spec=SPEC, host_cache_bytes=host_bytes, **settings) as kv:
        kv.register(memory, axes="PBNHD")
        for step in steps:
            found += (await kv.get_async(step.tokens, slots)).loaded
            known += step.known_tokens
            await kv.put_async(step.tokens, slots)
            for prompt, distance in step.ahead if hints else ():
                kv.retain(prompt, steps=distance)
    return 100.0 * found / known


def figures(*, agents: int, rounds: int, strangers: int, seed: int) -> list[dict[str, Any]]:
    """Hit rates over host sizes, without hints and with them."""
    steps = list(workload(agents=agents, rounds=rounds, strangers=strangers, seed=seed))
    rows: list[dict[str, Any]] = []
    for percent in (25, 50, 75, 100):
        blocks = (SYSTEM + agents * OWN) * percent // 100
        ways: dict[str, dict[str, Any]] = {
            "no hints": {"hints": False},
            "hints": {"hints": True},
            "hints, share 0.9": {"hints": True, "retain_share": 0.9},
        }
        rates = {
            name: round(asyncio.run(serve(steps, host_blocks=blocks, **way)), 1)
            for name, way in ways.items()
        }
        rows.append({"host_percent": percent, "host_blocks": blocks, "hit_percent": rates})
    return rows


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--strangers", type=int, default=2, help="other requests between two runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    rows = figures(**given)
    if as_json:
        json.dump({"workload": given, "results": rows}, sys.stdout, indent=1)
        print()
        return
    names = list(rows[0]["hit_percent"])
    policy = FlexKVConfig().eviction_policy
    print(f"policy {policy}; hits in percent of the tokens that could be known")
    print("host, % of the agents' prompts  " + "".join(f"{name:>18}" for name in names))
    for row in rows:
        rates = "".join(f"{row['hit_percent'][name]:18.1f}" for name in names)
        print(f"{row['host_percent']:>4} ({row['host_blocks']} blocks)".ljust(32) + rates)


if __name__ == "__main__":
    main()
