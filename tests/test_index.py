"""The prefix index at its edges: empty calls, full tables, ghosts, tiers, restoring, misuse."""

from __future__ import annotations

import heapq
import time
from typing import Any

import numpy as np
import pytest

from flexkv.errors import CapacityError, ConfigError
from flexkv.index import PrefixIndex
from flexkv.model import NO_BLOCK, NO_SLOT, KeyArray, TierState
from flexkv.policies.lru import LRU
from flexkv.protocols import Recovered

HOST, DISK = 0, 1
NOTHING = np.empty(0, np.uint32)
SEEDED = np.random.default_rng(7)


def random_keys(count: int) -> KeyArray:
    return SEEDED.integers(0, 1 << 63, (count, 2), np.uint64)


def index_of(max_blocks: int = 64, tiers: tuple[str, ...] = ("host", "disk")) -> PrefixIndex:
    index = PrefixIndex(max_blocks, tiers)
    for tier in range(len(tiers)):
        index.set_policy(tier, LRU())
    return index


def put(
    index: PrefixIndex, keys: KeyArray, *tiers: int, parent: int = NO_BLOCK, now: float = 1.0
) -> Any:
    blocks = index.insert(keys, parent)
    for tier in tiers:
        index.land(tier, blocks, blocks)  # slot = block: distinct for certain
        index.ready(tier, blocks, now)
    return blocks


def test_nothing_is_a_valid_argument_everywhere() -> None:
    index = index_of()
    none = np.empty((0, 2), np.uint64)
    assert len(index.match(none)) == len(index.find(none)) == len(index.insert(none, NO_BLOCK)) == 0
    index.land(HOST, NOTHING, NOTHING)
    index.ready(HOST, NOTHING, 0.0)
    index.touch(NOTHING, 0.0)
    index.pin(NOTHING)
    index.unpin(NOTHING)
    for answer in (index.drop, index.slots, index.states, index.evictable):
        assert len(answer(HOST, NOTHING)) == 0
    for answer in (index.keys, index.parents, index.depths):
        assert len(answer(NOTHING)) == 0
    assert (
        index.removable(NOTHING) == len(index.victims(HOST, 5)) == len(index.victims(HOST, -1)) == 0
    )
    assert len(index.evict(HOST, 5)[0]) == len(index.evict(HOST, -1)[0]) == 0
    recovered = Recovered(none, none, NOTHING, NOTHING)
    assert len(index.restore(DISK, recovered, 0.0)) == 0
    index.check_integrity()


@pytest.mark.parametrize("max_blocks", [0, 1, 5])
def test_a_full_index_refuses_as_a_whole(max_blocks: int) -> None:
    index = index_of(max_blocks)
    with pytest.raises(CapacityError, match=f"{max_blocks + 1} new blocks .* 0 of {max_blocks}"):
        index.insert(random_keys(max_blocks + 1), NO_BLOCK)
    keys = random_keys(max_blocks)
    put(index, keys, HOST)
    with pytest.raises(CapacityError):
        index.insert(random_keys(1), NO_BLOCK)
    assert len(index) == len(index.match(keys)) == max_blocks
    index.check_integrity()
    assert len(index.evict(HOST, max_blocks)[0]) == max_blocks
    put(index, random_keys(max_blocks), HOST)
    index.check_integrity()


@pytest.mark.parametrize(("max_blocks", "tiers"), [(-1, 1), (1 << 31, 1), (8, 0), (8, 9)])
def test_impossible_sizes_are_refused(max_blocks: int, tiers: int) -> None:
    with pytest.raises(ConfigError):
        PrefixIndex(max_blocks, ["tier"] * tiers)


