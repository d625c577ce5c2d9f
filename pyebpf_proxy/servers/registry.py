# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and histograms as plain numbers, and their text for Prometheus.

Writers only add to numbers and never wait. A scrape copies the numbers, and formats them in the servers' thread.
prometheus_client writes the text. Names, help and bucket labels are those of kube-proxy's library: for example,
``le="1"``, where Python has ``le="1.0"``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pyebpf_proxy.config.gotext import general_text

#: Buckets "exp15" of spec/metrics §1, seconds.
EXP15 = tuple(0.001 * 2**power for power in range(15))
#: Buckets "netprog". The leading 0 is as in kube-proxy.
NETPROG = (0.0, 0.25, 0.5, *map(float, (*range(1, 60), *range(60, 120, 5), *range(120, 301, 30))))

Labels = tuple[str, ...]


class MetricFamily(Protocol):
    """One metric with its samples."""

    name: str

    def collect(self) -> Metric:
        """A copy of the current values."""


class Counter:
    """A number for each combination of label values that has occurred; without labels, one that starts at 0."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = CounterMetricFamily

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self._text = text
        self._labels = list(labels)
        self._values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, value: float = 1.0) -> None:
        """Add ``value`` to the number of these label values. Only one thread may write a metric."""
        self._values[labels] = self._values.get(labels, 0.0) + value

    def clear(self) -> None:
        """Remove all combinations of label values."""
        self._values.clear()

    def get(self, *labels: str) -> float:
        """The current number; 0 if it was never written."""
        return self._values.get(labels, 0.0)

    def collect(self) -> Metric:
        """A copy of the present values."""
        family = self.kind(self.name, self._text, labels=self._labels)
        for labels, value in sorted(self._values.copy().items()):
            family.add_metric(labels, value)
        return family


class Gauge(Counter):
    """A number that is set instead of added to."""

    kind = GaugeMetricFamily

    def set(self, *labels: str, value: float) -> None:
        """Set the number to ``value``."""
        self._values[labels] = value

    def replace(self, values: Mapping[Labels, float]) -> None:
        """Replace all samples by these, by label values."""
        self._values = dict(values)


class Histogram:
    """The number of values in each bucket."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self.name = name
        self._text = text
        self._labels = list(labels)
        self._bounds = tuple(bounds)
        self._texts = [*map(general_text, bounds), "+Inf"]
        # For each combination of label values, a list: the counts of the buckets, then the sum.
        self._values: dict[Labels, list[float]] = {} if labels else {(): self._zeroes()}

    def observe(self, *labels: str, value: float) -> None:
        """Record one value."""
        counts = self._values.get(labels)
        if counts is None:
            counts = self._values[labels] = self._zeroes()
        counts[bisect_left(self._bounds, value)] += 1
        counts[-1] += value

    def collect(self) -> Metric:
        """A copy of the present values."""
        family = HistogramMetricFamily(self.name, self._text, labels=self._labels)
        for labels, counts in sorted(self._values.copy().items()):
            *numbers, total = counts.copy()
            buckets = []
            seen = 0.0
            for text, number in zip(self._texts, numbers, strict=True):
                seen += number
                buckets.append((text, seen))
            family.add_metric(labels, buckets, total)
        return family

    def _zeroes(self) -> list[float]:
        return [0.0] * (len(self._bounds) + 2)


class Read:
    """Numbers that are stored elsewhere and read at every scrape."""

    def __init__(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        text: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[Labels, float]]],
    ) -> None:
        """``read`` is called in the servers' thread and must be fast."""
        self.name = name
        self._make: Callable[[], CounterMetricFamily | GaugeMetricFamily] = partial(
            kind, name, text, labels=list(labels)
        )
        self._read = read

    def collect(self) -> Metric:
        """The current values."""
        family = self._make()
        for labels, value in self._read():
            family.add_metric(labels, value)
        return family


class Registry:
    """All metrics, sorted by name."""

    def __init__(self) -> None:
        self._families: list[MetricFamily] = []
        self._others: list[Callable[[], Iterable[Metric]]] = []

    def add(self, *families: MetricFamily) -> None:
        """Add metrics; duplicate names are an error."""
        self._families += families
        assert len(self.names) == len(set(self.names)), self.names

    def add_collector(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Add a collector that produces its metrics at every scrape."""
        self._others.append(collect)

    @property
    def names(self) -> list[str]:
        """The names of the metrics given to ``add``."""
        return [family.name for family in self._families]

    def collect(self) -> Iterator[Metric]:
        """All current metrics; one without samples is left out, as in Go's library."""
        metrics = [family.collect() for family in self._families]
        for collect in self._others:
            metrics += collect()
        yield from sorted((metric for metric in metrics if metric.samples), key=lambda metric: metric.name)


#: Prometheus also asks for OpenMetrics, but its buckets are ``le="1.0"``. Kube-proxy does not offer it: ``le="1"``.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"


def text(registry: Registry) -> bytes:
    """The body of a scrape, in Prometheus' text format."""
    from prometheus_client import exposition

    return exposition.generate_latest(_Collected(list(registry.collect())))


class _Collected:
    """A registry for prometheus_client."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics
