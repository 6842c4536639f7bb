"""Modules that look like vLLM's, as far as the connector imports them: `installed`.

`current` names the worker whose turn it is, as the process-wide groups of a real worker would.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

current = SimpleNamespace(rank=0, group=None)


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    """What the scheduler's side sends to the workers'."""


class KVConnectorWorkerMetadata:
    """What the workers' sides send back."""


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorTransferResults(NamedTuple):
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] = set()  # noqa: RUF012


class KVConnectorPromMetrics:
    """Base of Prometheus metrics of a connector."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass


class SupportsHMA:
    """Mixin of connectors that are told the blocks of every group."""


class KVConnectorBase_V1:
    """The base class: bound metadata, and defaults for what a connector does not care for."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self._connector_metadata: Any = None
        self._vllm_config, self._role = vllm_config, role
        self._kv_cache_config = kv_cache_config

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        assert self._connector_metadata is not None
        return self._connector_metadata

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults(*self.get_finished(finished))  # type: ignore[attr-defined]

    def bind_gpu_block_pool(self, pool: Any) -> None:
        pass

    def handle_preemptions(self, metadata: Any) -> None:
        pass

    def on_new_request(self, request: Any) -> None:
        pass

    def build_connector_worker_meta(self) -> Any:
        return None

    def get_kv_connector_stats(self) -> Any:
        return None

    def take_events(self) -> tuple[Any, ...]:
        return ()

    def has_pending_push_work(self) -> bool:
        return False

    def reset_cache(self) -> bool | None:
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        return True


_FORWARDED = [
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "register_kv_caches",
    "get_block_ids_with_load_errors",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_events",
    "get_kv_connector_stats",
    "shutdown",
]


class FlexKVConnectorV1(KVConnectorBase_V1):
    """vLLM's built-in class: it hands on these calls and no others."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        from flexkv.integration.vllm.vllm_v1_adapter import FlexKVConnectorV1Impl

        self._flexkv_connector = FlexKVConnectorV1Impl(vllm_config, role)
        for name in _FORWARDED:
            setattr(self, name, getattr(self._flexkv_connector, name))


@dataclass(frozen=True)
class KVCacheEvent:
    """Base of the events."""

    __struct_fields__ = ()


@dataclass(frozen=True)
class BlockStored(KVCacheEvent):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Any = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


@dataclass(frozen=True)
class BlockRemoved(KVCacheEvent):
    block_hashes: list[Any]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


@dataclass(frozen=True)
class AllBlocksCleared(KVCacheEvent):
    medium: str | None = None


_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_CONTENT: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.distributed": {},
    "vllm.distributed.kv_transfer": {"get_kv_transfer_group": lambda: current.group},
    "vllm.distributed.kv_transfer.kv_connector": {},
    _V1: {"SupportsHMA": SupportsHMA},
    f"{_V1}.base": {
        "KVConnectorBase_V1": KVConnectorBase_V1,
        "KVConnectorMetadata": KVConnectorMetadata,
        "KVConnectorWorkerMetadata": KVConnectorWorkerMetadata,
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "KVConnectorRole": KVConnectorRole,
        "SupportsHMA": SupportsHMA,
    },
    f"{_V1}.metrics": {
        "KVConnectorStats": KVConnectorStats,
        "KVConnectorPromMetrics": KVConnectorPromMetrics,
        "PromMetric": object,
        "PromMetricT": object,
    },
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.kv_cache_utils": {"maybe_convert_block_hash": lambda name: name},
    "vllm.distributed.parallel_state": {
        "get_tp_group": lambda: SimpleNamespace(rank_in_group=current.rank),
        "get_pp_group": lambda: SimpleNamespace(rank_in_group=0),
    },
    "vllm.distributed.kv_events": {
        "KVCacheEvent": KVCacheEvent,
        "BlockStored": BlockStored,
        "BlockRemoved": BlockRemoved,
        "AllBlocksCleared": AllBlocksCleared,
    },
}


@contextmanager
def installed() -> Iterator[ModuleType]:
    """Let `import vllm` find these modules; afterwards what was imported with them is forgotten."""
    before = dict(sys.modules)
    made = {}
    for name, content in _CONTENT.items():
        made[name] = module = ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    sys.modules.update(made)
    try:
        yield made["vllm"]
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] == "vllm" or name.startswith("flexkv.integration.vllm"):
                del sys.modules[name]
        sys.modules.update({name: before[name] for name in made if name in before})