def test_a_match_ends_at_the_first_block_that_no_tier_can_read() -> None:
    index, keys = index_of(), random_keys(6)
    blocks = index.insert(keys, NO_BLOCK)
    assert len(index.match(keys)) == 0
    assert index.find(keys).tolist() == blocks.tolist()
    index.land(HOST, blocks, np.arange(6))
    assert len(index.match(keys)) == 0
    index.ready(HOST, blocks[[0, 1, 4, 5]], 1.0)
    assert len(index.match(keys)) == 2
    index.land(DISK, blocks[2:4], np.arange(2))
    index.ready(DISK, blocks[[2]], 1.0)
    assert index.match(keys).tolist() == blocks[:3].tolist()
    index.ready(HOST, blocks[[3]], 1.0)
    assert len(index.match(keys)) == 6
    assert index.states(DISK, blocks).tolist() == [0, 0, TierState.READY, TierState.LANDING, 0, 0]
    assert index.slots(DISK, blocks).tolist() == [NO_SLOT, NO_SLOT, 0, 1, NO_SLOT, NO_SLOT]
    index.check_integrity()


def test_unknown_keys_match_nothing() -> None:
    index, keys = index_of(), random_keys(4)
    put(index, keys, HOST)
    other = keys.copy()
    other[2, 1] ^= np.uint64(1)
    assert len(index.match(other)) == len(index.find(other)) == 2
    other = keys.copy()
    other[0, 0] ^= np.uint64(1 << 40)  # the same home in the table, another key
    assert len(index.match(other)) == 0
    assert len(index.match(np.zeros((3, 2), np.uint64))) == 0


def test_the_zero_key_is_a_key() -> None:
    index = index_of()
    keys = np.zeros((1, 2), np.uint64)
    assert len(index.match(keys)) == 0
    put(index, keys, HOST)
    assert len(index.match(keys)) == 1
    index.evict(HOST, 1)
    assert len(index.match(keys)) == len(index.find(keys)) == 0


def test_a_ghost_hides_its_descendants_until_it_lands_again() -> None:
    index, keys = index_of(), random_keys(4)
    blocks = put(index, keys, HOST)
    assert index.drop(HOST, blocks[[1]]).tolist() == [blocks[1]]
    assert len(index.match(keys)) == 1
    assert len(index.find(keys)) == len(index) == 4
    index.check_integrity()
    index.land(HOST, blocks[[1]], blocks[[1]])
    index.ready(HOST, blocks[[1]], 2.0)
    assert len(index.match(keys)) == 4
    index.check_integrity()


def test_a_ghost_goes_with_its_last_child() -> None:
    index, keys = index_of(), random_keys(4)
    blocks = put(index, keys, HOST)
    index.drop(HOST, blocks[1:3])
    assert index.victims(HOST, 9).tolist() == [blocks[3], blocks[0]]
    assert index.evict(HOST, 1)[0].tolist() == [blocks[3]]
    assert index.find(keys).tolist() == [blocks[0]]
    index.check_integrity()
    assert index.evict(HOST, 9)[0].tolist() == [blocks[0]]
    assert len(index) == 0


def test_pins_keep_entries_and_forbid_eviction() -> None:
    index, keys = index_of(), random_keys(3)
    blocks = put(index, keys, HOST)
    index.pin(blocks[:2])
    index.pin(blocks[:1])
    assert index.pinned == 3
    assert index.evict(HOST, 9)[0].tolist() == [blocks[2]]
    index.drop(HOST, blocks[:2])
    assert len(index) == 2
    index.unpin(blocks[:2])
    assert index.find(keys).tolist() == [blocks[0]]
    index.unpin(blocks[:1])
    assert len(index) == index.pinned == 0
    index.check_integrity()


def test_a_block_may_leave_a_tier_before_its_children_when_another_tier_holds_it() -> None:
    index, keys = index_of(), random_keys(3)
    blocks = put(index, keys, HOST, DISK)
    index.drop(HOST, blocks[1:])
    assert index.evictable(HOST, blocks).tolist() == [True, False, False]
    index.drop(DISK, blocks[[0]])  # the host holds the only copy now, and has descendants on disk
    assert index.evictable(HOST, blocks).tolist() == [False, False, False]
    assert index.evictable(DISK, blocks).tolist() == [False, False, True]
    assert index.evict(DISK, 9)[0].tolist() == [blocks[2], blocks[1]]
    assert index.evict(HOST, 9)[0].tolist() == [blocks[0]]
    assert len(index) == 0


