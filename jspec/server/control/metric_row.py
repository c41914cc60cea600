"""A metric: its names, kind and meaning, and how a scrape reads it from a snapshot."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from jspec.config.limits import ServeLimits
from jspec.messages.request import FinishKind
from jspec.scheduler.stats import SchedulerStats

TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class MetricKind(enum.Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Histogram:
    """Counts of values by bucket. prometheus_client's version takes a lock and 2 us per value."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds  # ascending upper bounds; larger values have their own bucket
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, *, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class Observed:
    def __init__(self) -> None:
        self.ttft = Histogram(TTFT_BUCKETS)
        self.itl = Histogram(ITL_BUCKETS)
        self.e2e = Histogram(E2E_BUCKETS)
        self.decode = Histogram(E2E_BUCKETS)
        self.tpot = Histogram(ITL_BUCKETS)
        self.prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.output_tokens = Histogram(TOKEN_BUCKETS)
        self.num_finished = dict.fromkeys(FinishKind, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    stats: SchedulerStats
    limits: ServeLimits
    loras: Sequence[str]  # loaded adapters
    max_loras: int
    observed: Observed
    balancedness: Mapping[int, float]  # of the experts of each layer, if they are counted
    gen_throughput: float  # output tokens per second of the last window


Value = float | Histogram | Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One value and its metric names, counters without their _total."""

    names: tuple[str, ...]
    kind: MetricKind
    text: str
    read: Callable[[Snapshot], Value]
    labels: tuple[str, ...] = ()  # for the keys of a mapping that `read` returns

    @property
    def exposed(self) -> tuple[str, ...]:
        """Names in queries; a histogram's also get _bucket, _sum and _count."""
        end = "_total" if self.kind is MetricKind.COUNTER else ""
        return tuple(name + end for name in self.names)

    def metrics(self, snapshot: Snapshot, labels: Mapping[str, str]) -> list[Metric]:
        value = self.read(snapshot)
        return [self._metric(name, value, labels) for name in self.names]

    def _metric(self, name: str, value: Value, labels: Mapping[str, str]) -> Metric:
        own = [*labels.values()]
        names = (*labels, *self.labels)
        if isinstance(value, Histogram):
            histogram = HistogramMetricFamily(name, self.text, labels=names)
            value.add_to(histogram, own)
            return histogram
        is_counter = self.kind is MetricKind.COUNTER
        family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
            name, self.text, labels=names
        )
        by_label = value if isinstance(value, Mapping) else {(): value}
        for key, each in by_label.items():
            family.add_metric([*own, *key], each)
        return family
