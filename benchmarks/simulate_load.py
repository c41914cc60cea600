"""Serving under load in virtual time: the real scheduler, with a card that is a table of costs.

    python -m benchmarks.simulate_load [--set prefill_budget=4096] [--card row=0.1] [--seeds 4]

Three patterns of clients, those of the served table: 64 that are always busy, 12 requests per
second (Poisson), and a single one; prompts of 512 to 1,024 tokens, outputs of 128 to 256, lengths
and order from the seeded draws of the measuring client. One JSON object: the clients' latencies,
and the use of the device. It takes seconds, so that a policy can be chosen before it is measured.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.virtual_card import Card, VirtualRunner
from jspec.config.limits import Algorithm, ServeLimits, SpeculativeConfig
from jspec.messages.request import Request, SamplingParams, StreamChunk
from jspec.scheduler.scheduler import Scheduler
from jspec.spec.indexing import powers_of_two
from jspec.text.stream import IdsOnlyStream
from tests.support.flat_limits import PART_OF, flat_limits, with_limits

CHAIN = SpeculativeConfig(algorithm=Algorithm.EAGLE3, num_steps=3, topk=1, num_draft_tokens=4)
VOCAB = 120_000


@dataclass(frozen=True, slots=True)
class Job:
    """A request: tokens of its prompt and of its output."""

    prompt_len: int
    output_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Clients. rate: requests per second, 0: when one of the clients is free."""

    name: str
    num: int = 256
    clients: int
    rate: float = 0.0


PATTERNS = (
    Pattern(name="64 clients", clients=64),
    Pattern(name="12 a second", clients=256, rate=12.0),
    Pattern(name="one client", num=8, clients=1),
)


def draw(pattern: Pattern, *, seed: int = 0) -> tuple[list[Job], list[float]]:
    """Return the jobs and the earliest send time of each (ms), drawn as by the measuring client."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(pattern.num):
        job = Job(*(int(most * rng.uniform(0.5, 1)) for most in (1024, 256)))
        for _ in range(job.prompt_len):  # the prompt's ids
            rng.randrange(100, VOCAB)
        jobs.append(job)
    for job in jobs[: min(pattern.clients, 64, pattern.num)]:  # the warm-up prompts
        for _ in range(job.prompt_len):
            rng.randrange(100, VOCAB)
    times, now = [], 0.0
    for _ in jobs:
        times.append(now)
        now += 1e3 * rng.expovariate(pattern.rate) if pattern.rate else 0.0
    return jobs, times


@dataclass(slots=True)
class Seen:
    """A client's view of its request; times in ms. sent: when it was sent."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    def add(self, at: float, num_new: int) -> None:
        if self.num_tokens:
            self.gaps.append(at - self.last)
        else:
            self.first = at
        self.last, self.num_tokens = at, self.num_tokens + num_new


class Simulation:
    """One pattern against one scheduler. The host is one thread, like the engine's loop."""

    def __init__(self, limits: ServeLimits, card: Card, pattern: Pattern, *, seed: int = 0) -> None:
        self.runner = VirtualRunner(limits, card)
        self.seen: dict[str, Seen] = {}
        self._scheduler = Scheduler(limits, make_stream=lambda _: IdsOnlyStream())
        self._limits, self._card, self._pattern = limits, card, pattern
        jobs, times = draw(pattern, seed=seed)
        self._waiting = list(zip(times, jobs, strict=True))[::-1]
        self._arriving: list[tuple[float, int, Job]] = []  # a heap by queueing time
        self._number = itertools.count()
        self._now = 0.0
        self._num_out = 0

    def run(self) -> float:
        """Return the milliseconds until the last event was read."""
        self._send(0.0)
        while True:
            self._queue_arrived()
            plan = self._scheduler.plan()
            self._now += self._card.plan
            if plan is None and not self.runner.num_in_flight:
                if not self._arriving:
                    return max(seen.last for seen in self.seen.values())
                self._now = max(self._now, self._arriving[0][0])
                continue
            if plan is not None:
                self._now += self._card.dispatch
                self.runner.dispatch(plan, now=self._now)
            if plan is None or self.runner.num_in_flight > self._limits.scheduling.overlap_depth:
                self._collect()

    def _collect(self) -> None:
        plan, result, begun, end = self.runner.collect()
        self._scheduler.timed(plan, (end - begun) / 1e3)
        self._now = max(self._now, end) + self._card.read
        chunks = self._scheduler.commit(plan, result)
        self._now += self._card.row * len(chunks)
        read = self._now + self._card.deliver
        for chunk in chunks:
            self._deliver(chunk, read)

    def _deliver(self, chunk: StreamChunk, at: float) -> None:
        self.seen[chunk.request_id].add(at, len(chunk.new_ids))
        if chunk.finish is not None:
            self._num_out -= 1
            self._send(at)

    def _send(self, now: float) -> None:
        """Send all jobs with a fixed time, or one for each free client."""
        while self._waiting and self._num_out < self._pattern.clients:
            time, job = self._waiting.pop()
            sent, number = max(time, now), next(self._number)
            self._num_out += 1
            self.seen[str(number)] = Seen(sent)
            # Simultaneous requests are read one after the other.
            last = max((at for at, _, _ in self._arriving), default=0.0)
            at = max(sent + self._card.arrive, last + self._card.arrive / 4)
            heapq.heappush(self._arriving, (at, number, job))

    def _queue_arrived(self) -> None:
        while self._arriving and self._arriving[0][0] <= self._now:
            _, number, job = heapq.heappop(self._arriving)
            sampling = SamplingParams(
                max_new_tokens=job.output_len, temperature=0.0, ignore_eos=True
            )
            prompt_ids = (0,) * job.prompt_len
            request = Request(
                request_id=str(number), prompt_ids=prompt_ids, sampling=sampling, seed=number
            )
            self._scheduler.enqueue([request])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile as the measuring client computes it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(percent / 100 * len(ordered)))]


