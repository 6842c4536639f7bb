"""Life after death: managers killed at random moments, stale and live owners, other identities."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_child import ALL_BLOCKS, PROMPTS, Story, Zygote, verify
from rig import LAYERS, SPEC, TOKENS_PER_BLOCK, committed_records, open_rig, prompt

from flexkv import FlexKVConfig, FormatError, KVManager, KVSpec, OwnershipError

LIFE = 20  # kills per directory


def settings_of(seed: int) -> dict[str, Any]:
    """How the managers of one life are set up."""
    return {
        "spill": ["through", "on_evict"][seed % 2],
        "disk_engine": ["auto", "threads"][seed // 2 % 2],
        "evict_ratio": [0.0, 0.1][seed // 4 % 2],
        "eviction_policy": ["lru", "slru", "lfu", "fifo"][seed % 4],
    }


def one_kill(
    zygote: Zygote, path: Path, job: dict[str, Any], story: Story, random: np.random.Generator
) -> bool:
    """Start a child and kill it at work, or (one in four) while it opens and looks around; returns
    whether it had begun to work.
    """
    zygote.start(path, durable=sorted(story.durable), gone=sorted(story.gone), **job)
    story.tell(["pid", 0])
    if random.random() < 0.75:
        zygote.wait_for("opened")
    opened, until = False, time.monotonic() + float(random.uniform(0, 0.25))
    while (words := zygote.hear(until)) is not None:
        opened |= words[0] == "putting"
        story.tell(words)
    for words in zygote.kill():
        opened |= words[0] == "putting"
        story.tell(words)
    return opened


@pytest.mark.timeout(1200)
def test_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    """Every block said to be durable comes back, whatever the moment; half of the directories are
    so large that nothing is ever evicted.
    """
    worked, durable = 0, 0
    with Zygote() as zygote:
        for life in range(-(-kills // LIFE)):
            random = np.random.default_rng([7, life])
            large = life % 2 == 0
            job = {"mode": "random", "large": large, "settings": settings_of(life // 2)}
            path, story = tmp_path / f"life{life}", Story([], [])
            for generation in range(min(LIFE, kills - life * LIFE)):
                seed = 1000 * life + generation
                worked += one_kill(zygote, path, {**job, "seed": seed}, story, random)
                durable += len(story.durable)
            asyncio.run(last_look(path, story, job, large=large))
    print(f"{kills} kills, {worked} of them at work; {durable / kills:.1f} durable prompts each")
    assert worked > kills // 2, "most children were killed before they did anything"
    assert durable > kills, "hardly anything was durable when a child was killed"


async def last_look(path: Path, story: Story, job: dict[str, Any], *, large: bool) -> None:
    """Open once more, compare, and close: the files hold what the index holds, no more."""
    disk = ALL_BLOCKS + 8 if large else 40
    async with open_rig(path, dirs=2, disk=disk, host=32, **job["settings"]) as rig:
        await verify(rig, sorted(story.durable), sorted(story.gone), large=large)
        assert committed_records(path) == rig.kv.usage()["disk"]["resident"]


def test_the_story_follows_what_children_say() -> None:
    story = Story([], [5])
    for words in (["putting", 7], ["durable", 7], ["putting", 1], ["durable", 1]):
        story.tell(words)
    assert story.durable == {7, 1}
    story.tell(["durable", 0])
    story.tell(["removing", 0])
    assert story.durable == {7}, "prompt 1 is a part of prompt 0"
    story.tell(["gone", 0])
    assert story.gone == {5, 0}
    story.tell(["resetting"])
    story.tell(["durable", 9])
    assert story.durable == set()
    story.tell(["reset"])
    assert story.gone == set(range(PROMPTS))
    story.tell(["putting", 9])
    assert 9 not in story.gone


async def test_a_live_owner_keeps_its_directory(tmp_path: Path) -> None:
    with Zygote() as zygote:
        zygote.start(tmp_path, mode="hold", dirs=1, disk=32)
        zygote.wait_for("holding")
        with pytest.raises(OwnershipError, match=str(zygote.pid)):
            async with open_rig(tmp_path):
                pass
        zygote.kill()
        async with open_rig(tmp_path) as rig:
            await rig.put(prompt(1, 4))


async def test_a_second_manager_of_the_same_process_is_refused(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        with pytest.raises(OwnershipError):
            async with open_rig(tmp_path):
                pass
        await rig.put(prompt(1, 4))
        assert (await rig.get(prompt(1, 4))).loaded == 16


async def reopen(root: Path, **changes: Any) -> int:
    """Open the directory of a rig with some settings changed; returns readable blocks on disk."""
    settings: dict[str, Any] = {
        "model": "test-model",
        "spec": SPEC,
        "host_cache_bytes": 8 * 8192,
        "disk_cache_bytes": 32 * 8192,
        "disk_dirs": [root / "d0"],
        "huge_pages": False,
    }
    async with KVManager(FlexKVConfig.load(**(settings | changes))) as kv:
        return kv.usage()["disk"]["resident"]


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"model": "another-model"},
    "revision": {"revision": "r2"},
    "rank": {"rank": "tp0/2,pp0/1"},
    "dtype": {"spec": KVSpec.uniform(LAYERS, 2, 64, "bfloat16", tokens_per_block=4)},
    "layers": {"spec": KVSpec.uniform(LAYERS + 1, 2, 64, "float16", tokens_per_block=4)},
    "heads": {"spec": KVSpec.uniform(LAYERS, 1, 128, "float16", tokens_per_block=4)},
    "axes": {"spec": KVSpec.uniform(LAYERS, 2, 64, "float16", tokens_per_block=4, axes="PHND")},
    "tokens_per_block": {"spec": KVSpec.uniform(LAYERS, 2, 64, "float16", tokens_per_block=8)},
    "key_hash": {"key_hash": "sha256"},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
async def test_another_identity_is_refused_or_starts_empty(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.put(prompt(1, 4))
    with pytest.raises(FormatError, match="identity"):
        await reopen(tmp_path, **change)
    assert committed_records(tmp_path) == 4, "a refusal changes nothing"
    async with open_rig(tmp_path) as rig:
        assert (await rig.get(prompt(1, 4))).loaded == 16
    assert await reopen(tmp_path, on_mismatch="clear", **change) == 0
    with pytest.raises(FormatError, match="identity"):
        async with open_rig(tmp_path):
            pass


async def test_the_same_identity_in_another_size_keeps_what_fits(tmp_path: Path) -> None:
    async with open_rig(tmp_path, disk=32) as rig:
        await rig.put(prompt(1, 6))
    async with open_rig(tmp_path, disk=64, host=16) as rig:
        assert rig.kv.usage()["disk"]["resident"] == 6
        await rig.put(prompt(2, 16))
    async with open_rig(tmp_path, disk=12) as rig:
        await rig.check_idle()
        for name, blocks in ((1, 6), (2, 16)):
            await rig.get(prompt(name, blocks))


async def test_another_secret_finds_nothing_of_the_old_one(tmp_path: Path) -> None:
    async with open_rig(tmp_path, key_secret="first") as rig:
        await rig.put(prompt(1, 4))
    async with open_rig(tmp_path, key_secret="second") as rig:
        assert (await rig.get(prompt(1, 4))).matched == 0
    async with open_rig(tmp_path, key_secret="first") as rig:
        assert (await rig.get(prompt(1, 4))).loaded == 16


@pytest.mark.parametrize("engine", ["auto", "threads"])
async def test_a_clean_close_writes_a_full_spill_queue(tmp_path: Path, engine: str) -> None:
    async with open_rig(tmp_path, host=64, disk=64, disk_engine=engine, device=64) as rig:
        gate = rig.faults().hold("write")
        for name in range(8):
            await rig.start_put(prompt(name, 8))
        assert rig.kv.usage()["manager"]["spilling"] >= 56
        assert committed_records(tmp_path) == 0
        asyncio.get_running_loop().call_later(0.05, gate.open)
        await rig.kv.aclose()
    async with open_rig(tmp_path, host=64, disk=64) as rig:
        for name in range(8):
            assert (await rig.get(prompt(name, 8))).loaded == 8 * TOKENS_PER_BLOCK


async def test_a_close_that_cannot_write_gives_up_in_time(tmp_path: Path) -> None:
    async with open_rig(tmp_path, close_timeout_ms=100) as rig:
        gate = rig.faults().hold("write")
        await rig.start_put(prompt(1, 8))
        began = time.monotonic()
        closing = asyncio.ensure_future(rig.kv.aclose())
        asyncio.get_running_loop().call_later(0.5, gate.open)
        await closing
        assert time.monotonic() - began < 5
    async with open_rig(tmp_path) as rig:
        assert (await rig.get(prompt(1, 8))).loaded in range(0, 33, 4)
