"""Spellings of settings: what people may write (upstream FlexKV's names too), and what it means.

`translate` (settings of one source under any accepted name -> our fields, and what does nothing) -
`closest` (known names near a misspelt one) - `parse_size` ("32GiB" -> bytes) - `to_spec`,
`to_dirs`, `to_mapping` (text or mappings -> values). Names are in lower case, without `FLEXKV_`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from flexkv.errors import ConfigError
from flexkv.model import KVSpec, LayerGroup

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)
_SPEC_NAMES = {  # upstream's ModelConfig -> KVSpec.uniform
    "num_layers": "layers",
    "num_kv_heads": "heads",
    "kv_dim": "parts",
}

Rewrite: TypeAlias = Callable[[Any], tuple[str, Any]]  # upstream value -> (our field, our value)


def _renamed(field: str) -> Rewrite:
    return lambda value: (field, value)


def _gib(field: str) -> Rewrite:
    """Upstream's `_gb` are GiB; text with a unit of its own ("512MiB") is taken as it is."""

    def rewrite(value: Any) -> tuple[str, Any]:
        bare = str(value).strip().replace(".", "", 1).isdigit() and not isinstance(value, bool)
        return field, f"{str(value).strip()}GiB" if bare else value

    return rewrite


def _ring_entries(value: Any) -> tuple[str, Any]:
    """Upstream: 0 entries mean the thread engine."""
    return ("disk_engine", "threads") if str(value).strip() == "0" else ("disk_queue_depth", value)


ALIASES: dict[str, Rewrite] = {
    "cpu_cache_gb": _gib("host_cache_bytes"),
    "ssd_cache_gb": _gib("disk_cache_bytes"),
    "ssd_cache_dir": _renamed("disk_dirs"),
    "use_hugepage_cpu_buffer": _renamed("huge_pages"),
    "iouring_entries": _ring_entries,
}

_ONE_PROCESS = "everything runs on one event loop in one process, so there is nothing to set"
_NO_SERVER = "there is no server process in this build"
_NO_CLUSTER = "sharing between machines is not in this build"
_COPY = "the copy engine chooses its own path"
_TRACE = "traces are not in this build; use structlog events and the Prometheus collector"
_MANAGER = "the layout comes from the tensors given to register()"
_METRICS = "metrics are always counted; register telemetry.collector() on your own registry"
_NVCOMP = "compression is not in this build"
_SWA = "layer groups of the KVSpec describe the model; there is no separate pool"
_MOONCAKE = "the Mooncake store is not in this build"

_DEAD_BY_REASON: dict[str, str] = {
    _ONE_PROCESS: (
        "enable_mps enable_collective_sync worker_shutdown_timeout_s index_accel "
        "lt_pool_initial_capacity transfer_manager_shutdown_timeout_s idle_sleep_ms sync_get "
        "maybe_skip_put vmm_fd_sock_dir use_hugepage_tmp_buffer num_tmp_cpu_blocks master_host "
        "master_ports trt_subprocess_host trt_subprocess_ports use_trtllm_subprocess nnodes"
    ),
    _NO_SERVER: ("server_client_mode server_launch_mode server_recv_port instance_num instance_id"),
    _NO_CLUSTER: (
        "enable_p2p_cpu enable_p2p_ssd enable_3rd_remote enable_kv_sharing local_zmq_ip "
        "local_zmq_port redis_host redis_port redis_password local_ip node_ttl_seconds "
        "refresh_batch_size rebuild_interval_ms lease_ttl_ms safety_ttl_ms renew_lease_ms "
        "reset_barrier_timeout_ms reset_barrier_poll_ms enable_remote distributed_node_id"
    ),
    _COPY: (
        "use_ce_transfer_h2d use_ce_transfer_d2h transfer_num_cta_h2d transfer_num_cta_d2h "
        "ce_segment_threshold ce_path_opt enable_ce_memcpy2d ce_gather_threads ce_gather_nt "
        "enable_layerwise_transfer layerwise_notify_mode layerwise_eventfd_socket "
        "layerwise_wait_timeout_s layerwise_eventfd_connect_max_retries cudahost_chunk_size_gb "
        "ssd_io_opt iouring_flags"
    ),
    _TRACE: (
        "enable_trace trace_file_path trace_max_file_size_mb trace_max_files "
        "trace_flush_interval_ms transfer_trace"
    ),
    _MANAGER: (
        "cpu_layout ssd_layout remote_layout gds_layout kv_cache_dtype "
        "kv_shared_across_ranks_mode mla_d2h_mode"
    ),
    _METRICS: ("enable_metrics py_metrics_port cpp_metrics_port"),
    _NVCOMP: (
        "enable_nvcomp nvcomp_batch_size nvcomp_ssd_packed_write_threads "
        "nvcomp_ssd_packed_read_threads"
    ),
    _SWA: ("enable_swa_transfer swa_multi_group swa_multi_layer"),
    _MOONCAKE: (
        "use_mooncake_store_backend mooncake_store_config_path mooncake_store_pp_rank "
        "mooncake_store_pp_size mooncake_store_node_layer_start mooncake_store_node_layer_end "
        "mooncake_store_total_layers mooncake_config_path mooncake_fault_mode mooncake_fault_op "
        "mooncake_fault_prob mooncake_fault_tail_n mooncake_fault_random_ratio "
        "mooncake_fault_seed"
    ),
    "NIXL is not in this build": ("enable_nixl nixl_backend_plugin nixl_extra_config"),
    "huge pages come from the kernel's default pool, without a mounted file system": (
        "hugepage_size_bytes hugetlbfs_dir"
    ),
    "the number of files follows disk_dirs": ("max_file_size_gb"),
    "logging belongs to the application: configure structlog there": (
        "logging_prefix log_level num_log_interval_requests eviction_log_interval_s"
    ),
    "tiers exist when their size is above 0": ("enable_cpu enable_ssd"),
    "read by upstream's build only": ("debug enable_cfs enable_p2p enable_cputest git_commit"),
}
DEAD: dict[str, str] = {
    name: reason for reason, names in _DEAD_BY_REASON.items() for name in names.split()
}


