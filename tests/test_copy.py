"""The C copy engine: the right bytes and no others, in this thread and spread over the crew."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flexkv._core import ffi, lib
from flexkv.testing.held_crew import held

# XXH3-64 of fixed bytes under fixed keys: what is on disk must verify for ever.
GOLDEN = [0x66F5345E8FFF678D, 0x63F341FE573E1571, 0x27E0763F00D1EEEC]
GOLDEN_SHORT = [0x4311DC9E18487B3A, 0xA396EFF4454918E6, 0x7976325E25A8670A]


class Crew:
    """A hub and a crew without an event loop: `wait` polls the hub's descriptor."""

    def __init__(self, threads: int, depth: int = 64) -> None:
        self.hub = lib.fx_hub_open(64)
        self.crew = lib.fx_crew_open(threads, depth)
        self.poll = select.poll()
        self.poll.register(lib.fx_hub_fd(self.hub), select.POLLIN)

    def ticket(self) -> int:
        return lib.fx_ticket_take(self.hub, 1)

    def wait(self, count: int = 1) -> list[tuple[int, int, int]]:
        done = ffi.new("fx_done[]", 16)
        found: list[tuple[int, int, int]] = []
        while len(found) < count:
            assert self.poll.poll(10_000), "no completion within 10 s"
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(lib.fx_hub_fd(self.hub))
            while taken := lib.fx_hub_drain(self.hub, done, 16):
                found += [(done[i].ticket, done[i].failed, done[i].error) for i in range(taken)]
        return found

    def close(self) -> None:
        lib.fx_crew_close(self.crew)
        lib.fx_hub_close(self.hub, 0)


@pytest.fixture(params=[1, 3])
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(request.param)
    yield crew
    crew.close()


def address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def u32(values: Any) -> Any:
    return ffi.from_buffer("uint32_t[]", np.asarray(values, np.uint32).data)


def u64(values: Any) -> Any:
    return ffi.from_buffer("uint64_t[]", np.asarray(values, np.uint64).data)


class Case:
    """Planes of random shape over random memory, and the copy done by numpy, byte by byte."""

    def __init__(self, seed: int, segment: int | None = None) -> None:
        rng = random.Random(seed)
        self.blocks, self.slots = rng.randint(3, 9), rng.randint(3, 9)
        self.n = rng.randint(1, min(self.blocks, self.slots))
        self.device_ids = rng.sample(range(self.blocks), self.n)
        self.slot_ids = rng.sample(range(self.slots), self.n)
        self.count = rng.randint(1, 4)
        self.planes = ffi.new("fx_plane[]", self.count)
        self.rows: list[tuple[int, int, NDArray[np.uint8]]] = []  # offset, segment, device as grid
        offset = rng.choice([0, 3, 64])
        self.memory = []
        for plane in list(self.planes):
            size = segment or rng.choice(
                [1, 7, 63, 64, 130, 255, 256, 300, 4096, 5000, 9000, 40000]
            )
            counts = [rng.randint(1, 3) for _ in range(3)]
            shape = [self.blocks, *counts, size]
            order = rng.sample(range(4), 4)
            gaps = [rng.choice([0, 0, 1]) for _ in range(4)] + [rng.choice([0, 0, 5, 64])]
            stored = [shape[axis] + gaps[axis] for axis in order] + [size + gaps[4]]
            raw = np.frombuffer(rng.randbytes(64 + int(np.prod(stored))), np.uint8).copy()
            shift = rng.choice([0, 1, 32, 64])
            grid = raw[shift : shift + int(np.prod(stored))].reshape(stored)
            back = [*np.argsort(order), 4]
            device = grid[tuple(slice(shape[a]) for a in [*order, 4])].transpose(back)
            plane.base, plane.block_stride = address(device), device.strides[0]
            plane.stride, plane.count = device.strides[1:4], counts
            plane.segment_bytes, plane.offset = size, offset
            self.rows.append((offset, int(np.prod(counts)) * size, device))
            self.memory.append(raw)
            offset += int(np.prod(counts)) * size + rng.choice([0, 0, 11])
        self.stride = offset + rng.choice([0, 40])
        self.host = np.frombuffer(rng.randbytes(self.slots * self.stride), np.uint8).copy()

    def arguments(self, to_device: bool) -> Any:
        slots, blocks = u32(self.slot_ids), u32(self.device_ids)
        host = (address(self.host), self.stride)
        return (self.planes, self.count, *host, slots, blocks, self.n, int(to_device))

    def expect(self, to_device: bool) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
        """Do the copy in numpy on this case's own memory, return the result and undo it."""
        before = self.host.copy(), [raw.copy() for raw in self.memory]
        for slot, block in zip(self.slot_ids, self.device_ids, strict=True):
            for offset, size, device in self.rows:
                start = slot * self.stride + offset
                if to_device:
                    device[block] = self.host[start : start + size].reshape(device.shape[1:])
                else:
                    self.host[start : start + size] = device[block].reshape(-1)
        after = self.host.copy(), [raw.copy() for raw in self.memory]
        self.host[:] = before[0]
        for raw, old in zip(self.memory, before[1], strict=True):
            raw[:] = old
        return after

    def check(self, expected: tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]) -> None:
        assert np.array_equal(self.host, expected[0])
        for raw, want in zip(self.memory, expected[1], strict=True):
            assert np.array_equal(raw, want)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 1 << 32), to_device=st.booleans())
