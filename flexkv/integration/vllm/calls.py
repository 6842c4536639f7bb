"""The calls of vLLM that both entry points answer alike: `Calls`.

`open_side` (scheduler or worker) - one method per call of vLLM, named as vLLM names it - `_news`,
which the entry point provides. `SchedulerSide` and `WorkerSide` do the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_tp_group

from flexkv.errors import ConfigError
from flexkv.integration.vllm.geometry import minor_version
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.metrics import FlexKVStats
from flexkv.integration.vllm.options import Options
from flexkv.integration.vllm.scheduler import SchedulerSide
from flexkv.integration.vllm.worker import WorkerSide
from flexkv.telemetry import log

_SYNC_SINCE = 28  # connectors get to know the block pool


class Calls:
    """Hands vLLM's calls to the side that this process is: the scheduler's or a worker's."""

    _scheduler: SchedulerSide | None = None
    _worker: WorkerSide | None = None

    def open_side(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Become the scheduler's side or a worker's, as `role` says."""
        if role == KVConnectorRole.SCHEDULER:
            _refuse_sync(vllm_config)
            _prefer_recompute(vllm_config)
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
        """This step's news, None when vLLM has not handed any over."""
        raise NotImplementedError

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See WorkerSide.register."""
        self.worker.register(kv_caches, int(get_tp_group().rank_in_group))

    def handle_preemptions(self, *arguments: Any) -> None:
        """Called before each step's forward pass; old versions give a set of requests instead."""
        for news in arguments:
            if isinstance(news, StepNews):
                self.worker.begin(news)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Called before or after the forward pass; loads are started by the scheduler's side."""
        news = self._news()
        if news is not None:
            self.worker.begin(news)
            self.worker.expect(news)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See WorkerSide.await_layer."""
        self.worker.await_layer(layer_name)

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
        news = None if self._worker is None else self._news()
        return set() if news is None else self.worker.failed_blocks(news)

    # --- scheduler

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
        return self.scheduler.finished(request, block_ids), None

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping for the sake of ends to be reported."""
        return self._scheduler is not None and self._scheduler.busy()

    def take_events(self) -> Iterable[Any]:
        """See SchedulerSide.take_events."""
        return self.scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """See SchedulerSide.reset."""
        return self.scheduler.reset()

    # --- both

    def get_kv_connector_stats(self) -> Any:
        """Counts. Never None on a worker: vLLM would drop the outcome of steps without tokens."""
        return FlexKVStats() if self._scheduler is None else self._scheduler.take_stats()

    def shutdown(self) -> None:
        """Close whichever side this is."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def _refuse_sync(vllm_config: Any) -> None:
    """Refuse synchronous loads where vLLM could not take back what was computed from failed ones.

    Raises:
        ConfigError: vLLM is too old, or schedules a step before the outcome of the last is known.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if Options.read(extra).load != "sync":
        return
    if getattr(vllm_config.scheduler_config, "async_scheduling", False):
        raise ConfigError(
            'load "sync" needs each step to end before the next is scheduled: start vLLM with '
            '--no-async-scheduling, or leave load at "async"'
        )
    if minor_version(vllm.__version__) < _SYNC_SINCE:
        raise ConfigError(f'load "sync" needs vLLM 0.{_SYNC_SINCE} or newer; use "async"')


def _prefer_recompute(vllm_config: Any) -> None:
    """Have vLLM compute what fails to load, instead of failing the request (its default)."""
    transfer = vllm_config.kv_transfer_config
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        log.info("vllm.recompute", instead_of=transfer.kv_load_failure_policy)
        transfer.kv_load_failure_policy = "recompute"
