"""Measurements of requests, and the figures computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_ERRORS_SAID = 3


@dataclass(frozen=True, slots=True)
class Span:
    index: int
    sent: float
    first: float
    last: float
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class Seen:
    """Measurements of one or many requests; times are seconds of time.perf_counter()."""

    num_tokens: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)  # request to first token
    tpot: list[float] = field(default_factory=list)  # mean time between later tokens, per request
    itl: list[float] = field(default_factory=list)  # gaps divided by their tokens, one per token
    gaps: list[float] = field(default_factory=list)  # time between two events with new tokens
    e2e: list[float] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)  # by a traced request's name
    first: dict[str, float] = field(default_factory=dict)  # time of its first token, by that name
    errors: list[str] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    output_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by index of the job
    histogram: list[int] = field(default_factory=list)  # [i]: verifications that accepted i

    def add_histogram(self, counts: Sequence[int]) -> None:
        self.histogram += [0] * (len(counts) - len(self.histogram))
        for depth, count in enumerate(counts):
            self.histogram[depth] += count


class Stopwatch:
    def __init__(self, started: float) -> None:
        self._started = self._last = started
        self._first: float | None = None
        self.num_tokens = 0
        self._gaps: list[float] = []
        self._itl: list[float] = []

    def tokens(self, num_tokens: int, now: float) -> None:
        num_new = num_tokens - self.num_tokens
        if num_new <= 0:
            return
        if self._first is None:
            self._first = now
        else:
            self._gaps.append(now - self._last)
            self._itl += [(now - self._last) / num_new] * num_new
        self.num_tokens, self._last = num_tokens, now

    def finish(
        self, seen: Seen, *, new_tokens: int, is_exact: bool, prompt_tokens: int, index: int
    ) -> float | None:
        """Return the time of the first token. For an unexpected answer, record an error instead."""
        is_wrong = is_exact and self.num_tokens != new_tokens
        if self._first is None or is_wrong:
            seen.errors.append(f"{self.num_tokens} tokens came; expected {new_tokens}")
            return None
        seen.num_tokens += self.num_tokens
        seen.prompt_tokens.append(prompt_tokens)
        seen.ttft.append(self._first - self._started)
        seen.e2e.append(self._last - self._started)
        if self.num_tokens > 1:
            seen.tpot.append((self._last - self._first) / (self.num_tokens - 1))
        seen.gaps += self._gaps
        seen.itl += self._itl
        seen.spans.append(Span(index, self._started, self._first, self._last, self.num_tokens))
        return self._first


def summary(seen: Seen, seconds: float) -> dict[str, Any]:
    """Return the figures of a point; pairs are p50 and p99, in milliseconds."""
    return {
        "seconds": round(seconds, 3),
        "num_finished": len(seen.e2e),
        "prompt_tokens": sum(seen.prompt_tokens),
        "output_tokens": seen.num_tokens,
        "output_tokens_per_second": round(seen.num_tokens / seconds, 1),
        "ttft_ms": _p50_p99(seen.ttft),
        "tpot_ms": _p50_p99(seen.tpot),
        "itl_ms": _p50_p99(seen.itl),
        "gap_ms": _p50_p99(seen.gaps),
        "e2e_ms": _p50_p99(seen.e2e),
        "num_errors": len(seen.errors),
        "errors": list(dict.fromkeys(seen.errors))[:MAX_ERRORS_SAID],
    }


def acceptance(histogram: Sequence[int]) -> dict[str, Any] | None:
    """Summarize a histogram of verifications that accepted 0, 1, ... drafts; None if empty.

    by_depth has the share of verifications that accepted each depth, among all and among those that
    accepted its parent. Truncated last verifications count unchanged.

        In:  [2, 1, 1]
        Out: tokens_per_verification 1.75, shares 0.5 and 0.25, given the parent 0.5 and 0.5
    """
    total = sum(histogram)
    if not total or len(histogram) < 2:
        return None
    reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
    accepted = sum(depth * count for depth, count in enumerate(histogram))
    return {
        "num_verifications": total,
        "tokens_per_verification": round(1 + accepted / total, 3),
        "by_depth": [
            {
                "depth": depth,
                "share": round(reached[depth] / total, 4),
                "given_parent": round(reached[depth] / reached[depth - 1], 4)
                if reached[depth - 1]
                else None,
            }
            for depth in range(1, len(histogram))
        ],
    }


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over runs, elementwise for pairs. Errors are summed."""
    found: dict[str, Any] = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs]
        if name == "num_errors":
            found[name] = sum(values)
        elif name == "errors":
            said = dict.fromkeys(text for texts in values for text in texts)
            found[name] = list(said)[:MAX_ERRORS_SAID]
        elif isinstance(first, list):
            found[name] = [_median(places) for places in zip(*values, strict=True)]
        else:
            found[name] = _median(values)
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest rank from below; nan if empty. The 99th of 200 values is index 198."""
    if not values:
        return float("nan")
    return sorted(values)[min(int(percent / 100 * len(values)), len(values) - 1)]


def _p50_p99(seconds: Sequence[float]) -> list[float | None]:
    if not seconds:
        return [None, None]
    return [round(1e3 * percentile(seconds, percent), 2) for percent in (50, 99)]
