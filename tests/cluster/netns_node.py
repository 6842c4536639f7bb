"""A node of a cluster as a process of its own, told on stdin what to do; see netns_rig.

argv: JSON settings of the rig. Lines "put NAME BLOCKS", "get NAME BLOCKS", "match NAME BLOCKS",
"hits NAME BLOCKS COUNT" (the same get again and again), "end"; each is answered by a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import anyio
import anyio.to_thread
from cluster_rig import matched
from rig import Rig, open_rig, prompt


async def answer(rig: Rig, verb: str, name: int, blocks: int, count: int = 1) -> dict[str, Any]:
    """Do one thing; wrong bytes are an AssertionError of the rig."""
    tokens = prompt(name, blocks)
    if verb == "put":
        await rig.put(tokens, durable=False)
        return {}
    if verb == "match":
        return {"blocks": matched(rig, tokens)}
    took, least = [], len(tokens)
    for _ in range(count):
        began = time.perf_counter()
        got = await rig.get(tokens)
        took.append(1e3 * (time.perf_counter() - began))
        least = min(least, got.loaded)
    took.sort()
    at = min(len(took) - 1, int(0.99 * len(took)))
    return {
        "loaded": least,
        "by_tier": got.by_tier,
        "p50_ms": took[len(took) // 2],
        "p99_ms": took[at],
    }


async def main() -> None:
    """Serve until "end"."""
    async with open_rig(None, **json.loads(sys.argv[1])) as rig:
        print(json.dumps({"ready": True}), flush=True)
        while (words := (await anyio.to_thread.run_sync(sys.stdin.readline)).split())[:1] != [
            "end"
        ]:
            if not words:
                return
            print(json.dumps(await answer(rig, words[0], *map(int, words[1:]))), flush=True)


anyio.run(main)