def report(simulation: Simulation, total: float) -> dict[str, Any]:
    """Return the lines of the served table, and the use of the device."""
    seen, runner = list(simulation.seen.values()), simulation.runner
    tokens = sum(each.num_tokens for each in seen)
    gaps = [gap for each in seen for gap in each.gaps]

    def both(values: Sequence[float]) -> list[float]:
        return [round(percentile(values, 50), 2), round(percentile(values, 99), 2)]

    return {
        "tokens_per_second": round(1e3 * tokens / total, 1),
        "ttft_ms": both([each.first - each.sent for each in seen]),
        "tpot_ms": both([(s.last - s.first) / (s.num_tokens - 1) for s in seen]),
        "gap_ms": both(gaps),
        "longest_gap_ms": round(max(gaps), 1),
        "e2e_ms": both([each.last - each.sent for each in seen]),
        "device_busy": round(runner.busy_ms / total, 3),
        "padding": round(1 - runner.prompt_tokens / runner.padded_tokens, 3),
        "steps": {kind.name.lower(): count for kind, count in runner.num_steps.items()},
    }


def mean(results: Sequence[Any]) -> Any:
    """Return the means of results of one structure, number by number."""
    first = results[0]
    if isinstance(first, dict):
        return {name: mean([each[name] for each in results]) for name in first}
    if isinstance(first, list):
        return [mean(each) for each in zip(*results, strict=True)]
    return round(sum(results) / len(results), 3)


def limits_of(**changes: Any) -> ServeLimits:
    """Return the limits of the measured engine: 64 rows with pages for all, no prefix cache."""
    limits = flat_limits(
        draft_shape=CHAIN,
        num_slots=64,
        num_pages=64 * 48,
        page_size=64,
        context_length=2048,
        decode_buckets=powers_of_two(1, 64),
        prefill_buckets=(
            *range(128, 1024, 128),
            *range(1024, 2048, 256),
            2048,
            3072,
            4096,
            6144,
            8192,
        ),
        prefill_rows=16,
        prefill_budget=2048,
        max_queued_requests=1024,
    )
    return with_limits(limits, **changes)


def simulate(
    limits: ServeLimits, card: Card, patterns: Iterable[Pattern] = PATTERNS, *, seed: int = 0
) -> dict[str, Any]:
    """Return `report` of each pattern, by its name."""
    results = {}
    for pattern in patterns:
        simulation = Simulation(limits, card, pattern, seed=seed)
        results[pattern.name] = report(simulation, simulation.run())
    return results


def _number(text: str) -> Any:
    """Parse a limit or a cost: 4096, 0.5, or sizes 128,256."""
    if "," in text:
        return tuple(int(size) for size in text.split(","))
    return float(text) if "." in text else int(text)


def _given(words: Sequence[str], known: Iterable[str]) -> dict[str, Any]:
    """Parse name=value, each name among `known`. Raises SystemExit."""
    names, given = sorted(known), {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in names:
            raise SystemExit(f"{name!r} is unknown; expected one of {', '.join(names)}")
        given[name] = _number(value)
    return given


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Simulate, print one JSON object and return it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="LIMIT=N", help="of ServeLimits")
    parser.add_argument("--card", nargs="*", default=[], metavar="COST=MS", help="of Card")
    parser.add_argument("--seeds", type=int, default=1, help="draws of clients, averaged")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    limits = limits_of(**_given(args.set, PART_OF))
    card = Card(**_given(args.card, (each.name for each in fields(Card))))
    result = {
        "command": " ".join(["python -m benchmarks.simulate_load", *(arguments or sys.argv[1:])]),
        "card": asdict(card),
        "prefill_buckets": limits.programs.prefill_buckets,
        "prefill_budget": limits.scheduling.prefill_budget,
        "patterns": mean([simulate(limits, card, seed=seed) for seed in range(args.seeds)]),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return result


if __name__ == "__main__":
    main()
