"""Two vLLM engines, two nodes of a cluster: what one has computed the other one loads."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, Engine, check_idle, connector, prompt

from flexkv.testing.remote import RedisServer

pytestmark = [pytest.mark.timeout(600), pytest.mark.cluster]
LONG, ANSWER = 1500, 24
BLOCKS = LONG // BLOCK
SOON_S = 60.0


def node(url: str, name: str, **settings: Any) -> dict[str, Any]:
    """The connector of an engine that is a node of the cluster."""
    return connector(
        model="tiny",
        node_name=name,
        cluster_redis_url=url,
        cluster_listen="127.0.0.1:0",
        key_secret="a secret of these tests",
        peer_blocks=1000,
        **settings,
    )


def hears_of(engine: Any, blocks: int) -> None:
    """Wait until the engine knows so many blocks of the other one."""
    until = time.monotonic() + SOON_S
    while (known := engine.usage()["peer"]["resident"]) < blocks:
        assert time.monotonic() < until, f"it knows {known} of {blocks} blocks"


def from_disk(engine: Any) -> float:
    """Blocks that came from the engine's own disk."""
    moved = engine.counters()["transfer_blocks"]
    return sum(value for labels, value in moved.items() if "disk" in labels.split(",")[0])


@pytest.mark.parametrize("load", ["async", "sync"])
def test_b_loads_what_a_computed_from_its_memory_and_then_from_its_disk(
    tiny: Path, redis_server: RedisServer, tmp_path: Path, load: str
) -> None:
    first, second = prompt(LONG, 11), prompt(LONG, 12)
    disk = {"disk_cache_bytes": "64MiB", "disk_dirs": [str(tmp_path)], "host_cache_bytes": "8MiB"}
    with (
        Engine(tiny, node(redis_server.url, "a", load=load, **disk)) as a,
        Engine(tiny, node(redis_server.url, "b", load=load)) as b,
    ):
        cold = a.generate(prompts=[first, second], tokens=ANSWER)
        assert cold["cached"] == [0, 0]
        assert a.settle()
        hears_of(b, 2 * BLOCKS)
        warm = b.generate(prompts=[first], tokens=ANSWER)
        assert warm == {"tokens": cold["tokens"][:1], "cached": [BLOCKS * BLOCK]}
        assert b.metrics()["vllm:external_prefix_cache_hits"] == BLOCKS * BLOCK
        assert from_disk(a) == 0

        a.generate(prompts=[prompt(LONG, seed) for seed in range(20, 25)], tokens=1)
        check_idle(a)
        warm = b.generate(prompts=[second], tokens=ANSWER)
        assert warm == {"tokens": cold["tokens"][1:], "cached": [BLOCKS * BLOCK]}
        assert b.metrics()["vllm:external_prefix_cache_hits"] == 2 * BLOCKS * BLOCK
        assert from_disk(a) > 0  # the others were still in its memory
        check_idle(a)
        check_idle(b)
