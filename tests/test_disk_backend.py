"""The disk tier at work: what was written is read back, on every engine and any number of
directories.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest
from disk_rig import (
    DAMAGED,
    ENGINES,
    FAILED,
    IDENTITY,
    LANDED,
    MISSING,
    SPEC,
    Rig,
    folders,
    pattern,
)

from flexkv.backends.disk import DiskBackend, DiskSettings
from flexkv.backends.disk.engines import ThreadEngine, choose
from flexkv.completion import Completions
from flexkv.errors import (
    ClosedError,
    ConfigError,
    InputError,
    OwnershipError,
    StorageError,
)
from flexkv.memory import Arena
from flexkv.model import Identity, KVSpec
from flexkv.protocols import Services


@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize("engine", ENGINES)
async def test_blocks_come_back(tmp_path: Path, engine: str, count: int) -> None:
    async with Rig(folders(tmp_path, count), engine=engine) as rig:
        assert rig.recovered is None
        assert rig.backend.engine_name == engine
        numbers = list(range(5, 29))
        slots = [(number * 7) % 32 for number in numbers]
        assert await rig.put(numbers, slots) == [LANDED] * 24
        assert await rig.get(numbers, slots) == [LANDED] * 24
        order = [20, 3, 3, 11]  # any order, the same block twice
        asked = [numbers[i] for i in order], [slots[i] for i in order]
        assert await rig.get(*asked) == [LANDED] * 4
        assert rig.backend.used_blocks == 24
        assert rig.backend.used_bytes == 24 * SPEC.stride_bytes


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_batch_of_many_chunks_and_many_batches_at_once(tmp_path: Path, engine: str) -> None:
    chunk = 2 * SPEC.stride_bytes
    async with Rig(
        folders(tmp_path, 2), slots=256, host_slots=256, engine=engine, chunk_bytes=chunk
    ) as rig:
        assert await rig.put(range(200)) == [LANDED] * 200
        statuses: list[int] = []

        async def read(first: int) -> None:
            statuses.extend(await rig.get(range(first, first + 20), first=first))

        async def write(first: int) -> None:
            statuses.extend(await rig.put(range(first, first + 20), first=first))

        async with anyio.create_task_group() as group:
            for first in range(0, 200, 20):
                group.start_soon(read, first)
            group.start_soon(write, 200)
            group.start_soon(write, 220)
        assert statuses == [LANDED] * 240
        assert await rig.get(range(240)) == [LANDED] * 240


async def test_only_the_asked_key_is_read(tmp_path: Path) -> None:
    async with Rig(folders(tmp_path, 2)) as rig:
        await rig.put([1, 2, 3])
        statuses = await rig.get([1, 9, 3, 4], slots=[1, 2, 3, 4])
        assert statuses == [LANDED, MISSING, LANDED, MISSING]
        assert (rig.arena.view(1) == 0xEE).all(), "bytes of another block were handed out"


async def test_discarded_blocks_are_gone(tmp_path: Path) -> None:
    async with Rig(folders(tmp_path, 3)) as rig:
        await rig.put(range(10))
        assert await rig.drop([4, 5, 5, 11, 6], slots=[4, 5, 5, 11, 7]) == [
            LANDED,
            LANDED,
            LANDED,
            MISSING,
            MISSING,
        ]
        assert rig.backend.used_blocks == 8
        expected = [LANDED] * 4 + [MISSING] * 2 + [LANDED] * 4
        assert await rig.get(range(10)) == expected
    async with Rig(folders(tmp_path, 3)) as rig:
        assert sorted(rig.found) == [0, 1, 2, 3, 6, 7, 8, 9]


async def test_used_bytes_are_true_after_remove_clear_and_overwrite(tmp_path: Path) -> None:
    """Twenty rounds on 8 slots (D06): nothing of a round is left when the next one starts."""
    async with Rig(folders(tmp_path, 2), slots=8) as rig:
        reserved = allocated(tmp_path)
        for turn in range(20):
            pair = [100 + 2 * turn, 101 + 2 * turn]
            slots = [2 * turn % 8, (2 * turn + 1) % 8]
            assert await rig.put(pair, slots) == [LANDED] * 2
            assert rig.backend.used_bytes == 2 * SPEC.stride_bytes
            if turn >= 15:
                assert await rig.put(pair, slots) == [LANDED] * 2
            assert rig.backend.used_bytes == 2 * SPEC.stride_bytes
            assert await rig.drop(pair, slots) == [LANDED] * 2
            assert rig.backend.used_bytes == 0
            assert allocated(tmp_path) == reserved
        assert await rig.put(range(8)) == [LANDED] * 8
        assert await rig.get(range(8)) == [LANDED] * 8


def allocated(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.rglob("flexkv.*"))


async def test_misuse_is_told(tmp_path: Path) -> None:
    async with Rig(folders(tmp_path, 1)) as rig:
        with pytest.raises(InputError, match="slot 32 does not exist"):
            await rig.get([32])
        with pytest.raises(InputError, match="twice"):
            await rig.put([1, 2], slots=[3, 3])
        backend = rig.backend
        await backend.aclose()
        await backend.aclose()
        with pytest.raises(ClosedError):
            await rig.get([1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "aio"}, "io_uring"),
        ({"on_mismatch": "ignore"}, "error, clear"),
        ({"queue_depth": 0}, "queue_depth"),
        ({"threads": "8"}, "threads"),
        ({"depth": 8}, "unknown setting depth"),
        ({"directories": []}, "directories"),
        ({"directories": "a;b;./a"}, "more than once"),
    ],
)
async def test_wrong_settings_are_told(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    rig = Rig(folders(tmp_path, 1))
    rig.settings.update(settings)
    with pytest.raises(ConfigError, match=words):
        await rig.__aenter__()


async def test_too_few_slots_and_too_small_an_arena_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few"):
        await Rig(folders(tmp_path, 3), slots=2).__aenter__()
    rig = Rig(folders(tmp_path, 1))
    await rig.__aenter__()
    await rig.__aexit__(None, None, None)
    other = DiskBackend()
    async with Rig(folders(tmp_path / "x", 1)) as rig:
        big = Identity("m", "", KVSpec.uniform(8, 8, 128))
        services = Services(rig.completions, rig.arena, big, {"directories": [tmp_path / "y"]}, 4)
        with pytest.raises(ConfigError, match="do not fit"):
            await other.open(services)


def test_directories_may_be_one_text() -> None:
    read = DiskSettings.read({"directories": " /a ; /b;"})
    assert read.directories == (Path("/a"), Path("/b"))


async def test_memory_file_systems_are_used_with_threads(memory_folder: Path) -> None:
    async with Rig(folders(memory_folder, 2)) as rig:
        assert rig.backend.engine_name == "threads"
        assert "tmpfs" in rig.backend.engine_reason
        assert await rig.put(range(8)) == [LANDED] * 8
        assert await rig.get(range(8)) == [LANDED] * 8


@pytest.mark.parametrize("engine", ENGINES[:1])
async def test_a_prefaulted_arena_is_registered_and_the_reason_says_so(
    tmp_path: Path, engine: str
) -> None:
    async with Rig(folders(tmp_path, 2), engine=engine) as rig:
        assert "buffers are registered" in rig.backend.engine_reason
        assert await rig.put(range(20)) == [LANDED] * 20
        assert await rig.get(range(20)) == [LANDED] * 20
    async with Rig(folders(tmp_path, 2), engine=engine, register_buffers="never") as rig:
        assert "not registered" in rig.backend.engine_reason
        assert await rig.get(range(20)) == [LANDED] * 20


@pytest.mark.parametrize("engine", ENGINES[:1])
async def test_an_arena_that_is_not_there_yet_is_not_registered(
    tmp_path: Path, engine: str
) -> None:
    completions = Completions(crew_threads=1)
    arena = Arena(32, SPEC.stride_bytes, huge_pages=False, prefault=False)
    settings = {"directories": folders(tmp_path, 1), "engine": engine}
    backend = DiskBackend()
    await backend.open(Services(completions, arena, IDENTITY, settings, 32))
    assert "not prefaulted" in backend.engine_reason
    await backend.aclose()
    assert os.fstat(arena.fd).st_blocks == 0
    assert await completions.aclose() == 0
    arena.close()


@pytest.mark.parametrize("engine", ENGINES[:1])
async def test_opening_may_be_given_up_while_the_arena_is_registered(
    tmp_path: Path, engine: str
) -> None:
    completions = Completions(crew_threads=1)
    arena = Arena(32, SPEC.stride_bytes, huge_pages=False)
    settings = {"directories": folders(tmp_path, 1), "engine": engine}
    services = Services(completions, arena, IDENTITY, settings, 32)
    directory, buffered = DiskSettings.read(settings), ""
    before = len(os.listdir("/proc/self/fd"))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await choose(directory, buffered, completions, arena)
    assert scope.cancelled_caught
    assert len(os.listdir("/proc/self/fd")) == before, "the ring is still open"
    backend = DiskBackend()
    await backend.open(services)
    await backend.aclose()
    assert await completions.aclose() == 0
    arena.close()


_LOCKED = """
import anyio, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from disk_rig import Rig

