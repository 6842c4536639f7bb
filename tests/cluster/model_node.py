"""A node with the real SmolLM2 in a process of its own: see test_real_model.

`model_node.py URL FOLDER SHARED OWN`. It answers the first question, says its tokens as a line of
JSON, and for each line that it is told pushes that prompt out of its memory, or says how many
blocks came from its disk ("counts").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import anyio
import anyio.to_thread

from flexkv import KVManager
from flexkv.integration.transformers import (
    PrefixReuse,
    config_for,
    load_model,
    use_grouped_attention,
)
from flexkv.integration.transformers.demo_text import QUESTIONS, Prompts

ANSWER = 6
HOST_BLOCKS = 40  # one reader may hold a quarter; and what is pushed has as many


def settings_of(url: str, name: str) -> dict[str, Any]:
    """How a node of these tests meets the others."""
    return {"cluster_redis_url": url, "cluster_listen": "127.0.0.1:0", "node_name": name}


def say(**facts: Any) -> None:
    """Tell the parent."""
    print(json.dumps(facts), flush=True)


async def main(url: str, folder: str, shared: int, own: int) -> None:
    """Serve until the standard input ends."""
    model, tokenizer = load_model()
    use_grouped_attention(model)
    prompts = Prompts(tokenizer, shared, own)
    config = config_for(
        model,
        host_cache_bytes=HOST_BLOCKS * 737_280,
        disk_cache_bytes="128MiB",
        disk_dirs=(Path(folder),),
        **settings_of(url, "a"),
    )
    async with KVManager(config) as kv:
        reuse = PrefixReuse(model, kv, max_tokens=shared + own + ANSWER, requests=1)

        async def answer(tokens: Any, count: int) -> list[int]:
            found = await reuse.generate(tokens, max_new_tokens=count, stop=()).run()
            await kv.flush()
            return found

        say(tokens=await answer(prompts.question(QUESTIONS[0]), ANSWER))
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            if line.strip() == "push":
                for text in QUESTIONS:
                    await answer(prompts.question(text)[::-1], 1)
                say(host=kv.usage()["host"])
            else:
                moved = kv.telemetry.value("transfer_blocks", source="disk", target="host")
                say(from_disk=int(moved))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
