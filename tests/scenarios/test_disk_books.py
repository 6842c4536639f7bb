"""D06 (disk accounting over twenty rounds), D07 (a torn write, a lost file, a short file)."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_child import Zygote
from rig import STRIDE, Rig, committed_records, open_rig, prompt

from flexkv import CapacityError
from flexkv.backends.disk.format import DATA_NAME
from flexkv.testing.faults import cut_file


def data_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob(DATA_NAME))


async def check_accounts(rig: Rig, root: Path, live: int) -> None:
    """Index, pool, backend and the files themselves agree that `live` blocks are stored."""
    await rig.kv.flush()
    disk = rig.kv.usage()["disk"]
    assert (disk["resident"], disk["free"]) == (live, disk["capacity"] - live)
    assert rig.store.used_bytes == live * STRIDE
    assert committed_records(root) == live
    assert data_bytes(root) == disk["capacity"] * STRIDE


@pytest.mark.parametrize("spill", ["through", "on_evict"])
async def test_d06_twenty_rounds_leave_the_accounts_right(tmp_path: Path, spill: str) -> None:
    async with open_rig(tmp_path, disk=8, dirs=2, spill=spill) as rig:
        for round_ in range(1, 21):
            tokens = prompt(round_ if round_ <= 15 else 99, 2)
            await rig.put(tokens)
            await check_accounts(rig, tmp_path, 2)
            if round_ <= 10:
                assert rig.kv.remove(tokens) == 8
            elif round_ <= 15:
                await rig.kv.reset()
            await check_accounts(rig, tmp_path, 2 if round_ > 15 else 0)
        await rig.kv.reset()
        await rig.put(prompt(50, 8))
        await check_accounts(rig, tmp_path, 8)
        assert (await rig.get(prompt(50, 8))).loaded == 32
    async with open_rig(tmp_path, disk=8, dirs=2, spill=spill) as rig:
        result = await rig.get(prompt(50, 8))
        assert (result.loaded, result.by_tier["disk"]) == (32, 8)


async def test_d06_overwriting_a_full_disk_keeps_it_full(tmp_path: Path) -> None:
    async with open_rig(tmp_path, disk=8, dirs=2) as rig:
        for name in range(1, 13):
            await rig.put(prompt(name, 4))
            await check_accounts(rig, tmp_path, min(8, 4 * name))


@pytest.mark.parametrize("verb", ["remove", "reset", "evict"])
async def test_d06_what_was_forgotten_stays_forgotten(tmp_path: Path, verb: str) -> None:
    settings = {"evict_ratio": 0.5} if verb == "evict" else {}
    async with open_rig(tmp_path, disk=8, **settings) as rig:
        await rig.put(prompt(1, 4))
        await rig.put(prompt(2, 4))
        if verb == "remove":
            rig.kv.remove(prompt(1, 4))
        elif verb == "reset":
            await rig.kv.reset()
        else:
            await rig.put(prompt(3, 1))
        await rig.kv.flush()
        live = rig.kv.usage()["disk"]["resident"]
        await check_accounts(rig, tmp_path, live)
    async with open_rig(tmp_path, disk=8, **settings) as rig:
        await check_accounts(rig, tmp_path, live)
        assert (await rig.get(prompt(1, 4))).loaded == 0
        assert (await rig.get(prompt(2, 4))).loaded == (0 if verb == "reset" else 16)


async def test_d06_a_refused_put_costs_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path, disk=8) as rig:
        await rig.put(prompt(1, 4))
        with pytest.raises(CapacityError):
            await rig.put(prompt(2, 9))
        await check_accounts(rig, tmp_path, 4)


async def test_d07_a_kill_a_lost_file_and_a_short_file(tmp_path: Path) -> None:
    """Seven directories, so that each file holds one of the seven blocks."""
    with Zygote() as zygote:
        zygote.start(tmp_path, mode="six", dirs=7, disk=28)
        zygote.wait_for("closed")
        zygote.join()
        async with open_rig(tmp_path, dirs=7, disk=28) as rig:
            for name in range(6):
                assert (await rig.get(prompt(name, 1))).loaded == 4
        zygote.start(tmp_path, mode="seventh", dirs=7, disk=28)
        zygote.wait_for("writing")
        zygote.kill()
    assert committed_records(tmp_path) == 6
    (tmp_path / "d0" / DATA_NAME).unlink()
    cut_file(tmp_path / "d1" / DATA_NAME, STRIDE - 1)
    async with open_rig(tmp_path, dirs=7, disk=28) as rig:
        await check_accounts(rig, tmp_path, 4)
        loaded = [(await rig.get(prompt(name, 1))).loaded for name in range(7)]
        assert loaded == [0, 0, 4, 4, 4, 4, 0]
        for name in (0, 1, 6):
            await rig.put(prompt(name, 1))
        await rig.push_out()
        for name in range(7):
            assert (await rig.get(prompt(name, 1))).loaded == 4
    assert committed_records(tmp_path) == 15
