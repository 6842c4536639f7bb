"""FlexKVConnectorV1Impl: what vLLM's built-in `FlexKVConnectorV1` looks for in this package.

    {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both",
     "kv_connector_extra_config": {"host_cache_bytes": "8GiB"}}

A thin shim over the same two sides as `connector.FlexKVConnector`, which is to be preferred: the
built-in class hands on neither the KV cache's configuration nor the calls before a step's forward
pass, so that hybrid models are not told apart, and news reach a worker after the pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from flexkv.integration.vllm.connector import prefer_recompute
from flexkv.integration.vllm.messages import FlexKVStats, StepNews
from flexkv.integration.vllm.scheduler import SchedulerSide
from flexkv.integration.vllm.worker import WorkerSide


class FlexKVConnectorV1Impl:
    """Delegate of vLLM's built-in connector; every call that it forwards, and those of forks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
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

    def _news(self) -> StepNews | None:
        """This step's news. They are bound to vLLM's class, which does not hand them on."""
        group = get_kv_transfer_group()
        if not group.has_connector_metadata():
            return None
        news = group._get_connector_metadata()
        return news if isinstance(news, StepNews) else None

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See WorkerSide.register."""
        stage, tensor_rank = get_pp_group().rank_in_group, get_tp_group().rank_in_group
        self.worker.register(kv_caches, int(stage), int(tensor_rank))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See FlexKVConnector.start_load_kv."""
        news = self._news()
        if news is not None:
            self.worker.begin(news)
            self.worker.expect(news)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for loads that this step needs."""
        self.worker.await_loads()

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved when a request ends."""

    def wait_for_save(self) -> None:
        """Nothing: see save_kv_layer."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See WorkerSide.ends."""
        news = self._news()
        return (None, None) if news is None else self.worker.ends(news)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See WorkerSide.failed_blocks."""
        news = self._news() if self._worker is not None else None
        return set() if news is None else self.worker.failed_blocks(news)

    # --- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See SchedulerSide.matched_tokens."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int, *more: Any
    ) -> None:
        """See SchedulerSide.allocated. Some forks pass a fourth value, which is not needed."""
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

    def take_events(self) -> Iterable[Any]:
        """None so far."""
        return ()

    # --- both

    def get_kv_connector_stats(self) -> Any:
        """Counts. Never None on a worker: vLLM would drop the outcome of steps without tokens."""
        return self._scheduler.take_stats() if self._scheduler is not None else FlexKVStats()

    def shutdown(self) -> None:
        """Close whichever side this is."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # --- forks

    def reset_cache(self) -> bool | None:
        """See SchedulerSide.reset; vLLM itself does not forward this call."""
        return self.scheduler.reset()

    def before_device_sleep(self) -> None:
        """Nothing: the device memory is not touched unless the scheduler asks."""

    def after_device_wake(self) -> None:
        """Nothing: see before_device_sleep."""
