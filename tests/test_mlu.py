"""plugins/flexkv-mlu on a fake torch_mlu, in processes of their own: the fake changes torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from installed import install

from flexkv import plugins

pytestmark = pytest.mark.torch
TESTS = Path(__file__).parent
PLUGIN = TESTS.parent / "plugins" / "flexkv-mlu"
PROBE = "from flexkv_mlu.backend import MluBackend; print([d.name for d in MluBackend.probe()])"
POINTS = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]["entry-points"]


def run(*command: str, paths: list[Path], cwd: Path) -> str:
    """Run Python with the plug-in and `paths` in reach; returns what it prints."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, [PLUGIN, *paths]))},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_the_kit_verifies_the_plug_in_on_a_fake_with_faults(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site, "flexkv-mlu", POINTS[plugins.BACKENDS], {}, plugins.BACKENDS)
    harness = {"mlu": "fake_mlu_harness:FakeMluHarness"}
    install(site, "fake-mlu", harness, {}, plugins.HARNESSES)
    verify = ["-m", "pytest", "-p", "no:cacheprovider", "--flexkv-verify", "mlu"]
    said = run(*verify, paths=[site, TESTS / "fake_mlu", TESTS], cwd=tmp_path)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) > 40, said


def test_without_torch_mlu_there_is_no_mlu(tmp_path: Path) -> None:
    assert run("-c", PROBE, paths=[], cwd=tmp_path).strip() == "[]"


def test_the_fake_is_found_in_place_of_torch_mlu(tmp_path: Path) -> None:
    said = run("-c", PROBE, paths=[TESTS / "fake_mlu", TESTS], cwd=tmp_path)
    assert said.strip() == "['mlu:0']"
