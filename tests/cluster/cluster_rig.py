"""Whole nodes of a cluster: managers that meet on a real redis-server.

`open_node` (a rig whose manager is a member) - `knows` (wait until a node matches so many blocks of
a prompt), `until` (wait for anything).
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from rig import TOKENS_PER_BLOCK, Rig, open_rig

from flexkv.cluster.member import Member
from flexkv.testing.remote import RedisServer

SOON_S = 20.0  # how long a busy machine may take


@asynccontextmanager
async def open_node(
    server: RedisServer, name: str, path: Path | None = None, **settings: Any
) -> AsyncIterator[Rig]:
    """Open a manager that is a member of the cluster on `server`."""
    cluster = {
        "cluster_redis_url": server.url,
        "cluster_listen": "127.0.0.1:0",
        "node_name": name,
        "peer_blocks": 256,
        "key_secret": "a secret of these tests",
    }
    async with open_rig(path, **(cluster | settings)) as rig:
        yield rig


def member(rig: Rig) -> Member:
    """The manager's part in the cluster."""
    found = rig.kv._stack.member
    assert found is not None
    return found


def matched(rig: Rig, tokens: Sequence[int]) -> int:
    """How many blocks of a prompt the node could load now."""
    plan = rig.kv.get_match(tokens)
    plan.cancel()
    return plan.matched // TOKENS_PER_BLOCK


async def until(reached: Callable[[], bool]) -> None:
    """Look now and again until it is so: news of other nodes come when they come."""
    with anyio.fail_after(SOON_S):
        for _ in itertools.count():
            if reached():
                return
            await anyio.sleep(0.002)


async def knows(rig: Rig, tokens: Sequence[int], blocks: int) -> None:
    """Wait until the node matches exactly so many blocks of a prompt."""
    await until(lambda: matched(rig, tokens) == blocks)
