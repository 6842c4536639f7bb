"""Telemetry: the logger, counters that are true, and a Prometheus collector that only reads.

`log` (structured events, one per request) - `Telemetry.add`, `observe`, `gauge` (what a manager
counts) - `snapshot` (all of it as plain data) - `collector`, `expose` (for a registry of the
caller) - `retire` (the manager is gone, its counts stay). Configuring structlog belongs to the
application.
"""

from __future__ import annotations

import bisect
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from flexkv.metrics import METRICS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class _Log:
    """The application's structlog where it has configured one, else the standard `logging`.

    structlog that nobody configured prints everything to stdout, which is the application's; the
    logger "flexkv" of the standard library stays quiet below WARNING and writes to stderr.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger("flexkv")
        self._standard = structlog.wrap_logger(
            self._logger,
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        ).bind()

    def debug(self, event: str, **facts: Any) -> None:
        """Log what happens once per request; costs next to nothing where nobody listens."""
        if structlog.is_configured():
            structlog.get_logger("flexkv").debug(event, **facts)
        elif self._logger.isEnabledFor(logging.DEBUG):
            self._standard.debug(event, **facts)

    def __getattr__(self, name: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger("flexkv"), name)
        return getattr(self._standard, name)


log: Any = _Log()

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
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
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
        self.readers: dict[Key, Callable[[], float]] = {}
        self.watchers: weakref.WeakSet[Collector] = weakref.WeakSet()
        # told of every get and put: kind, tokens, keys of the whole blocks, time in seconds
        self.on_request: Callable[[str, int, NDArray[np.uint64], float], None] | None = None

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count up by `amount` (>= 0; 0 makes the series appear)."""
        key = (name, *labels.values())
        try:
            self.counters[key] += amount
        except KeyError:
            key = _key(("counter",), name, labels)
            self.counters[key] = self.counters.get(key, 0.0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Count a value into a histogram."""
        key = (name, *labels.values())
        found = self.histograms.get(key)
        if found is None:
            key = _key(("histogram",), name, labels)
            found = self.histograms.setdefault(key, Histogram(METRICS[name].bounds))
        found.observe(value)

    def gauge(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Let `read()` answer whenever somebody looks; it must change nothing.

        Counters that somebody else keeps may be offered in the same way.
        """
        self.readers[_key(("gauge", "counter"), name, labels)] = read

    def value(self, name: str, **labels: str) -> float:
        """Return a counter or gauge (0 if never touched), or how many values a histogram has."""
        key = _key(("counter", "gauge", "histogram"), name, labels)
        if key in self.histograms:
            return float(sum(self.histograms[key].counts))
        return self.read_all(key).get(key, 0.0)

    def read_all(self, *keys: Key) -> dict[Key, float]:
        """Return the counters and gauges, of `keys` or all."""
        values = {
            key: self.counters[key] for key in keys or list(self.counters) if key in self.counters
        }
        for key, read in list(self.readers.items()):
            if not keys or key in keys:
                values[key] = values.get(key, 0.0) + float(read())
        return values

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
        yield from self.read_all().items()
        for key, item in list(self.histograms.items()):
            yield key, {"count": sum(item.counts), "sum": item.total}

    def collector(self) -> Collector:
        """Return a Prometheus collector of this telemetry alone: `registry.register(collector)`."""
        collector = Collector()
        collector.watch(self)
        return collector

    def retire(self) -> None:
        """Say that the manager is about to close: gauges end, counts stay with collectors.

        Do it last, but while what the gauges read is still there.
        """
        totals = self.read_all()
        self.counters.update({key: value for key, value in totals.items() if _is_counter(key)})
        self.readers.clear()
        for collector in list(self.watchers):
            collector.fold(self)
        self.watchers.clear()


def _is_counter(key: Key) -> bool:
    return METRICS[key[0]].kind == "counter"


def _key(kinds: tuple[str, ...], name: str, labels: Mapping[str, str]) -> Key:
    """Check a name and its labels; return the key."""
    series = METRICS.get(name)
    if series is None or series.kind not in kinds:
        raise ValueError(f"{name!r} is not a {' or '.join(kinds)}; declare it in METRICS first")
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
                telemetry.watchers.add(self)

    def fold(self, telemetry: Telemetry) -> None:
        """Keep the counts of a retired telemetry and let go of it."""
        with self._lock:
            if telemetry in self._live:
                self._live.remove(telemetry)
                for key, value in telemetry.counters.items():
                    self._past.counters[key] = self._past.counters.get(key, 0.0) + value
                _merge(self._past.histograms, telemetry.histograms)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without samples, so that registering reads nothing."""
        return [_family(name) for name in METRICS]

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with all samples, each series once."""
        with self._lock:
            values: dict[Key, float] = {}
            histograms: dict[Key, Histogram] = {}
            for part in (self._past, *self._live):
                for key, value in part.read_all().items():
                    values[key] = values.get(key, 0.0) + value
                _merge(histograms, part.histograms)
        families = {name: _family(name) for name in METRICS}
        for (name, *labels), value in values.items():
            families[name].add_metric(labels, value)
        for (name, *labels), item in histograms.items():
            families[name].add_metric(labels, item.cumulative(), item.total)
        return list(families.values())


def _merge(target: dict[Key, Histogram], source: Mapping[Key, Histogram]) -> None:
    for key, item in list(source.items()):
        target.setdefault(key, Histogram(item.bounds)).merge(item)


def _family(name: str) -> Any:
    from prometheus_client import core

    series = METRICS[name]
    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[series.kind](f"flexkv_{name}", series.help, labels=series.labels)


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
