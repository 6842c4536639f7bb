"""FlexKVConnector: vLLM's KV connector, loaded by `kv_connector_module_path`.

    {"kv_connector": "FlexKVConnector", "kv_role": "kv_both",
     "kv_connector_module_path": "flexkv.integration.vllm.connector",
     "kv_connector_extra_config": {"host_cache_bytes": "8GiB"}}

One class with two lives: `SchedulerSide` in the scheduler, `WorkerSide` in each worker; what vLLM
calls is in `calls`. Serves vLLM 0.19 to 0.33; methods that an older one does not know are never
called there.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from flexkv.integration.vllm.calls import Calls
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.metrics import FlexKVPromMetrics, FlexKVStats
from flexkv.integration.vllm.options import Options


class FlexKVConnector(Calls, KVConnectorBase_V1):
    """Keeps the engine's KV blocks in host memory and on SSD, and brings matched prefixes back."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.open_side(vllm_config, role, kv_cache_config)

    def _news(self) -> StepNews | None:
        if not self.has_connector_metadata():
            return None
        news = self._get_connector_metadata()
        assert isinstance(news, StepNews)
        return news

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See SyncLoads.pool."""
        self.scheduler.sync_loads.pool = gpu_block_pool

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is lost is a miss later."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FlexKVStats:
        """Make statistics of what travelled as plain data."""
        stats = FlexKVStats()
        stats.aggregate(FlexKVStats(data=data or {}))
        return stats

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FlexKVPromMetrics:
        """Register flexkv's metrics with vLLM's."""
        return FlexKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Only synchronous loads wait inside the forward pass."""
        return Options.read(extra_config).load == "sync"