def test_every_byte_lands_and_no_other_changes(seed: int, to_device: bool) -> None:
    case = Case(seed)
    expected = case.expect(to_device)
    lib.fx_copy_blocks(*case.arguments(to_device))
    case.check(expected)


SEGMENTS = [1, 63, 64, 65, 255, 256, 319, 320, 512, 4096, 4097, 8192, 12288, 16384, 20480, 33000]


@pytest.mark.parametrize("segment", SEGMENTS)
@pytest.mark.parametrize("to_device", [True, False])
def test_segments_of_every_size_class(segment: int, to_device: bool) -> None:
    for seed in range(6):
        case = Case(seed, segment)
        expected = case.expect(to_device)
        lib.fx_copy_blocks(*case.arguments(to_device))
        case.check(expected)


@pytest.mark.parametrize("to_device", [True, False])
def test_the_crew_copies_what_one_thread_copies(crew: Crew, to_device: bool) -> None:
    cases = [Case(seed, segment) for seed, segment in enumerate([None, None, 40_000, 300_000, 1])]
    expected = [case.expect(to_device) for case in cases]
    tickets = []
    for case in cases:
        tickets.append(crew.ticket())
        arguments: Any = case.arguments(to_device)
        queued: Any = (crew.crew, *arguments, tickets[-1])
        assert lib.fx_crew_copy(*queued) == 0
        ffi.memmove(arguments[4], bytes(4 * case.n), 4 * case.n)  # arrays are copied: ours may go
        ffi.memmove(arguments[5], bytes(4 * case.n), 4 * case.n)
    done = crew.wait(len(cases))
    assert sorted(done) == sorted((ticket, 0, 0) for ticket in tickets)
    for case, want in zip(cases, expected, strict=True):
        case.check(want)


def test_nothing_to_do_completes_at_once(crew: Crew) -> None:
    ticket = crew.ticket()
    error = lib.fx_crew_copy(crew.crew, ffi.NULL, 0, 0, 0, ffi.NULL, ffi.NULL, 0, 1, ticket)
    assert error == 0
    assert crew.wait() == [(ticket, 0, 0)]


@pytest.mark.parametrize("size", [1, 64, 4096, 70_000, 3 << 20])
def test_moves_between_plain_addresses(crew: Crew, size: int) -> None:
    source = np.frombuffer(random.Random(size).randbytes(5 * size), np.uint8)
    target = np.zeros(5 * size + 2, np.uint8)
    order = [3, 0, 4, 1]
    sources = [address(source) + i * size for i in order]
    targets = [address(target) + 1 + i * size for i in range(4)]
    ticket = crew.ticket()
    assert lib.fx_crew_move(crew.crew, u64(sources), u64(targets), size, 4, ticket) == 0
    assert crew.wait() == [(ticket, 0, 0)]
    want = source.reshape(5, size)[order].reshape(-1)
    assert np.array_equal(target[1 : 1 + 4 * size], want)
    assert target[0] == 0
    assert not target[1 + 4 * size :].any()


