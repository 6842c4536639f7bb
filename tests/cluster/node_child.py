"""A node in its own process: `node_child.py URL NAME FOLDER BLOCKS` stores prompt 1 and says so.

It lives until its standard input ends. "gone" lets it push the prompt out of its memory first,
"more" store prompt 2, "time" tell what its wall clock says.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import anyio
import anyio.to_thread
from cluster_rig import open_node
from rig import prompt


class Server:
    """What `open_node` needs to know of a server."""

    def __init__(self, url: str) -> None:
        self.url = url


async def main(url: str, name: str, folder: str, blocks: int) -> None:
    path = Path(folder) if folder else None
    async with open_node(Server(url), name, path, host=max(8, 2 * blocks)) as rig:
        if blocks:
            await rig.put(prompt(1, blocks))
        print("stored", flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            word = answer = line.strip()
            if word == "gone":
                await rig.push_out()
            elif word == "more":
                await rig.put(prompt(2, blocks))
            elif word == "time":
                answer = repr(time.time())
            print(answer, flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:4], int(sys.argv[4]))
