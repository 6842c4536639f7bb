"""Counts on their way from the scheduler's process to vLLM's log and metrics, without an engine."""

from __future__ import annotations

import socket
import urllib.request
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from flexkv import ConfigError
from flexkv.telemetry import Telemetry

with warnings.catch_warnings():  # of vLLM and torch while they are imported
    warnings.simplefilter("ignore")
    from flexkv.integration.vllm.connector import FlexKVConnector
    from flexkv.integration.vllm.metrics import FlexKVPromMetrics, FlexKVStats, Metrics
    from flexkv.integration.vllm.requests import Work


def finished_load(blocks: int, moved_tokens: int) -> Work:
    work = Work("request", list(range(blocks)), True)
    work.moved_tokens, work.elapsed_s = moved_tokens, 0.002
    return work


def test_what_the_manager_counted_travels_once() -> None:
    telemetry = Telemetry()
    metrics = Metrics(telemetry, 0)
    telemetry.add("hit_blocks", 3)
    first = metrics.take()
    assert first is not None
    assert first.data["counts"] == {"hit_blocks": 3}
    assert metrics.take() is None
    telemetry.add("evicted_blocks", 2, tier="host")
    telemetry.gauge("tier_free_blocks", lambda: 5, tier="host")
    metrics.count(finished_load(4, 64), 16)
    second = metrics.take()
    assert second is not None
    assert second.data["counts"] == {"loaded_tokens": 64, "evicted_blocks\thost": 2}
    assert second.data["gauges"] == {"tier_free_blocks\thost": 5}
    assert second.data["samples"] == {"load_seconds": [0.002]}


def test_stats_of_several_steps_become_one_line_of_the_log() -> None:
    metrics = Metrics(Telemetry(), 0)
    total = FlexKVConnector.build_kv_connector_stats(None)
    for moved in (64, 32):  # the second one did not arrive whole
        metrics.add("loads")
        metrics.count(finished_load(4, moved), 16)
        taken = metrics.take()
        assert taken is not None
        total.aggregate(FlexKVConnector.build_kv_connector_stats(taken.data))
    assert total.reduce() == {
        "loads": 2,
        "failed_loads": 1,
        "loaded_tokens": 96,
        "failed_tokens": 32,
        "load_ms_mean": 2.0,
    }
    assert FlexKVStats().is_empty()


def test_each_engine_has_its_own_series() -> None:
    registry = CollectorRegistry()
    types: Any = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    engines: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    shown = FlexKVPromMetrics(config, types, ["model_name", "engine"], engines)
    labels = {"model_name": "tiny", "engine": "1"}
    assert registry.get_sample_value("vllm:flexkv_loads_total", labels) == 0
    shown.observe(
        {
            "counts": {"loads": 2, "evicted_blocks\thost": 7},
            "gauges": {"tier_free_blocks\thost": 5},
            "samples": {"load_seconds": [0.002, 0.2]},
        },
        engine_idx=1,
    )
    value = registry.get_sample_value
    assert value("vllm:flexkv_loads_total", labels) == 2
    assert value("vllm:flexkv_loads_total", labels | {"engine": "0"}) == 0
    assert value("vllm:flexkv_evicted_blocks_total", labels | {"tier": "host"}) == 7
    assert value("vllm:flexkv_tier_free_blocks", labels | {"tier": "host"}) == 5
    assert value("vllm:flexkv_load_seconds_count", labels) == 2


def test_the_managers_own_metrics_are_on_a_port_that_is_let_go() -> None:
    telemetry = Telemetry()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port {port}"):
            Metrics(telemetry, port)
    metrics = Metrics(telemetry, port)
    telemetry.add("hit_blocks", 3)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert "flexkv_hit_blocks_total 3.0" in answer.read().decode()
    metrics.close()
    metrics.close()
    Metrics(telemetry, port).close()