async def main():
    async with Rig([Path(sys.argv[1])], host_slots=256, engine="io_uring") as rig:
        assert await rig.get([1]) == [3], "an empty tier"
        assert await rig.put(range(20)) == await rig.get(range(20)) == [0] * 20
        sys.stdout.write(rig.backend.engine_reason)

anyio.run(main)
"""


@pytest.mark.parametrize("engine", ENGINES[:1])
def test_too_little_locked_memory_is_told_and_lived_with(tmp_path: Path, engine: str) -> None:
    command = [sys.executable, "-c", _LOCKED, str(tmp_path / "ssd"), str(Path(__file__).parent)]
    if os.geteuid() == 0:  # root may lock as much as it likes, unless that right is taken away
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv here")
        command = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "not registered" in done.stdout
    assert "ulimit -l" in done.stdout


@pytest.mark.parametrize("engine", ENGINES[:1])
async def test_io_uring_may_be_demanded_without_direct_io(memory_folder: Path, engine: str) -> None:
    async with Rig(folders(memory_folder, 2), engine=engine) as rig:
        assert rig.backend.engine_name == engine
        assert await rig.put(range(8)) == [LANDED] * 8
        assert await rig.get(range(8)) == [LANDED] * 8


@pytest.fixture
def memory_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = Path("/dev/shm")
    if not os.access(root, os.W_OK):
        pytest.skip("no /dev/shm to write to")
    folder = root / f"flexkv-test-{os.getpid()}-{tmp_path_factory.mktemp('m').name}"
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield small
    subprocess.run(["umount", str(small)], check=True)


async def test_a_full_device_is_told_at_open(small_device: Path) -> None:
    folder = small_device / "ssd"
    with pytest.raises(StorageError, match=r"small/ssd: .*bytes more, \d+ bytes are free"):
        await Rig([folder], slots=64).__aenter__()
    assert allocated(folder) <= 16 * 512, "what was reserved for nothing was kept"
    async with Rig([folder], slots=8) as rig:
        assert await rig.put(range(8)) == [LANDED] * 8


_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
sys.path.insert(0, sys.argv[1])
import asyncio, pathlib
from disk_rig import Rig
from flexkv.errors import StorageError
async def main():
    try:
        await Rig([pathlib.Path(sys.argv[2])], slots=64, host_slots=4).__aenter__()
    except StorageError as error:
        print(error)
asyncio.run(main())
"""


