"""The whole manager on hardware that misbehaves: a miss or a typed error, never a wrong byte,
never a hang, and books that balance when it is over.

`Rig.get` compares every block that counts as loaded with its pattern.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_rig import ENGINES
from fakes import FakeRemote, FaultyDevice, plugged
from rig import (
    SPEC,
    STRIDE,
    TOKENS_PER_BLOCK,
    Rig,
    committed_records,
    open_rig,
    prompt,
    slots_of,
)

from flexkv import CapacityError, GetResult, TransferError
from flexkv.backends.disk.format import DATA_NAME, RECORD_BYTES, RECORDS_NAME, SUPERBLOCK_BYTES
from flexkv.testing.faults import cut_file, flip_bit, swap_ranges

pytestmark = pytest.mark.timeout(30)
each_engine = pytest.mark.parametrize("engine", ENGINES)

TOKENS = prompt(1, 6)


async def everything_works_again(rig: Rig) -> None:
    """What was lost can be stored again, and comes back from disk."""
    await rig.put(TOKENS)
    await rig.push_out(800)
    assert (await rig.get(TOKENS)).loaded == 24


# reads


@each_engine
@pytest.mark.parametrize("route", ["host", "staging"])
@pytest.mark.parametrize("kind", ["EIO", "short", "flip", "swap"])
async def test_bad_reads(tmp_path: Path, engine: str, kind: str, route: str) -> None:
    """Blocks 2 and 3 of 6 arrive badly, on their way to host slots or through staging memory."""
    async with open_rig(tmp_path, disk_engine=engine, dirs=2) as rig:
        await rig.put(TOKENS)
        await rig.push_out()
        lock = rig.kv.get_match(prompt(900, 8)) if route == "staging" else None
        faults = rig.faults()
        faults.add("read", kind, skip=2, times=2)
        result = await rig.get(TOKENS)
        assert (result.matched, result.loaded) == (24, 8)
        assert result.failed_device_blocks.tolist() == [2, 3]
        target = "device" if route == "staging" else "host"
        failed = rig.count("failed_blocks", source="disk", target=target)
        damaged = rig.count("damaged_blocks", tier="disk")
        assert (failed, damaged) == ((2, 0) if kind in {"EIO", "short"} else (0, 2))
        faults.clear()
        again = await rig.get(TOKENS)
        assert again.loaded == (24 if kind in {"EIO", "short"} else 8)
        if lock is not None:
            lock.cancel()
        await everything_works_again(rig)


@each_engine
async def test_reads_that_fail_for_good_are_given_up(tmp_path: Path, engine: str) -> None:
    async with open_rig(tmp_path, disk_engine=engine, max_read_failures=3) as rig:
        await rig.put(TOKENS)
        await rig.push_out()
        faults = rig.faults()
        faults.add("read", "EIO")
        for _ in range(3):
            result = await rig.get(TOKENS)
            assert (result.matched, result.loaded) == (24, 0)
        assert (await rig.get(TOKENS)).matched == 0
        assert rig.count("failed_blocks", source="disk", target="host") == 18
        faults.clear()
        await everything_works_again(rig)


@each_engine
async def test_a_block_that_is_lost_after_it_was_matched_ends_the_load(
    tmp_path: Path, engine: str
) -> None:
    async with open_rig(tmp_path, disk_engine=engine) as rig:
        await rig.put(TOKENS)
        await rig.push_out()
        plan = rig.kv.get_match(TOKENS)
        rig.faults().add("read", "flip", skip=3, times=1)
        assert (await rig.get(TOKENS)).loaded == 12
        result = await rig.kv.launch(plan, slots_of(range(6)))
        assert isinstance(result, GetResult)
        assert (result.matched, result.loaded) == (24, 12)
        assert result.failed_device_blocks.tolist() == [3], "the others are in host memory now"
        await everything_works_again(rig)


# writes


@each_engine
@pytest.mark.parametrize(
    ("on", "kind"),
    [
        ("write", "EIO"),
        ("write", "ENOSPC"),
        ("write", "short"),
        ("record", "EIO"),
        ("record", "ENOSPC"),
    ],
)
async def test_writes_that_fail(tmp_path: Path, engine: str, on: Any, kind: str) -> None:
    """For a moment they are tried again; for good, durability is refused and nothing is found."""
    async with open_rig(tmp_path, disk_engine=engine, dirs=2) as rig:
        faults = rig.faults()
        faults.add(on, kind, times=2)
        await rig.put(TOKENS)
        assert rig.count("failed_blocks", source="host", target="disk") == 2
        assert committed_records(tmp_path) == 6
        faults.add(on, kind)
        other = rig.start_put(prompt(2, 2))
        assert (await other).stored == 8, "host memory has it"
        with pytest.raises(TransferError, match="did not reach disk"):
            await other.durable()
        await rig.kv.flush()
        assert rig.kv.usage()["disk"]["resident"] == 6
        assert (await rig.get(prompt(2, 2))).loaded == 8
        faults.clear()
        await rig.push_out()
        assert (await rig.get(prompt(2, 2))).loaded == 0
        await everything_works_again(rig)


@each_engine
@pytest.mark.parametrize("kind", ["flip", "swap", "lost"])
async def test_writes_that_lie(tmp_path: Path, engine: str, kind: str) -> None:
    """The device says it wrote, but did not, or wrote something else."""
    async with open_rig(tmp_path, disk_engine=engine) as rig:
        faults = rig.faults()
        await rig.put(TOKENS[:8])
        faults.add("write", kind, times=2)
        await rig.put(TOKENS[:16])  # alone, so that no other block is written first
        faults.clear()
        await rig.put(TOKENS)
        await rig.push_out()
        result = await rig.get(TOKENS)
        assert result.loaded == 8
        assert rig.count("damaged_blocks", tier="disk") == 2
        await rig.kv.flush()
        assert committed_records(tmp_path) == 12
        await everything_works_again(rig)


@each_engine
@pytest.mark.parametrize("size_bytes", [0, 8, 33, 60, 62])
async def test_a_torn_record_is_no_record(tmp_path: Path, engine: str, size_bytes: int) -> None:
    async with open_rig(tmp_path, disk_engine=engine, chunk_bytes=8 * STRIDE) as rig:
        rig.faults().add("record", "torn", skip=2, times=1, size_bytes=size_bytes)
        await rig.put(TOKENS)
    async with open_rig(tmp_path, disk_engine=engine) as rig:
        await rig.kv.flush()
        loaded = (await rig.get(TOKENS)).loaded
        assert loaded == 8, "and what came behind it is of no use"
        assert committed_records(tmp_path) == 2
        await everything_works_again(rig)


# files


def data(root: Path) -> Path:
    return root / "d0" / DATA_NAME


def records(root: Path) -> Path:
    return root / "d0" / RECORDS_NAME


def record_at(slot: int) -> int:
    return SUPERBLOCK_BYTES + slot * RECORD_BYTES


# what is done to the files of six blocks in slots 0-5, and how many blocks then come back
AT_REST: dict[str, tuple[Callable[[Path], Any], int]] = {
    "a bit of the data flips": (lambda root: flip_bit(data(root), 2 * STRIDE + 99, 5), 2),
    "the last bit of the data flips": (lambda root: flip_bit(data(root), 3 * STRIDE - 1, 7), 2),
    "two blocks change places": (
        lambda root: swap_ranges(data(root), 2 * STRIDE, 4 * STRIDE, STRIDE),
        2,
    ),
    "two records change places": (
        lambda root: swap_ranges(records(root), record_at(2), record_at(4), RECORD_BYTES),
        2,
    ),
    "two blocks and their records change places": (
        lambda root: (
            swap_ranges(data(root), 2 * STRIDE, 4 * STRIDE, STRIDE),
            swap_ranges(records(root), record_at(2), record_at(4), RECORD_BYTES),
        ),
        2,
    ),
    "a bit of a key flips": (lambda root: flip_bit(records(root), record_at(2) + 3), 2),
    "a bit of a parent flips": (lambda root: flip_bit(records(root), record_at(2) + 20), 2),
    "a bit of a checksum flips": (lambda root: flip_bit(records(root), record_at(2) + 50), 2),
    "the data is cut": (lambda root: cut_file(data(root), 3 * STRIDE + 1), 3),
    "the data is gone": (lambda root: data(root).unlink(), 0),
    "the records are cut": (lambda root: cut_file(records(root), record_at(4)), 4),
    "the records are cut within one": (lambda root: cut_file(records(root), record_at(4) + 7), 4),
    "the data is empty": (lambda root: cut_file(data(root), 0), 0),
}


@each_engine
@pytest.mark.parametrize("damage", AT_REST)
async def test_files_spoiled_at_rest(tmp_path: Path, engine: str, damage: str) -> None:
    spoil, survivors = AT_REST[damage]
    async with open_rig(tmp_path, disk_engine=engine) as rig:
        await rig.put(TOKENS)
    spoil(tmp_path)
    async with open_rig(tmp_path, disk_engine=engine) as rig:
        assert (await rig.get(TOKENS)).loaded == survivors * TOKENS_PER_BLOCK
        await rig.kv.flush()
        await everything_works_again(rig)
    async with open_rig(tmp_path, disk_engine=engine) as rig:
        assert (await rig.get(TOKENS)).loaded == 24


IN_USE = [name for name in AT_REST if "record" not in name and "of a" not in name]


@each_engine
@pytest.mark.parametrize("damage", ["a bit of the data flips", *IN_USE[1:]])
async def test_files_spoiled_in_use(tmp_path: Path, engine: str, damage: str) -> None:
    spoil, survivors = AT_REST[damage]
    if damage == "the data is gone":
        survivors = 6  # but not for us, who have it open
    async with open_rig(tmp_path, disk_engine=engine) as rig:
        await rig.put(TOKENS)
        await rig.push_out()
        spoil(tmp_path)
        for _ in range(3):  # where the file ends too early, reads fail, and are given up
            assert (await rig.get(TOKENS)).loaded == survivors * TOKENS_PER_BLOCK
        await rig.kv.flush()
        await everything_works_again(rig)


# devices and stores that raise


class Odd(Exception):
    """Something nobody expects."""


ERRORS = [RuntimeError("boom"), OSError(5, "boom"), MemoryError(), Odd(), TimeoutError()]
GROUP = ExceptionGroup("several", [Odd(), ExceptionGroup("more", [ValueError("boom")])])


@pytest.mark.parametrize("error", [*ERRORS, GROUP], ids=repr)
@pytest.mark.parametrize("on", ["read", "write", "discard"])
async def test_a_store_that_raises(tmp_path: Path, on: Any, error: Exception) -> None:
    with plugged(FakeRemote) as remote:
        async with open_rig(tmp_path, disk_backend=remote) as rig:
            await rig.put(TOKENS)
            await rig.push_out()
            rig.store.faults.add(on, "raise", error=error)
            result = await rig.get(TOKENS)
            assert result.loaded == (0 if on == "read" else 24)
            if on == "write":
                with pytest.raises(TransferError, match="did not reach"):
                    await rig.put(prompt(3, 2))
            rig.kv.remove(prompt(900, 8))
            await rig.kv.flush()
            assert (await rig.get(prompt(900, 8))).loaded == 0
            await rig.kv.reset()
            rig.store.faults.clear()
            await everything_works_again(rig)


class Nonsense(FakeRemote):
    """A store that answers what the protocol does not allow, once asked to."""

    answer: Any = None
    silly = False

    async def read(self, batch: Any) -> Any:
        return self.answer if self.silly else await super().read(batch)

    async def write(self, batch: Any) -> Any:
        return self.answer if self.silly else await super().write(batch)

    async def discard(self, batch: Any) -> Any:
        return self.answer if self.silly else await super().discard(batch)


@pytest.mark.parametrize(
    "answer",
    [None, 0, np.zeros(1, np.uint8), np.zeros(99, np.uint8), np.full(2, 77, np.uint8), "landed"],
    ids=repr,
)
async def test_a_store_that_answers_nonsense(tmp_path: Path, answer: Any) -> None:
    with plugged(Nonsense) as store:
        async with open_rig(tmp_path, disk_backend=store) as rig:
            await rig.put(TOKENS)
            await rig.push_out()
            rig.store.answer, rig.store.silly = answer, True
            assert (await rig.get(TOKENS)).loaded == 0
            with pytest.raises(TransferError, match="did not reach"):
                await rig.put(prompt(3, 2))
            rig.kv.remove(prompt(3, 2))
            await rig.kv.flush()
            rig.store.silly = False
            await everything_works_again(rig)


class OddDevice(FaultyDevice):
    """A device whose copies raise something unexpected."""

    error: BaseException | None = None

    async def copy(self, batch: Any) -> None:
        if self.error is not None:
            raise self.error
        await super().copy(batch)


@pytest.mark.parametrize("error", [*ERRORS, GROUP], ids=repr)
async def test_a_device_that_raises(tmp_path: Path, error: Exception) -> None:
    with plugged(OddDevice) as device:
        async with open_rig(tmp_path, device_backend=device) as rig:
            await rig.put(TOKENS)
            backend = rig.kv._stack.device
            backend.error = error
            for _ in range(4):
                result = await rig.get(TOKENS)
                assert (result.loaded, len(result.failed_device_blocks)) == (0, 6)
            with pytest.raises(TransferError, match="6 of 6"):
                await rig.put(prompt(2, 6))
            assert rig.count("failed_blocks", source="host", target="device") == 24
            backend.error = None
            assert (await rig.get(TOKENS)).loaded == 24
            assert (await rig.get(prompt(2, 6))).matched == 0
            await everything_works_again(rig)


# slowness


@each_engine
async def test_a_slow_disk_does_not_hold_up_host_memory(tmp_path: Path, engine: str) -> None:
    async with open_rig(tmp_path, disk_engine=engine, host=16) as rig:
        await rig.put(TOKENS)
        await rig.push_out(2)
        gate = rig.faults().hold("read")
        slow = rig.kv.get_async(TOKENS, slots_of(range(40, 46)))
        await gate.reached.wait()
        for _ in range(20):
            fast = await asyncio.wait_for(rig.kv.get_async(prompt(2, 6), slots_of(range(6))), 1)
            assert fast.loaded == 24
        assert not slow.done
        gate.open()
        assert (await slow).loaded == 24


@each_engine
async def test_a_slow_disk_drops_spills_and_serves_puts(tmp_path: Path, engine: str) -> None:
    """Writes stand still: the queue stays within its limit, what is dropped is counted."""
    async with open_rig(
        tmp_path, disk_engine=engine, host=64, disk=128, spill_queue_blocks=8
    ) as rig:
        gate = rig.faults().hold("write")
        for name in range(12):
            transfer = rig.start_put(prompt(name, 4))
            await asyncio.wait_for(transfer, 2)
            assert rig.kv.usage()["manager"]["spilling"] <= 8
        assert rig.count("dropped_blocks", work="spill") > 20
        gate.open()
        await rig.kv.flush()
        for name in range(12):
            assert (await rig.get(prompt(name, 4))).loaded == 16


# all of it together


class Storm:
    """Random work under random faults; every loaded block is compared."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.random = rig, np.random.default_rng(seed)
        self.faults = rig.faults()
        self.outcomes: dict[str, int] = {}

    def trouble(self) -> None:
        """Sometimes add a fault, sometimes take all back."""
        dice = self.random.random()
        if dice < 0.25:
            on = str(self.random.choice(["read", "write", "record"]))
            kinds = {
                "read": ["EIO", "short", "flip", "swap"],
                "write": ["EIO", "ENOSPC", "short", "flip", "swap", "lost"],
                "record": ["EIO", "lost"],
            }[on]
            times = int(self.random.integers(1, 5))
            self.faults.add(on, str(self.random.choice(kinds)), times=times)  # type: ignore[arg-type]
        elif dice < 0.35:
            self.faults.clear()

    async def step(self, number: int) -> None:
        """One piece of work in device blocks of its own."""
        rig, name = self.rig, int(self.random.integers(12))
        tokens = prompt(name, int(self.random.integers(1, 7)))
        first, count = 8 * number, len(tokens) // TOKENS_PER_BLOCK
        verb = str(self.random.choice(["put", "get", "get", "prefetch", "remove", "cancel"]))
        try:
            if verb == "put":
                await rig.start_put(tokens, first=first)
            elif verb == "prefetch":
                await rig.kv.prefetch_async(tokens)
            elif verb == "remove":
                rig.kv.remove(tokens)
            else:
                transfer = rig.kv.get_async(tokens, slots_of(range(first, first + count)))
                if verb == "cancel":
                    await asyncio.sleep(0)
                    transfer.cancel()
                result: GetResult = await transfer
                await transfer.quiesced()
                for i in range(result.loaded // TOKENS_PER_BLOCK):
                    rig.compare(first + i, tokens, i)
            self.outcomes[verb] = self.outcomes.get(verb, 0) + 1
        except CapacityError:
            self.outcomes["refused"] = self.outcomes.get("refused", 0) + 1


@each_engine
@pytest.mark.parametrize("spill", ["through", "on_evict"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_faults(tmp_path: Path, engine: str, spill: str, seed: int) -> None:
    settings = {"host": 16, "disk": 40, "dirs": 2, "max_read_failures": 2, "spill": spill}
    async with open_rig(tmp_path, disk_engine=engine, **settings) as rig:
        storm = Storm(rig, seed)
        for _ in range(80):
            storm.trouble()
            await asyncio.gather(*(storm.step(number) for number in range(4)))
        storm.faults.clear()
        await rig.check_idle()
        assert storm.outcomes.get("get", 0) > 30
        await everything_works_again(rig)
    async with open_rig(tmp_path, **settings) as rig:
        for name in range(12):
            await rig.get(prompt(name, 6))
        await everything_works_again(rig)
    assert SPEC.block_bytes == STRIDE, "no padding: every byte of a slot is compared"
