import pytest

from flexkv.backends.disk import DiskBackend
from flexkv.testing import StorageBackendTests
from flexkv.testing.built_in import DiskHarness


class TestDisk(StorageBackendTests):
    @pytest.fixture(params=["auto", "threads"])
    def harness(self, request):
        return DiskHarness(DiskBackend, {"engine": request.param})
