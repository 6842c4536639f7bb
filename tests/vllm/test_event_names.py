"""What blocks are called in events, without an engine: a manager, and vLLM's own event types."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rig import SPEC, STRIDE, TOKENS_PER_BLOCK, Device, prompt, slots_of

from flexkv import BlockingKVManager

with warnings.catch_warnings():  # of vLLM and torch while they are imported
    warnings.simplefilter("ignore")
    from flexkv.integration.vllm import events
    from flexkv.integration.vllm.events import EventTranslator, Naming

Said = list[tuple[str, str, list[Any]]]


class Bench:
    """A manager of 8 host blocks and 32 on disk, and a translator that listens to it."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.kv = BlockingKVManager(
            spec=SPEC,
            model="m",
            host_cache_bytes=8 * STRIDE,
            disk_cache_bytes=32 * STRIDE,
            disk_dirs=[path],
            huge_pages=False,
            **settings,
        )
        self.kv.__enter__()
        self.kv.register(Device(64).caches, axes="PBNHD")
        config = SimpleNamespace(cache_config=SimpleNamespace())
        self.translator = EventTranslator(self.kv, TOKENS_PER_BLOCK, config)

    def put(self, tokens: list[int], hashes: list[Any], namespace: tuple[str, ...] = ()) -> None:
        count = len(hashes)
        transfer = self.kv.put(tokens, slots_of(range(count)), namespace=namespace)
        naming = Naming(hashes, np.array(tokens, np.int32).tobytes(), (None, None), [None] * count)
        self.kv.call(self.translator.learn, transfer._transfer.keys, naming)
        transfer.result()
        self.kv.flush()

    def heard(self) -> Said:
        """(kind, medium, hashes) of what happened since the last time."""
        return [
            (type(event).__name__, event.medium, list(event.block_hashes))
            for event in self.translator.take()
        ]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.kv.close()


def test_stored_blocks_carry_their_tokens_and_parents(bench: Bench) -> None:
    tokens = prompt(1, 3)
    bench.put(tokens, [11, 12, 13])
    for event, medium in zip(bench.translator.take(), ("CPU", "STORAGE"), strict=True):
        assert event.medium == medium
        assert event.block_hashes == [11, 12, 13]
        assert event.parent_block_hash is None
        assert (event.token_ids, event.block_size) == (tokens, TOKENS_PER_BLOCK)
    longer = [*tokens, *prompt(2, 1)]
    bench.put(longer, [11, 12, 13, 14])
    first, _ = bench.translator.take()
    assert (first.block_hashes, first.parent_block_hash) == ([14], 13)
    assert first.token_ids == longer[-TOKENS_PER_BLOCK:]
    assert bench.heard() == []
    assert not bench.translator.busy


def test_a_hash_that_stands_for_two_blocks_leaves_with_the_last(bench: Bench) -> None:
    """Two prompts that differ in a later image share vLLM's hashes, not flexkv's keys."""
    tokens = prompt(1, 1)
    bench.put(tokens, [11], ("mm=a",))
    assert bench.heard() == [("BlockStored", "CPU", [11]), ("BlockStored", "STORAGE", [11])]
    bench.put(tokens, [11], ("mm=b",))
    assert bench.heard() == []
    bench.kv.remove(tokens, namespace=("mm=a",))
    assert bench.heard() == []
    bench.kv.remove(tokens, namespace=("mm=b",))
    assert bench.heard() == [("BlockRemoved", "CPU", [11]), ("BlockRemoved", "STORAGE", [11])]


def test_what_a_disk_held_at_start_is_announced_once_it_has_a_name(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    first.put(prompt(1, 2), [11, 12])
    first.kv.close()
    again = Bench(tmp_path)
    try:
        assert again.heard() == []
        again.put(prompt(2, 1), [21])
        assert again.heard() == [("BlockStored", "CPU", [21]), ("BlockStored", "STORAGE", [21])]
        again.put(prompt(1, 2), [11, 12])
        assert sorted(again.heard()) == [
            ("BlockStored", "CPU", [11, 12]),
            ("BlockStored", "STORAGE", [11, 12]),
        ]
    finally:
        again.kv.close()


def test_a_listener_that_fell_behind_is_put_right(tmp_path: Path) -> None:
    bench = Bench(tmp_path, event_queue_blocks=6)
    try:
        held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        for number in range(12):
            bench.put(prompt(number, 2), [100 + number, 200 + number])
            if number in (3, 11):
                for kind, medium, hashes in bench.heard():
                    held[medium] -= set(hashes)
                    if kind == "BlockStored":
                        held[medium] |= set(hashes)
        usage = bench.kv.usage()
        assert len(held["CPU"]) == usage["host"]["resident"] == 8
        assert len(held["STORAGE"]) == usage["disk"]["resident"] == 24
    finally:
        bench.kv.close()


def test_names_of_blocks_that_are_nowhere_are_limited(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SPARE_NAMES", 3)
    for number in range(5):
        bench.put(prompt(number, 2), [100 + number, 200 + number])
    bench.heard()
    bench.kv.reset()
    bench.heard()
    assert len(bench.translator._blocks) == len(bench.translator._spare) == 3
    bench.put(prompt(1, 2), [101, 201])
    assert ("BlockStored", "CPU", [101, 201]) in bench.heard()
