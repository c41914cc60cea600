"""Prometheus metrics under SGLang's names, and the rates of the decode log.

Counts and gauges are read off the scheduler's statistics when somebody asks; only latencies are
collected here, from the chunks as they pass. It knows no HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jspec.core.config import ServeLimits
from jspec.core.request import StreamChunk
from jspec.scheduler.stats import SchedulerStats
from jspec.server.background_checks import CheckCounts

TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
ITL_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
WINDOW_SECONDS = 10.0
MAX_SAMPLES = 1000  # a clock that often stands still would make a window of very many
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the last window. gen_throughput: output tokens a second; the others as in SGLang's log.

    has_tokens, has_verifications: whether the window holds any; without, the numbers mean nothing.
    """

    gen_throughput: float = 0.0
    acceptance_length: float = 0.0
    accept_rate: float = 0.0
    has_tokens: bool = False
    has_verifications: bool = False


class RateMeter:
    """Turns running totals into rates over the last WINDOW_SECONDS of `clock`.

    A clock that stands still while nothing runs (Engine.busy_seconds) leaves idle time out.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, SchedulerStats]] = deque(maxlen=MAX_SAMPLES)

    def sample(self, stats: SchedulerStats) -> None:
        """Remembers `stats` as of now; call it about once a second."""
        now = self._clock()
        if self._samples and _is_idle(self._samples[-1][1], stats):
            self._samples.clear()  # the window begins where the work does
        self._samples.append((now, stats))
        # The oldest sample stays until the next one is old enough to stand in for it.
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
            self._samples.popleft()

    def rates(self, stats: SchedulerStats) -> Rates:
        """Rates between the oldest sample and `stats`; zeros where nothing happened."""
        if not self._samples:
            return Rates()
        began, then = self._samples[0]
        seconds = self._clock() - began
        new, old = stats.counters, then.counters
        return Rates(
            gen_throughput=_ratio(stats.num_emitted - then.num_emitted, seconds),
            acceptance_length=_ratio(
                new.full_num_emitted - old.full_num_emitted,
                new.full_verify_ct - old.full_verify_ct,
            ),
            accept_rate=_ratio(
                new.num_accepted - old.num_accepted, new.num_proposed - old.num_proposed
            ),
            has_tokens=stats.num_emitted > then.num_emitted,
            has_verifications=new.full_verify_ct > old.full_verify_ct,
        )

    def seconds_until_left(self, stats: SchedulerStats, num_sequences: int) -> float:
        """About how long until that many sequences more have ended, at the window's pace.

        A window in which none ended stands for one that will end in as long again. From 1 to 60:
        a client that comes back is refused again at worst, one that waits for long is idle.
        """
        if not self._samples:
            return MIN_RETRY_SECONDS
        began, then = self._samples[0]
        num_ended = _num_ended(stats) - _num_ended(then)
        seconds = num_sequences * (self._clock() - began) / max(num_ended, 1)
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)


def _num_ended(stats: SchedulerStats) -> int:
    return stats.num_finished + stats.num_aborted


def _is_idle(old: SchedulerStats, new: SchedulerStats) -> bool:
    return new.num_running == 0 and new.num_emitted == old.num_emitted


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


def token_usage(stats: SchedulerStats) -> float:
    """Share of the KV pool that sequences hold; what is only cached does not count."""
    return _ratio(stats.num_pages - stats.num_free_pages, stats.num_pages)


class Latencies:
    """A histogram of seconds. bounds: upper, ascending; what is beyond the last has its own place.

    prometheus_client's own takes a lock and 2 us for each value, of which a step has hundreds.
    """

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, *, count: int = 1) -> None:
        """Counts a value `count` times; it belongs to the first bound that is not below it."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def metric(self, labels: Mapping[str, str]) -> Metric:
        """As of now, for the registry."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(
            f"sglang:{self._name}",
            f"{self._name}, measured where answers are written",
            labels=tuple(labels),
        )
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(tuple(labels.values()), buckets=buckets, sum_value=self._sum)
        return family


class ServerMetrics(Collector):
    """The registry of one server. `read_stats` is called at each scrape."""

    def __init__(
        self,
        *,
        model_name: str,
        limits: ServeLimits,
        read_stats: Callable[[], SchedulerStats],
        meter: RateMeter,
        read_checks: Callable[[], CheckCounts] = CheckCounts,
    ) -> None:
        self._read_checks = read_checks
        self._labels = {"model_name": model_name}
        self._limits = limits
        self._read_stats = read_stats
        self._meter = meter
        self._registry = CollectorRegistry()
        self._ttft = Latencies("time_to_first_token_seconds", TTFT_BUCKETS)
        self._itl = Latencies("inter_token_latency_seconds", ITL_BUCKETS)
        self._e2e = Latencies("e2e_request_latency_seconds", E2E_BUCKETS)

        self._latencies = (self._ttft, self._itl, self._e2e)
        self._registry.register(self)

    def render(self) -> bytes:
        """The exposition text, version 0.0.4."""
        return generate_latest(self._registry)

    def clock(self, *, started: float) -> RequestClock:
        """A stopwatch for one sequence, started at that time.monotonic()."""
        return RequestClock(ttft=self._ttft, itl=self._itl, e2e=self._e2e, started=started)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at a scrape."""
        yield from (latencies.metric(self._labels) for latencies in self._latencies)
        stats, spec = self._read_stats(), self._limits.spec
        counters = stats.counters
        gauges: dict[str, tuple[float, str]] = {
            "spec_accept_length": (
                counters.acceptance_length,
                "Mean tokens a verification emitted, bonus included, since the start",
            ),
            "spec_accept_rate": (
                _ratio(counters.num_accepted, counters.num_proposed),
                "Share of draft tokens that were accepted, since the start",
            ),
            "spec_num_steps": (spec.num_steps, "S: draft levels"),
            "spec_num_draft_tokens": (spec.num_draft_tokens, "N: tree nodes, root included"),
            "num_running_reqs": (stats.num_running, "Sequences that hold a slot"),
            "num_queue_reqs": (stats.num_queued, "Sequences that wait for one"),
            "token_usage": (token_usage(stats), "Share of the KV pool that sequences hold"),
            "cache_hit_rate": (
                stats.cache_hit_rate,
                "Share of all prompt tokens that were found in the prefix cache",
            ),
            "kv_available_tokens": (
                stats.num_free_pages * self._limits.page_size,
                "Tokens that free pages hold, and cached ones that no sequence uses",
            ),
            "gen_throughput": (
                self._meter.rates(stats).gen_throughput,
                f"Output tokens a second over the last {WINDOW_SECONDS:g} s in which steps ran",
            ),
        }
        totals: dict[str, tuple[float, str]] = {
            "sglang:spec_verify_calls": (counters.verify_ct, "Verifications, one a row and step"),
            "jspec:spec_accepted_drafts": (counters.num_accepted, "Draft tokens accepted"),
            "jspec:spec_proposed_drafts": (counters.num_proposed, "Draft tokens proposed"),
            "sglang:prompt_tokens": (stats.num_prompt_tokens, "Prompt tokens"),
            "sglang:cached_tokens": (
                stats.num_cached_tokens,
                "Prompt tokens found in the prefix cache",
            ),
            "sglang:generation_tokens": (stats.num_emitted, "Output tokens"),
            "sglang:num_requests": (stats.num_requests, "Sequences taken in"),
            "sglang:num_aborted_requests": (stats.num_aborted, "Sequences aborted"),
            "jspec:num_slow_readers": (
                stats.num_slow_readers,
                "Sequences aborted because nobody read what they made",
            ),
            "sglang:num_retracted_requests": (stats.num_retractions, "Retractions"),
            **_check_totals(self._read_checks()),
        }
        for name, (value, text) in gauges.items():
            gauge = GaugeMetricFamily(f"sglang:{name}", text, labels=tuple(self._labels))
            gauge.add_metric(tuple(self._labels.values()), value)
            yield gauge
        for name, (value, text) in totals.items():
            total = CounterMetricFamily(name, text, labels=tuple(self._labels))
            total.add_metric(tuple(self._labels.values()), value)
            yield total


