"""Nodes on hosts of their own: the network between them is cut, healed, and loses packets.

Whatever happens, what a node has itself is served, and no wrong byte comes (the rig compares all).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from netns_rig import SOON_S, Network, Node, open_cluster
from rig import TOKENS_PER_BLOCK

BLOCKS = 6
TOKENS = BLOCKS * TOKENS_PER_BLOCK
Nodes = tuple[Network, Node, Node]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    """Host 1 has the directory, 2 and 3 a node each."""
    with open_cluster(2, peer_timeout_ms=500) as (network, (a, b)):
        yield network, a, b


@pytest.fixture
def nodes(cluster: Nodes) -> Iterator[Nodes]:
    yield cluster
    network, _, _ = cluster
    network.heal()
    network.loss(0)


def loads_everything(node: Node, name: int) -> None:
    """Ask until a prompt is loaded whole."""
    until = time.monotonic() + SOON_S
    while (found := node.ask("get", name, BLOCKS)["loaded"]) < TOKENS:
        assert time.monotonic() < until, f"{found} of {TOKENS} tokens came"


def serves_its_own(node: Node, name: int) -> None:
    """Ask again and again for what lies in the node's own memory."""
    found = node.ask("hits", name, BLOCKS, 20)
    assert (found["loaded"], found["by_tier"]) == (TOKENS, {"host": BLOCKS})


def test_a_cut_between_two_nodes_costs_misses_and_heals(nodes: Nodes) -> None:
    network, a, b = nodes
    for name in (1, 2):
        a.ask("put", name, BLOCKS)
        b.until(BLOCKS, name, BLOCKS)
    loads_everything(b, 1)
    network.cut(2, 3)
    for _ in range(4):  # until b leaves a alone, and after that
        assert b.ask("get", 2, BLOCKS)["loaded"] == 0
        serves_its_own(b, 1)
        serves_its_own(a, 2)
    network.heal()
    loads_everything(b, 2)


def test_a_node_cut_off_from_the_directory_is_forgotten_and_found_again(nodes: Nodes) -> None:
    network, a, b = nodes
    a.ask("put", 11, BLOCKS)
    b.until(BLOCKS, 11, BLOCKS)
    network.cut(1, 2)
    b.until(0, 11, BLOCKS)  # its record expires
    a.ask("put", 12, BLOCKS)
    serves_its_own(a, 11)
    network.heal()
    for name in (11, 12):
        b.until(BLOCKS, name, BLOCKS)
        loads_everything(b, name)


def test_every_host_alone_serves_itself_and_all_of_it_heals(nodes: Nodes) -> None:
    network, a, b = nodes
    a.ask("put", 21, BLOCKS)
    b.ask("put", 22, BLOCKS)
    a.until(BLOCKS, 22, BLOCKS)
    b.until(BLOCKS, 21, BLOCKS)
    for pair in ((1, 2), (1, 3), (2, 3)):
        network.cut(*pair)
    for _ in range(3):
        serves_its_own(a, 21)
        serves_its_own(b, 22)
        assert b.ask("get", 21, BLOCKS)["loaded"] == 0
    network.heal()
    loads_everything(a, 22)
    loads_everything(b, 21)


def test_one_packet_in_ten_lost_costs_time_only(nodes: Nodes) -> None:
    network, a, b = nodes
    network.loss(0.1)
    for name in range(31, 35):
        a.ask("put", name, BLOCKS)
    for name in range(31, 35):
        b.until(BLOCKS, name, BLOCKS)
        loads_everything(b, name)
        serves_its_own(b, name)