def test_evicting_from_one_tier_updates_the_other_tiers_order() -> None:
    index, keys = index_of(), random_keys(2)
    blocks = put(index, keys, HOST, DISK)
    index.drop(HOST, blocks[[1]])
    index.drop(DISK, blocks[[1]])  # gone: block 0 has no child left and is in both tiers
    below = put(index, random_keys(1), DISK, parent=int(blocks[0]))
    assert index.evict(HOST, 1)[0].tolist() == [blocks[0]]
    assert index.evictable(DISK, np.append(blocks[[0]], below)).tolist() == [False, True]
    index.check_integrity()
    assert len(index.evict(DISK, 2)[0]) == 2


def test_removable_counts_the_tail_that_nobody_else_uses() -> None:
    index, keys = index_of(), random_keys(4)
    blocks = put(index, keys, HOST)
    assert index.removable(blocks) == 4
    assert index.removable(blocks[:3]) == 0
    branch = put(index, random_keys(1), DISK, parent=int(blocks[1]))
    assert index.removable(blocks) == 2
    index.drop(DISK, branch)
    index.pin(blocks[2:3])
    assert index.removable(blocks) == 1
    index.unpin(blocks[2:3])
    index.land(DISK, blocks[3:], np.arange(1))
    assert index.removable(blocks) == 0


def test_entries_of_a_chain_are_neighbours_again_after_long_use() -> None:
    index = index_of(4096, ("host",))
    for now in range(600):
        count = int(SEEDED.integers(1, 200))
        free = 4096 - len(index)
        if count > free:
            index.evict(HOST, count - free)
        put(index, random_keys(count), HOST, now=float(now))
    blocks = (
        put(index, random_keys(100), HOST, now=600.0)
        if len(index) < 3997
        else index.evict(HOST, 100)[0]
    )
    assert np.count_nonzero(np.abs(np.diff(blocks.astype(int))) != 1) <= 4
    index.check_integrity()


def test_colliding_homes_survive_any_order_of_removal() -> None:
    index = index_of(512, ("host",))
    keys = random_keys(400)
    keys[:, 0] = (keys[:, 0] & ~np.uint64(0xFFF)) | np.uint64(0xFFE)  # one home, close to the end
    blocks = [int(put(index, keys[i : i + 1], HOST)[0]) for i in range(400)]
    alive = list(range(400))
    SEEDED.shuffle(alive)
    while alive:
        index.drop(HOST, np.array([blocks[i] for i in alive[-40:]], np.uint32))
        del alive[-40:]
        index.check_integrity()
        assert all(index.match(keys[i : i + 1]).tolist() == [blocks[i]] for i in alive)


def test_clear_forgets_everything_and_tells_the_policies() -> None:
    index, keys = index_of(), random_keys(5)
    blocks = put(index, keys, HOST, DISK)
    index.pin(blocks[:1])
    with pytest.raises(AssertionError, match="pins"):
        index.clear()
    index.unpin(blocks[:1])
    index.clear()
    assert len(index) == index.resident(HOST) == index.resident(DISK) == len(index.find(keys)) == 0
    index.check_integrity()
    assert len(put(index, keys, HOST)) == 5


def rows_of(*prompts: KeyArray) -> Recovered:
    parents = [np.vstack((np.zeros((1, 2), np.uint64), keys[:-1])) for keys in prompts]
    depths = np.concatenate([np.arange(len(keys), dtype=np.uint32) for keys in prompts])
    slots = np.arange(len(depths), dtype=np.uint32)
    return Recovered(np.vstack(prompts), np.vstack(parents), depths, slots)


def picked(table: Recovered, rows: Any) -> Recovered:
    return Recovered(table.keys[rows], table.parents[rows], table.depths[rows], table.slots[rows])


def test_rows_in_any_order_become_runs_again() -> None:
    index = index_of(256)
    prompts = [random_keys(20) for _ in range(8)]
    table = rows_of(*prompts)
    shuffled = picked(table, SEEDED.permutation(160))
    assert index.restore(DISK, shuffled, 1.0).all()
    for number, keys in enumerate(prompts):
        blocks = index.match(keys)
        assert np.diff(blocks.astype(int)).tolist() == [1] * 19
        assert index.slots(DISK, blocks).tolist() == list(range(20 * number, 20 * number + 20))
        assert index.depths(blocks).tolist() == list(range(20))
        assert index.parents(blocks).tolist() == [NO_BLOCK, *blocks[:-1].tolist()]
        assert (index.keys(blocks) == keys).all()
    index.check_integrity()
    assert len(index.evict(DISK, 160)[0]) == 160


def test_orphans_duplicates_and_impossible_depths_are_left_out() -> None:
    index, keys = index_of(), random_keys(6)
    table = rows_of(keys)
    table.depths[5] = 9
    rows = [0, 1, 1, 3, 4, 5]  # 2 is missing: 3 and 4 are orphans; 1 comes twice
    kept = index.restore(DISK, picked(table, rows), 1.0)
    assert kept.tolist() == [True, True, False, False, False, False]
    assert len(index.match(keys)) == len(index) == 2
    index.check_integrity()


def test_rows_whose_parents_name_each_other_are_orphans() -> None:
    index, keys = index_of(), random_keys(2)
    table = Recovered(
        keys, keys[::-1].copy(), np.array([1, 2], np.uint32), np.arange(2, dtype=np.uint32)
    )
    assert not index.restore(DISK, table, 1.0).any()
    assert len(index) == 0


def test_what_does_not_fit_is_left_out_from_the_end_of_its_prompt() -> None:
    index, prompts = index_of(10), [random_keys(6), random_keys(6)]
    kept = index.restore(DISK, rows_of(*prompts), 1.0)
    assert kept.tolist() == [True] * 10 + [False] * 2
    assert [len(index.match(keys)) for keys in prompts] == [6, 4]
    index.check_integrity()


def test_a_second_store_adds_to_what_the_first_restored() -> None:
    index, keys = index_of(), random_keys(6)
    table = rows_of(keys)
    assert index.restore(HOST, picked(table, slice(0, 4)), 1.0).all()
    assert index.restore(DISK, picked(table, slice(2, 6)), 1.0).all()
    assert len(index.match(keys)) == len(index) == 6
    assert not index.restore(DISK, picked(table, slice(2, 6)), 1.0).any()
    index.check_integrity()


def test_a_million_rows_are_restored_in_seconds() -> None:
    index = index_of(1_000_000, ("disk",))
    table = rows_of(*[random_keys(500) for _ in range(2000)])
    shuffled = picked(table, SEEDED.permutation(1_000_000))
    start = time.perf_counter()
    assert index.restore(0, shuffled, 1.0).all()
    assert time.perf_counter() - start < 4.0  # the budget is 2 s on an idle machine


def test_misuse_is_said_and_does_no_harm() -> None:
    index, keys = index_of(), random_keys(3)
    blocks = put(index, keys, HOST)
    gone = put(index, random_keys(1), DISK)
    index.evict(DISK, 1)
    far = np.array([10_000], np.uint32)
    for call, said in [
        (lambda: index.insert(keys[:1], NO_BLOCK), "known already"),
        (lambda: index.insert(keys[2:], int(blocks[1])), "known already"),
        (lambda: index.insert(random_keys(1), int(gone[0])), "not in the index"),
        (lambda: index.insert(random_keys(1), 10_000), "not in the index"),
        (lambda: index.land(HOST, blocks, blocks), "state"),
        (lambda: index.land(DISK, blocks[[0, 0]], blocks[:2]), "state"),
        (lambda: index.ready(HOST, blocks, 1.0), "state"),
        (lambda: index.unpin(blocks), "unpinned"),
        (lambda: index.pin(gone), "not in the index"),
        (lambda: index.drop(HOST, far), "not in the index"),
        (lambda: index.slots(HOST, far), "not in the index"),
        (lambda: index.states(HOST, far), "not in the index"),
        (lambda: index.keys(far), "not in the index"),
        (lambda: index.parents(gone), "not in the index"),
        (lambda: index.depths(gone), "not in the index"),
        (lambda: index.evictable(HOST, far), "not in the index"),
        (lambda: index.touch(gone, 1.0), "not in the index"),
        (lambda: index.removable(gone), "not in the index"),
        (lambda: index.order(HOST).rank(gone, 1.0), "not in the index"),
        (lambda: index.order(HOST).rank(blocks, float("nan")), "not a number"),
        (lambda: index.order(HOST).rank_each(blocks, np.array([1, 2, np.nan])), "not a number"),
        (lambda: index.order(HOST).ranks(far), "not in the index"),
        (lambda: index.states(2, blocks), "tier 2 is none of"),
        (lambda: index.set_policy(HOST, LRU()), "before blocks come"),
    ]:
        with pytest.raises(AssertionError, match=said):
            call()
    assert index.match(keys).tolist() == blocks.tolist()
    index.drop(DISK, blocks[[0]])  # what the duplicate landed before it was noticed
    index.check_integrity()