def test_a_file_size_limit_is_told_at_open(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, here, str(tmp_path)], capture_output=True, text=True
    )
    assert str(tmp_path) in done.stdout, done.stderr
    assert "bytes more" in done.stdout


async def test_one_owner_per_directory(tmp_path: Path) -> None:
    async with Rig(folders(tmp_path, 2)) as rig:
        with pytest.raises(OwnershipError, match=rf"ssd1 belongs to process {os.getpid()}"):
            await Rig([tmp_path / "other", tmp_path / "ssd1"]).__aenter__()
        assert await rig.put([1]) == [LANDED]
    async with Rig(folders(tmp_path, 2)) as rig:
        assert rig.found == {1: 1}


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file/ssd"):
        await Rig([tmp_path / "file" / "ssd"]).__aenter__()


async def test_a_full_crew_queue_is_no_failure(tmp_path: Path) -> None:
    """Checksums and records are done elsewhere when the crew takes no more work."""
    limits = {"crew_threads": 1, "crew_queue": 1}
    async with Rig(folders(tmp_path, 1), completions=limits, chunk_bytes=1) as rig:
        assert await rig.put(range(30)) == [LANDED] * 30
        assert await rig.get(range(30)) == [LANDED] * 30
        assert await rig.put(range(30)) == [LANDED] * 30