def _check_totals(counts: CheckCounts) -> dict[str, tuple[float, str]]:
    """Of --verify-fraction."""
    return {
        "jspec:verify_requests": (counts.num_requests, "Answers that were scored again"),
        "jspec:verify_tokens": (counts.num_tokens, "Their tokens"),
        "jspec:verify_tie_flips": (
            counts.num_tie_flips,
            "Tokens that rounding let differ from the target's own choice",
        ),
        "jspec:verify_faults": (
            counts.num_faults,
            "Tokens that differ from the target's own choice by more than rounding",
        ),
        "jspec:verify_skipped": (counts.num_skipped, "Chosen answers that could not be checked"),
    }


class RequestClock:
    """Times of one sequence; an interval between chunks counts once for each of its tokens."""

    def __init__(self, *, ttft: Latencies, itl: Latencies, e2e: Latencies, started: float) -> None:
        self._ttft, self._itl, self._e2e = ttft, itl, e2e
        self._started = started
        self._last: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the request was taken."""
        return time.monotonic() - self._started

    def observe(self, chunk: StreamChunk) -> None:
        """Counts a chunk that came just now."""
        now = time.monotonic()
        if chunk.new_ids:
            if self._last is None:
                self._ttft.observe(now - self._started)
            else:
                num_ids = len(chunk.new_ids)
                self._itl.observe((now - self._last) / num_ids, count=num_ids)
            self._last = now
        if chunk.finish is not None:
            self._e2e.observe(now - self._started)