def test_keys_of_evicted_blocks_are_known_until_the_next_insert() -> None:
    index, keys = index_of(), random_keys(5)
    put(index, keys, HOST)
    blocks, _ = index.evict(HOST, 3)
    assert (index.keys(blocks) == keys[:1:-1]).all()
    assert index.states(HOST, blocks).tolist() == [TierState.ABSENT] * 3


def test_ranks_order_leaves_and_ties_leave_in_the_order_they_were_set() -> None:
    index = index_of(64, ("host",))
    order = index.order(HOST)
    blocks = np.concatenate([put(index, random_keys(1), HOST) for _ in range(6)])
    order.rank_each(blocks, np.array([3.0, -1.0, 0.0, -0.0, np.inf, -np.inf]))
    assert order.ranks(blocks).tolist() == [3.0, -1.0, 0.0, 0.0, np.inf, -np.inf]
    assert order.take(9).tolist() == blocks[[5, 1, 2, 3, 0, 4]].tolist()
    order.rank(blocks[[4, 2]], 0.0)
    order.rank(blocks[[3]], 0.0)
    assert order.take(4).tolist() == blocks[[5, 1, 2, 4]].tolist()
    assert order.take(9).tolist() == blocks[[5, 1, 2, 4, 3, 0]].tolist()
    index.check_integrity()


def test_eviction_of_a_large_random_forest_is_by_rank_and_leaves_first() -> None:
    index = index_of(5000, ("host",))
    blocks: list[int] = []
    while len(blocks) < 4900:
        parent = blocks[int(SEEDED.integers(len(blocks)))] if len(blocks) > 20 else NO_BLOCK
        blocks += put(index, random_keys(int(SEEDED.integers(1, 9))), HOST, parent=parent).tolist()
    everyone = np.array(blocks, np.uint32)
    ranks = SEEDED.integers(0, 50, len(blocks)).astype(np.float64)
    index.order(HOST).rank_each(everyone, ranks)
    parents, rank_of = index.parents(everyone), dict(zip(blocks, ranks, strict=True))
    parent_of = dict(zip(blocks, parents.tolist(), strict=True))
    index.check_integrity()
    children = dict.fromkeys(blocks, 0)
    for parent in parent_of.values():
        if parent != NO_BLOCK:
            children[parent] += 1
    expected = []
    leaves = [(rank_of[block], block) for block in blocks if not children[block]]
    heapq.heapify(leaves)
    while leaves:
        _, block = heapq.heappop(leaves)
        expected.append(block)
        parent = parent_of[block]
        if parent != NO_BLOCK:
            children[parent] -= 1
            if not children[parent]:
                heapq.heappush(leaves, (rank_of[parent], parent))
    assert index.victims(HOST, 5000).tolist() == expected
    index.check_integrity()
    left: list[int] = []
    while len(index):
        left += index.evict(HOST, 333)[0].tolist()
        index.check_integrity()
    assert left == expected
