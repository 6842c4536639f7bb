"""Telemetry: the logger, counters that are true, and a Prometheus collector that only reads.

`log` (structured events, one per request) - `Telemetry.add`, `observe`, `gauge` (what a manager
counts) - `snapshot` (all of it as plain data) - `collector`, `expose` (for a registry of the
caller) - `retire` (the manager is gone, its counts stay). Configuring structlog belongs to the
application.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import structlog

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

log = structlog.get_logger("flexkv")

_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Series(NamedTuple):
    """One metric: kind, what it says, its labels in order; `bounds` are upper edges of buckets."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = _SECONDS


METRICS: dict[str, Series] = {
    # what was asked for
    "flexkv_requests_total": Series(
        "counter", "requests by kind and how they ended", ("kind", "outcome")
    ),
    "flexkv_queried_blocks_total": Series("counter", "blocks looked up in a tier", ("tier",)),
    "flexkv_cache_hit_blocks_total": Series("counter", "blocks a tier could serve", ("tier",)),
    "flexkv_cache_miss_blocks_total": Series("counter", "blocks no tier could serve"),
    # what became of it
    "flexkv_loaded_blocks_total": Series(
        "counter", "blocks that reached the device, by the tier they were in", ("tier",)
    ),
    "flexkv_stored_blocks_total": Series(
        "counter", "blocks that became readable in a tier", ("tier",)
    ),
    "flexkv_failed_blocks_total": Series(
        "counter", "blocks whose I/O or copy failed", ("tier", "operation")
    ),
    "flexkv_damaged_blocks_total": Series(
        "counter", "blocks whose bytes were wrong and were dropped", ("tier",)
    ),
    "flexkv_shared_reads_blocks_total": Series(
        "counter", "blocks that waited for a read another request had begun", ("tier",)
    ),
    # what moved
    "flexkv_transfer_blocks_total": Series("counter", "blocks moved", ("source", "target")),
    "flexkv_transfer_ops_total": Series("counter", "copy operations", ("source", "target")),
    "flexkv_transfer_bytes_total": Series("counter", "bytes moved", ("source", "target")),
    # what had to go
    "flexkv_evicted_blocks_total": Series("counter", "blocks evicted from a tier", ("tier",)),
    "flexkv_allocation_failures_total": Series(
        "counter", "requests for slots that a tier could not meet", ("tier",)
    ),
    "flexkv_dropped_blocks_total": Series(
        "counter", "blocks of work given up under load", ("work",)
    ),
    "flexkv_deadlines_total": Series(
        "counter", "operations that passed their deadline", ("operation",)
    ),
    # how long it took
    "flexkv_request_seconds": Series("histogram", "from the call to its result", ("kind",)),
    "flexkv_exposed_seconds": Series("histogram", "transfer time somebody waited for", ("kind",)),
    "flexkv_hidden_seconds": Series(
        "histogram", "transfer time that passed beside other work", ("kind",)
    ),
    "flexkv_transfer_seconds": Series(
        "histogram", "duration of one operation", ("source", "target")
    ),
    "flexkv_match_seconds": Series("histogram", "duration of a match"),
    # how it stands
    "flexkv_mempool_total_blocks": Series("gauge", "slots of a tier", ("tier",)),
    "flexkv_mempool_free_blocks": Series("gauge", "free slots of a tier", ("tier",)),
    "flexkv_mempool_in_flight_blocks": Series(
        "gauge", "slots of a tier with bytes on their way", ("tier",)
    ),
    "flexkv_tier_up": Series(
        "gauge", "1 while a tier is in use, 0 when it was switched off", ("tier",)
    ),
    "flexkv_lane_queued_ops": Series("gauge", "operations waiting for a lane", ("lane",)),
    "flexkv_lane_in_flight_bytes": Series("gauge", "bytes in flight in a lane", ("lane",)),
    "flexkv_requests_in_flight": Series("gauge", "requests that have not ended", ("kind",)),
    "flexkv_spill_queued_blocks": Series("gauge", "blocks waiting to be spilled"),
    "flexkv_index_blocks": Series("gauge", "entries of the index"),
    "flexkv_pinned_blocks": Series("gauge", "pins held by requests and plans"),
    "flexkv_tickets_in_flight": Series("gauge", "batches of hardware work in flight"),
}

Key = tuple[str, ...]  # name, then the values of its labels


class Histogram:
    """Counts per bucket (the last one has no upper edge), and the sum of what was observed."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = [
            ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)
        ]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper edge, values up to it) as Prometheus wants them."""
        edges = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        sums, running = [], 0
        for edge, count in zip(edges, list(self.counts), strict=True):
            running += count
            sums.append((edge, float(running)))
        return sums


