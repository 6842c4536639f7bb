"""The conformance kit on honest plug-ins: everything built in, and a sample of each other door."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, ClassVar

import pytest
from kit_samples import Int8, Patient, PatientHarness, Plain, Queue, ShelfDevice, ShelfDeviceHarness

from flexkv import FlexKVConfig, plugins
from flexkv.backends.cpu import CpuBackend
from flexkv.backends.disk import DiskBackend
from flexkv.testing import (
    CodecHarness,
    CodecTests,
    DeviceBackendTests,
    DirectStorageTests,
    EvictionPolicyTests,
    PolicyHarness,
    StorageBackendTests,
)
from flexkv.testing.built_in import CpuHarness, DiskHarness
from flexkv.testing.device_bench import DeviceKit
from flexkv.testing.guard import ContractError, no_blocking_calls
from flexkv.testing.harness import DeviceHarness, DirectHarness, StorageHarness


class TestCpu(DeviceBackendTests):
    @pytest.fixture
    def harness(self) -> DeviceHarness:
        return CpuHarness(CpuBackend)


class TestCpuByTheCrew(DeviceBackendTests):
    """Every copy goes to the crew's threads; on uvloop."""

    loop_options: ClassVar[dict[str, Any]] = {"use_uvloop": True}

    @pytest.fixture
    def harness(self) -> DeviceHarness:
        return CpuHarness(CpuBackend, {"inline_bytes": 0})


class TestPatientDevice(DeviceKit):
    test_it_ends_in_time = DeviceBackendTests.test_a_completion_that_never_comes_ends_in_time

    @pytest.fixture
    def harness(self) -> DeviceHarness:
        return PatientHarness(Patient)


class OneDirectory(DiskHarness):
    directories = 1


def eager_loop() -> asyncio.AbstractEventLoop:
    """A loop whose tasks start at once, where asyncio has that (3.12)."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(getattr(asyncio, "eager_task_factory", None))
    return loop


class TestDisk(StorageBackendTests):
    """With eager tasks."""

    loop_options: ClassVar[dict[str, Any]] = {"loop_factory": eager_loop}

    @pytest.fixture
    def harness(self) -> StorageHarness:
        return DiskHarness(DiskBackend)


class TestDiskWithThreads(StorageBackendTests):
    """Without io_uring, and with asyncio's debugging."""

    loop_options: ClassVar[dict[str, Any]] = {"debug": True}

    @pytest.fixture
    def harness(self) -> StorageHarness:
        return OneDirectory(DiskBackend, {"engine": "threads"})


class TestPolicies(EvictionPolicyTests):
    @pytest.fixture(params=[*plugins.available(plugins.POLICIES), Queue])
    def harness(self, request: pytest.FixtureRequest) -> PolicyHarness:
        if isinstance(request.param, str):
            return PolicyHarness(plugins.load(plugins.POLICIES, request.param))
        return PolicyHarness(request.param)


class TestDirect(DirectStorageTests):
    @pytest.fixture
    def harness(self) -> DirectHarness:
        return ShelfDeviceHarness(ShelfDevice)


class TestPlainCodec(CodecTests):
    @pytest.fixture
    def harness(self) -> CodecHarness:
        return CodecHarness(Plain)


class Float32(CodecHarness):
    dtypes = ("float32",)


class TestLossyCodec(CodecTests):
    @pytest.fixture
    def harness(self) -> CodecHarness:
        return Float32(Int8)


async def test_blocking_calls_of_flexkv_are_seen_wherever_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("model: m")
    watched = no_blocking_calls(CpuBackend, "DeviceBackend.copy")
    with pytest.raises(ContractError, match="on the event loop"), watched:
        FlexKVConfig.load(tmp_path / "settings.yaml")


# --- pytest --flexkv-verify


def verify(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder that knows nothing of this repository."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_installed_plug_ins_are_verified_from_anywhere(tmp_path: Path) -> None:
    names = ("--flexkv-verify", "disk", "--flexkv-verify", "mru", "--flexkv-seed", "7")
    done = verify(tmp_path, *names, "-v", "-k", "verbs or identity or tiers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verifying disk, mru, seed 7" in done.stdout
    assert "flexkv::disk.StorageBackendTests::test_it_has_the_verbs_of_the_door" in done.stdout
    assert "flexkv::mru.EvictionPolicyTests::test_two_tiers" in done.stdout
    assert "4 passed" in done.stdout


def test_verifying_runs_beside_tests_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_mine_verbs(): pass\n")
    done = verify(tmp_path, "--flexkv-verify", "mru", "-k", "verbs", "test_mine.py")
    assert "2 passed" in done.stdout
    alone = verify(tmp_path, "--flexkv-verify", "mru", "-k", "verbs")
    assert "1 passed" in alone.stdout, "tests of the folder ran although nobody named them"


def test_an_unknown_name_says_which_there_are(tmp_path: Path) -> None:
    done = verify(tmp_path, "--flexkv-verify", "dsik")
    assert done.returncode == 2
    names = "flexkv.backends: cpu, cuda, disk, "
    assert f"no plug-in is called 'dsik'; installed: {names}" in done.stdout


def test_options_go_to_the_plug_in_they_name(tmp_path: Path) -> None:
    names = ("--flexkv-verify", "cpu", "--flexkv-verify", "disk", "-k", "empty_batch")
    done = verify(tmp_path, *names, "--flexkv-option", "disk.engine=threads")
    assert "2 passed" in done.stdout, done.stdout
    done = verify(tmp_path, *names, "--flexkv-option", "disk.engine=steam")
    assert "1 failed, 1 passed" in done.stdout
    assert "engine must be one of auto, io_uring, threads" in done.stdout
    done = verify(tmp_path, *names, "--flexkv-option", "engine")
    assert "write key=value, or NAME.key=value" in done.stdout


def test_a_failure_says_what_is_promised_where_and_by_which_seed(tmp_path: Path) -> None:
    source = """
        import pytest
        from flexkv.policies.lru import LRU
        from flexkv.testing import EvictionPolicyTests, PolicyHarness

        class Nothing(LRU):
            def victims(self, count, evictable):
                return []

        class TestNothing(EvictionPolicyTests):
            @pytest.fixture
            def harness(self):
                return PolicyHarness(Nothing)
        """
    (tmp_path / "test_nothing.py").write_text(textwrap.dedent(source))
    done = verify(tmp_path, "test_nothing.py", "-k", "something_leaves", "--flexkv-seed", "3")
    assert done.returncode == 1
    assert "could leave" in done.stdout
    assert "The contract: flexkv/protocols.py, `EvictionPolicy.victims`" in done.stdout
    assert "--flexkv-seed 3" in done.stdout


def test_pytest_without_the_option_loads_nothing_of_the_kit(tmp_path: Path) -> None:
    source = """
        import sys
        def test_it():
            kit = [name for name in sys.modules if name.startswith("flexkv.testing.")]
            assert kit == ["flexkv.testing.plugin"]
            assert "flexkv.completion" not in sys.modules and "numpy" not in sys.modules
        """
    (tmp_path / "test_light.py").write_text(textwrap.dedent(source))
    done = verify(tmp_path, "-p", "no:anyio", "test_light.py")
    assert done.returncode == 0, done.stdout
