"""What other nodes hold, as a tier of the index: matched with our own, and no burden to it."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import groups_of, key_of, keys_of

from flexkv.brain import Brain, build_brain
from flexkv.cluster.delta import MEDIA, Delta
from flexkv.cluster.holdings import MAX_HOLDERS, NOBODY, Holdings
from flexkv.errors import CapacityError
from flexkv.model import DAMAGED, DISK, FAILED, HOST, MISSING, PEER, READY, KeyArray

Path = tuple[int, ...]


class Node:
    """A brain with a host, a disk and a peer tier, and what it knows of others."""

    def __init__(self, host: int = 16, peers: int = 16, disk: int = 8) -> None:
        capacities = {HOST: host, DISK: disk, PEER: peers}
        self.brain: Brain = build_brain(
            capacities, lambda tier: "lru", tokens_per_block=1, foreign=(PEER,)
        )
        self.index, self.ledger, self.planner = (
            self.brain.index,
            self.brain.ledger,
            self.brain.planner,
        )
        self.peer = self.ledger.tiers[PEER]
        self.holdings = Holdings(self.ledger, self.peer)
        self.now = 0.0

    def tell(
        self, node: str, *stored: Path, removed: tuple[Path, ...] = (), medium: str = "host", **more
    ) -> int:
        number = self.holdings.join(node)
        self.now += 1
        self.holdings.apply(number, delta(stored, removed, medium, **more), self.now)
        self.check()
        return number

    def check(self) -> None:
        self.index.check_integrity()
        self.holdings.check_integrity()
        for tier in self.ledger.tiers.values():
            tier.pool.check_integrity()

    def matched(self, path: Path) -> int:
        return len(self.index.match(keys_of(path)))

    def hold(self, path: Path, tier: str = HOST) -> None:
        """Store a prompt of our own."""
        self.now += 1
        put = self.planner.plan_put(groups_of(path)[:1], self.now)
        graph = self.planner.launch_put(put, np.arange(len(path), dtype=np.uint32))
        for copy in graph.ops:
            landed = np.zeros(len(copy), np.uint8)
            self.ledger.commit(graph, copy, copy.positions, landed, self.now)
        self.planner.release(graph.blocks)

    def who(self, path: Path) -> list[tuple[str | None, str]]:
        """Who can be asked for the last block of a path, in order."""
        block = self.index.find(keys_of(path))[-1:]
        rows = self.holdings.holders(self.index.slots(self.peer.number, block))[0]
        return [
            (self.holdings.name(int(row["node"])), MEDIA[row["medium"]])
            for row in rows
            if row["node"] != NOBODY
        ]


def delta(
    stored: tuple[Path, ...],
    removed: tuple[Path, ...] = (),
    medium: str = "host",
    cleared: bool = False,
) -> Delta:
    number = MEDIA.index(medium)
    parents = [key_of(path[:-1]) if len(path) > 1 else (0, 0) for path in stored]
    return Delta(
        _keys(stored),
        np.array(parents, np.uint64).reshape(-1, 2),
        np.full(len(stored), number, np.uint8),
        _keys(removed),
        np.full(len(removed), number, np.uint8),
        cleared,
    )


def _keys(paths: tuple[Path, ...]) -> KeyArray:
    return np.array([key_of(path) for path in paths], np.uint64).reshape(-1, 2)


def chain(path: Path) -> list[Path]:
    return [path[: i + 1] for i in range(len(path))]


def test_local_and_peer_blocks_make_one_prefix() -> None:
    node = Node()
    node.hold((1, 2))
    node.tell("a", *chain((1, 2, 3, 4)))
    assert node.matched((1, 2, 3, 4, 5)) == 4
    assert node.who((1, 2, 3)) == [("a", "host")]


def test_a_block_of_ours_and_of_a_peer_is_read_here() -> None:
    node = Node()
    node.hold((1, 2))
    node.tell("a", *chain((1, 2, 3, 4)))
    keys = keys_of((1, 2, 3, 4))
    found = node.planner.match(groups_of((1, 2, 3, 4))[:1])
    plan = node.planner.plan_get(found.blocks[0], keys, np.arange(4, dtype=np.uint32), 9.0)
    assert plan.by_tier == {HOST: 2, DISK: 0, PEER: 2}
    assert sum(len(copy) for copy in plan.graph.ops if copy.source.place == PEER) == 2


def test_nothing_is_spilled_to_peers_and_they_do_not_make_a_put_durable() -> None:
    node = Node()
    node.tell("a", *chain((1, 2)))
    node.hold((1, 2))
    assert [store.name for store in node.ledger.stores] == [DISK]
    (offer,) = node.ledger.spills
    spill = node.planner.plan_spill(*offer)
    assert spill.graph is not None
    assert [copy.target.place for copy in spill.graph.ops] == [DISK]


def test_a_local_block_whose_only_descendants_are_with_a_peer_can_leave() -> None:
    node = Node(host=2)
    node.ledger.spill = "never"
    node.hold((1, 2))
    node.tell("a", *chain((1, 2, 3)))
    node.tell("a", removed=((1, 2), (1,)))  # and still (1, 2, 3), for a moment
    assert node.matched((1, 2, 3)) == 3
    node.hold((5, 6))  # takes both slots
    assert node.matched((1, 2, 3)) == 0
    assert node.matched((5, 6)) == 2
    node.check()
    node.tell("a", removed=((1, 2, 3),))
    assert node.peer.free == node.peer.capacity
    assert len(node.index) == 2


def test_what_stayed_for_descendants_becomes_readable_when_somebody_has_it() -> None:
    node = Node()
    node.tell("a", *chain((1, 2, 3)))
    node.tell("a", removed=((1,),))
    assert node.matched((1, 2, 3)) == 0
    node.tell("b", (1,))
    assert node.matched((1, 2, 3)) == 3
    assert node.who((1,)) == [("b", "host")]


def test_blocks_without_their_parent_are_counted_and_left_out() -> None:
    node = Node()
    node.tell("a", (1,), (1, 2, 3), (1, 2, 3, 4), (1, 5))
    assert node.holdings.orphans == 2
    assert node.matched((1, 5)) == 2
    assert node.matched((1, 2, 3)) == 1


def test_a_lie_about_a_parent_changes_nothing() -> None:
    node = Node()
    node.tell("a", *chain((1, 2, 3)))
    honest = delta(((1, 2, 3),))
    lie = Delta(
        honest.stored_keys,
        _keys(((1,),)),
        honest.stored_media,
        honest.removed_keys,
        honest.removed_media,
    )
    other = Node()
    other.hold((1, 2, 3))
    other.tell("a", (1,))
    other.holdings.apply(other.holdings.join("a"), lie, 5.0)
    other.check()
    assert other.holdings.orphans == 1
    assert other.matched((1, 2, 3)) == 3


def test_a_key_that_comes_twice_in_one_delta_has_one_row() -> None:
    node = Node()
    node.tell("a", (1,), (1, 2), (1,), (1, 2))
    assert node.index.resident(node.peer.number) == 2


def test_when_the_tier_is_full_the_oldest_leave_first() -> None:
    node = Node(peers=4)
    node.tell("a", *chain((1, 2)))
    node.tell("a", *chain((3, 4)))
    node.tell("a", (3, 4, 5), (3, 4, 5, 6))  # goes on from what is there
    assert node.matched((3, 4, 5, 6)) == 4
    assert node.matched((1, 2)) == 0
    assert node.peer.evicted_blocks == 2
    node.tell("a", *chain((7, 7, 7, 7, 7, 7)))
    assert node.matched((7, 7, 7, 7, 7, 7)) == 4
    assert node.holdings.overflowed == 2


def test_a_pinned_block_is_not_evicted_and_its_row_is_not_given_out_again() -> None:
    node = Node(peers=4)
    node.tell("a", *chain((1, 2)))
    found = node.planner.match(groups_of((1, 2))[:1])
    rows = set(node.index.slots(node.peer.number, found.blocks[0]).tolist())
    node.tell("a", *chain((3, 4, 5)))
    assert node.matched((1, 2)) == 2
    assert node.matched((3, 4, 5)) == 2
    node.tell("a", removed=((1, 2), (1,)))  # the holder lost it while we are reading
    assert node.matched((1, 2)) == 0
    node.tell("a", *chain((6, 6, 6, 6)))
    fresh = node.index.slots(node.peer.number, node.index.find(keys_of((6, 6, 6, 6))))
    assert not rows & set(fresh.tolist())
    node.planner.release(found.blocks[0])
    node.tell("a", *chain((8, 8, 8, 8)))
    assert node.matched((8, 8, 8, 8)) == 4


@pytest.mark.parametrize("status", [MISSING, DAMAGED])
def test_what_nobody_could_give_leaves_the_tier_at_once(status: int) -> None:
    node = Node()
    node.tell("a", *chain((1, 2)))
    _read(node, (1, 2), status)
    assert node.matched((1, 2)) == 0
    assert not node.ledger.discards
    node.check()


def test_a_peer_that_does_not_answer_may_have_it_all_the_same() -> None:
    node = Node()
    node.tell("a", *chain((1, 2)))
    for _ in range(5):
        _read(node, (1, 2), FAILED)
    assert node.matched((1, 2)) == 2


def _read(node: Node, path: Path, status: int) -> None:
    """Read a prefix that only peers hold; all of it ends with this status."""
    found = node.planner.match(groups_of(path)[:1])
    plan = node.planner.plan_get(found.blocks[0], keys_of(path), None, 9.0)
    for copy in plan.graph.ops:
        statuses = np.full(len(copy), status, np.uint8)
        node.ledger.commit(plan.graph, copy, copy.positions, statuses, 9.0)
    node.planner.release(found.blocks[0])


def test_holders_come_cheapest_first_and_a_shared_store_once_more() -> None:
    node = Node()
    node.tell("a", (1,), medium="disk")
    node.tell("b", (1,), medium="remote")
    node.tell("b", (1,), medium="host")
    assert node.who((1,)) == [("b", "host"), ("a", "disk"), ("b", "remote")]
    node.holdings.lost(node.holdings.join("b"), keys_of((1,)))
    assert node.who((1,)) == [("a", "disk"), ("b", "remote")]
    node.holdings.lost(node.holdings.join("b"), keys_of((1,)), shared=True)
    assert node.who((1,)) == [("a", "disk")]


def test_more_holders_than_a_row_has_room_for_are_counted() -> None:
    node = Node()
    for number in range(MAX_HOLDERS + 2):
        node.tell(f"n{number}", (1,))
    assert node.holdings.crowded == 2
    assert len(node.who((1,))) == MAX_HOLDERS


def test_what_a_node_left_behind_is_not_given_out_and_goes_in_small_steps() -> None:
    node = Node()
    number = node.tell("a", *chain((1, 2)))
    node.tell("a", *chain((3, 4)), medium="remote")
    node.holdings.leave(number)
    assert node.who((1,)) == []
    assert node.who((3, 4)) == [("a", "remote")]
    while node.holdings.sweep():
        node.check()
    assert (node.matched((1, 2)), node.matched((3, 4))) == (0, 2)
    assert node.holdings.join("a") == number
    node.tell("a", (1,), cleared=True)
    while node.holdings.sweep():
        node.check()
    assert (node.matched((1, 2)), node.matched((3, 4))) == (1, 0)
    assert node.holdings.count(number) == 1


def test_a_node_that_is_gone_for_good_leaves_its_number_to_others() -> None:
    node = Node()
    for life in range(3):
        number = node.tell(f"a{life}", (1,))
        node.holdings.leave(number)
        while node.holdings.sweep():
            pass
        assert number == 0
    assert node.holdings.nodes() == {}


def test_what_is_told_anew_survives_the_sweep_of_what_was_before() -> None:
    node = Node()
    number = node.tell("a", *chain((1, 2, 3)))
    node.tell("a", *chain((1, 2)), cleared=True)
    while node.holdings.sweep():
        node.check()
    assert node.matched((1, 2, 3)) == 2
    assert node.holdings.count(number) == 2


def test_a_reset_forgets_the_others_too() -> None:
    node = Node()
    node.tell("a", *chain((1, 2, 3)))
    node.ledger.forget_everything()
    node.check()
    assert node.matched((1,)) == 0
    assert node.peer.free == node.peer.capacity
    node.tell("a", (4,))
    assert node.matched((4,)) == 1


def test_a_block_is_found_by_its_key_alone() -> None:
    node = Node()
    node.hold((1, 2, 3))
    keys = keys_of((1, 2, 3))[1:]
    blocks = node.index.alone.find(keys)
    assert (node.index.states(0, blocks) == READY).all()
    assert (node.index.keys(blocks) == keys).all()


LABELS = st.integers(0, 2)
PATHS = st.lists(LABELS, min_size=1, max_size=4).map(tuple)
NODES = st.sampled_from("abc")


class HoldingsMachine(RuleBasedStateMachine):
    """Deltas of three nodes, own puts and gets, in any order, against sets of (node, path)."""

    @initialize()
    def begin(self) -> None:
        self.node = Node(host=6, peers=200, disk=8)
        self.truth: dict[str, set[Path]] = {name: set() for name in "abc"}
        self.pinned: list[np.ndarray] = []

    @rule(name=NODES, path=PATHS)
    def stored(self, name: str, path: Path) -> None:
        self.truth[name] |= set(chain(path))
        self.node.tell(name, *chain(path))

    @rule(name=NODES, path=PATHS)
    def removed(self, name: str, path: Path) -> None:
        gone = {other for other in self.truth[name] if other[: len(path)] == path}
        self.truth[name] -= gone
        self.node.tell(name, removed=tuple(sorted(gone, key=len, reverse=True)))

    @rule(name=NODES)
    def left(self, name: str) -> None:
        self.truth[name] = set()
        self.node.holdings.leave(self.node.holdings.join(name))
        while self.node.holdings.sweep():
            pass

    @rule(path=PATHS)
    def put(self, path: Path) -> None:
        try:
            self.node.hold(path)
        except CapacityError:
            assert self.pinned

    @rule(path=PATHS)
    def pin(self, path: Path) -> None:
        found = self.node.planner.match(groups_of(path)[:1])
        self.pinned.append(found.blocks[0])

    @rule()
    def unpin(self) -> None:
        for blocks in self.pinned:
            self.node.planner.release(blocks)
        self.pinned.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "node"):
            return
        node = self.node
        node.check()
        held = set().union(*self.truth.values())
        assert node.index.resident(node.peer.number) == len(held)
        for path in held:
            block = node.index.find(keys_of(path))[-1:]
            assert node.index.states(node.peer.number, block) == READY
            assert {name for name, _ in node.who(path)} == {
                name for name, paths in self.truth.items() if path in paths
            }


TestHoldingsModel = HoldingsMachine.TestCase
TestHoldingsModel.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
