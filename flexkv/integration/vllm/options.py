"""Settings of the vLLM connector: `Options.read` takes kv_connector_extra_config apart, once.

`socket_path`, `manager_config` (what the manager is made of) - `worker_device` (who copies in a
worker). What is not named here is a setting of flexkv itself (docs/configuration.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from flexkv.config import FlexKVConfig
from flexkv.errors import ConfigError
from flexkv.integration.vllm.geometry import Geometry
from flexkv.ranks.wire import private_path

_CHOICES = {"load": ("async", "sync"), "save": ("finish", "prompt", "none")}


@dataclass(frozen=True, slots=True)
class Options:
    """What may be set for the connector.

    `load`: "async" parks a request until its blocks are here and computes others meanwhile, "sync"
    loads within the request's first step. `save`: "finish" stores prompt and answer when a request
    ends, "prompt" only its prompt, "none" nothing. `save_every_tokens`: store the blocks of a
    request that still runs whenever so many tokens are new; 0: only at its end. `socket`: where
    workers join (default: in a private directory). `axes`: letters of the KV tensors, for layouts
    that are not declared. `rank_timeout_ms`: how long a worker may be silent while it owes a copy.
    `match_timeout_ms`: how long the scheduler waits for an answer, `engine_wait_ms`: how long
    a load or save may take, before they are given up and the engine computes. `min_load_tokens`:
    shorter hits are computed instead. `metrics_port`: where flexkv's own metrics can be read on
    127.0.0.1 (0: nowhere).
    """

    load: str = "async"
    save: str = "finish"
    save_every_tokens: int = 0
    socket: str = ""
    axes: str = ""
    rank_timeout_ms: int = 1000
    match_timeout_ms: int = 1000
    engine_wait_ms: int = 60_000
    min_load_tokens: int = 0
    metrics_port: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> Options:
        """Check what was given.

        Raises:
            ConfigError: a value is not one of its choices or of another type.
        """
        rest = dict(given or {})
        own = {entry.name for entry in fields(cls)} - {"settings"}
        values = {name: rest.pop(name) for name in list(rest) if name in own}
        for name, value in values.items():
            wanted = type(getattr(cls(), name))
            if not isinstance(value, wanted):
                raise ConfigError(f"{name} must be {wanted.__name__}, got {value!r}")
        for name, choices in _CHOICES.items():
            if values.get(name, choices[0]) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}: {values[name]!r}")
        return cls(**values, settings=rest)

    def socket_path(self, vllm_config: Any) -> Path:
        """Return where the workers of this engine join: the same in all of its processes."""
        if self.socket:
            return Path(self.socket)
        engine = str(vllm_config.kv_transfer_config.engine_id)
        return private_path(engine, os.environ.get("XDG_RUNTIME_DIR"))

    def manager_config(self, vllm_config: Any, geometry: Geometry, server: Any) -> FlexKVConfig:
        """Return the manager's configuration: what was set, completed from vLLM's.

        Raises:
            ConfigError: a setting is unknown or contradicts the engine.
        """
        model = vllm_config.model_config
        weights = (model.revision or "", str(model.dtype), str(model.quantization or ""))
        filled = {
            "model": str(model.model),
            "revision": ",".join(weights),
            "rank": geometry.ranks_label,
            **self.settings,
            "spec": geometry.whole,
            "tokens_per_block": geometry.tokens_per_block,
        }
        config = FlexKVConfig.load(**filled)
        own: dict[str, Any] = {"device": "ranks", "device_options": {"server": server}}
        if geometry.replica:  # a directory has one owner; the first replica's is the one named
            own["disk_dirs"] = tuple(path / f"dp{geometry.replica}" for path in config.disk_dirs)
        return config.model_copy(update=own)

    def worker_device(self, tensor_type: str) -> tuple[str, dict[str, Any]]:
        """Return name and options of the device plug-in that copies in the workers: what was set,
        else the one named like the type of the device that the KV tensors are on.

        Raises:
            ConfigError: a setting is unknown or malformed.
        """
        config = FlexKVConfig.load(**self.settings)
        chosen = config.device if "device" in config.model_fields_set else tensor_type
        return chosen, config.device_options
