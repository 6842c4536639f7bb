import pytest

from flexkv.policies.fifo import FIFO
from flexkv.policies.filo import FILO
from flexkv.policies.lfu import LFU
from flexkv.policies.lru import LRU
from flexkv.policies.mru import MRU
from flexkv.policies.slru import SLRU
from flexkv.testing.harness import PolicyHarness
from flexkv.testing.policy import EvictionPolicyTests


class TestPolicies(EvictionPolicyTests):
    @pytest.fixture(params=[LRU, LFU, SLRU, FIFO, MRU, FILO])
    def harness(self, request):
        return PolicyHarness(request.param)
