"""Which blocks of a hybrid model's requests are loaded and saved; vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_vllm_geometry import attention, caches, engine, window

from flexkv.integration.vllm.geometry import describe
from flexkv.integration.vllm.groups import GroupTable

# blocks of 32 tokens: a window of 100 needs four blocks


class Pool:
    """vLLM's block pool: blocks that requests have given up, by hash and group."""

    enable_caching = True
    hash_block_size = 32

    def __init__(self, given_up: dict[tuple[Any, int], int]) -> None:
        self.blocks = {
            name: SimpleNamespace(block_id=block, ref_cnt=0) for name, block in given_up.items()
        }
        self.freed: list[int] = []

    def get_cached_block(self, name: Any, groups: list[int]) -> list[Any] | None:
        found = [self.blocks.get((name, group)) for group in groups]
        return None if None in found else found

    def touch(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)


def table(*specs: Any) -> GroupTable:
    return GroupTable(describe(engine(), caches(*specs), "0.32.0"))


@pytest.fixture
def hybrid() -> GroupTable:
    return table(attention(), window())


def request(blocks: int) -> Any:
    return SimpleNamespace(block_hashes=[f"h{i}" for i in range(blocks)])


def test_a_load_fills_all_blocks_of_full_attention_and_the_window_of_the_others(
    hybrid: GroupTable,
) -> None:
    full, near = list(range(101, 113)), [0] * 6 + list(range(201, 207))
    assert hybrid.to_load((full, near), 2, 10) == [full[2:10], near[6:10]]
    assert hybrid.to_load((full, near), 8, 10) == [full[8:10], near[8:10]]
    assert not hybrid.by_block


def test_a_save_finds_the_window_at_the_end_in_the_block_table(hybrid: GroupTable) -> None:
    full, near = list(range(101, 111)), [0] * 6 + [201, 202, 203, 204]
    found = hybrid.to_save(request(10), (full, near), 10, (200, 0))
    assert found.held[0] is None
    assert found.held[1] is not None
    assert found.held[1].tolist() == [6, 7, 8, 9]
    assert found.blocks == [*full, 201, 202, 203, 204]
    assert not found.kept


def test_windows_that_were_given_up_are_saved_while_the_pool_still_has_them_whole(
    hybrid: GroupTable,
) -> None:
    full, near = list(range(101, 111)), [0] * 6 + [201, 202, 203, 204]
    given_up = {(f"h{i}", 1): 300 + i for i in range(1, 6)}
    pool = Pool(given_up)
    hybrid.bind(pool)
    # 5 blocks: 1..4 are there; 3 blocks: 0 is not; 8 blocks: two of each
    found = hybrid.to_save(request(10), (full, near), 10, (170, 100, 256))
    assert found.held[1] is not None
    assert found.held[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert found.blocks[10:] == [301, 302, 303, 304, 305, 201, 202, 203, 204]
    # a block is held once, whatever windows it belongs to, and given back last one first
    held = [block.block_id for block in found.kept]
    assert sorted(held) == [301, 302, 303, 304, 305]
    assert [block.ref_cnt for block in pool.blocks.values()] == [1] * 5
    hybrid.give_back(found.kept)
    assert pool.freed == held[::-1]
    assert [block.ref_cnt for block in pool.blocks.values()] == [0] * 5


def test_a_block_that_somebody_has_may_be_about_to_be_written(hybrid: GroupTable) -> None:
    pool = Pool({(f"h{i}", 1): 300 + i for i in range(6)})
    pool.blocks["h3", 1].ref_cnt = 1
    hybrid.bind(pool)
    full, near = list(range(101, 111)), [0] * 6 + [201, 202, 203, 204]
    found = hybrid.to_save(request(10), (full, near), 10, (170,))
    assert found.held[1] is not None
    assert found.held[1].tolist() == [6, 7, 8, 9]
    assert not found.kept


def test_vllm_is_asked_to_keep_a_window_only_if_it_knows_how(hybrid: GroupTable) -> None:
    knows = SimpleNamespace(shared_prefix_boundary=64)
    hybrid.keep_window(knows, 32)
    assert knows.shared_prefix_boundary == 64
    hybrid.keep_window(knows, 96)
    assert knows.shared_prefix_boundary == 96
    old = SimpleNamespace()
    hybrid.keep_window(old, 96)
    assert not vars(old)


def test_keys_of_loads_and_saves_are_told_by_stretches(hybrid: GroupTable) -> None:
    keys = np.arange(30, dtype=np.uint64).reshape(-1, 2)

    def told(stretches: Any) -> list[tuple[list[int], int, int]]:
        return [(part[:, 0].tolist(), first, group) for part, first, group in stretches]

    plan = SimpleNamespace(keys=keys[:8], offset=64, matched=192, parts=(192, 64))
    assert told(hybrid.loaded(plan)) == [([0, 2, 4, 6, 8, 10], 2, 0), ([12, 14], 6, 1)]
    saved = hybrid.saved(keys[:9], [None, np.array([1, 2, 5, 6])])
    assert told(saved) == [([0, 2, 4, 6, 8], 0, 0), ([10, 12], 1, 1), ([14, 16], 5, 1)]
    assert told(table(attention()).saved(keys[:3], None)) == [([0, 2, 4], 0, 0)]
