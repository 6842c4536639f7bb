import pytest

from flexkv.backends.cpu import CpuBackend
from flexkv.testing import DeviceBackendTests
from flexkv.testing.built_in import CpuHarness


class TestCpu(DeviceBackendTests):
    @pytest.fixture
    def harness(self):
        return CpuHarness(CpuBackend)
