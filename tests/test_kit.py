"""The conformance kit on honest plug-ins: everything built in, and a sample of each other door."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit_samples import Int8, Plain, Queue, ShelfDevice, ShelfDeviceHarness

from flexkv import plugins
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
from flexkv.testing.harness import DeviceHarness, DirectHarness, StorageHarness


class TestCpu(DeviceBackendTests):
    @pytest.fixture
    def harness(self) -> DeviceHarness:
        return CpuHarness(CpuBackend)


class TestCpuByTheCrew(DeviceBackendTests):
    """Every copy goes to the crew's threads; on uvloop."""

    loop_options = {"use_uvloop": True}

    @pytest.fixture
    def harness(self) -> DeviceHarness:
        return CpuHarness(CpuBackend, {"inline_bytes": 0})


class OneDirectory(DiskHarness):
    directories = 1


class TestDisk(StorageBackendTests):
    @pytest.fixture
    def harness(self) -> StorageHarness:
        return DiskHarness(DiskBackend)


class TestDiskWithThreads(StorageBackendTests):
    """Without io_uring, and with asyncio's debugging."""

    loop_options = {"debug": True}

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


class TestDirectDevice(DeviceBackendTests):
    @pytest.fixture
    def harness(self) -> DeviceHarness:
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
