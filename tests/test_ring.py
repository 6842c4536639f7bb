"""The ring: bytes in their place, failures with their own entry, no batch in the way of another."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import resource
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_matrix import LOOPS, run_on
from numpy.typing import ArrayLike, NDArray

from flexkv._core import ffi, lib
from flexkv.completion import Completions, Done, Ticket

PAGE = 4096
READ, WRITE, BUFFERED = 0, 1, 2
ring_error = lib.fx_ring_probe()
pytestmark = [
    pytest.mark.skipif(ring_error != 0, reason=f"io_uring: {os.strerror(-ring_error)}"),
    pytest.mark.parametrize("loop", [name for name in LOOPS if name != "debug"]),
]


class Memory:
    """Page-aligned memory; `bytes` is a view of it."""

    def __init__(self, pages: int) -> None:
        self.map = mmap.mmap(-1, pages * PAGE)
        self.bytes = np.frombuffer(self.map, dtype=np.uint8)
        self.base = self.bytes.ctypes.data


class Ring:
    """An fx_ring with the calls a backend makes."""

    def __init__(self, completions: Completions, depth: int, max_bytes: int) -> None:
        self.completions = completions
        self.ring = lib.fx_ring_open(completions.hub, depth, max_bytes)
        assert self.ring != ffi.NULL, os.strerror(ffi.errno)
        completions.attach(self.ring)

    def queue(
        self,
        mode: int,
        fds: ArrayLike,
        offsets: ArrayLike,
        addresses: ArrayLike,
        lengths: ArrayLike,
    ) -> tuple[Ticket, NDArray[np.int32]]:
        """Queue one batch; scalars stand for equal entries. Results are filled by the ticket."""
        fds, offsets, addresses, lengths = np.broadcast_arrays(fds, offsets, addresses, lengths)
        results = np.full(fds.size, -9999, np.int32)
        ticket = self.completions.ticket(keep=results)
        self.answer = lib.fx_ring_queue(
            self.ring,
            mode,
            fds.size,
            ffi.from_buffer("int32_t[]", np.array(fds, np.int32)),
            ffi.from_buffer("uint64_t[]", np.array(offsets, np.uint64)),
            ffi.from_buffer("uint64_t[]", np.array(addresses, np.uint64)),
            ffi.from_buffer("uint32_t[]", np.array(lengths, np.uint32)),
            ffi.from_buffer("int32_t[]", results),
            ticket.number,
        )
        if self.answer < 0:
            self.completions.fail(ticket, self.answer)
        self.completions.request_flush()
        return ticket, results

    def close(self) -> None:
        self.completions.detach(self.ring)
        assert lib.fx_ring_close(self.ring) == 0


@asynccontextmanager
async def opened(depth: int = 32, max_bytes: int = 64 << 20) -> AsyncIterator[Ring]:
    completions = Completions(crew_threads=1)
    ring = Ring(completions, depth, max_bytes)
    try:
        yield ring
    finally:
        ring.close()
        assert await completions.aclose() == 0


@pytest.fixture
def content(tmp_path: Path) -> NDArray[np.uint8]:
    """1,000 random pages, also in the file `data`."""
    content = np.random.default_rng(7).integers(0, 256, 1000 * PAGE, dtype=np.uint8)
    content.tofile(tmp_path / "data")
    return content


@pytest.fixture
def direct(tmp_path: Path, content: NDArray[np.uint8]) -> Iterator[int]:
    try:
        fd = os.open(tmp_path / "data", os.O_RDWR | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    yield fd
    os.close(fd)


def test_random_reads_bring_the_bytes_of_their_place(
    loop: str, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        memory = Memory(1000)
        pages = np.random.default_rng(1).permutation(1000)
        async with opened(depth=16) as ring:
            ticket, results = ring.queue(
                READ, direct, pages * PAGE, memory.base + np.arange(1000) * PAGE, PAGE
            )
            assert await ticket == Done(0, 0)
            assert (results == PAGE).all()
            assert lib.fx_ring_in_flight(ring.ring) == lib.fx_ring_queued(ring.ring) == 0
        expected = content.reshape(1000, PAGE)[pages]
        assert (memory.bytes.reshape(1000, PAGE) == expected).all()

    run_on(loop, main())


def test_many_batches_of_one_tick_start_before_it_ends(loop: str, direct: int) -> None:
    async def main() -> None:
        memory = Memory(12)
        async with opened() as ring:
            tickets = []
            for page in range(12):  # no await in here: the loop gets no turn
                address = memory.base + page * PAGE
                tickets.append(ring.queue(READ, direct, [page * PAGE], address, PAGE)[0])
            assert lib.fx_ring_queued(ring.ring) < 8
            assert lib.fx_ring_in_flight(ring.ring) >= 5
            assert [await ticket for ticket in tickets] == [Done(0, 0)] * 12

    run_on(loop, main())


def test_random_writes_land_in_their_place(loop: str, direct: int, tmp_path: Path) -> None:
    async def main() -> None:
        random = np.random.default_rng(2)
        memory = Memory(1000)
        memory.bytes[:] = random.integers(0, 256, memory.bytes.size, dtype=np.uint8)
        starts = np.arange(0, 1000, 4)  # pieces of 1 to 4 pages, in any order, from any place
        lengths = random.integers(1, 5, starts.size) * PAGE
        targets = random.permutation(starts)
        before = np.fromfile(tmp_path / "data", dtype=np.uint8)
        async with opened(depth=8) as ring:
            ticket, results = ring.queue(
                WRITE, direct, targets * PAGE, memory.base + starts * PAGE, lengths
            )
            assert await ticket == Done(0, 0)
            assert (results == lengths).all()
        for start, target, length in zip(starts, targets, lengths, strict=True):
            source = memory.bytes[start * PAGE :][:length]
            before[target * PAGE :][:length] = source
        assert (np.fromfile(tmp_path / "data", dtype=np.uint8) == before).all()

    run_on(loop, main())


def test_neighbours_are_merged_and_results_stay_per_entry(
    loop: str, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        memory = Memory(1000)
        lengths = np.tile([1, 2, 5, 2], 100) * PAGE  # 1,000 pages, 400 entries, all neighbours
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        async with opened(depth=256) as ring:
            ticket, results = ring.queue(READ, direct, offsets, memory.base + offsets, lengths)
            lib.fx_ring_submit(ring.ring)
            assert 4 <= lib.fx_ring_in_flight(ring.ring) <= 5  # 4 MB in I/Os of up to 1 MiB
            assert await ticket == Done(0, 0)
            assert (results == lengths).all()
            assert (memory.bytes == content).all()
            memory.bytes[:] = 0  # neighbours in the file only: not merged
            ticket, results = ring.queue(
                READ, direct, np.arange(10) * PAGE, memory.base + np.arange(10)[::-1] * PAGE, PAGE
            )
            lib.fx_ring_submit(ring.ring)
            assert lib.fx_ring_in_flight(ring.ring) == 10
            assert await ticket == Done(0, 0)
        expected = content[: 10 * PAGE].reshape(10, PAGE)[::-1].ravel()
        assert (memory.bytes[: 10 * PAGE] == expected).all()

    run_on(loop, main())


@pytest.mark.parametrize("size", [6 * PAGE, 6 * PAGE + 100, 6 * PAGE + 512 * 3])
def test_the_end_of_a_file_is_a_short_result_and_a_failed_part(
    loop: str, tmp_path: Path, size: int, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        os.truncate(tmp_path / "data", size)
        memory = Memory(20)
        places = np.arange(5) * 2 * PAGE
        async with opened() as ring:
            ticket, results = ring.queue(READ, direct, places, memory.base + places, 2 * PAGE)
            apart, results_apart = ring.queue(
                READ, direct, places, memory.base + places[::-1] * 2, 2 * PAGE
            )
            assert await ticket == await apart == Done(1, errno.EIO)
            expected = np.clip(size - places, 0, 2 * PAGE)
            assert results.tolist() == results_apart.tolist() == expected.tolist()

    run_on(loop, main())


def test_a_bad_descriptor_or_address_or_alignment_fails_its_own_entry(
    loop: str, direct: int, tmp_path: Path
) -> None:
    async def main() -> None:
        memory = Memory(8)
        read_only = os.open(tmp_path / "data", os.O_RDONLY | os.O_DIRECT)
        offsets = np.array([0, 0, 4096, 100, 0])
        addresses = memory.base + np.array([0, 4096, 8192 + 8, 12288, 16384])
        addresses[4] = PAGE  # never mapped
        fds = [direct, 10_000, direct, direct, direct]
        async with opened() as ring:
            ticket, results = ring.queue(READ, fds, offsets, addresses, PAGE)
            done = await ticket
            wanted = [PAGE, -errno.EBADF, -errno.EINVAL, -errno.EINVAL, -errno.EFAULT]
            if (
                results[2] == PAGE
            ):  # file systems and kernels differ in what memory must be aligned to
                wanted[2] = PAGE
            assert results.tolist() == wanted
            assert done.failed == 1
            assert done.error in (errno.EBADF, errno.EINVAL, errno.EFAULT)
            ticket, results = ring.queue(WRITE, read_only, 0, memory.base, PAGE)
            assert await ticket == Done(1, errno.EBADF)
        os.close(read_only)

    run_on(loop, main())


def test_one_bad_page_among_merged_neighbours_fails_alone(
    loop: str, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        memory = Memory(8)
        libc = ctypes.CDLL(None, use_errno=True)
        places = np.arange(8) * PAGE
        hole = ctypes.c_void_p(memory.base + 3 * PAGE)
        assert libc.mprotect(hole, ctypes.c_size_t(PAGE), 0) == 0
        async with opened() as ring:
            ticket, results = ring.queue(READ, direct, places, memory.base + places, PAGE)
            assert await ticket == Done(1, errno.EFAULT)
        assert libc.mprotect(hole, ctypes.c_size_t(PAGE), 3) == 0
        assert results.tolist() == [PAGE] * 3 + [-errno.EFAULT] + [PAGE] * 4
        good = np.flatnonzero(results == PAGE)
        assert (
            memory.bytes.reshape(8, PAGE)[good] == content[: 8 * PAGE].reshape(8, PAGE)[good]
        ).all()

    run_on(loop, main())


def test_a_full_device_is_told(loop: str) -> None:
    async def main() -> None:
        memory = Memory(4)
        fd = os.open("/dev/full", os.O_WRONLY)
        places = np.arange(4) * PAGE
        async with opened() as ring:
            ticket, results = ring.queue(WRITE | BUFFERED, fd, places, memory.base + places, PAGE)
            assert await ticket == Done(1, errno.ENOSPC)
            assert results.tolist() == [-errno.ENOSPC] * 4
        os.close(fd)

    run_on(loop, main())


def test_a_write_cut_short_is_continued_and_then_blamed_on_the_right_entry(
    loop: str, tmp_path: Path
) -> None:
    async def main() -> None:
        memory = Memory(4)
        memory.bytes[:] = 7
        fd = os.open(tmp_path / "limited", os.O_RDWR | os.O_CREAT)
        places = np.arange(4) * PAGE
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        async with opened() as ring:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE + 1000, hard))
            try:
                ticket, results = ring.queue(WRITE, fd, places, memory.base + places, PAGE)
                assert await ticket == Done(1, errno.EFBIG)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert results.tolist() == [PAGE, PAGE, -errno.EFBIG, -errno.EFBIG]
        os.close(fd)

    run_on(loop, main())


def test_files_without_o_direct_work(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        memory = Memory(8)
        memory.bytes[:] = np.arange(memory.bytes.size) % 251
        fd = os.open(tmp_path / "buffered", os.O_RDWR | os.O_CREAT)
        async with opened() as ring:  # odd lengths and addresses are fine here
            ticket, _ = ring.queue(
                WRITE | BUFFERED, fd, [0, 5001], memory.base + np.array([0, 5001]), [5001, 3000]
            )
            assert await ticket == Done(0, 0)
            ticket, results = ring.queue(READ | BUFFERED, fd, 0, memory.base + 4 * PAGE + 1, 8001)
            assert await ticket == Done(0, 0)
            assert results.tolist() == [8001]
        assert (memory.bytes[4 * PAGE + 1 :][:8001] == memory.bytes[:8001]).all()
        os.close(fd)

    run_on(loop, main())


@pytest.mark.parametrize("where", ["all", "inside", "outside"])
def test_registered_memory_is_one_more_way_to_the_same_bytes(
    loop: str, direct: int, content: NDArray[np.uint8], where: str
) -> None:
    async def main() -> None:
        memory = Memory(40)
        first, pages = {"all": (0, 40), "inside": (10, 20), "outside": (40, 1)}[where]
        other = Memory(1)
        async with opened() as ring:
            base = memory.base if where != "outside" else other.base - 40 * PAGE
            assert lib.fx_ring_register(ring.ring, base + first * PAGE, pages * PAGE) == 0
            # merged neighbours reach from what is registered into what is not
            places = np.arange(40)
            reads, results = ring.queue(
                READ, direct, places * PAGE, memory.base + places * PAGE, PAGE
            )
            apart, _ = ring.queue(READ, direct, 90 * PAGE, other.base, PAGE)
            assert await reads == await apart == Done(0, 0)
            assert (results == PAGE).all()
            assert (memory.bytes == content[: 40 * PAGE]).all()
            back, _ = ring.queue(
                WRITE, direct, (50 + 2 * places) * PAGE, memory.base + places * PAGE, PAGE
            )
            assert await back == Done(0, 0)
            again, _ = ring.queue(
                READ, direct, (50 + 2 * places) * PAGE, memory.base + places[::-1] * PAGE, PAGE
            )
            assert await again == Done(0, 0)
            mirrored = content[: 40 * PAGE].reshape(40, PAGE)[::-1]
            assert (memory.bytes.reshape(40, PAGE) == mirrored).all()

    run_on(loop, main())


def test_io_across_two_pieces_of_registered_memory_works(
    loop: str, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        memory = mmap.mmap(-1, (1 << 30) + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # 1 GiB is pinned: let that be few pages
        view = np.frombuffer(memory, dtype=np.uint8)
        border = view.ctypes.data + (1 << 30)
        async with opened() as ring:
            answer = lib.fx_ring_register(ring.ring, view.ctypes.data, len(memory))
            if answer == -errno.ENOMEM:
                pytest.skip("not enough memory may be locked here")
            assert answer == 0
            places = np.array([-2, -1, 0, 1])  # these merge into one I/O over the border
            reads, results = ring.queue(
                READ, direct, (places + 5) * PAGE, places * PAGE + border, PAGE
            )
            assert await reads == Done(0, 0)
            assert (results == PAGE).all()
            landed = view[(1 << 30) - 2 * PAGE : (1 << 30) + 2 * PAGE]
            assert (landed == content[3 * PAGE : 7 * PAGE]).all()

    run_on(loop, main())


def test_memory_that_cannot_be_registered_changes_nothing(
    loop: str, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        memory = Memory(2)
        async with opened() as ring:
            assert lib.fx_ring_register(ring.ring, 1 << 40, 8 * PAGE) == -errno.EFAULT
            assert lib.fx_ring_register(ring.ring, memory.base, 0) == -errno.EINVAL
            reads, _ = ring.queue(READ, direct, 3 * PAGE, memory.base, PAGE)
            assert await reads == Done(0, 0)
            assert (memory.bytes[:PAGE] == content[3 * PAGE : 4 * PAGE]).all()
            assert lib.fx_ring_register(ring.ring, memory.base, 2 * PAGE) == 0
            twice = lib.fx_ring_register(ring.ring, memory.base, 2 * PAGE)
            assert twice == -errno.EINVAL

    run_on(loop, main())


def pinned_bytes() -> int:
    """What is pinned by this process, as the kernel counts it."""
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmPin" in line
    ]
    return int(line.split()[1]) * 1024


def test_close_unpins_registered_memory(loop: str) -> None:
    async def main() -> None:
        memory = Memory(256)
        before = pinned_bytes()
        async with opened() as ring:
            assert lib.fx_ring_register(ring.ring, memory.base, 256 * PAGE) == 0
            assert pinned_bytes() >= before + 256 * PAGE
        assert pinned_bytes() == before

    run_on(loop, main())


def test_of_equal_jobs_the_first_is_there_soonest(loop: str, direct: int) -> None:
    async def main() -> None:
        memory = Memory(512)
        places = np.arange(512)
        async with opened(depth=4, max_bytes=256 << 10) as ring:
            jobs = [
                ring.queue(READ, direct, places[::-1] * PAGE, memory.base + places * PAGE, PAGE)[0]
                for _ in range(8)
            ]
            assert await jobs[0] == Done(0, 0)
            assert lib.fx_ring_queued(ring.ring) > 6 * 512
            for job in jobs:
                assert await job == Done(0, 0)

    run_on(loop, main())


def test_many_batches_at_once_all_come_back_right(
    loop: str, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        random = np.random.default_rng(3)
        memory = Memory(2000)
        file_pages = content.reshape(1000, PAGE)
        async with opened(depth=8, max_bytes=5 * PAGE) as ring:
            batches, position = [], 0
            while position + 20 <= 2000:
                n = int(random.integers(1, 20))
                pages = random.integers(0, 1000, n)
                if n > 10:
                    pages = np.minimum(pages[0] + np.arange(n), 999)  # with neighbours
                addresses = memory.base + (position + np.arange(n)) * PAGE
                batches.append(
                    (position, pages, *ring.queue(READ, direct, pages * PAGE, addresses, PAGE))
                )
                position += n
            done = await asyncio.gather(*(ticket for _, _, ticket, _ in batches))
            assert done == [Done(0, 0)] * len(batches)
            for position, pages, _, results in batches:
                assert (results == PAGE).all()
                landed = memory.bytes.reshape(2000, PAGE)[position : position + len(pages)]
                assert (landed == file_pages[pages]).all()

    run_on(loop, main())


def test_a_short_batch_overtakes_a_long_one(loop: str, direct: int) -> None:
    async def main() -> None:
        memory = Memory(1)
        pages = np.tile(np.arange(1000), 5)
        async with opened(depth=2) as ring:
            long, _ = ring.queue(READ, direct, pages * PAGE, memory.base, PAGE)
            write, _ = ring.queue(WRITE, direct, 0, memory.base, PAGE)
            short, _ = ring.queue(READ, direct, [0, 8192], memory.base, PAGE)
            assert await short == await write == Done(0, 0)
            assert long.done is None
            assert lib.fx_ring_queued(ring.ring) > 2000
            assert await long == Done(0, 0)

    run_on(loop, main())


def test_a_stream_of_short_batches_does_not_keep_a_long_one_waiting(loop: str, direct: int) -> None:
    async def main() -> None:
        memory, pages = Memory(1), 300
        async with opened(depth=1) as ring:
            places = np.arange(pages)[::-1] * PAGE
            long, _ = ring.queue(READ, direct, places, memory.base, PAGE)
            waiting = deque(ring.queue(READ, direct, 0, memory.base, PAGE)[0] for _ in range(3))
            overtook = 0
            while long.done is None:
                assert await waiting.popleft() == Done(0, 0)
                waiting.append(ring.queue(READ, direct, 0, memory.base, PAGE)[0])
                overtook += 1
                assert overtook < 4 * pages
            assert overtook > pages / 2
            for ticket in waiting:
                assert await ticket == Done(0, 0)

    run_on(loop, main())


def test_bytes_in_flight_are_limited_but_one_io_always_goes(loop: str, direct: int) -> None:
    async def main() -> None:
        memory = Memory(64)
        offsets = np.arange(8)[::-1] * 8 * PAGE
        async with opened(depth=32, max_bytes=20 * PAGE) as ring:
            ticket, _ = ring.queue(READ, direct, offsets, memory.base, 8 * PAGE)
            lib.fx_ring_submit(ring.ring)
            assert lib.fx_ring_in_flight(ring.ring) == 2
            assert lib.fx_ring_queued(ring.ring) == 6
            assert await ticket == Done(0, 0)
            ticket, results = ring.queue(READ, direct, 0, memory.base, 64 * PAGE)
            assert await ticket == Done(0, 0)
            assert results.tolist() == [64 * PAGE]

    run_on(loop, main())


def test_queued_batches_have_a_limit_and_refused_ones_change_nothing(
    loop: str, direct: int
) -> None:
    async def main() -> None:
        memory = Memory(1)
        completions = Completions(tickets=8192)
        ring = Ring(completions, 32, 1 << 20)
        queued = []
        while True:
            ticket, results = ring.queue(READ, direct, 0, memory.base, PAGE)
            if ring.answer < 0:
                break
            queued.append(ticket)
        assert ring.answer == -errno.EAGAIN
        assert await ticket == Done(1, errno.EAGAIN)
        assert results.tolist() == [-9999]
        assert await asyncio.gather(*queued) == [Done(0, 0)] * 4096
        for length in (0, 1 << 31):
            ticket, _ = ring.queue(READ, direct, 0, memory.base, [PAGE, length])
            assert ring.answer == -errno.EINVAL
        ticket, _ = ring.queue(READ, [], [], [], [])
        assert await ticket == Done(0, 0)
        ring.close()
        await completions.aclose()

    run_on(loop, main())


def test_close_waits_for_what_started_and_cancels_the_rest(
    loop: str, direct: int, content: NDArray[np.uint8]
) -> None:
    async def main() -> None:
        memory = Memory(1000)
        pages = np.arange(0, 1000, 2)
        async with opened(depth=4) as ring:
            ticket, results = ring.queue(
                READ, direct, pages * PAGE, memory.base + pages * PAGE, PAGE
            )
            lib.fx_ring_submit(ring.ring)
        assert ticket.done == Done(1, errno.ECANCELED)
        assert results.tolist() == [PAGE] * 4 + [-errno.ECANCELED] * 496
        landed = memory.bytes.reshape(1000, PAGE)[pages[:4]]
        assert (landed == content.reshape(1000, PAGE)[pages[:4]]).all()

    run_on(loop, main())


def test_a_listener_that_gives_up_leaves_buffers_in_place(loop: str, direct: int) -> None:
    async def main() -> None:
        memory = Memory(1)
        pages = np.arange(0, 1000, 2)
        async with opened(depth=2) as ring:
            ticket, results = ring.queue(READ, direct, pages * PAGE, memory.base, PAGE)
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await ticket
            assert ring.completions.in_flight == 1
            assert await ticket == Done(0, 0)
            assert (results == PAGE).all()

    run_on(loop, main())


@pytest.mark.parametrize("depth", [0, 5000])
def test_nonsense_depths_are_refused(loop: str, depth: int) -> None:
    async def main() -> None:
        completions = Completions()
        assert lib.fx_ring_open(completions.hub, depth, 1 << 20) == ffi.NULL
        assert ffi.errno == errno.EINVAL
        await completions.aclose()

    run_on(loop, main())


def test_the_ring_says_why_it_cannot_be_opened(loop: str) -> None:
    async def main() -> int:
        completions = Completions()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # no new descriptor
        try:
            ring: Any = lib.fx_ring_open(completions.hub, 8, 1 << 20)
            error = int(ffi.errno)
            assert ring == ffi.NULL
            assert lib.fx_ring_probe() == -error
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await completions.aclose()
        return error

    assert run_on(loop, main()) == errno.EMFILE


def ring_fds() -> set[int]:
    links = {fd: Path(f"/proc/self/fd/{fd}") for fd in range(3, 1024)}
    return {fd for fd, link in links.items() if link.is_symlink() and "uring" in os.readlink(link)}


def test_a_ring_that_breaks_fails_what_the_kernel_never_had(loop: str, direct: int) -> None:
    async def main() -> None:
        memory = Memory(1)
        pages = np.arange(0, 1000, 2)
        before = ring_fds()  # uvloop has one of its own
        async with opened(depth=128) as ring:
            reads, read_results = ring.queue(READ, direct, pages * PAGE, memory.base, PAGE)
            writes, _ = ring.queue(WRITE, direct, pages * PAGE, memory.base, PAGE)
            [number] = ring_fds() - before
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, number)  # the kernel will answer that this is no ring
            os.close(null)
            assert await reads == await writes == Done(1, errno.EOPNOTSUPP)
            assert (read_results == -errno.EOPNOTSUPP).all()
            assert lib.fx_ring_in_flight(ring.ring) == lib.fx_ring_queued(ring.ring) == 0
            refused, _ = ring.queue(READ, direct, 0, memory.base, PAGE)
            assert await refused == Done(1, errno.EOPNOTSUPP)

    run_on(loop, main())