class Telemetry:
    """What one manager counts. Counts come from one thread (the loop); any thread may read.

    Names and labels are those of METRICS; anything else is an error. Counters never go back.
    """

    def __init__(self) -> None:
        self.counters: dict[Key, float] = {
            (name,): 0.0
            for name, kind in METRICS.items()
            if kind.kind == "counter" and not kind.labels
        }
        self.histograms: dict[Key, Histogram] = {}
        self.gauges: dict[Key, Callable[[], float]] = {}
        self._watchers: weakref.WeakSet[Collector] = weakref.WeakSet()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count up by `amount` (>= 0; 0 makes the series appear)."""
        key = (name, *labels.values())
        try:
            self.counters[key] += amount
        except KeyError:
            key = _key("counter", name, labels)
            self.counters[key] = self.counters.get(key, 0.0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Count a value into a histogram."""
        key = (name, *labels.values())
        found = self.histograms.get(key)
        if found is None:
            key = _key("histogram", name, labels)
            found = self.histograms.setdefault(key, Histogram(METRICS[name].bounds))
        found.observe(value)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Let `read()` answer for a gauge whenever somebody looks; it must not change anything."""
        self.gauges[_key("gauge", name, labels)] = read

    def value(self, name: str, **labels: str) -> float:
        """Return a counter or gauge (0 if never touched), or how many values a histogram has."""
        kind = METRICS[name].kind
        key = _key(kind, name, labels)
        if kind == "gauge":
            return float(self.gauges[key]()) if key in self.gauges else 0.0
        if kind == "histogram":
            return float(sum(self.histograms[key].counts)) if key in self.histograms else 0.0
        return self.counters.get(key, 0.0)

    def snapshot(self) -> dict[str, Any]:
        """Return everything as plain data: {name: value} or {name: {"label=value,...": value}}.

        Histograms become {"count", "sum"}.
        """
        result: dict[str, Any] = {}
        for key, value in self._plain():
            name, *labels = key
            if not labels:
                result[name] = value
                continue
            text = ",".join(f"{a}={b}" for a, b in zip(METRICS[name].labels, labels, strict=True))
            result.setdefault(name, {})[text] = value
        return result

    def _plain(self) -> Iterator[tuple[Key, Any]]:
        yield from list(self.counters.items())
        for key, read in list(self.gauges.items()):
            yield key, float(read())
        for key, item in list(self.histograms.items()):
            yield key, {"count": sum(item.counts), "sum": item.total}

    def collector(self) -> Collector:
        """Return a Prometheus collector of this telemetry alone: `registry.register(collector)`."""
        collector = Collector()
        collector.watch(self)
        return collector

    def retire(self) -> None:
        """Say that the manager is closed: gauges end, counts stay with collectors. Do it last."""
        self.gauges.clear()
        for collector in list(self._watchers):
            collector.fold(self)
        self._watchers.clear()


def _key(kind: str, name: str, labels: Mapping[str, str]) -> Key:
    """Check a name and its labels; return the key with labels in their declared order."""
    series = METRICS.get(name)
    if series is None or series.kind != kind:
        raise ValueError(f"{name!r} is not a {kind}; declare it in METRICS first")
    if set(labels) != set(series.labels):
        raise ValueError(f"{name} has the labels {series.labels}, got {tuple(labels)}")
    if tuple(labels) != series.labels:
        raise ValueError(f"{name}: give its labels in the order {series.labels}")
    return (name, *labels.values())


class Collector:
    """Reads the counts of every live manager and of those that are gone; changes nothing.

    Several managers on one registry are summed: each series appears once, and a manager that stops
    and starts again goes on counting where it was.
    """

    def __init__(self) -> None:
        self._live: list[Telemetry] = []
        self._past = Telemetry()
        self._lock = threading.Lock()

    def watch(self, telemetry: Telemetry) -> None:
        """Read `telemetry` from now on; asking twice is fine."""
        with self._lock:
            if telemetry not in self._live:
                self._live.append(telemetry)
                telemetry._watchers.add(self)

    def fold(self, telemetry: Telemetry) -> None:
        """Keep the counts of a retired telemetry and let go of it."""
        with self._lock:
            if telemetry in self._live:
                self._live.remove(telemetry)
                _merge(self._past, telemetry)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, so that registering reads nothing."""
        return [_family(name) for name in METRICS]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with all samples, each series once."""
        with self._lock:
            total = Telemetry()
            gauges: dict[Key, float] = {}
            for part in (self._past, *self._live):
                _merge(total, part)
                for key, read in list(part.gauges.items()):
                    gauges[key] = gauges.get(key, 0.0) + float(read())
        families = {name: _family(name) for name in METRICS}
        for (name, *labels), value in (*total.counters.items(), *gauges.items()):
            families[name].add_metric(labels, value)
        for (name, *labels), item in total.histograms.items():
            families[name].add_metric(labels, item.cumulative(), item.total)
        return list(families.values())


def _merge(target: Telemetry, source: Telemetry) -> None:
    for key, value in list(source.counters.items()):
        target.counters[key] = target.counters.get(key, 0.0) + value
    for key, item in list(source.histograms.items()):
        target.histograms.setdefault(key, Histogram(item.bounds)).merge(item)


def _family(name: str) -> Any:
    from prometheus_client import core

    series = METRICS[name]
    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[series.kind](name, series.help, labels=series.labels)


_exposed: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()


def expose(registry: CollectorRegistry, telemetry: Telemetry) -> Collector:
    """Show `telemetry` on the caller's registry, through the one collector flexkv has there.

    A second manager in the same process, or one that was stopped and started again, neither raises
    nor duplicates series nor loses counts.
    """
    collector = _exposed.get(registry)
    if collector is None:
        collector = Collector()
        registry.register(collector)
        _exposed[registry] = collector
    collector.watch(telemetry)
    return collector
