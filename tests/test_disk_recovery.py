"""Opening again: every committed block is found, nothing else is, and no slot is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from disk_rig import (
    DAMAGED,
    ENGINES,
    IDENTITY,
    LANDED,
    MISSING,
    SPEC,
    Rig,
    folders,
    keys_of,
    numbers_of,
)

from flexkv.backends.disk import format as disk_format
from flexkv.backends.disk.files import Directory
from flexkv.backends.disk.format import FORMATTING, RECORD, Superblock
from flexkv.errors import FormatError, OwnershipError
from flexkv.testing.faults import cut_file, flip_bit, swap_ranges

RECORDS, DATA = disk_format.RECORDS_NAME, disk_format.DATA_NAME


def files(root: Path, name: str) -> list[Path]:
    """The files below `root` whose name matches."""
    return sorted(root.rglob(name))


async def fill(paths: list[Path], count: int = 12, **settings: object) -> None:
    async with Rig(paths, **settings) as rig:
        assert await rig.put(range(count)) == [LANDED] * count


@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize("engine", ENGINES)
async def test_committed_blocks_are_found_again(tmp_path: Path, engine: str, count: int) -> None:
    paths = folders(tmp_path, count)
    async with Rig(paths, engine=engine) as rig:
        await rig.put(range(10, 20))
    async with Rig(paths, engine=engine) as rig:
        found = rig.recovered
        assert found is not None
        order = np.argsort(found.depths)
        numbers = list(range(10, 20))
        assert numbers_of(found.keys[order]) == numbers
        assert found.slots[order].tolist() == numbers
        assert found.depths[order].tolist() == numbers
        assert np.array_equal(found.parents[order], keys_of(range(9, 19)))
        assert await rig.get(numbers) == [LANDED] * 10
        assert rig.backend.used_blocks == 10
        await rig.put([50], slots=[10])
    async with Rig(paths, engine=engine) as rig:
        assert rig.found == {50: 10} | {n: n for n in range(11, 20)}


async def test_of_two_records_of_a_key_the_newer_counts(tmp_path: Path) -> None:
    paths = folders(tmp_path, 2)
    async with Rig(paths) as rig:
        await rig.put([7, 8, 9], slots=[20, 21, 22])
        await rig.put([7, 9], slots=[3, 4])
        await rig.put([7], slots=[9])
    async with Rig(paths) as rig:
        assert rig.found == {7: 9, 8: 21, 9: 4}
        assert rig.backend.report.duplicates == 3
        await rig.drop([7], slots=[9])
    async with Rig(paths) as rig:
        assert rig.found == {8: 21, 9: 4}, "an older record of a discarded block came back"


async def test_a_kill_a_lost_file_and_a_short_file(tmp_path: Path) -> None:
    """D07 on the disk's side, with a directory for each of 7 blocks."""
    paths = folders(tmp_path, 7)
    await fill(paths, 6, slots=14)
    async with Rig(paths, slots=14) as rig:
        assert await rig.get(range(6)) == [LANDED] * 6
    with Zygote() as zygote:
        zygote.start(paths, seed=1, mode="one", slots=14)
        zygote.wait_for("begun")
        zygote.kill()
    (paths[0] / DATA).unlink()
    cut_file(paths[1] / DATA, SPEC.stride_bytes - 1)
    async with Rig(paths, slots=14) as rig:
        assert {number for number in rig.found if number < 6} == {2, 3, 4, 5}
        assert rig.backend.report.cut_off == 2
        found = [number for number in rig.found if number < 6]
        assert await rig.get(found) == [LANDED] * 4
        assert rig.backend.used_blocks == len(rig.found)
        assert len(files(tmp_path, DATA)) == len(files(tmp_path, "*.data*")) == 7
        assert await rig.put([0, 1, 6]) == [LANDED] * 3
    async with Rig(paths, slots=14) as rig:
        assert sorted(rig.found)[:7] == list(range(7))
        assert await rig.get(range(7)) == [LANDED] * 7


