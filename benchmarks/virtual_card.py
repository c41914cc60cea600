"""A card in virtual time: the costs of a step on it, and a runner with those costs.

The figures are of one H200 with Llama-3.1-8B's shapes in bf16 and an EAGLE-3 chain 3/1/4
(benchmarks/results/h200_table.json).
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

from jspec.config.limits import ServeLimits
from jspec.messages.plan import RoundResult, StepKind, StepPlan, StepResult
from jspec.spec import indexing

# Rows of a decode step and its milliseconds; between them it is interpolated.
H200_CHAIN = ((1, 4.85), (8, 5.46), (32, 7.03), (64, 10.64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Costs of a step and of the host, in milliseconds.

    prefill_base + prefill_token * padded tokens, at least prefill_least (reading the weights);
    decode: (rows, ms) of the padded batch, ascending.

    plan, dispatch, read: of the host per step. row: of the host for each committed row, including
    its text and event, during which no other step can be planned. arrive: from a client's send
    until the request is queued. deliver: from the commit of a step until its events are read.
    """

    prefill_base: float = 1.6
    prefill_token: float = 0.0218
    prefill_least: float = 6.0
    decode: tuple[tuple[int, float], ...] = H200_CHAIN
    plan: float = 0.3
    dispatch: float = 1.5
    read: float = 0.3
    row: float = 0.06
    arrive: float = 1.5
    deliver: float = 0.7

    def step(self, plan: StepPlan, limits: ServeLimits) -> float:
        """Return the milliseconds of a step on the device, in the nearest of all its programs."""
        if not plan.is_prefill:
            return self.decode_step(indexing.bucket(len(plan.rows), limits.programs.decode_buckets))
        num_tokens = plan.num_prefill_tokens
        return self.prefill_step(indexing.bucket(num_tokens, limits.programs.prefill_buckets))

    def prefill_step(self, padded: int) -> float:
        return max(self.prefill_least, self.prefill_base + self.prefill_token * padded)

    def decode_step(self, padded: int) -> float:
        """Return milliseconds for `padded` rows, interpolated between measured batches."""
        sizes = [size for size, _ in self.decode]
        i = min(max(bisect.bisect_left(sizes, padded), 1), len(sizes) - 1)
        (low, less), (high, more) = self.decode[i - 1], self.decode[i]
        return less + (more - less) * (padded - low) / (high - low)


@dataclass(slots=True)
class _Running:
    plan: StepPlan
    begun: float
    end: float


class VirtualRunner:
    """A runner in virtual time; each verification emits `accepted` tokens. busy_ms: of the device.
    padded_tokens, prompt_tokens: of prefill steps, with and without padding.
    """

    def __init__(self, limits: ServeLimits, card: Card, *, accepted: int = 3) -> None:
        self._limits = limits
        self._card = card
        self._accepted = accepted
        self._free_at = 0.0
        self._in_flight: deque[_Running] = deque()
        self.busy_ms = 0.0
        self.num_steps = dict.fromkeys((StepKind.PREFILL, StepKind.DECODE), 0)
        self.prompt_tokens = self.padded_tokens = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def dispatch(self, plan: StepPlan, *, now: float) -> None:
        """Enqueue a step at `now`."""
        cost = self._card.step(plan, self._limits)
        begun = max(self._free_at, now)
        self._free_at = begun + cost
        self.busy_ms += cost
        self.num_steps[plan.kind] += 1
        if plan.is_prefill:
            num_tokens = plan.num_prefill_tokens
            self.prompt_tokens += num_tokens
            self.padded_tokens += indexing.bucket(num_tokens, self._limits.programs.prefill_buckets)
        self._in_flight.append(_Running(plan, begun, self._free_at))

    def collect(self) -> tuple[StepPlan, StepResult, float, float]:
        """Return the oldest step, its result, and its start and end on the device."""
        running = self._in_flight.popleft()
        plan = running.plan
        if not plan.is_prefill:
            ids: tuple[tuple[int, ...], ...] = ((0,) * self._accepted,) * len(plan.rows)
        else:
            ids = tuple((0,) if chunk.is_final else () for chunk in plan.chunks)
        result = StepResult(step=plan.step, rounds=(RoundResult.of(ids),))
        return plan, result, running.begun, running.end