def test_a_full_queue_refuses_and_leaves_the_ticket_alone() -> None:
    crew = Crew(1, depth=2)
    data = np.zeros(1 << 20, np.uint8)
    base = address(data)
    expected = []
    with held(crew.crew):
        for _ in range(5):
            ticket = crew.ticket()
            error = lib.fx_crew_move(crew.crew, u64([base]), u64([base + 4096]), 4096, 1, ticket)
            assert error in (0, -errno.EAGAIN)
            if error:
                lib.fx_fail(ffi.cast("void *", ticket), errno.EAGAIN)
            expected.append((ticket, int(error != 0), errno.EAGAIN if error else 0))
        assert 3 <= sum(failed for _, failed, _ in expected) < 5
    assert sorted(crew.wait(5)) == sorted(expected)
    crew.close()


def test_a_queue_that_fills_up_midway_costs_threads_only() -> None:
    crew = Crew(3, depth=4)
    source = np.frombuffer(random.Random(5).randbytes(6 << 20), np.uint8)
    target = np.zeros(6 << 20, np.uint8)
    places = range(0, 6 << 20, 1 << 20)
    with held(crew.crew):
        ticket = crew.ticket()
        sources, targets = (u64([address(a) + at for at in places]) for a in (source, target))
        assert lib.fx_crew_move(crew.crew, sources, targets, 1 << 20, 6, ticket) == 0
    assert crew.wait() == [(ticket, 0, 0)]
    assert np.array_equal(source, target)
    crew.close()


def checksums(host: NDArray[np.uint8], stride: int, slots: Any, size: int, keys: Any) -> list[int]:
    sums = np.zeros(len(slots), np.uint64)
    out = ffi.from_buffer("uint64_t[]", sums.data, require_writable=True)
    lib.fx_checksum_blocks(
        address(host),
        stride,
        u32(slots),
        size,
        u64(np.array(keys, np.uint64).reshape(-1)),
        len(slots),
        out,
    )
    return [int(value) for value in sums]


def test_checksums_bind_content_and_both_words_of_the_key() -> None:
    host = np.frombuffer(random.Random(1).randbytes(4 * 8192), np.uint8).copy()
    host[8192 : 2 * 8192] = host[:8192]
    keys = [[1, 2], [1, 2], [2, 1], [1, 3], [0, 2], [0, 0], [1, 2]]
    slots = [0, 1, 0, 0, 0, 0, 2]
    sums = checksums(host, 8192, slots, 5000, keys)
    assert sums[0] == sums[1]
    assert len(set(sums)) == 6
    host[5000:8192] = 0  # behind `size`: not part of it
    assert checksums(host, 8192, slots, 5000, keys) == sums
    host[4999] ^= 1
    changed = checksums(host, 8192, slots, 5000, keys)
    assert changed[0] != sums[0]
    assert changed[1] == sums[1]


def test_checksums_stay_what_they_were_on_disk() -> None:
    host = np.arange(3 * 4096, dtype=np.uint32).astype(np.uint8)
    keys = [[5, 6], [0, 1 << 63], [(1 << 64) - 1, 0]]
    assert checksums(host, 4096, [0, 1, 2], 4096, keys) == GOLDEN
    assert checksums(host, 4096, [0, 1, 2], 200, keys) == GOLDEN_SHORT


def test_the_crew_gives_the_same_checksums(crew: Crew) -> None:
    host = np.frombuffer(random.Random(2).randbytes(30 * 65536), np.uint8)
    slots = np.array(random.Random(3).sample(range(30), 20), np.uint32)
    keys = np.arange(40, dtype=np.uint64)
    sums = np.zeros(20, np.uint64)
    out = ffi.from_buffer("uint64_t[]", sums.data, require_writable=True)
    ticket = crew.ticket()
    base = address(host)
    error = lib.fx_crew_checksum(
        crew.crew, base, 65536, u32(slots), 60_000, u64(keys), 20, out, ticket
    )
    assert error == 0
    assert crew.wait() == [(ticket, 0, 0)]
    assert sums.tolist() == checksums(host, 65536, slots, 60_000, keys)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_yardsticks_copy_too(kind: int) -> None:
    source = np.frombuffer(random.Random(4).randbytes(8 * 32768 + 64), np.uint8)
    raw = np.zeros(8 * 32768 + 64, np.uint8)
    target = raw[-address(raw) % 64 :][: 8 * 32768]
    order = [5, 1, 7, 0, 2, 6, 4, 3]
    sources = u64([address(source) + i * 32768 for i in order])
    targets = u64([address(target) + i * 32768 for i in range(8)])
    lib.fx_copy_plain(sources, targets, 32768, 8, kind)
    want = source[: 8 * 32768].reshape(8, 32768)[order].reshape(-1)
    assert np.array_equal(target, want)
