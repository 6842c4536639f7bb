from flexkv.testing import DeviceBackendTests
from flexkv.testing.built_in import CpuHarness
from flexkv.backends.cpu import CpuBackend
import pytest


class TestCpu(DeviceBackendTests):
    @pytest.fixture
    def harness(self):
        return CpuHarness(CpuBackend)
