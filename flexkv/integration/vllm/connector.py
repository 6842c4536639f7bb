"""FlexKVConnector: vLLM's KV connector, loaded by `kv_connector_module_path`.

    {"kv_connector": "FlexKVConnector", "kv_role": "kv_both",
     "kv_connector_module_path": "flexkv.integration.vllm.connector",
     "kv_connector_extra_config": {"host_cache_bytes": "8GiB"}}

One class with two lives: `SchedulerSide` in the scheduler, `WorkerSide` in each worker. Serves
vLLM 0.19 to 0.33; methods that an older one does not know are never called there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from flexkv.integration.vllm.messages import FlexKVStats, StepNews
from flexkv.integration.vllm.options import Options
from flexkv.integration.vllm.scheduler import SchedulerSide
from flexkv.integration.vllm.worker import WorkerSide
from flexkv.telemetry import log

# Several groups are served where a load that failed can be reported by request.
_OfGroups: Any = object
if hasattr(base, "KVConnectorTransferResults"):
    _OfGroups = base.SupportsHMA


class FlexKVConnector(KVConnectorBase_V1, _OfGroups):
    """Keeps the engine's KV blocks in host memory and on SSD, and brings matched prefixes back."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            prefer_recompute(vllm_config)
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, vllm.__version__)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, vllm.__version__)

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side."""
        assert self._scheduler is not None, "a worker's connector was asked as the scheduler's"
        return self._scheduler

    @property
    def worker(self) -> WorkerSide:
        """The worker's side."""
        assert self._worker is not None, "the scheduler's connector was asked as a worker's"
        return self._worker

    def _news(self) -> StepNews:
        news = self._get_connector_metadata()
        assert isinstance(news, StepNews)
        return news

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See WorkerSide.register."""
        stage, tensor_rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        self.worker.register(kv_caches, int(stage), int(tensor_rank))

    def handle_preemptions(self, *arguments: Any) -> None:
        """Called before each step's forward pass."""
        for news in arguments:
            if isinstance(news, StepNews):
                self.worker.begin(news)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called before or after the forward pass; loads are started by the scheduler's side."""
        news = self._news()
        self.worker.begin(news)
        self.worker.expect(news)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for loads that this step needs, at its first layer."""
        self.worker.await_loads()

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved when a request ends."""

    def wait_for_save(self) -> None:
        """Nothing: see save_kv_layer."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See WorkerSide.ends."""
        return self.worker.ends(self._news())

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See WorkerSide.ends; with requests that must be computed from their start."""
        sent, received = self.get_finished(finished_req_ids)
        failed = self._news().failed_requests
        return base.KVConnectorTransferResults(sent or set(), received or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See WorkerSide.failed_blocks."""
        if self._worker is None or not self.has_connector_metadata():
            return set()
        return self.worker.failed_blocks(self._news())

    # --- scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a save that is lost is a miss later."""
        return False

    def on_new_request(self, request: Any) -> None:
        """See SchedulerSide.arrived."""
        self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See SchedulerSide.matched_tokens."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, *more: Any
    ) -> None:
        """See SchedulerSide.allocated."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See SchedulerSide.news."""
        return self.scheduler.news(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See SchedulerSide.outcome."""
        self.scheduler.outcome(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.finished."""
        return self.scheduler.finished(request, (block_ids,)), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.finished."""
        return self.scheduler.finished(request, block_ids), None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See GroupTable.bind."""
        self.scheduler.groups.bind(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping for the sake of ends to be reported."""
        return self._scheduler is not None and self._scheduler.busy()

    def take_events(self) -> Iterable[Any]:
        """None so far: events of host memory and disk are not published yet."""
        return ()

    def reset_cache(self) -> bool | None:
        """See SchedulerSide.reset."""
        return self.scheduler.reset()

    def get_kv_connector_stats(self) -> Any:
        """Counts of the scheduler's side; workers have none."""
        return self._scheduler.take_stats() if self._scheduler is not None else None

    def shutdown(self) -> None:
        """Close whichever side this is."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # --- class

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FlexKVStats:
        """Make statistics of what travelled as plain data."""
        return FlexKVStats(data=dict(data or {}))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Only synchronous loads wait inside the forward pass."""
        return Options.read(extra_config).load == "sync"


def prefer_recompute(vllm_config: Any) -> None:
    """Have vLLM compute what fails to load, instead of failing the request (its default)."""
    transfer = vllm_config.kv_transfer_config
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        log.info("vllm.recompute", instead_of=transfer.kv_load_failure_policy)
        transfer.kv_load_failure_policy = "recompute"
