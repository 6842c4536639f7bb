"""What nodes write: it comes back as it was, it is small, and nothing else is taken for it."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from directory_rig import chain
from hypothesis import given, settings
from hypothesis import strategies as st

from flexkv.cluster.changes import Changes, chain_order, coalesce
from flexkv.cluster.delta import Delta
from flexkv.cluster.wire import NodeRecord, WireError, cut, decode_record, encode_record, pack
from flexkv.cluster.wire import unpack as unpack_at
from flexkv.events import BlockEvent
from flexkv.model import KeyArray

RECORD = NodeRecord(
    node="a", incarnation=2**64 - 1, epoch=3, identity=b"m" * 32, addresses={"tcp": "[::1]:7411"}
)


def unpack(data: bytes) -> Delta:
    return unpack_at(data, 0)


def forest(seed: int, count: int) -> tuple[KeyArray, KeyArray]:
    """Keys and parents of random trees, parents first; some parents are outside."""
    dice = random.Random(seed)
    keys = chain(seed, count)
    parents = np.zeros_like(keys)
    for number in range(count):
        kind = dice.random()
        if number and kind < 0.8:
            parents[number] = keys[number - 1 if kind < 0.5 else dice.randrange(number)]
        elif kind < 0.9:
            parents[number] = chain(seed + 10_000 + number, 1)[0]
    return keys, parents


def pairs(keys: KeyArray, parents: KeyArray) -> list[tuple[bytes, bytes]]:
    return [(key.tobytes(), up.tobytes()) for key, up in zip(keys, parents, strict=True)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(0, 20))
def test_changes_come_back(seed: int, stored: int, removed: int) -> None:
    keys, parents = forest(seed, stored)
    masks = np.random.default_rng(seed).integers(1, 8, stored).astype(np.uint8)
    gone = chain(seed + 1, removed)
    gone_masks = np.full(removed, 5, np.uint8)
    delta = unpack(pack(Changes(keys, parents, masks, gone, gone_masks), 0))
    wanted = [
        (pair, medium)
        for pair, mask in zip(pairs(keys, parents), masks, strict=True)
        for medium in range(3)
        if mask >> medium & 1
    ]
    found = pairs(delta.stored_keys, delta.stored_parents)
    assert list(zip(found, delta.stored_media.tolist(), strict=True)) == wanted
    assert [key.tobytes() for key in delta.removed_keys] == [
        key.tobytes() for key in gone for _ in range(2)
    ]
    assert delta.removed_media.tolist() == [0, 2] * removed


def test_a_chain_of_blocks_costs_its_keys_and_little_else() -> None:
    keys = chain(1, 4096)
    parents = np.concatenate([np.zeros((1, 2), np.uint64), keys[:-1]])
    data = pack(Changes(keys, parents, np.ones(4096, np.uint8)), 0)
    assert len(data) <= 16 * 4096 + 64


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 80))
def test_chains_are_kept_together_behind_their_ancestors(seed: int, count: int) -> None:
    dice = random.Random(seed)
    parents = np.array([dice.randrange(-1, max(1, n)) if n else -1 for n in range(count)])
    shuffled = np.random.default_rng(seed).permutation(count)  # new position of each
    moved = np.full(count, -1)
    moved[shuffled] = np.where(parents < 0, -1, shuffled[parents])
    order = chain_order(moved).tolist()
    assert sorted(order) == list(range(count))
    place = {position: number for number, position in enumerate(order)}
    assert all(
        place[moved[position]] < place[position] for position in order if moved[position] >= 0
    )
    with_children = {int(parent) for parent in moved if parent >= 0}
    together = sum(moved[after] == before for before, after in pairwise(order))
    assert together == len(with_children), "each block is followed by one of its children"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_coalescing_keeps_the_last_word_on_each_block(seed: int, strict: bool) -> None:
    dice = random.Random(seed)
    keys = chain(seed, 6)
    held: dict[str, set[int]] = {"host": set(dice.sample(range(6), 3)), "disk": set()}
    before = {(n, medium) for medium, tier in enumerate(held) for n in held[tier]}
    events, touched = [], set()
    for _ in range(dice.randrange(12)):
        tier = dice.choice(["host", "disk"])
        some = sorted(dice.sample(range(6), 2))
        stored = [n for n in some if n not in held[tier]]
        removed = [n for n in some if n in held[tier]]
        for kind, numbers in (("stored", stored), ("removed", removed)):
            if numbers:
                chosen = keys[numbers]
                events.append(BlockEvent(kind, tier, chosen, np.zeros_like(chosen)))
                touched |= {(n, {"host": 0, "disk": 1}[tier]) for n in numbers}
        held[tier] = held[tier].symmetric_difference(some)
    events.append(BlockEvent("stored", "peer", chain(99, 2), chain(98, 2)))
    after = {(n, medium) for medium, tier in enumerate(held) for n in held[tier]}
    delta = unpack(pack(coalesce(events, strict=strict), 0))
    number = {key.tobytes(): n for n, key in enumerate(keys)}
    stored_now = [
        (number[key.tobytes()], int(medium))
        for key, medium in zip(delta.stored_keys, delta.stored_media, strict=True)
    ]
    removed_now = [
        (number[key.tobytes()], int(medium))
        for key, medium in zip(delta.removed_keys, delta.removed_media, strict=True)
    ]
    assert len(set(stored_now)) == len(stored_now)
    assert set(stored_now) == after & touched
    passing = touched - before - after  # came and went
    assert set(removed_now) == touched - after - (set() if strict else passing)


def test_a_delta_is_cut_into_pieces_that_say_the_same() -> None:
    keys, parents = forest(1, 50)
    changes = Changes(keys, parents, np.full(50, 3, np.uint8), chain(2, 30), np.ones(30, np.uint8))
    whole = unpack_at(pack(changes, 0), 0, cleared=True)
    pieces = cut(whole, 16)
    assert max(len(piece) for piece in pieces) <= 16
    assert [piece.cleared for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    for field in ("stored_keys", "stored_parents", "stored_media", "removed_keys", "removed_media"):
        joined = np.concatenate([getattr(piece, field) for piece in pieces])
        assert np.array_equal(joined, getattr(whole, field))


def test_records_of_a_later_minor_version_are_read() -> None:
    later = msgspec.msgpack.decode(encode_record(RECORD)) | {"colour": "blue"}
    assert decode_record(msgspec.msgpack.encode(later)) == RECORD
    earlier = msgspec.msgpack.decode(encode_record(RECORD))
    del earlier["blocks"]
    assert decode_record(msgspec.msgpack.encode(earlier)) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": 0},
        {"node": ""},
        {"node": "x" * 129},
        {"incarnation": -1},
        {"epoch": 2**60},
        {"identity": b"x" * 65},
        {"addresses": {str(n): "a" for n in range(9)}},
        {"addresses": {"tcp": "x" * 257}},
        {"addresses": ["tcp"]},
        {"state": "lost"},
        {"chunks": 2**40},
        {"snapshot": 1.5},
    ],
)
def test_a_record_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    data = msgspec.msgpack.encode(msgspec.msgpack.decode(encode_record(RECORD)) | change)
    with pytest.raises(WireError):
        decode_record(data)


def _valid() -> list[object]:
    keys, parents = forest(5, 20)
    data = pack(Changes(keys, parents, np.ones(20, np.uint8), keys[:3], np.ones(3, np.uint8)), 0)
    fields: list[object] = msgspec.msgpack.decode(data)
    return fields


def _words(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (0, 2),
        (1, 7),
        (2, b"x" * 15),
        (2, b"x" * 16 * 4097),
        (3, b""),
        (3, _words(1, 0)),
        (3, _words(0, 0, 0, 0)),
        (3, _words(0, 0, 25, 0)),
        (3, _words(0, 1)),
        (3, _words(0, 2**31)),
        (3, _words(0, 2**32 - 1)),
        (4, b"x" * 1600),
        (5, _words(19 * 256 + 1)),
        (5, _words((2**24 - 1) * 256 + 1)),
        (5, _words(20 * 256)),
        (5, _words(20 * 256 + 8)),
        (5, _words(20 * 256 + 1, 1)),
        (6, b"x" * 8),
        (7, b"abc"),
        (7, None),
    ],
)
def test_a_message_that_does_not_fit_itself_is_refused(field: int, value: object) -> None:
    fields = _valid()
    assert unpack(msgspec.msgpack.encode(fields)).stored_keys.shape == (20, 2)
    fields[field] = value
    with pytest.raises(WireError):
        unpack(msgspec.msgpack.encode(fields))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_damaged_bytes_are_an_error_or_a_valid_message_never_anything_else(seed: int) -> None:
    dice = random.Random(seed)
    for data in (msgspec.msgpack.encode(_valid()), encode_record(RECORD)):
        bad = bytearray(data)
        for _ in range(dice.randrange(1, 5)):
            at = dice.randrange(len(bad))
            kind = dice.randrange(3)
            if kind == 0:
                bad[at] = dice.randrange(256)
            elif kind == 1:
                del bad[at : at + dice.randrange(1, 20)]
            else:
                bad[at:at] = dice.randbytes(dice.randrange(1, 9))
            if not bad:
                break
        for read in (unpack, decode_record):
            try:
                found = read(bytes(bad))
            except WireError:
                continue
            if isinstance(found, Delta):
                assert len(found.stored_keys) == len(found.stored_media) <= 3 * 4096


def test_lengths_that_promise_much_take_no_memory() -> None:
    """MessagePack can announce 4 GiB in five bytes."""
    for data in (
        b"\xc6\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
    ):
        for read in (unpack, decode_record):
            with pytest.raises(WireError):
                read(data)
