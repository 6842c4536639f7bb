"""A node reads what another one holds: from its host memory, from its disk, from a shared store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from peer_rig import INCARNATION, Known, keys_of, open_owner, open_reader
from rig import SPEC, STRIDE, prompt

from flexkv.brain import build_brain
from flexkv.cluster.fetching import PeerSettings
from flexkv.cluster.holdings import DISK_MEDIUM, HOST_MEDIUM, REMOTE_MEDIUM, Delta, Holdings
from flexkv.cluster.lender import Loan
from flexkv.model import DAMAGED, FAILED, HOST, LANDED, MISSING, PEER, SKIPPED
from flexkv.protocols import BlockIO

BLOCKS = 6
ALL = range(BLOCKS)


@pytest.fixture
def known() -> Known:
    return Known()


async def test_blocks_come_from_the_memory_of_another_node(known: Known) -> None:
    async with open_owner(known=known) as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        statuses = await reader.read(prompt(1, BLOCKS))
        assert statuses.tolist() == [LANDED] * BLOCKS
        assert reader.store.requests == 1
        await owner.unpinned()
        assert owner.lender.leases.expired == 0


async def test_many_reads_share_few_connections(known: Known) -> None:
    settings = PeerSettings(connections=2)
    async with (
        open_owner(known=known) as owner,
        open_reader(known, settings=settings) as reader,
    ):
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        keys = keys_of(prompt(1, BLOCKS))

        async def one(at: int) -> None:
            source = np.arange(BLOCKS, dtype=np.uint32)
            target = source + np.uint32(BLOCKS * at)
            statuses = await reader.store.read(BlockIO(target, source, keys))
            assert statuses.tolist() == [LANDED] * BLOCKS

        async with anyio.create_task_group() as group:
            for at in range(8):
                group.start_soon(one, at)
        assert len(owner.server._wires) <= 2
        await owner.unpinned()


async def test_what_left_the_owners_memory_comes_from_its_disk(
    known: Known, tmp_path: Path
) -> None:
    async with (
        open_owner(tmp_path, known=known, host=24) as owner,
        open_reader(known) as reader,
    ):
        await owner.rig.put(prompt(1, BLOCKS))
        await owner.rig.push_out()
        assert owner.rig.kv.usage()["disk"]["resident"] >= BLOCKS
        known.hold(ALL, 0, DISK_MEDIUM)
        statuses = await reader.read(prompt(1, BLOCKS))
        assert statuses.tolist() == [LANDED] * BLOCKS
        assert owner.rig.count("transfer_blocks", source="disk", target="host") >= BLOCKS
        await owner.unpinned()


async def test_a_block_that_nobody_holds_any_more_is_missing_and_leaves_the_holdings(
    known: Known,
) -> None:
    async with open_owner(known=known) as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, 4))
        known.hold(ALL, 0)
        statuses = await reader.read(prompt(1, BLOCKS))
        assert statuses.tolist() == [LANDED] * 4 + [MISSING] * 2
        assert known.losses == [(0, 2, False)]


async def test_blocks_come_in_any_order_and_from_the_middle_of_a_prompt(known: Known) -> None:
    async with open_owner(known=known) as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        statuses = await reader.read(prompt(1, BLOCKS), [4, 2, 5])
        assert statuses.tolist() == [LANDED] * 3


async def test_the_next_holder_is_asked_for_what_the_first_has_lost(known: Known) -> None:
    async with (
        open_owner(known=known, node=0) as first,
        open_owner(known=known, node=1) as second,
        open_reader(known) as reader,
    ):
        await first.rig.put(prompt(1, 3))
        await second.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        known.hold(ALL, 1, DISK_MEDIUM)  # dearer, so that it is the second choice
        statuses = await reader.read(prompt(1, BLOCKS))
        assert statuses.tolist() == [LANDED] * BLOCKS
        assert first.server.sent_blocks == second.server.sent_blocks == 3


async def test_each_node_is_asked_once_for_all_that_it_is_the_cheapest_for(known: Known) -> None:
    async with (
        open_owner(known=known, node=0) as first,
        open_owner(known=known, node=1) as second,
        open_reader(known) as reader,
    ):
        await first.rig.put(prompt(1, BLOCKS))
        await second.rig.put(prompt(1, BLOCKS))
        known.hold([0, 2, 4], 0)
        known.hold([1, 3, 5], 1)
        statuses = await reader.read(prompt(1, BLOCKS))
        assert statuses.tolist() == [LANDED] * BLOCKS
        assert reader.store.requests == 2
        assert first.server.sent_blocks == second.server.sent_blocks == 3


async def test_the_holder_that_was_measured_to_be_faster_is_chosen(known: Known) -> None:
    async with (
        open_owner(known=known, node=0) as first,
        open_owner(known=known, node=1) as second,
        open_reader(known) as reader,
    ):
        for owner in (first, second):
            await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        known.hold(ALL, 1)
        await reader.read(prompt(1, BLOCKS))
        await reader.read(prompt(1, BLOCKS))  # the one that was not measured is tried
        assert first.server.sent_blocks == second.server.sent_blocks == BLOCKS
        fetcher = reader.store._fetcher
        assert fetcher is not None
        fetcher.cost(0, 0).latency_s = 5.0
        for _ in range(3):
            await reader.read(prompt(1, BLOCKS))
        assert second.server.sent_blocks == 4 * BLOCKS


class Shared:
    """A store addressed by key that all nodes share."""

    def __init__(self, arena: Any, held: dict[bytes, Any]) -> None:
        self._arena, self._held = arena, held

    async def read(self, batch: BlockIO) -> Any:
        statuses = np.full(len(batch), MISSING, np.uint8)
        for i, key in enumerate(batch.keys):
            if (data := self._held.get(key.tobytes())) is not None:
                self._arena.view(int(batch.host_slots[i]))[: SPEC.block_bytes] = data
                statuses[i] = LANDED
        return statuses


async def test_blocks_in_a_shared_store_come_from_there_also_when_their_node_is_gone(
    known: Known,
) -> None:
    from rig import pattern

    tokens = prompt(1, BLOCKS)
    held = {keys_of(tokens)[i].tobytes(): pattern(tokens, i) for i in range(4)}
    async with open_reader(known) as reader:
        reader.store._remote = Shared(reader.arena, held)  # type: ignore[assignment]
        for node in (3, 4):  # both have put them there
            known.hold(ALL, node, REMOTE_MEDIUM)
        statuses = await reader.read(tokens)
        assert statuses.tolist() == [LANDED] * 4 + [MISSING] * 2
        assert sorted(known.losses) == [(3, 2, True), (4, 2, True)]
        assert reader.store.requests == 0


async def test_a_request_of_another_epoch_or_incarnation_is_refused(known: Known) -> None:
    book = Known()
    async with open_owner(known=book) as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        known.add(0, owner.address, INCARNATION + 1)
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [SKIPPED] * BLOCKS
        known.add(0, owner.address)
        book.epoch = 2
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [SKIPPED] * BLOCKS
        assert owner.server.sent_blocks == 0
        known.epoch = 2
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
        assert known.losses == []


async def test_what_was_read_before_a_reset_and_came_after_it_is_missing(known: Known) -> None:
    async with open_owner(known=known) as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        lend = owner.lender.lend

        async def slow(*arguments: Any) -> Any:
            loan = await lend(*arguments)
            known.epoch = 2
            return loan

        owner.lender.lend = slow  # type: ignore[method-assign]
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [MISSING] * BLOCKS


@pytest.mark.parametrize("secret", [b"", b"another one"])
async def test_who_does_not_know_the_secret_gets_nothing(known: Known, secret: bytes) -> None:
    async with open_owner(known=known) as owner, open_reader(known, secret=secret) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [FAILED] * BLOCKS
        assert owner.server.strangers == 1
        assert owner.server.sent_blocks == 0


async def test_an_owner_that_does_not_know_the_secret_is_not_believed(known: Known) -> None:
    async with open_owner(known=known, secret=b"") as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [FAILED] * BLOCKS


async def test_a_node_that_is_down_is_left_alone_and_its_blocks_are_not_missing(
    known: Known,
) -> None:
    settings = PeerSettings(failures=2, retry_ms=60_000, timeout_ms=2000)
    async with open_owner(known=known) as owner, open_reader(known, settings=settings) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        known.addresses[0, "tcp"] = "127.0.0.1:1"  # nobody listens there
        for expected in (FAILED, FAILED, SKIPPED):
            assert (await reader.read(prompt(1, BLOCKS))).tolist() == [expected] * BLOCKS
        assert reader.store.requests == 2
        known.addresses[0, "tcp"] = owner.address  # it comes back
        assert (await reader.read(prompt(1, BLOCKS))).tolist() == [LANDED] * BLOCKS
        assert known.losses == []


async def test_a_reader_gets_half_of_what_all_may_hold(known: Known) -> None:
    async with (
        open_owner(known=known, bytes_in_flight=8 * STRIDE) as owner,
        open_reader(known) as reader,
    ):
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        statuses = await reader.read(prompt(1, BLOCKS))
        assert statuses.tolist() == [LANDED] * 4 + [SKIPPED] * 2
        await owner.unpinned()


async def test_a_block_that_is_vouched_for_under_another_key_is_damaged(known: Known) -> None:
    async with open_owner(known=known) as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        known.hold(ALL, 0)
        lend = owner.lender.lend

        async def confusing(*arguments: Any) -> Loan:
            loan = await lend(*arguments)
            keys = loan.keys.copy()
            keys[2, 1] ^= np.uint64(1)
            return replace(loan, keys=keys)

        owner.lender.lend = confusing  # type: ignore[method-assign]
        statuses = await reader.read(prompt(1, BLOCKS))
        assert statuses.tolist() == [LANDED, LANDED, DAMAGED, LANDED, LANDED, LANDED]


async def test_the_store_writes_nothing_and_discards_nothing(known: Known) -> None:
    async with open_reader(known) as reader:
        slots = np.arange(2, dtype=np.uint32)
        batch = BlockIO(slots, slots, keys_of(prompt(1, 2)))
        assert (await reader.store.write(batch)).tolist() == [FAILED] * 2
        assert (await reader.store.discard(batch)).tolist() == [LANDED] * 2


async def test_a_match_of_what_others_hold_is_read_by_its_slots(known: Known) -> None:
    """With the real holdings: matched like any blocks, in slots of the tier `peer`."""
    brain = build_brain(
        {HOST: 8, PEER: 64}, lambda tier: "lru", tokens_per_block=4, foreign=(PEER,)
    )
    holdings = Holdings(brain.ledger, brain.ledger.tiers[PEER], own_node="reader")
    async with open_owner(known=known) as owner, open_reader(known) as reader:
        await owner.rig.put(prompt(1, BLOCKS))
        reader.store._holdings = holdings
        number = holdings.join("node-0")
        known.add(number, owner.address)
        keys = keys_of(prompt(1, BLOCKS))
        parents = np.vstack((np.zeros((1, 2), np.uint64), keys[:-1]))
        media = np.full(BLOCKS, HOST_MEDIUM, np.uint8)
        none = np.empty((0, 2), np.uint64), np.empty(0, np.uint8)
        holdings.apply(number, Delta(keys, parents, media, *none), 0.0)
        blocks = brain.index.match(keys)
        assert len(blocks) == BLOCKS
        slots = brain.index.slots(brain.ledger.tiers[PEER].number, blocks)
        targets = np.arange(BLOCKS, dtype=np.uint32)
        statuses = await reader.store.read(BlockIO(targets, slots, keys))
        assert statuses.tolist() == [LANDED] * BLOCKS
        owner.rig.kv.remove(prompt(1, BLOCKS))
        statuses = await reader.store.read(BlockIO(targets, slots, keys))
        assert statuses.tolist() == [MISSING] * BLOCKS
        assert len(brain.index.match(keys)) == 0
