"""flexkv's counts on vLLM's way to its log and its /metrics.

`FlexKVStats` (what travels with a step: counts, gauges, samples) - `Metrics` (what the manager has
counted since the last time) - `FlexKVPromMetrics` (the same on the other side, as Prometheus
metrics vllm:flexkv_NAME, with the names of `flexkv.telemetry` and `SERIES`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from flexkv.errors import ConfigError
from flexkv.integration.vllm.requests import Work
from flexkv.metrics import METRICS, Series
from flexkv.telemetry import Telemetry

SERIES: dict[str, Series] = {
    "loads": Series("counter", "loads that vLLM asked for"),
    "failed_loads": Series("counter", "loads of which not everything arrived"),
    "saves": Series("counter", "requests whose blocks were to be stored"),
    "failed_saves": Series("counter", "requests whose blocks could not be stored"),
    "asked_tokens": Series("counter", "tokens that vLLM asked to be loaded"),
    "loaded_tokens": Series("counter", "tokens that were loaded"),
    "failed_tokens": Series("counter", "tokens that were to be loaded and were computed instead"),
    "saved_tokens": Series("counter", "tokens of requests that were stored"),
    "load_seconds": Series("histogram", "time from vLLM's order to the last byte of a load"),
    "save_seconds": Series("histogram", "time from the end of a request to its blocks' storage"),
}
_ALL = METRICS | SERIES
_INTERVAL_S = 1.0
_MOST_SAMPLES = 1000  # of a histogram between two steps that carry them


def _key(name: str, *labels: str) -> str:
    return "\t".join((name, *labels))


@dataclass
class FlexKVStats(KVConnectorStats):
    """What happened since it was asked for last: {"counts" | "gauges" | "samples": {series: ...}}.

    A series is a name and the values of its labels, with tabs between.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Start from nothing."""
        self.data = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        counts = self.data.setdefault("counts", {})
        counts[name] = counts.get(name, 0) + amount

    def observe(self, name: str, value: float) -> None:
        """Take one sample of a histogram."""
        samples = self.data.setdefault("samples", {}).setdefault(name, [])
        if len(samples) < _MOST_SAMPLES:
            samples.append(value)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another has counted; its gauges are newer."""
        for name, amount in other.data.get("counts", {}).items():
            self.add(name, amount)
        if gauges := other.data.get("gauges"):
            self.data.setdefault("gauges", {}).update(gauges)
        for name, values in other.data.get("samples", {}).items():
            for value in values:
                self.observe(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what is worth a line in the log; what did not happen is left out."""
        counts, samples = self.data.get("counts", {}), self.data.get("samples", {})
        line: dict[str, int | float] = {
            name: int(counts[name])
            for name, series in SERIES.items()
            if series.kind == "counter" and counts.get(name)
        }
        if queried := counts.get("queried_blocks"):
            line["hit_percent"] = round(100 * counts.get("hit_blocks", 0) / queried, 1)
        for name, values in samples.items():
            line[name.replace("_seconds", "_ms_mean")] = round(1e3 * sum(values) / len(values), 2)
        for total in ("transfer_bytes", "evicted_blocks", "damaged_blocks", "dropped_blocks"):
            parts = {key: value for key, value in counts.items() if key.split("\t")[0] == total}
            for key, value in sorted(parts.items()):
                line["_".join(key.split("\t"))] = int(value)
        return line

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data.get("counts") and not self.data.get("samples")


class Metrics:
    """What the scheduler's side counts (`add`, `count`) and what its manager does: for vLLM
    (`take`), and on a port of this machine.
    """

    def __init__(self, telemetry: Telemetry, port: int) -> None:
        self._telemetry = telemetry
        self._own = FlexKVStats()
        self._server: tuple[Any, Any] | None = None
        if port:
            registry = CollectorRegistry()
            registry.register(telemetry.collector())
            try:
                self._server = start_http_server(port, "127.0.0.1", registry)
            except OSError as error:
                raise ConfigError(f"metrics_port {port} cannot be had: {error.strerror}") from error
        self._last: dict[tuple[str, ...], float] = {}
        self._next_s = 0.0

    def add(self, name: str, amount: float = 1) -> None:
        """Count."""
        self._own.add(name, amount)

    def count(self, work: Work, tokens_per_block: int) -> None:
        """Count a load or a save that has ended."""
        kind = "load" if work.is_load or work.number else "save"
        moved = work.moved_tokens
        missed = len(work.blocks) * tokens_per_block - moved
        self._own.add("loaded_tokens" if kind == "load" else "saved_tokens", moved)
        if missed > 0:
            self._own.add(f"failed_{kind}s")
            if kind == "load":
                self._own.add("failed_tokens", missed)
        if moved:
            self._own.observe(f"{kind}_seconds", work.elapsed_s)

    def take(self) -> FlexKVStats | None:
        """Return what happened since the last time, with the manager's gauges; None if nothing did.

        The manager is asked when there is something of our own to tell, else once a second.
        """
        now, own = time.monotonic(), self._own
        if own.is_empty() and now < self._next_s:
            return None
        self._next_s = now + _INTERVAL_S
        for key, value in self._telemetry.read_all().items():
            if METRICS[key[0]].kind == "gauge":
                own.data.setdefault("gauges", {})[_key(*key)] = value
            elif value != self._last.get(key, 0.0):
                own.add(_key(*key), value - self._last.get(key, 0.0))
                self._last[key] = value
        if own.is_empty():
            return None
        self._own = FlexKVStats()
        return own

    def close(self) -> None:
        """Let the port go. Twice is fine."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()


class FlexKVPromMetrics(KVConnectorPromMetrics):
    """Shows what FlexKVStats bring as vllm:flexkv_NAME, with vLLM's labels in front of its own.

    vLLM takes metrics with its name off the registry before it starts another engine there.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {name: self._make(name, series) for name, series in _ALL.items()}
        for name, series in _ALL.items():
            if not series.labels:
                for engine in per_engine_labelvalues.values():
                    self._metrics[name].labels(*engine)  # shown from the start

    def _make(self, name: str, series: Series) -> Any:
        title, labels = f"vllm:flexkv_{name}", [*self._labelnames, *series.labels]
        if series.kind == "counter":
            return self._counter_cls(title, series.help, labels)
        if series.kind == "gauge":
            return self._gauge_cls(title, series.help, labels, multiprocess_mode="mostrecent")
        return self._histogram_cls(title, series.help, labels, buckets=series.bounds)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what one engine's step brought."""
        engine = self.per_engine_labelvalues[engine_idx]

        def series(key: str) -> Any:
            name, *labels = key.split("\t")
            return self._metrics[name].labels(*engine, *labels)

        for key, amount in transfer_stats_data.get("counts", {}).items():
            series(key).inc(amount)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            series(key).set(value)
        for key, values in transfer_stats_data.get("samples", {}).items():
            for value in values:
                series(key).observe(value)
