"""SmolLM2-135M-Instruct on real text: the same answers from wherever the KV comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, Engine, check_idle, connector, spoil

import flexkv

pytestmark = [pytest.mark.timeout(900)]
ANSWER = 24
HANDBOOK = Path(flexkv.__file__).parent / "integration" / "transformers" / "demo_handbook.md"


def texts() -> list[str]:
    """Two questions on a handbook: about 2,000 and 3,000 tokens of English."""
    handbook = HANDBOOK.read_text()
    return [
        f"{handbook}\n\nQuestion: what does the handbook say first?\nAnswer:",
        f"Notes.\n\n{handbook}\n{handbook[:4500]}\n\nQuestion: how does it go on?\nAnswer:",
    ]


def whole(prompts: list[list[int]]) -> list[int]:
    return [(len(tokens) - 1) // BLOCK * BLOCK for tokens in prompts]


def test_real_text_gets_the_same_answer_from_host_memory_disk_and_after_damage(
    smollm2: Path, tmp_path: Path
) -> None:
    transfer = connector(
        host_cache_bytes="512MiB",
        disk_cache_bytes="512MiB",
        disk_dirs=[str(tmp_path / "ssd")],
        model="smollm2",
    )

    def engine() -> Any:
        return Engine(smollm2, transfer, max_num_batched_tokens=2048)

    with engine() as first:
        prompts = [first.encode(text=text) for text in texts()]
        assert all(1500 < len(tokens) < 4000 for tokens in prompts)
        ask = {"prompts": prompts, "tokens": ANSWER}
        cold = first.generate(**ask)
        assert cold["cached"] == [0, 0]
        hit = first.generate(**ask)
        assert hit["cached"] == whole(prompts)
        assert hit["tokens"] == cold["tokens"]
        assert first.reset_local()
        assert not first.metrics()["vllm:external_prefix_cache_hits"]
        host = first.generate(**ask)
        assert host["cached"] == whole(prompts)
        assert host["tokens"] == cold["tokens"]
        metrics = first.metrics()
        assert metrics["vllm:external_prefix_cache_hits"] == sum(whole(prompts))
        check_idle(first)
        assert first.usage()["disk"]["resident"] >= sum(whole(prompts)) // BLOCK
    with engine() as second:
        disk = second.generate(**ask)
        assert disk["cached"] == whole(prompts)
        assert disk["tokens"] == cold["tokens"]
        check_idle(second)
    spoil(tmp_path / "ssd")
    with engine() as third:
        damaged = third.generate(**ask)
        assert damaged["tokens"] == cold["tokens"]
        assert sum(third.counters()["damaged_blocks"].values()) == 1
        check_idle(third)
