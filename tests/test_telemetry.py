"""Telemetry: counts are true, looking changes nothing, a restart neither raises nor loses any."""

from __future__ import annotations

import gc
import weakref

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from flexkv.metrics import METRICS
from flexkv.telemetry import Telemetry, expose, log

BYTES = "transfer_bytes"


def test_adding_counts_per_label() -> None:
    telemetry = Telemetry()
    telemetry.add(BYTES, 5, source="disk", target="host")
    telemetry.add(BYTES, 6, source="disk", target="host")
    telemetry.add(BYTES, 7, source="host", target="device")
    telemetry.add("refused_puts")
    assert telemetry.value(BYTES, source="disk", target="host") == 11
    assert telemetry.value(BYTES, source="host", target="device") == 7
    assert telemetry.value(BYTES, source="host", target="disk") == 0
    snapshot = telemetry.snapshot()
    assert snapshot[BYTES] == {"source=disk,target=host": 11, "source=host,target=device": 7}
    assert snapshot["refused_puts"] == 1


def test_misspelt_names_and_labels_are_errors() -> None:
    telemetry = Telemetry()
    with pytest.raises(ValueError, match="not a counter"):
        telemetry.add("nonsense")
    with pytest.raises(ValueError, match="not a histogram"):
        telemetry.observe(BYTES, 1, source="a", target="b")
    with pytest.raises(ValueError, match="labels"):
        telemetry.add(BYTES, 1, source="disk")
    with pytest.raises(ValueError, match="order"):
        telemetry.add(BYTES, 1, target="host", source="disk")
    assert telemetry.snapshot() == Telemetry().snapshot()


def test_histograms_count_into_the_right_bucket() -> None:
    telemetry = Telemetry()
    bounds, labels = METRICS["transfer_seconds"].bounds, {"kind": "get", "part": "hidden"}
    for value in (0.0, bounds[0], bounds[0] * 1.01, bounds[-1] * 2):
        telemetry.observe("transfer_seconds", value, **labels)
    item = telemetry.histograms["transfer_seconds", "get", "hidden"]
    assert item.counts[0] == 2  # an upper edge belongs to its bucket
    assert item.counts[1] == 1
    assert item.counts[-1] == 1
    assert item.cumulative()[-1] == ("+Inf", 4)
    assert telemetry.value("transfer_seconds", **labels) == 4
    key = "kind=get,part=hidden"
    assert telemetry.snapshot()["transfer_seconds"][key]["count"] == 4


def test_gauges_are_read_when_asked() -> None:
    telemetry = Telemetry()
    free = [10]
    telemetry.gauge("tier_free_blocks", lambda: free[0], tier="host")
    assert telemetry.value("tier_free_blocks", tier="host") == 10
    free[0] = 3
    assert telemetry.value("tier_free_blocks", tier="host") == 3


def exercise(telemetry: Telemetry) -> None:
    telemetry.add(BYTES, 4096, source="device", target="host")
    telemetry.add("transfers", kind="put", outcome="done")
    telemetry.observe("transfer_seconds", 0.002, kind="put", part="exposed")
    telemetry.gauge("tier_capacity_blocks", lambda: 8, tier="host")


def test_scraping_changes_nothing_and_shows_every_series_once() -> None:
    registry, telemetry = CollectorRegistry(), Telemetry()
    registry.register(telemetry.collector())
    exercise(telemetry)
    before = telemetry.snapshot()
    pages = [generate_latest(registry) for _ in range(5)]
    assert len(set(pages)) == 1
    assert telemetry.snapshot() == before
    series = [line.rsplit(" ", 1)[0] for line in pages[0].decode().splitlines() if line[0] != "#"]
    assert len(series) == len(set(series))
    text = pages[0].decode()
    assert 'flexkv_transfer_bytes_total{source="device",target="host"} 4096.0' in text
    assert 'flexkv_tier_capacity_blocks{tier="host"} 8.0' in text
    labels = {"kind": "put", "part": "exposed"}
    for edge, count in (("0.001", 0), ("0.003", 1), ("+Inf", 1)):
        name = "flexkv_transfer_seconds_bucket"
        assert registry.get_sample_value(name, {**labels, "le": edge}) == count


def test_stopping_and_starting_keeps_counts_and_duplicates_nothing() -> None:
    registry = CollectorRegistry()
    for life in range(1, 4):
        telemetry = Telemetry()
        expose(registry, telemetry)
        expose(registry, telemetry)
        exercise(telemetry)
        labels = {"kind": "put", "outcome": "done"}
        assert registry.get_sample_value("flexkv_transfers_total", labels) == life
        assert registry.get_sample_value("flexkv_tier_capacity_blocks", {"tier": "host"}) == 8
        telemetry.retire()
        assert registry.get_sample_value("flexkv_transfers_total", labels) == life
        assert (
            registry.get_sample_value(
                "flexkv_transfer_seconds_count", {"kind": "put", "part": "exposed"}
            )
            == life
        )
        assert registry.get_sample_value("flexkv_tier_capacity_blocks", {"tier": "host"}) is None
        assert telemetry.value("transfers", **labels) == 1  # its own books stay


def test_two_managers_on_one_registry_are_summed() -> None:
    registry, first, second = CollectorRegistry(), Telemetry(), Telemetry()
    assert expose(registry, first) is expose(registry, second)
    exercise(first)
    exercise(second)
    assert registry.get_sample_value("flexkv_tier_capacity_blocks", {"tier": "host"}) == 16
    first.retire()
    labels = {"source": "device", "target": "host"}
    assert registry.get_sample_value("flexkv_transfer_bytes_total", labels) == 8192
    assert registry.get_sample_value("flexkv_tier_capacity_blocks", {"tier": "host"}) == 8


def test_registering_reads_no_gauge() -> None:
    telemetry = Telemetry()
    reads: list[int] = []

    def read() -> float:
        reads.append(1)
        return 1

    telemetry.gauge("index_blocks", read)
    registry = CollectorRegistry()
    expose(registry, telemetry)
    assert not reads
    generate_latest(registry)
    assert len(reads) == 1


def test_a_retired_manager_is_let_go() -> None:
    class Manager:
        def free(self) -> float:
            return 1

    registry, telemetry, manager = CollectorRegistry(), Telemetry(), Manager()
    telemetry.gauge("index_blocks", manager.free)
    expose(registry, telemetry)
    gone = weakref.ref(manager)
    telemetry.retire()
    del manager
    gc.collect()
    assert gone() is None


def test_a_counter_kept_elsewhere_survives_its_keeper() -> None:
    registry, telemetry, evicted = CollectorRegistry(), Telemetry(), [3]
    telemetry.gauge("evicted_blocks", lambda: evicted[0], tier="host")
    expose(registry, telemetry)
    evicted[0] = 5
    assert telemetry.value("evicted_blocks", tier="host") == 5
    telemetry.retire()
    assert registry.get_sample_value("flexkv_evicted_blocks_total", {"tier": "host"}) == 5
    assert telemetry.value("evicted_blocks", tier="host") == 5


def test_the_logger_leaves_configuration_to_the_application() -> None:
    with capture_logs() as events:
        log.info("transfer.done", size_bytes=5)
    assert events == [{"event": "transfer.done", "size_bytes": 5, "log_level": "info"}]