def parse_size(value: Any) -> int:
    """Return bytes for 4096, "32GiB", "32G" (the same), "32GB" (10^9), "0.5 TiB"; rounded down.

    Raises:
        ValueError: not a size, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(
            f"{value!r} is not a size; write bytes as a number or text such as '32GiB'"
        )
    found = _SIZE.fullmatch(str(value) if not isinstance(value, float) else f"{value:f}")
    if found is None:
        raise ValueError(
            f"{value!r} is not a size; write bytes as a number or text such as '32GiB'"
        )
    number, unit, binary, byte = found.groups()
    power = " kmgtp".index(unit.lower()) if unit else 0
    base = 1000 if byte and unit and not binary else 1024
    whole, _, fraction = number.partition(".")
    scale: int = base**power
    return int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)


def to_spec(value: Any) -> KVSpec | None:
    """Accept a KVSpec, {"groups": [...], ...}, or arguments of KVSpec.uniform (upstream's too)."""
    if value is None or isinstance(value, KVSpec):
        return value
    if isinstance(value, str):
        value = yaml.safe_load(value)
    if not isinstance(value, Mapping):
        raise ValueError(
            "spec must be a KVSpec or a mapping such as {layers: 32, heads: 8, head_size: 128}"
        )
    try:
        if "groups" in value:
            groups = tuple(LayerGroup(**group) for group in value["groups"])
            return KVSpec(**{**value, "groups": groups})
        return KVSpec.uniform(
            **{_SPEC_NAMES.get(str(key), str(key)): item for key, item in value.items()}
        )
    except TypeError as error:  # a missing or unknown argument
        raise ValueError(f"spec: {str(error).split('() ')[-1]}") from error


def to_dirs(value: Any) -> Any:
    """Split "a;b" into directories; expand "~"."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(";") if part.strip()]
    elif isinstance(value, Path):
        value = [value]
    return (
        [Path(part).expanduser() for part in value] if isinstance(value, (list, tuple)) else value
    )


def to_mapping(value: Any) -> Any:
    """Read JSON or YAML text, as environment variables hold it."""
    return yaml.safe_load(value) if isinstance(value, str) else value


def closest(name: str, known: Collection[str]) -> list[str]:
    """Return up to three known names that look like `name`, best first."""
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)


def translate(
    settings: Mapping[str, Any], fields: Collection[str], origin: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (our fields, {dead name: reason}) for the settings of one source, called `origin`.

    Raises:
        ConfigError: a name is unknown (the closest known name is given), or one field is given
            under two names.
    """
    ours: dict[str, Any] = {}
    dead: dict[str, str] = {}
    given: dict[str, str] = {}
    for name, value in settings.items():
        if name in fields:
            field = name
        elif name in ALIASES:
            field, value = ALIASES[name](value)
        elif name in DEAD:
            dead[name] = DEAD[name]
            continue
        else:
            near = closest(name, {*fields, *ALIASES, *DEAD})
            hint = f"; did you mean {' or '.join(near)}?" if near else "; see docs/configuration.md"
            raise ConfigError(f"{origin}: unknown setting {name!r}{hint}")
        if field in given:
            raise ConfigError(
                f"{origin}: {given[field]!r} and {name!r} both set {field}; keep one of them"
            )
        given[field] = name
        ours[field] = value
    return ours, dead
