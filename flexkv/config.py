"""Configuration: keywords win over a file, the file over `FLEXKV_*` variables, those over defaults.

`FlexKVConfig` (the settings) - `FlexKVConfig.load` (from a file) - `identity`, `host_slots`,
`store_slots`, `chunk_blocks`, `staging_slots` (what follows from them for a KVSpec) - `policy_of`,
`policy_settings`, `store_plugin`, `backend_settings` (what plug-ins are opened with). Upstream's
names are accepted too, see compat.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from flexkv.clusterconfig import ClusterFields, Options, Size
from flexkv.compat import to_dirs, to_mapping, to_spec
from flexkv.errors import ConfigError
from flexkv.model import PAGE_BYTES, Identity, KVSpec
from flexkv.sources import ConfigWarning, Source, environment, explain, read_file, warn

__all__ = ["ConfigWarning", "FlexKVConfig"]

Spec = Annotated[KVSpec | None, PlainValidator(to_spec)]
Directories = Annotated[tuple[Path, ...], BeforeValidator(to_dirs)]


class FlexKVConfig(ClusterFields):
    """Settings of a KVManager. Every limit has a unit in its name and a default.

    Keywords win over the file (`config_path`, or FLEXKV_CONFIG_PATH), the file over FLEXKV_*
    variables, those over the defaults. Sizes are bytes or text ("32GiB"). Instances are frozen.

    Raises:
        ConfigError: a setting is unknown, malformed, or contradicts another.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )

    config_path: Path | None = Field(None, description="YAML or JSON file to read settings from")

    # What the bytes are
    model: str = Field("", description="name of the model; the disk tier needs it")
    revision: str = Field("", description="revision of the weights")
    spec: Spec = Field(None, description="what a block holds; the manager needs it")
    tokens_per_block: int = Field(16, ge=1, le=4096, description="tokens of one block")
    rank: str = Field("tp0/1,pp0/1", description="parallel rank and size whose share is cached")
    key_hash: Literal["xxh3", "sha256"] = Field("xxh3", description="hash that makes block keys")
    key_secret: SecretStr = Field(
        SecretStr(""), description="secret of this deployment mixed into keys; never printed"
    )

    # Host tier
    host_cache_bytes: Size = Field(2**30, gt=0, description="memory of the host tier")
    huge_pages: bool = Field(True, description="ask for huge pages; falls back to small ones")
    prefault: bool = Field(True, description="touch the host tier at start, not at first use")

    # Disk tier
    disk_cache_bytes: Size = Field(0, ge=0, description="space of the disk tier; 0 = no disk tier")
    disk_dirs: Directories = Field(
        (Path("flexkv_ssd"),), min_length=1, description="directories to stripe over, ';' between"
    )
    disk_backend: str = Field("disk", description="plug-in that stores the disk tier")
    disk_engine: Literal["auto", "io_uring", "threads"] = Field(
        "auto", description="how the disk tier does I/O; auto = io_uring where allowed"
    )
    disk_queue_depth: int = Field(64, ge=1, le=4096, description="I/Os in the kernel at once")
    disk_bytes_in_flight: Size = Field(2**25, gt=0, description="bytes of disk I/O at once")
    disk_threads: int = Field(8, ge=1, le=64, description="threads of the thread engine")
    disk_options: Options = Field({}, description="further options of the disk plug-in")
    disk_codec: str | None = Field(
        None, description="codec of blocks on disk, such as int8; a lossy one is part of the keys"
    )
    disk_codec_bytes: Size = Field(
        2**26, gt=0, description="memory for encoded blocks on their way to and from the disk"
    )
    on_mismatch: Literal["error", "clear"] = Field(
        "error", description="a directory of another model or format: refuse, or empty it"
    )
    max_read_failures: int = Field(
        3, ge=1, description="failed read batches in a row before the disk tier is switched off"
    )
    spill: Literal["through", "on_evict", "never"] = Field(
        "through", description="when blocks go from host to disk"
    )
    spill_queue_blocks: int = Field(
        4096, ge=1, description="blocks waiting to be spilled; more are dropped"
    )
    promote: Literal["always", "when_room", "never"] = Field(
        "always", description="whether a get leaves blocks of lower tiers in the host"
    )

    # Remote tier
    remote_backend: str = Field(
        "", description="plug-in of the remote tier: redis, objects, mooncake; none"
    )
    remote_cache_bytes: Size = Field(
        0, ge=0, description="bytes of blocks of ours that the remote tier holds at most"
    )
    remote_options: Options = Field({}, description="options of the remote plug-in, such as url")

    # Eviction
    eviction_policy: str = Field("hazard", description="policy of every tier")
    host_policy: str | None = Field(None, description="policy of the host tier, if another")
    disk_policy: str | None = Field(None, description="policy of the disk tier, if another")
    remote_policy: str | None = Field(None, description="policy of the remote tier, if another")
    evict_ratio: float = Field(0.0, ge=0, le=1, description="least share of a tier evicted at once")
    evict_start_threshold: float = Field(
        1.0, gt=0, le=1, description="share of a tier in use from which eviction starts"
    )
    hit_reward_seconds: float = Field(
        0.0, ge=0, description="lru: seconds a hit adds to a block's age limit"
    )
    slru_protected_threshold: int = Field(2, ge=1, description="slru: hits that protect a block")
    policy_options: Options = Field({}, description="further options of the policies")

    # Hints
    retain_share: float = Field(0.5, ge=0, le=1, description="share of a tier that hints may hold")
    retain_blocks: int = Field(
        2**17, ge=0, description="blocks that hints name, there or not; the least important end"
    )
    retain_ttl_s: float = Field(300.0, gt=0, description="seconds that a hint lives if not told")
    retain_max_ttl_s: float = Field(3600.0, gt=0, description="seconds that a hint lives at most")
    prefetch_lead_steps: int = Field(
        1, ge=-1, description="a hinted prefix so near to execution is promoted; -1 = never"
    )

    # Fetch or recompute
    fetch_or_recompute: bool = Field(
        False, description="leave out the end of a prefix that is computed sooner than fetched"
    )
    prefill_tokens_per_s: float = Field(
        0.0, ge=0, description="tokens prefilled per second at the start of a prompt; 0 = learned"
    )
    prefill_crossover_tokens: float = Field(
        30_000.0, gt=0, description="position at which attention costs a token as much as the rest"
    )
    recompute_weight: float = Field(
        1.0, gt=0, description="seconds of fetching that a second of computing is worth"
    )
    fetch_margin: float = Field(
        0.1, ge=0, lt=1, description="share of its time that a prompt must save by fetching less"
    )
    fetch_probe_s: float = Field(
        10.0, gt=0, description="seconds without a read after which a declined tier is tried again"
    )

    # Device
    device: str = Field("cpu", description="plug-in of the device that holds the engine's KV")
    device_options: Options = Field({}, description="options of the device plug-in")
    device_bytes_in_flight: Size = Field(
        2**28, gt=0, description="bytes of device copies per direction at once"
    )
    enable_gds: bool = Field(
        False, description="read from disk to device directly (not in this build)"
    )

    # Transfers and limits
    chunk_bytes: Size = Field(2**24, gt=0, description="piece of a long get that moves as one")
    staging_bytes: Size = Field(
        2**28, gt=0, description="host memory that reads from disk may hold at once"
    )
    max_in_flight_gets: int = Field(256, ge=1, description="gets at once; more wait")
    max_in_flight_puts: int = Field(256, ge=1, description="puts at once; more wait")
    max_in_flight_prefetches: int = Field(
        64, ge=1, description="prefetches at once; more are dropped"
    )
    max_queued_requests: int = Field(
        4096, ge=1, description="requests waiting for their turn; more are refused"
    )
    plan_ttl_ms: int = Field(10_000, ge=1, description="life of a plan that is not launched")
    transfer_timeout_ms: int = Field(30_000, ge=1, description="deadline of a transfer")
    close_timeout_ms: int = Field(10_000, ge=1, description="how long closing waits for transfers")
    settle_timeout_ms: int = Field(
        60_000, ge=1, description="how long flush, reset, durable and quiesced wait"
    )
    tickets: int = Field(4096, ge=16, description="batches of hardware work in flight")
    crew_threads: int = Field(
        0, ge=0, le=64, description="copy threads; 0 = one per core, at most 4"
    )
    crew_queue: int = Field(4096, ge=1, description="pieces of work waiting for copy threads")
    trace_path: Path | None = Field(None, description="file that requests are recorded in")
    event_queue_blocks: int = Field(
        2**20, ge=1, description="blocks of events not taken by a listener; then it starts anew"
    )
    inline_copy_bytes: Size = Field(
        2**20, ge=0, description="copies up to this size run on the loop itself"
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error)) from error
        if self.enable_gds:
            warn("enable_gds: GPU-direct storage is not in this build; blocks go through the host")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put our three sources in the place of pydantic's."""
        keywords = Source(settings_cls, init_settings(), "keyword")
        variables = Source(settings_cls, environment(), "environment")
        path = keywords.values.get("config_path") or variables.values.get("config_path")
        file = Source(settings_cls, read_file(path), str(path)) if path else None
        return (keywords, file, variables) if file else (keywords, variables)

    @model_validator(mode="before")
    @classmethod
    def _one_block_size(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Let spec and tokens_per_block speak of the same blocks, whichever of them is given."""
        spec, tokens = values.get("spec"), values.get("tokens_per_block")
        spec = to_mapping(spec)
        stated = tokens is not None and str(tokens).isdigit()  # anything else: the field complains
        if isinstance(spec, Mapping) and stated:
            spec = {"tokens_per_block": int(str(tokens)), **spec}
        spec = to_spec(spec)
        if spec is None or (tokens is not None and not stated):
            return values
        if stated and int(str(tokens)) != spec.tokens_per_block:
            raise ValueError(
                f"tokens_per_block is {tokens}, but spec says {spec.tokens_per_block}; set one"
            )
        return {**values, "spec": spec, "tokens_per_block": spec.tokens_per_block}

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if len(set(self.disk_dirs)) != len(self.disk_dirs):
            raise ValueError("disk_dirs names a directory twice")
        if bool(self.remote_backend) != bool(self.remote_cache_bytes):
            raise ValueError("set both remote_backend and remote_cache_bytes, or none of them")
        if self.node_ttl_ms < 2 * self.heartbeat_ms:
            raise ValueError("node_ttl_ms must be at least two heartbeats of heartbeat_ms")
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, **overrides: Any) -> Self:
        """Read a YAML or JSON file (FLEXKV_CONFIG_PATH if `path` is None); `overrides` win."""
        return cls(**({} if path is None else {"config_path": Path(path)}), **overrides)

    def identity(self, spec: KVSpec) -> Identity:
        """Return what makes cached bytes interchangeable under these settings.

        Raises:
            ConfigError: `spec` is not the configured one, or a disk tier has no model name to tell
                caches apart.
        """
        if self.spec is not None and self.spec != spec:
            raise ConfigError(f"the configuration says {self.spec}, but the device holds {spec}")
        shared = self.remote_cache_bytes or self.cluster_redis_url
        if (self.disk_cache_bytes or shared) and not self.model:
            raise ConfigError(
                "set model (and revision): what outlives the process or leaves it, as the disk "
                "tier, the remote tier and a cluster do, must know them"
            )
        return Identity(self.model, self.revision, spec, self.rank, key_hash=self.key_hash)

    def host_slots(self, spec: KVSpec) -> int:
        """Return how many blocks fit into the host tier; ConfigError if none does."""
        return self._slots("host_cache_bytes", self.host_cache_bytes, spec.block_bytes)

    def store_slots(
        self, spec: KVSpec, stored_bytes: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Return how many blocks fit into each tier below the host, from near to far.

        `stored_bytes` are the sizes of blocks in tiers with a codec (see tiercodec.py).

        Raises:
            ConfigError: one of them is too small.
        """
        sizes = {"disk": self.disk_cache_bytes, "remote": self.remote_cache_bytes}
        coded = stored_bytes or {}
        return {
            tier: self._slots(f"{tier}_cache_bytes", size, coded.get(tier, spec.block_bytes))
            for tier, size in sizes.items()
            if size
        }

    def store_plugin(self, tier: str) -> str:
        """Return the name of the plug-in of a tier below the host."""
        return {"disk": self.disk_backend, "remote": self.remote_backend}[tier]

    def chunk_blocks(self, spec: KVSpec) -> int:
        """Return how many blocks move as one piece of a long transfer."""
        return max(1, self.chunk_bytes // spec.stride_bytes)

    def staging_slots(self, spec: KVSpec) -> int:
        """Return how many slots blocks pass through that do not stay in the host."""
        some = self.disk_cache_bytes or self.remote_cache_bytes or self.cluster_redis_url
        return max(2, self.staging_bytes // spec.stride_bytes) if some else 0

    @staticmethod
    def _slots(name: str, size_bytes: int, block_bytes: int) -> int:
        stride_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
        if size_bytes < stride_bytes:
            raise ConfigError(f"{name} is {size_bytes}, but one block takes {stride_bytes} bytes")
        return size_bytes // stride_bytes

    def policy_of(self, tier: str) -> str:
        """Return the name of the eviction policy of a tier."""
        own = {"host": self.host_policy, "disk": self.disk_policy, "remote": self.remote_policy}
        return own.get(tier) or self.eviction_policy

    def policy_settings(self) -> dict[str, Any]:
        """Return what policies are opened with."""
        return {
            "hit_reward_seconds": self.hit_reward_seconds,
            "slru_protected_threshold": self.slru_protected_threshold,
            **self.policy_options,
        }

    def backend_settings(self, place: str) -> dict[str, Any]:
        """Return what the plug-in of the device, or of a tier below the host, is opened with."""
        if place == "device":
            return {"inline_bytes": self.inline_copy_bytes, **self.device_options}
        if place == "remote":
            return self.remote_options
        return {
            "directories": self.disk_dirs,
            "engine": self.disk_engine,
            "queue_depth": self.disk_queue_depth,
            "in_flight_bytes": self.disk_bytes_in_flight,
            "threads": self.disk_threads,
            "on_mismatch": self.on_mismatch,
            **self.disk_options,
        }

    def secret_bytes(self) -> bytes:
        """Return the deployment's secret for the Keyring; empty if none is set."""
        return self.key_secret.get_secret_value().encode()
