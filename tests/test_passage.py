"""Blocks pass a socket whole, with their checksums, however the socket cuts them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from flexkv.backends.remote.heads import checksums
from flexkv.cluster.blocks import SUM_BYTES, Passage
from flexkv.errors import InputError
from flexkv.memory import Arena

STRIDE, SLOTS = 1 << 20, 6
SOURCES = np.array([4, 0, 1, 5], np.uint32)
TARGETS = np.array([2, 3, 0, 5], np.uint32)
KEYS = np.array([[1, 2], [2, 1], [0, 0], [1 << 63, 7]], np.uint64)

Pair = tuple[socket.socket, socket.socket]
Arenas = tuple[Arena, Arena]


@pytest.fixture(scope="module")
def arenas() -> Iterator[Arenas]:
    made = [Arena(SLOTS, STRIDE, huge_pages=False) for _ in range(2)]
    made[0].rows(0, SLOTS)[:] = np.random.default_rng(7).integers(0, 256, (SLOTS, STRIDE), np.uint8)
    yield made[0], made[1]
    for arena in made:
        arena.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    for end in (one, other):
        end.setblocking(False)
    with one, other:
        yield one, other


def passages(arenas: Arenas, size: int) -> tuple[Passage, Passage]:
    arenas[1].rows(0, SLOTS)[:] = 0xEE
    return Passage(arenas[0], SOURCES, KEYS, size), Passage(arenas[1], TARGETS, KEYS, size)


def blocks(arena: Arena, slots: NDArray[np.uint32], size: int) -> NDArray[np.uint8]:
    return arena.rows(0, SLOTS)[slots, :size]


@pytest.mark.parametrize("most", [1, 999, 1 << 30])
@pytest.mark.parametrize("size", [1, 7, 240, 5000, STRIDE])
def test_blocks_arrive_as_they_were_with_the_checksums_of_whole_blocks(
    arenas: Arenas, pair: Pair, size: int, most: int
) -> None:
    if size > 1000 * most:
        most = 4097
    out, into = passages(arenas, size)
    sent = got = 0
    while sent != 1 or got != 1:
        sent = out.move("send", pair[0].fileno(), most, 0)
        got = into.move("receive", pair[1].fileno(), most, 0)
        assert {sent, got} <= {0, 1, -errno.EAGAIN}
    assert np.array_equal(blocks(arenas[1], TARGETS, size), blocks(arenas[0], SOURCES, size))
    assert (arenas[1].rows(0, SLOTS)[TARGETS, size:] == 0xEE).all()
    assert (arenas[1].rows(0, SLOTS)[[1, 4]] == 0xEE).all()
    expected = checksums(arenas[0], SOURCES, KEYS, size).tolist()
    assert out.sums.tolist() == into.sums.tolist() == into.told.tolist() == expected
    assert into.whole == len(KEYS)
    assert into.moved_bytes == into.size_bytes == len(KEYS) * (size + SUM_BYTES)


def test_what_was_changed_on_its_way_does_not_fit_its_checksum(arenas: Arenas, pair: Pair) -> None:
    size = 64
    out, into = passages(arenas, size)
    assert out.move("send", pair[0].fileno(), 1 << 30, 0) == 1
    stream = bytearray(pair[1].recv(1 << 20))
    stream[size + SUM_BYTES + 3] ^= 1  # the second block's bytes
    stream[3 * (size + SUM_BYTES) - 1] ^= 1  # the third one's checksum
    pair[0].sendall(stream)
    assert into.move("receive", pair[1].fileno(), 1 << 30, 0) == 1
    assert (into.sums == into.told).tolist() == [True, False, False, True]


def test_a_passage_stands_still_and_ends_with_its_socket(arenas: Arenas, pair: Pair) -> None:
    size = 100
    out, into = passages(arenas, size)
    assert into.move("receive", pair[1].fileno(), 1 << 30, 0) == -errno.EAGAIN
    assert out.move("send", pair[0].fileno(), 2 * (size + SUM_BYTES) + 50, 0) in (0, 1)
    stream = pair[1].recv(1 << 20)
    pair[0].sendall(stream[: 2 * (size + SUM_BYTES) + 50])
    pair[0].shutdown(socket.SHUT_WR)
    assert into.move("receive", pair[1].fileno(), 1 << 30, 0) == -errno.ENODATA
    assert into.whole == 2
    assert (into.sums == into.told).tolist()[:2] == [True, True]
    pair[1].close()
    again, _ = passages(arenas, size)
    assert again.move("send", pair[0].fileno(), 1 << 30, 0) == -errno.EPIPE


def test_a_slot_outside_of_the_arena_is_refused(arenas: Arenas) -> None:
    with pytest.raises(InputError, match="slot 6"):
        Passage(arenas[0], np.array([1, 6], np.uint32), KEYS[:2], 100)


def test_nothing_passes_at_once(arenas: Arenas, pair: Pair) -> None:
    none = Passage(arenas[0], SOURCES[:0], KEYS[:0], 100)
    assert none.move("receive", pair[0].fileno(), 1 << 30, 0) == 1
