"""Cold copies: only their own session, prompt and blocks bring them back, whole and to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import SPEC, STRIDE, Device, Rig, open_rig, pattern, prompt, slots_of
from rig import TOKENS_PER_BLOCK as SIZE

from flexkv import BlockingKVManager, ColdCopy, FlexKVConfig, InputError, SinkWindow, TopBlocks

SOME = SinkWindow(sink_tokens=SIZE, window_tokens=2 * SIZE)


def cold(tokens: Any, keep: Any = SOME, session: str = "chat 7", **more: Any) -> ColdCopy:
    return ColdCopy.of(tokens, keep, session=session, tokens_per_block=SIZE, **more)


async def put(rig: Rig, tokens: list[int], copy: ColdCopy) -> None:
    """Put a copy of a prompt whose blocks lie in device blocks 0, 1, 2 ..."""
    for number in range(len(tokens) // SIZE):
        rig.device.write(number, pattern(tokens, number))
    slots = copy.slots(slots_of(range(len(tokens) // SIZE)))
    await rig.kv.put_async(copy.tokens, slots, namespace=copy.namespace).durable()


async def check(rig: Rig, tokens: list[int], copy: ColdCopy) -> None:
    """Bring a copy back to where its blocks stood; nothing else is touched."""
    rig.device.wipe()
    plan = copy.find(rig.kv)
    assert plan is not None
    result = await rig.kv.launch(plan, copy.slots(slots_of(range(len(tokens) // SIZE))))
    assert result.loaded == len(copy.tokens)
    for number in range(rig.device.blocks):
        if number in copy.blocks:
            assert np.array_equal(rig.device.read(number), pattern(tokens, number))
        else:
            assert rig.device.holds_sentinel(number)


async def test_a_copy_comes_back_from_host_and_disk_to_where_it_stood(tmp_path: Path) -> None:
    tokens = prompt(1, 7)
    copy = cold(tokens)
    assert copy.blocks.tolist() == [0, 5, 6]
    assert copy.positions.tolist() == [*range(SIZE), *range(5 * SIZE, 7 * SIZE)]
    assert copy.lossy
    async with open_rig(tmp_path) as rig:
        await put(rig, tokens, copy)
        await check(rig, tokens, copy)
        await rig.push_out()
        await check(rig, tokens, copy)
        await rig.kv.flush()
    async with open_rig(tmp_path) as rig:  # found again by prompt, session and blocks alone
        await check(rig, tokens, cold(tokens, copy.blocks))


async def test_it_is_all_or_nothing_and_putting_it_again_stores_what_is_missing() -> None:
    tokens = prompt(1, 7)
    copy = cold(tokens)
    async with open_rig(host=8) as rig:
        part = ColdCopy(
            copy.tokens[:SIZE], copy.namespace, copy.blocks[:1], copy.positions[:SIZE], 7 * SIZE
        )
        await put(rig, tokens, part)  # as if the last two had been evicted
        assert copy.find(rig.kv) is None
        assert rig.kv.usage()["manager"]["plans"] == 0
        slots = copy.slots(slots_of(range(7)))
        stored = await rig.kv.put_async(copy.tokens, slots, namespace=copy.namespace)
        assert stored.new == 2 * SIZE
        await check(rig, tokens, copy)


async def test_looking_for_a_copy_that_is_on_its_way_does_not_lose_it() -> None:
    tokens = prompt(1, 7)
    copy = cold(tokens)
    async with open_rig(host=8) as rig:
        for number in range(7):
            rig.device.write(number, pattern(tokens, number))
        slots = copy.slots(slots_of(range(7)))
        transfer = rig.kv.put_async(copy.tokens, slots, namespace=copy.namespace)
        assert copy.find(rig.kv) is None
        await transfer
        await check(rig, tokens, copy)


async def test_a_copy_in_a_remote_store_comes_back_for_its_session_alone(tmp_path: Path) -> None:
    remote: dict[str, Any] = {
        "remote_backend": "objects",
        "remote_cache_bytes": 32 * STRIDE,
        "remote_options": {"url": tmp_path.as_uri()},
        "spill": "through",
    }
    tokens = prompt(1, 7)
    copy = cold(tokens)
    async with open_rig(host=4, **remote) as rig:
        await put(rig, tokens, copy)
        await rig.push_out()
        assert rig.kv.get_match(copy.tokens).matched == 0
        assert cold(tokens, session="chat 8").find(rig.kv) is None
        await check(rig, tokens, copy)


async def test_nobody_else_finds_it_and_it_finds_nobody_else() -> None:
    tokens = prompt(1, 6)
    copy = cold(tokens)
    async with open_rig(host=64) as rig:
        await put(rig, tokens, copy)
        others = [
            cold(tokens, session="chat 8"),
            cold(tokens, namespace=["tenant"]),
            cold([*tokens, *range(SIZE)]),
            cold(tokens[: 5 * SIZE]),
            cold([tokens[0], tokens[1] + 1, *tokens[2:]]),
            cold([*tokens[: 2 * SIZE], 5, *tokens[2 * SIZE + 1 :]]),  # in a block that is dropped
            cold(tokens, SinkWindow(SIZE, SIZE)),
            cold(tokens, [0, 4, 5][:2]),
        ]
        for other in others:
            assert other.find(rig.kv) is None
        for plain in (tokens, copy.tokens, tokens[: SIZE + 1]):
            assert rig.kv.get_match(plain).matched == 0
        await rig.put(tokens)
        plan = rig.kv.get_match(copy.tokens)
        assert plan.matched == SIZE  # the exact prompt's own first block
        plan.cancel()
        await check(rig, tokens, copy)


@given(
    first=st.lists(st.integers(0, 3), min_size=SIZE, max_size=5 * SIZE),
    other=st.lists(st.integers(0, 3), min_size=SIZE, max_size=5 * SIZE),
    sessions=st.tuples(st.sampled_from("ab"), st.sampled_from("ab")),
    draw=st.data(),
)
def test_names_are_equal_only_where_prompt_session_and_blocks_are(
    first: list[int], other: list[int], sessions: tuple[str, str], draw: st.DataObject
) -> None:
    copies = []
    for tokens, session in zip((first, other), sessions, strict=True):
        count = len(tokens) // SIZE
        keep = sorted(draw.draw(st.sets(st.integers(0, count - 1), min_size=1)))
        copies.append(cold(tokens, keep, session))
    one, two = copies
    same = (
        sessions[0] == sessions[1]
        and first[: len(first) // SIZE * SIZE] == other[: len(other) // SIZE * SIZE]
        and one.blocks.tolist() == two.blocks.tolist()
    )
    assert (one.namespace == two.namespace) == same


def test_sink_and_window_are_whole_blocks_and_may_meet() -> None:
    for sink, window, blocks, stay in (
        (1, 1, 6, [0, 5]),
        (5, 4, 6, [0, 1, 5]),
        (0, 9, 6, [3, 4, 5]),
        (16, 16, 6, [0, 1, 2, 3, 4, 5]),
        (99, 99, 2, [0, 1]),
        (4, 0, 3, [0]),
    ):
        assert SinkWindow(sink, window).select(blocks, SIZE).tolist() == stay


def test_top_blocks_are_those_with_the_highest_scores_beside_sink_and_window() -> None:
    scores = np.repeat([0.0, 5, 1, 3, 2, 0], SIZE)
    for share, sink, window, stay in (
        (0.5, SIZE, SIZE, [0, 1, 5]),
        (0.6, SIZE, SIZE, [0, 1, 3, 5]),
        (0.1, SIZE, SIZE, [0, 5]),
        (0.3, 0, 0, [1, 3]),
        (1.0, 0, 0, [0, 1, 2, 3, 4, 5]),
    ):
        chosen = TopBlocks(scores, share, sink, window).select(6, SIZE)
        assert chosen.tolist() == stay
    one_token = np.zeros(6 * SIZE)
    one_token[3 * SIZE + 1] = 1  # a block has the sum of its tokens'
    assert TopBlocks(one_token, 0.01, 0, 0).select(6, SIZE).tolist() == [3]
    assert not cold(prompt(1, 6), TopBlocks(scores, 1.0)).lossy


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SinkWindow(-1, 4), "sink_tokens"),
        (lambda: SinkWindow(0, 0), "keep something"),
        (lambda: TopBlocks(np.ones(24), 0.0), "share"),
        (lambda: TopBlocks(np.ones(24), 0.5, -1), "sink_tokens"),
        (lambda: cold(prompt(1, 6), TopBlocks(np.ones(23), 0.5)), "one for each token"),
        (lambda: cold(prompt(1, 6), TopBlocks(np.full(24, np.nan), 0.5)), "finite"),
        (lambda: cold(prompt(1, 6), [0, 6]), "ascend below 6"),
        (lambda: cold(prompt(1, 6), [2, 2]), "ascend below 6"),
        (lambda: cold(prompt(1, 6), []), "one at least"),
        (lambda: cold([1, 2], SOME), "one at least"),
        (lambda: cold(prompt(1, 6), [-1]), ">= 0"),
        (lambda: cold(prompt(1, 6), session=""), "session"),
        (lambda: cold(prompt(1, 6)).slots([1, 2]), "2 slots for a prompt of 24"),
    ],
)
def test_bad_input_is_said(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_threads_find_copies_through_the_blocking_manager() -> None:
    device, tokens = Device(), prompt(1, 6)
    config = FlexKVConfig(model="m", spec=SPEC, host_cache_bytes=16 * STRIDE, huge_pages=False)
    if device.caches and not isinstance(next(iter(device.caches.values())), np.ndarray):
        pytest.skip("this one is of threads: the cpu will do")
    copy = cold(tokens)
    with BlockingKVManager(config) as kv:
        kv.register(device.caches, axes="PBNHD")
        for number in range(6):
            device.write(number, pattern(tokens, number))
        slots = copy.slots(slots_of(range(6)))
        kv.put(copy.tokens, slots, namespace=copy.namespace).result()
        device.wipe()
        plan = kv.call(copy.find, kv.manager)
        assert plan is not None
        kv.launch(plan, slots).result()
        assert np.array_equal(device.read(5), pattern(tokens, 5))
        assert device.holds_sentinel(3)
