"""Events: who replays them has exactly what each tier holds, at every moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from rig import Rig, open_rig, prompt

from flexkv import BlockEvent, BlockingKVManager, EventStream
from flexkv.model import READY

Held = dict[str, set[bytes]]


class Consumer:
    """What a listener believes that each tier holds."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.held: Held = {}
        self.seen: list[BlockEvent] = []

    def catch_up(self) -> Held:
        self.replay(self.stream.take())
        return self.held

    def replay(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            self.seen.append(event)
            tier = self.held.setdefault(event.tier, set())
            keys = {key.tobytes() for key in event.keys}
            if event.kind == "cleared":
                tier.clear()
            elif event.kind == "removed":
                assert keys <= tier, "a block left twice"
                tier -= keys
            else:
                assert not keys & tier, "a block came twice"
                assert len(event.parents) == len(event.keys)
                tier |= keys


def held(rig: Rig, prompts: Iterable[list[int]]) -> Held:
    """What the index says of every block of these prompts."""
    stack = rig.kv._stack
    tiers: Held = {name: set() for name in stack.ledger.tiers}
    for tokens in prompts:
        keys = stack.keyring.chain(np.array(tokens), stack.keyring.root(None))
        blocks = stack.index.find(keys)
        for name, tier in stack.ledger.tiers.items():
            here = stack.index.states(tier.number, blocks) == READY
            tiers[name] |= {key.tobytes() for key in keys[: len(blocks)][here]}
    for name, keys in tiers.items():
        assert len(keys) == rig.kv.usage()[name]["resident"]
    return tiers


@pytest.mark.parametrize("spill", ["through", "on_evict"])
@pytest.mark.parametrize("seed", range(4))
async def test_replaying_gives_what_the_index_holds_after_every_step(
    tmp_path: Path, seed: int, spill: str
) -> None:
    dice = random.Random(seed)
    shared = prompt(1, 3)
    prompts = [prompt(2 + i, dice.randint(3, 7), shared=shared) for i in range(10)]
    for _ in range(3):
        async with open_rig(tmp_path, host=8, disk=12, spill=spill) as rig:
            consumer = Consumer(rig.kv.events())
            assert consumer.catch_up() == held(rig, prompts), "after the start"
            for _ in range(25):
                step = dice.random()
                tokens = dice.choice(prompts)
                if step < 0.55:
                    await rig.put(tokens, durable=False)
                elif step < 0.8:
                    await rig.get(tokens)
                elif step < 0.9:
                    rig.kv.remove(tokens)
                elif step < 0.95:
                    await rig.kv.reset()
                else:
                    await rig.kv.prefetch_async(tokens)
                await rig.kv.flush()
                assert consumer.catch_up() == held(rig, prompts)


async def test_a_block_is_stored_only_when_its_bytes_have_landed(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        consumer = Consumer(rig.kv.events())
        consumer.catch_up()
        faults = rig.faults()
        gate = faults.hold("write")
        transfer = rig.start_put(prompt(1, 3))
        assert consumer.catch_up() == {"host": set(), "disk": set()}
        await transfer
        await gate.reached.wait()
        assert [len(keys) for keys in consumer.catch_up().values()] == [3, 0]
        faults.add("write", "EIO", times=1)
        gate.open()
        await rig.kv.flush()
        assert consumer.catch_up() == held(rig, [prompt(1, 3)])


async def test_a_damaged_block_leaves_its_tier_alone(tmp_path: Path) -> None:
    tokens = prompt(1, 4)
    async with open_rig(tmp_path) as rig:
        await rig.put(tokens)
        await rig.push_out()
        consumer = Consumer(rig.kv.events())
        before = set(consumer.catch_up()["disk"])
        rig.faults().add("read", "flip", skip=2, times=1)
        assert (await rig.get(tokens)).loaded < len(tokens)
        await rig.kv.flush()
        gone = before - consumer.catch_up()["disk"]
        keys = rig.kv._stack.keyring.chain(np.array(tokens), rig.kv._stack.keyring.root(None))
        assert gone == {keys[2].tobytes()}


async def test_stored_blocks_name_their_parents(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        stream = rig.kv.events()
        stream.take()
        await rig.put(prompt(1, 3))
        keys = rig.kv._stack.keyring.chain(np.array(prompt(1, 3)), rig.kv._stack.keyring.root(None))
        events = stream.take()
        assert {event.tier for event in events} == {"host", "disk"}
        for event in events:
            for key, parent in zip(event.keys, event.parents, strict=True):
                position = int(np.flatnonzero((keys == key).all(axis=1))[0])
                before = keys[position - 1] if position else np.zeros(2, np.uint64)
                assert np.array_equal(parent, before)


async def test_a_slow_listener_starts_anew_and_is_told_so(tmp_path: Path) -> None:
    async with open_rig(tmp_path, event_queue_blocks=16) as rig:
        quick, slow = Consumer(rig.kv.events()), Consumer(rig.kv.events())
        quick.catch_up(), slow.catch_up()
        prompts = [prompt(i, 4) for i in range(5)]
        for tokens in prompts:
            await rig.put(tokens)
            quick.catch_up()
        slow.seen.clear()
        assert slow.catch_up() == quick.held == held(rig, prompts)
        assert slow.seen[0].kind == "cleared"
        assert (quick.stream.dropped_blocks, slow.stream.dropped_blocks > 16) == (0, True)
        assert rig.count("dropped_blocks", work="events") == slow.stream.dropped_blocks
        await rig.put(prompt(9, 2))
        slow.seen.clear()
        slow.catch_up()
        assert "cleared" not in [event.kind for event in slow.seen]


async def test_nothing_is_recorded_when_nobody_listens(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        stream = rig.kv.events()
        stream.take()
        stream.close()
        stream.close()
        await rig.put(prompt(1, 3))
        assert not stream.pending
        assert not rig.kv._stack.events.listened_to
        assert all(audience.watcher is None for audience in rig.kv._stack.index._audiences)


async def test_a_stream_can_be_awaited_and_ends_with_the_manager(tmp_path: Path) -> None:
    taken: list[BlockEvent] = []

    async def listen(stream: EventStream) -> None:
        async for events in stream:
            taken.extend(events)

    async with open_rig(tmp_path) as rig:
        listener = asyncio.create_task(listen(rig.kv.events()))
        await rig.put(prompt(1, 3))
        expected = held(rig, [prompt(1, 3)])
    await listener
    consumer = Consumer.__new__(Consumer)
    consumer.held, consumer.seen = {}, []
    consumer.replay(taken)
    assert consumer.held == expected


def test_other_threads_take_events_while_the_loop_rests(tmp_path: Path) -> None:
    from rig import SPEC, STRIDE, Device, slots_of

    with BlockingKVManager(
        spec=SPEC, model="m", host_cache_bytes=8 * STRIDE, huge_pages=False
    ) as kv:
        kv.register(Device(8).caches, axes="PBNHD")
        consumer = Consumer(kv.events())
        consumer.replay(kv.visit(consumer.stream.take))
        kv.put(prompt(1, 2), slots_of([0, 1])).result()
        assert consumer.stream.pending
        consumer.replay(kv.visit(consumer.stream.take))
        assert len(consumer.held["host"]) == 2


async def test_what_there_is_can_be_read_in_pieces_while_it_changes(tmp_path: Path) -> None:
    """A survey, and after it the changes since it began, give what the index holds."""
    prompts = [prompt(i, 6) for i in range(8)]
    async with open_rig(tmp_path, host=30, disk=40) as rig:
        for tokens in prompts[:6]:
            await rig.put(tokens)
        stream = rig.kv.events()
        stream.catch_up()
        assert not stream.behind
        survey = stream.survey(("host", "disk", "elsewhere"))
        count = len(survey.arrange())
        believer = Consumer(stream)
        believer.held = {"host": set(), "disk": set()}
        for at in range(0, count, 4):
            keys, _, readable = survey.piece(np.arange(at, min(count, at + 4)))
            for tier, here in readable.items():
                believer.held[tier] |= {key.tobytes() for key in keys[here]}
            await rig.put(prompts[6 + at % 2])
            rig.kv.remove(prompts[at % 6])
            await rig.kv.flush()
        for event in stream.take():  # what was seen early or late is said again: that is no harm
            keys = {key.tobytes() for key in event.keys}
            believer.held[event.tier] -= keys
            if event.kind == "stored":
                believer.held[event.tier] |= keys
        assert believer.held == held(rig, prompts)


async def test_a_survey_knows_where_the_parents_stand(tmp_path: Path) -> None:
    async with open_rig(tmp_path, host=30, disk=40) as rig:
        shared = prompt(1, 3)
        for tokens in (prompt(2, 6, shared=shared), prompt(3, 6, shared=shared)):
            await rig.put(tokens)
        survey = rig.kv.events().survey(("host",))
        above = survey.arrange()
        keys, parents, _ = survey.piece(np.arange(len(above)))
        assert len(keys) == 9
        for at, parent in zip(above, parents, strict=True):
            assert np.array_equal(keys[at] if at >= 0 else np.zeros(2, np.uint64), parent)