async def test_a_lost_directory_costs_only_its_blocks(tmp_path: Path) -> None:
    paths = folders(tmp_path, 3)
    await fill(paths)
    for path in paths[1].iterdir():
        path.unlink()
    paths[1].rmdir()
    async with Rig(paths) as rig:
        kept = [number for number in range(12) if number % 3 != 1]
        assert sorted(rig.found) == kept
        assert rig.backend.report.remade == [str(paths[1])]
        assert await rig.get(kept) == [LANDED] * len(kept)
        assert await rig.put([1, 4]) == [LANDED] * 2
    async with Rig(paths) as rig:
        assert sorted(rig.found) == sorted([*kept, 1, 4])


async def test_lost_records_cost_only_their_blocks(tmp_path: Path) -> None:
    paths = folders(tmp_path, 2)
    await fill(paths)
    (paths[0] / RECORDS).unlink()
    async with Rig(paths) as rig:
        assert sorted(rig.found) == [1, 3, 5, 7, 9, 11]
        assert await rig.put([0]) == [LANDED]


async def test_lost_records_of_the_only_directory(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    await fill(paths)
    (paths[0] / RECORDS).unlink()
    with pytest.raises(FormatError, match=r"flexkv\.records is gone"):
        await Rig(paths).__aenter__()
    await start_empty(paths)


async def test_a_record_cut_at_any_byte_is_not_served(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    await fill(paths, 2)
    path = paths[0] / RECORDS
    whole = path.read_bytes()
    start = disk_format.SUPERBLOCK_BYTES + disk_format.RECORD_BYTES
    for size in range(64):
        torn = whole[: start + size] + bytes(64 - size) + whole[start + 64 :]
        path.write_bytes(torn)
        async with Rig(paths) as rig:
            assert sorted(rig.found) == [0], size
            assert rig.backend.report.damaged_records == (size > 0)
            assert await rig.get([0, 1]) == [LANDED, MISSING]
        after = path.read_bytes()
        assert after[start : start + 64] == bytes(64), "the torn record was left behind"
    cut_file(path, start + 30)
    async with Rig(paths) as rig:
        assert sorted(rig.found) == [0]


async def test_flipped_bits_on_disk_are_not_served(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    await fill(paths)
    for number in (2, 5):
        flip_bit(paths[0] / DATA, number * SPEC.stride_bytes + 1234, number)
    for number in (7, 8):
        flip_bit(paths[0] / RECORDS, 4096 + number * 64 + number, 1)
    async with Rig(paths) as rig:
        assert sorted(rig.found) == [0, 1, 2, 3, 4, 5, 6, 9, 10, 11]
        statuses = await rig.get(range(12))
        assert statuses == [0, 0, DAMAGED, 0, 0, DAMAGED, 0, MISSING, MISSING, 0, 0, 0]
        assert rig.backend.used_blocks == 8
        assert await rig.put([2, 5, 7, 8]) == [LANDED] * 4
    async with Rig(paths) as rig:
        assert sorted(rig.found) == list(range(12))
        assert await rig.get(range(12)) == [LANDED] * 12


async def test_swapped_blocks_are_not_served(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    await fill(paths)
    stride = SPEC.stride_bytes
    swap_ranges(paths[0] / DATA, 1 * stride, 4 * stride, stride)
    swap_ranges(paths[0] / RECORDS, 4096 + 6 * 64, 4096 + 7 * 64, 64)
    for name, start, size in ((DATA, 0, stride), (RECORDS, 4096, 64)):  # both: a whole row moved
        swap_ranges(paths[0] / name, start + 9 * size, start + 10 * size, size)
    async with Rig(paths) as rig:
        assert await rig.get([1, 4]) == [DAMAGED] * 2
        assert not {6, 7, 9, 10} & set(rig.found)
        kept = [0, 2, 3, 5, 8, 11]
        assert await rig.get(kept) == [LANDED] * 6
    async with Rig(paths) as rig:
        assert sorted(rig.found) == kept, "damaged blocks came back"


async def test_the_tier_may_grow_and_shrink(tmp_path: Path) -> None:
    paths = folders(tmp_path, 3)
    await fill(paths, 12, slots=12)
    async with Rig(paths, slots=31) as rig:
        assert sorted(rig.found) == list(range(12))
        assert await rig.put([30]) == [LANDED]
        assert await rig.get([*range(12), 30]) == [LANDED] * 13
    async with Rig(paths, slots=8) as rig:
        assert sorted(rig.found) == list(range(8))
        assert await rig.get(range(8)) == [LANDED] * 8
        sizes = [path.stat().st_size for path in files(tmp_path, DATA)]
        assert sum(sizes) == 8 * SPEC.stride_bytes
    async with Rig(paths, slots=31) as rig:
        assert sorted(rig.found) == list(range(8)), "dropped blocks came back"


async def start_empty(paths: list[Path], **options: object) -> None:
    """Open with "clear": empty, usable, and still so afterwards without "clear"."""
    async with Rig(paths, on_mismatch="clear", **options) as rig:
        assert rig.found == {}
        assert rig.backend.report.cleared
        assert await rig.get(range(12)) == [MISSING] * 12
        assert await rig.put([3, 5]) == [LANDED] * 2
    async with Rig(paths, **options) as rig:
        assert rig.found == {3: 3, 5: 5}
        assert await rig.get([3, 5]) == [LANDED] * 2


def flip_superblock(paths: list[Path]) -> None:
    flip_bit(paths[1] / RECORDS, 60, 2)


def make_older(paths: list[Path]) -> None:
    rewrite(paths[0] / RECORDS, format_version=0)


def rewrite(path: Path, **changes: object) -> None:
    with path.open("r+b") as file:
        found = Superblock.decode(file.read(4096))
        file.seek(0)
        file.write(replace(found, **changes).encode())


def make_foreign(paths: list[Path]) -> None:
    (paths[1] / RECORDS).write_bytes(b"my diary" * 1000)
    (paths[1] / DATA).write_bytes(b"my photos")


def swap_directories(paths: list[Path]) -> None:
    paths[0].rename(paths[0].with_name("t"))
    paths[1].rename(paths[0])
    paths[0].with_name("t").rename(paths[1])


def mix_sets(paths: list[Path]) -> None:
    rewrite(paths[1] / RECORDS, set_id=b"x" * 16)


def cut_superblock(paths: list[Path]) -> None:
    cut_file(paths[0] / RECORDS, 1000)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (flip_superblock, "superblock is damaged"),
        (cut_superblock, "cut off after 1000 bytes"),
        (make_older, "older format, 0"),
        (make_foreign, "does not start with the mark"),
        (swap_directories, "order of the directories changed"),
        (mix_sets, "parts of different stores"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_spoilt_store_is_an_error_or_empty(tmp_path: Path, spoil, words: str) -> None:
    paths = folders(tmp_path, 2)
    await fill(paths)
    spoil(paths)
    before = {path: path.read_bytes() for path in files(tmp_path, "flexkv.[rd]*")}
    with pytest.raises(FormatError, match=words) as caught:
        await Rig(paths).__aenter__()
    assert "ssd" in str(caught.value)
    assert 'on_mismatch="clear"' in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before, "an error changed the files"
    await start_empty(paths)
    if spoil is make_foreign:
        kept = {path.read_bytes()[:9] for path in paths[1].glob("*.foreign-1")}
        assert kept == {b"my diarym", b"my photos"}, "files of somebody else were lost"


async def test_another_identity_is_named_field_by_field(tmp_path: Path) -> None:
    paths = folders(tmp_path, 2)
    await fill(paths)
    other = replace(IDENTITY, model="other-model", codec="int8")
    with pytest.raises(FormatError) as caught:
        await Rig(paths, identity=other).__aenter__()
    assert "model is 'test-model' on disk and 'other-model' here" in str(caught.value)
    assert "codec is 'none' on disk and 'int8' here" in str(caught.value)
    async with Rig(paths) as rig:
        assert len(rig.found) == 12, "an error changed the store"
    await start_empty(paths, identity=other)


@pytest.mark.parametrize("count", [1, 3])
async def test_another_number_of_directories(tmp_path: Path, count: int) -> None:
    await fill(folders(tmp_path, 2))
    paths = folders(tmp_path, count)
    with pytest.raises(FormatError, match=f"directories=2, now it is {count}"):
        await Rig(paths).__aenter__()
    await start_empty(paths)


async def test_records_of_an_earlier_life_do_not_come_back(tmp_path: Path) -> None:
    """A kill while a store is cleared leaves old records: their checks are of another store."""
    paths = folders(tmp_path, 1)
    await fill(paths)
    old = (paths[0] / RECORDS).read_bytes()[4096:]
    rewrite(paths[0] / RECORDS, set_id=b"y" * 16)
    assert (paths[0] / RECORDS).read_bytes()[4096:] == old
    async with Rig(paths) as rig:
        assert rig.found == {}
        assert rig.backend.report.damaged_records == 12


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
async def test_a_store_whose_making_was_killed_is_made_again(
    tmp_path: Path, which: list[int]
) -> None:
    paths = folders(tmp_path, 2)
    async with Rig(paths):
        pass
    for index in which:
        rewrite(paths[index] / RECORDS, state=FORMATTING)
    async with Rig(paths) as rig:
        assert rig.found == {}
        assert await rig.put(range(6)) == [LANDED] * 6
    async with Rig(paths) as rig:
        assert len(rig.found) == 6


async def test_an_empty_records_file_is_a_new_store(tmp_path: Path) -> None:
    """A kill right after the lock was taken leaves an empty file."""
    (tmp_path / "ssd0").mkdir()
    (tmp_path / "ssd0" / RECORDS).touch()
    async with Rig(folders(tmp_path, 1)) as rig:
        assert await rig.put([1]) == [LANDED]


async def test_other_files_in_the_directory_stay(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    paths[0].mkdir()
    (paths[0] / "notes.txt").write_text("mine")
    await fill(paths)
    await start_empty(paths, identity=replace(IDENTITY, model="x"))
    assert (paths[0] / "notes.txt").read_text() == "mine"


def test_a_million_records_are_read_quickly(tmp_path: Path) -> None:
    """Reopening 1 M blocks takes < 2 s with the index; this is the store's part, in CPU time."""
    count = 1_000_000
    directory = Directory(tmp_path, 0)
    directory.acquire()
    geometry = disk_format.Geometry(count, 1, 4096, 4096)
    superblock = Superblock(b"d" * 32, "{}", b"s" * 16, 0, geometry)
    records = np.zeros(count, RECORD)
    random = np.random.default_rng(1)
    records["key"] = random.integers(1, 1 << 63, (count, 2), np.uint64)
    records["sequence"] = np.arange(1, count + 1)
    records["size"] = 4096
    slots = np.arange(count, dtype=np.uint32)
    disk_format.seal(records, slots, np.full(count, superblock.seed, np.uint64))
    directory.write_superblock(superblock)
    os.pwrite(directory.records_fd, records.tobytes(), disk_format.SUPERBLOCK_BYTES)
    os.ftruncate(directory.data_fd, count * 4096)
    from flexkv.backends.disk.recovery import Opening
    from flexkv.backends.disk.settings import DiskSettings

    opening = Opening(DiskSettings((tmp_path,)), IDENTITY, geometry, [directory])
    opening.members[0] = superblock
    started = time.process_time()
    table, recovered = opening._adopt(b"s" * 16)
    elapsed = time.process_time() - started
    directory.shrink_to_nothing()
    directory.release()
    assert recovered is not None
    assert len(recovered.slots) == table.used == count
    print(f"1 M records: {elapsed:.3f} s")
    assert elapsed < 1.5


# --- kill -9


class Zygote:
    """A process that forks children which use the store until they are killed (disk_child.py)."""

    def __enter__(self) -> Zygote:
        script = Path(__file__).with_name("disk_child.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.lines: list[list[object]] = []
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            assert self._process.wait(20) == 0
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def start(self, paths: list[Path], **job: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"paths": [str(p) for p in paths], **job}) + "\n")
        self.lines.clear()
        self._pid = int(self.wait_for("pid")[1])

    def wait_for(self, word: str) -> list[object]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            self.lines.append(said)
            if said[0] == word:
                return said
        raise AssertionError(f"the child ended before it said {word!r}: {self.lines[-3:]}")

    def kill(self, after_ms: float = 0) -> None:
        """Kill the child, now or in a while, and read the rest of what it said."""
        timer = threading.Timer(after_ms / 1000, os.kill, (self._pid, signal.SIGKILL))
        timer.start()
        self.wait_for("dead")
        timer.join()


KILLS = int(os.environ.get("FLEXKV_TEST_KILLS", "20"))


@pytest.mark.timeout(60 + KILLS * 3)
@pytest.mark.parametrize("engine", ENGINES)
async def test_kill_at_any_moment(tmp_path: Path, engine: str) -> None:
    """What was acknowledged is there, what was discarded is not, and every found byte is right.

    FLEXKV_TEST_KILLS sets the number of kills (default 20).
    """
    paths = folders(tmp_path, 3)
    random = np.random.default_rng(7)
    held: dict[int, int] = {}  # slot -> number, as far as it is certain
    with Zygote() as zygote:
        for turn in range(KILLS // 2):
            zygote.start(paths, seed=turn, mode="loop", slots=48, engine=engine)
            zygote.wait_for("begun")
            zygote.kill(after_ms=random.uniform(0, 30))
            held, unsure = replay(held, zygote.lines)
            async with Rig(paths, slots=48, host_slots=48, engine=engine) as rig:
                slots = {slot: number for number, slot in rig.found.items()}
                assert len(slots) == len(rig.found), "two blocks in one slot"
                for slot in range(48):
                    if slot in unsure:
                        assert slots.get(slot) in unsure[slot], f"turn {turn} slot {slot}"
                    else:
                        assert slots.get(slot) == held.get(slot), f"turn {turn} slot {slot}"
                asked = list(slots.values()), list(slots)
                assert await rig.get(*asked) == [LANDED] * len(slots)
                assert rig.backend.used_blocks == len(slots)
            held = slots


def replay(
    held: dict[int, int], lines: list[list[object]]
) -> tuple[dict[int, int], dict[int, set[int | None]]]:
    """What the child's words say of each slot: what is certain, and what else may be there."""
    held, unsure = dict(held), {}
    for word, *rest in lines:
        if word == "begun":
            kind, slots, numbers = rest
            for slot, number in zip(slots, numbers, strict=True):
                unsure[slot] = {held.get(slot), None, number if kind == "write" else None}
        elif word == "done":
            kind, slots, numbers = rest
            for slot, number in zip(slots, numbers, strict=True):
                unsure.pop(slot)
                held.pop(slot, None)
                if kind == "write":
                    held[slot] = number
    return held, unsure


async def test_a_dead_owner_does_not_keep_the_directory(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    with Zygote() as zygote:
        zygote.start(paths, seed=1, mode="loop", slots=32)
        zygote.wait_for("done")
        with pytest.raises(OwnershipError, match=f"process {zygote._pid}"):
            await Rig(paths).__aenter__()
        zygote.kill()
        async with Rig(paths) as rig:
            assert rig.found
