"""FlexKVConnector with a clock: how long vLLM's scheduler waits in each of its calls.

Loaded by `kv_connector_module_path`, as `load.py --calls` does. When the engine ends, the times are
written to the file named by CALLS_FILE: {call: [microseconds, ...]} in JSON.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexkv.integration.vllm.connector import FlexKVConnector

CALLS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_events",
)


class TimedConnector(FlexKVConnector):
    """Times the scheduler's calls; those of a worker are as they are."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._times: dict[str, list[float]] = defaultdict(list)
        self._asked: set[str] = set()
        if self._scheduler is not None:
            for name in CALLS:
                setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*arguments: Any) -> Any:
            start = clock()
            try:
                return call(*arguments)
            finally:
                self._times[self._kind(name, arguments)].append((clock() - start) * 1e6)

        return timed

    def _kind(self, name: str, arguments: tuple[Any, ...]) -> str:
        """Tell apart what costs different amounts by nature."""
        if name == "get_num_new_matched_tokens":
            request = arguments[0].request_id
            if request in self._asked:
                return f"{name}, asked again"
            self._asked.add(request)
        elif name == "build_connector_meta" and not arguments[0].total_num_scheduled_tokens:
            return f"{name}, nothing to compute"
        return name

    def shutdown(self) -> None:
        """Write the times down and close."""
        if self._scheduler is not None:
            Path(os.environ["CALLS_FILE"]).write_text(json.dumps(self._times))
        super().shutdown()
