"""FlexKVConnectorV1Impl: what vLLM's built-in `FlexKVConnectorV1` looks for in this package.

    {"kv_connector": "FlexKVConnectorV1", "kv_role": "kv_both",
     "kv_connector_extra_config": {"host_cache_bytes": "8GiB"}}

The same calls as `connector.FlexKVConnector`, which is to be preferred: the built-in class hands on
neither the KV cache's configuration nor all calls (a step's beginning, resets, pending work), so
that hybrid models are not told apart, and news reach a worker after the forward pass.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from flexkv.errors import ConfigError
from flexkv.integration.vllm.calls import Calls
from flexkv.integration.vllm.messages import StepNews
from flexkv.integration.vllm.options import Options


class FlexKVConnectorV1Impl(Calls):
    """Delegate of vLLM's built-in connector; answers every call that it forwards, and forks'.

    Raises:
        ConfigError: a setting needs a call that is not forwarded.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        options = Options.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if options.save_every_tokens or options.load == "sync":
            raise ConfigError(
                'save_every_tokens and load "sync" need calls that vLLM\'s FlexKVConnectorV1 does '
                'not hand on; use "kv_connector_module_path": '
                '"flexkv.integration.vllm.connector" instead'
            )
        self.open_side(vllm_config, role, kv_cache_config)

    def _news(self) -> StepNews | None:
        """Look where vLLM binds them: to its own class, which does not hand them on."""
        group = get_kv_transfer_group()
        if not group.has_connector_metadata():
            return None
        news = group._get_connector_metadata()
        return news if isinstance(news, StepNews) else None

    # --- forks

    def before_device_sleep(self) -> None:
        """Nothing: the device memory is not touched unless the scheduler asks."""

    def after_device_wake(self) -> None:
        """Nothing: see before_device_sleep."""