@pytest.mark.parametrize("engine", ENGINES)
async def test_bytes_beyond_the_block_do_not_count(tmp_path: Path, engine: str) -> None:
    """What lies between block_bytes and stride_bytes belongs to nobody."""
    async with Rig(folders(tmp_path, 1), engine=engine) as rig:
        rig.arena.view(0)[SPEC.block_bytes :] = 1
        await rig.put([3])
        path = tmp_path / "ssd0" / "flexkv.data"
        stored = np.fromfile(path, np.uint8)[3 * SPEC.stride_bytes :][: SPEC.block_bytes]
        assert np.array_equal(stored, pattern(3))
        with path.open("r+b") as file:
            file.seek(3 * SPEC.stride_bytes + SPEC.block_bytes + 5)
            file.write(b"\x07")
        assert await rig.get([3]) == [LANDED]
        with path.open("r+b") as file:
            file.seek(3 * SPEC.stride_bytes + SPEC.block_bytes - 1)
            file.write(bytes([stored[-1] ^ 1]))
        assert await rig.get([3]) == [DAMAGED]
        assert await rig.get([3]) == [MISSING]


def _short(call, most: int):
    def limited(fd: int, views, offset: int) -> int:
        left, taken = most, []
        for view in views:
            taken.append(view[:left])
            left -= len(taken[-1])
            if left == 0:
                break
        return call(fd, taken, offset)

    return limited


@pytest.mark.parametrize("most", [4096, 12288])
async def test_the_thread_engine_continues_short_calls(tmp_path: Path, most: int) -> None:
    async with Rig(folders(tmp_path, 2), engine="threads") as rig:
        await rig.backend.engine.aclose()
        rig.backend.engine = ThreadEngine(
            rig.arena, 3, read=_short(os.preadv, most), write=_short(os.pwritev, most)
        )
        assert await rig.put(range(20)) == [LANDED] * 20
        assert await rig.get(range(20)) == [LANDED] * 20


async def test_one_bad_block_does_not_take_its_neighbours_along(tmp_path: Path) -> None:
    bad = 5 * SPEC.stride_bytes

    def spoilt(fd: int, views, offset: int) -> int:
        if offset <= bad < offset + sum(map(len, views)):
            raise OSError(5, "input/output error")
        return os.preadv(fd, views, offset)

    async with Rig(folders(tmp_path, 1), engine="threads") as rig:
        await rig.put(range(12))
        await rig.backend.engine.aclose()
        rig.backend.engine = ThreadEngine(rig.arena, 2, read=spoilt)
        assert await rig.get(range(12)) == [LANDED] * 5 + [FAILED] + [LANDED] * 6


async def test_identity_is_used_for_the_layout(tmp_path: Path) -> None:
    larger = Identity("m", "", KVSpec.uniform(4, 2, 64))
    assert larger.spec.block_bytes != IDENTITY.spec.block_bytes
    async with Rig(folders(tmp_path, 2), identity=larger) as rig:
        assert await rig.put(range(6)) == [LANDED] * 6
        assert await rig.get(range(6)) == [LANDED] * 6
