"""The kit finds bugs: each plug-in of kit_mutants.py is killed by the test that is meant for it."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from kit_mutants import MUTANTS, Mutant

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """What pytest says of every mutant, in one process of its own: failures by class and test."""
    report = tmp_path_factory.mktemp("mutants") / "report.xml"
    ids = [f"kit_mutants.py::Test{mutant.name}::{mutant.killed_by}" for mutant in MUTANTS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={report}",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(HERE), "-c", "/dev/null", "-o", "asyncio_mode=strict", *ids],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        where = case.get("classname", "").rpartition(".")[2], case.get("name", "")
        found[where] = "" if failure is None else failure.get("message", "") + str(failure.text)
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed_by_its_test(
    mutant: Mutant, verdicts: dict[tuple[str, str], str]
) -> None:
    said = verdicts[f"Test{mutant.name}", mutant.killed_by]
    assert said, f"survived: {mutant.bug}"
    assert mutant.says in " ".join(said.split())
    assert "The contract: flexkv/protocols.py" in said


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_table_of_mutants_is_complete(mutant: Mutant) -> None:
    row = f"| {mutant.bug.rstrip('.')} | `{mutant.killed_by.partition('[')[0]}` |"
    assert row in (HERE.parent / "docs/testing.md").read_text().splitlines()
