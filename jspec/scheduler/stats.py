"""What the scheduler says about itself, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jspec.messages.request import SpecCounters
from jspec.scheduler.outputs.token_history import Tally
from jspec.scheduler.shapes.shape_choice import NO_SHAPES, ShapeTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot for metrics. Totals are since the start and count committed ids only.

    num_pages, num_free_pages: of the full space; num_free_window_pages: of each other one. Free is
    also what is cached and held by no row. num_cached_pages, num_cached_window_pages: in the prefix
    cache, held or not.
    num_leaked_pages: lent pages, of whatever space, that no tenancy and no cache holds; 0 always,
    idle or not. num_emitted: all output tokens, prefill's included. num_cached_tokens: prompt
    tokens found in the prefix cache. counters: sums over all sequences.
    num_slow_readers: of num_aborted, those whose chunks nobody read.
    num_shared_keys: read by other rows of the same decodes for those that begin alike, as planned.
    num_restarts: times that the runner failed and was to be begun anew. num_faults: times that an
    invariant did not hold and slots and pages were counted anew. shapes: if they are chosen.
    num_steps: steps that were read, which is progress also while a long prompt emits nothing.
    """

    num_running: int
    num_queued: int
    num_pages: int
    num_free_pages: int
    num_leaked_pages: int
    num_steps_in_flight: int
    num_requests: int
    num_finished: int
    num_aborted: int
    num_retractions: int
    num_prompt_tokens: int
    num_emitted: int
    counters: SpecCounters
    num_free_window_pages: tuple[int, ...] = ()
    num_cached_window_pages: tuple[int, ...] = ()
    num_steps: int = 0
    num_cached_pages: int = 0
    num_cached_tokens: int = 0
    num_slow_readers: int = 0
    num_restarts: int = 0
    num_faults: int = 0
    num_shared_keys: int = 0
    shapes: ShapeTotals = NO_SHAPES

    @property
    def num_used_pages(self) -> int:
        """Of the full space, by sequences; what is only cached does not count."""
        return self.num_pages - self.num_free_pages

    @property
    def token_usage(self) -> float:
        """Share of the KV pool that sequences hold."""
        return self.num_used_pages / self.num_pages

    @property
    def cache_hit_rate(self) -> float:
        """Share of all prompt tokens that were found in the prefix cache."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    def to_json(self) -> dict[str, Any]:
        """What is live of SGLang's internal_states."""
        return {
            "avg_spec_accept_length": self.counters.acceptance_length,
            "num_running_reqs": self.num_running,
            "num_queue_reqs": self.num_queued,
            "num_leaked_pages": self.num_leaked_pages,
            **self._shape_now(),
        }

    def _shape_now(self) -> dict[str, Any]:
        """S of the moment, where it is chosen: SGLang's name for it is the argument's."""
        now = self.shapes.num_steps
        return {} if now is None else {"speculative_num_steps": now}


@dataclass(slots=True, kw_only=True)
class Totals:
    """What SchedulerStats adds up since the start; the scheduler's own, and it alone writes."""

    tally: Tally
    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_slow_readers: int = 0
    num_restarts: int = 0
    num_faults: int = 0
    num_retractions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_emitted: int = 0

    def by_name(self) -> dict[str, Any]:
        """As SchedulerStats names them."""
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "tally"}
        return {**counts, "counters": self.tally.counters}
