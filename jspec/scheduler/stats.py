"""Scheduler statistics, for metrics and logs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jspec.messages.request import SpecCounters
from jspec.scheduler.outputs.token_history import Tally
from jspec.scheduler.shapes.shape_choice import NO_SHAPES, ShapeTotals


@dataclass(frozen=True, slots=True)
class RankStats:
    num_running: int
    num_used_pages: int  # of the full space


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot for metrics, over all data ranks.

    Totals are since the start and count committed ids only. Page counts without `window` are of the
    full space; free ones include unused cached ones.
    """

    num_running: int
    num_queued: int
    num_pages: int
    num_free_pages: int
    num_leaked_pages: int  # of any space, in use without a row; 0 unless there is a bug
    num_steps_in_flight: int
    num_requests: int
    num_finished: int
    num_aborted: int
    num_retractions: int
    num_prompt_tokens: int
    num_emitted: int  # output tokens, including those of prefills
    counters: SpecCounters  # sums over all sequences
    num_callers_waiting: int = 0
    most_rows_of_a_caller: int = 0
    # Sequences with a LoRA adapter, by its name.
    running_by_lora: Counter[str] = field(default_factory=Counter)
    waiting_by_lora: Counter[str] = field(default_factory=Counter)
    num_free_window_pages: tuple[int, ...] = ()
    num_cached_window_pages: tuple[int, ...] = ()  # in the prefix cache, in use or not
    num_steps: int = 0  # steps read, which increase also while a long prompt emits nothing
    num_cached_pages: int = 0  # in the prefix cache, in use or not
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_slow_readers: int = 0  # of num_aborted, those whose reader left too much unread
    num_restarts: int = 0  # runner failures followed by a restart attempt
    num_faults: int = 0  # broken invariants, after which slots and pages were reset
    num_shared_keys: int = 0  # planned key reads saved by rows that share a prefix
    shapes: ShapeTotals = NO_SHAPES  # if shapes are adaptive
    by_rank: tuple[RankStats, ...] = ()  # of each data rank

    @property
    def num_used_pages(self) -> int:
        """Pages of the full space that sequences use, without pages that are only cached."""
        return self.num_pages - self.num_free_pages

    @property
    def token_usage(self) -> float:
        return self.num_used_pages / self.num_pages

    @property
    def cache_hit_rate(self) -> float:
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "avg_spec_accept_length": self.counters.acceptance_length,
            "num_running_reqs": self.num_running,
            "num_queue_reqs": self.num_queued,
            "num_leaked_pages": self.num_leaked_pages,
            **self._shape_now(),
        }

    def _shape_now(self) -> dict[str, Any]:
        now = self.shapes.num_steps
        return {} if now is None else {"speculative_num_steps": now}


@dataclass(slots=True, kw_only=True)
class Totals:
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
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "tally"}
        return {**counts, "counters": self.tally.counters}
