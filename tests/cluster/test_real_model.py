"""SmolLM2 on two nodes, two processes: what one has computed the other one does not compute."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import transformers  # noqa: F401 - where it is missing this module is skipped
from anyio.streams.buffered import BufferedByteReceiveStream
from cluster_rig import until
from model_node import ANSWER, settings_of
from test_transformers import answer, cold, smollm2  # noqa: F401 - a fixture

from flexkv import KVManager
from flexkv.testing.remote import RedisServer

SHARED, OWN = 160, 48
START_S = 100.0  # a busy machine loads a model
NODE = Path(__file__).parent / "model_node.py"


class NodeA:
    """The other process, which computes first."""

    def __init__(self, process: Any) -> None:
        self._process, self._said = process, BufferedByteReceiveStream(process.stdout)

    async def hears(self, word: str = "") -> dict[str, Any]:
        """Tell it a word; what it says then."""
        if word:
            await self._process.stdin.send(f"{word}\n".encode())
        with anyio.fail_after(START_S):
            found: dict[str, Any] = json.loads(await self._said.receive_until(b"\n", 10_000))
        return found


@asynccontextmanager
async def node_a(url: str, folder: Path) -> AsyncIterator[NodeA]:
    command = [sys.executable, str(NODE), url, str(folder), str(SHARED), str(OWN)]
    async with await anyio.open_process(command, stderr=None) as process:
        try:
            yield NodeA(process)
        finally:
            process.kill()


def matched(kv: KVManager, tokens: Sequence[int]) -> int:
    plan = kv.get_match(tokens)
    plan.cancel()
    return plan.matched


def asked(kv: KVManager) -> list[float]:
    """How much the node has asked of others, and of the directory."""
    member = kv._stack.member
    assert member is not None
    links = ("publish", "follow")
    said = [kv.telemetry.value("directory_commands", link=link) for link in links]
    return [member.store.requests, *said]


@pytest.mark.model
@pytest.mark.timeout(240)
async def test_both_processes_answer_the_same_and_the_second_computes_only_its_own_part(
    smollm2: tuple[Any, Any],  # noqa: F811
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    from flexkv.integration.transformers import PrefixReuse, config_for
    from flexkv.integration.transformers.demo_text import QUESTIONS, Prompts

    async with node_a(redis_server.url, tmp_path) as a:
        model, tokenizer = smollm2
        prompts = Prompts(tokenizer, SHARED, OWN)
        first, second = (prompts.question(text) for text in QUESTIONS[:2])
        told = (await a.hears())["tokens"]  # it is idle from now on
        assert told == cold(model, first, ANSWER)
        expected = cold(model, second, 12)
        config = config_for(model, host_cache_bytes="32MiB", **settings_of(redis_server.url, "b"))
        for place in ("memory", "disk"):
            if place == "disk":
                await a.hears("push")
            async with KVManager(config) as b:
                await until(lambda b=b: matched(b, second) == SHARED)
                before = asked(b)
                assert all(matched(b, second) == SHARED for _ in range(100))
                assert asked(b) == before  # a match asks nobody
                reuse = PrefixReuse(model, b, max_tokens=SHARED + OWN + 12, requests=1)
                tokens, generation = await answer(reuse, second)
                assert tokens == expected, place
                assert generation.restored.by_tier == {"host": 0, "peer": SHARED // 16}
                assert generation.restored.loaded == SHARED, place
                assert asked(b)[0] > before[0]
            from_disk = (await a.hears("counts"))["from_disk"]
            assert from_disk == (SHARED // 16 if place == "disk" else 0)
