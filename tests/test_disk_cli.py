"""`flexkv disk inspect|verify` and `flexkv bench disk`: what they say is true, and changes
nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from disk_rig import LANDED, SPEC, Rig, folders
from structlog.testing import capture_logs
from typer.testing import CliRunner

from flexkv.backends.disk import survey
from flexkv.backends.disk.format import DATA_NAME, RECORDS_NAME
from flexkv.bench.disk import run as run_bench
from flexkv.cli.disk import app
from flexkv.errors import FormatError, OwnershipError
from flexkv.testing.faults import cut_file, flip_bit


async def fill(paths: list[Path]) -> None:
    async with Rig(paths) as rig:
        assert await rig.put(range(12)) == [LANDED] * 12


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


async def test_inspect_tells_what_there_is(tmp_path: Path) -> None:
    paths = folders(tmp_path, 2)
    await fill(paths)
    code, text = call("inspect", "--json", *paths)
    assert code == 0
    said = json.loads(text)
    first, second = said["directories"]
    assert (first["index"], second["index"], second["directories"]) == (0, 1, 2)
    assert first["committed_blocks"] == 6
    assert first["used_bytes"] == 6 * SPEC.stride_bytes
    assert first["identity"]["model"] == "test-model"
    assert first["set_id"] == second["set_id"]
    assert not first["locked"]
    code, text = call("inspect", *paths)
    assert code == 0
    assert "test-model r1" in text
    assert "1 of 2" in text


async def test_inspect_works_beside_an_owner_and_verify_does_not(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    async with Rig(paths) as rig:
        await rig.put([1, 2])
        found = survey.inspect(paths[0])
        assert found["locked"]
        assert found["owner"] == os.getpid()
        assert found["committed_blocks"] == 2
        with pytest.raises(OwnershipError, match=f"process {os.getpid()}"):
            survey.verify(paths[0])
        assert await rig.put([3]) == [LANDED]


async def test_verify_finds_nothing_wrong_in_a_good_store(tmp_path: Path) -> None:
    paths = folders(tmp_path, 3)
    await fill(paths)
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("flexkv.*"))}  # noqa: ASYNC240
    code, text = call("verify", "--json", *paths)
    assert code == 0
    said = json.loads(text)
    assert said["whole"]
    assert sum(item["good"] for item in said["directories"]) == 12
    assert {path: path.read_bytes() for path in before} == before
    assert call("verify", *paths)[0] == 0


async def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    paths = folders(tmp_path, 1)
    await fill(paths)
    flip_bit(paths[0] / DATA_NAME, 4 * SPEC.stride_bytes + 99)
    flip_bit(paths[0] / RECORDS_NAME, 4096 + 7 * 64 + 3)
    cut_file(paths[0] / DATA_NAME, 11 * SPEC.stride_bytes)
    code, text = call("verify", "--json", paths[0])
    assert code == 1
    (item,) = json.loads(text)["directories"]
    assert item["damaged_slots"] == [4]
    assert (item["damaged_records"], item["cut_off"]) == (1, 1)
    assert (item["committed"], item["good"]) == (10, 9)
    assert call("verify", paths[0])[0] == 1


@pytest.mark.parametrize("verb", ["inspect", "verify"])
async def test_what_is_no_store_is_named(tmp_path: Path, verb: str) -> None:
    (tmp_path / "empty").mkdir()
    code, text = call(verb, "--json", tmp_path / "empty", tmp_path / "none")
    assert code == 1
    problems = json.loads(text)["problems"]
    assert [
        str(tmp_path / name) in item["problem"]
        for item, name in zip(problems, ("empty", "none"), strict=True)
    ] == [True, True]
    await fill(folders(tmp_path, 1))
    flip_bit(tmp_path / "ssd0" / RECORDS_NAME, 50)
    with pytest.raises(FormatError, match=r"ssd0.*superblock is damaged"):
        getattr(survey, verb)(tmp_path / "ssd0")
    assert call(verb, tmp_path / "ssd0")[0] == 1


async def test_opening_is_told_once(tmp_path: Path) -> None:
    paths = folders(tmp_path, 2)
    with capture_logs() as logs:
        await fill(paths)
    assert [entry["event"] for entry in logs] == ["disk.opened"]
    assert logs[0]["engine"] in ("io_uring", "threads")
    assert logs[0]["reason"]
    flip_bit(paths[0] / RECORDS_NAME, 4096)
    with capture_logs() as logs:
        async with Rig(paths):
            pass
    assert [entry["event"] for entry in logs] == ["disk.opened", "disk.mended"]
    assert logs[0]["recovered_blocks"] == 11
    assert logs[1]["damaged_records"] == 1


def test_the_benchmark_measures_what_it_says(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    results = run_bench(
        lambda *step: steps.append(step),
        directory=tmp_path,
        block_kib=(64, 1024),
        repeats=1,
        size_mib=16,
    )
    assert [result.name for result in results] == [
        "write",
        "read",
        "read_cpu",
        "loop_stall_p99",
    ] * 2
    for result in results:
        assert result.value > 0
        if result.name in ("read", "write"):
            assert (result.ratio is None) == ("note" in result.params)
    assert steps[-1][1:] == (2, 2)
    assert list(tmp_path.iterdir()) == [], "the benchmark left files behind"
