"""What the scheduler says about itself, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass

from jspec.core.request import SpecCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot for metrics. Totals are since the start and count committed ids only.

    num_pages, num_free_pages: of the full space; num_free_window_pages: of each other one.
    num_leaked_pages: lent pages, of whatever space, that no tenancy holds; 0 always, idle or not.
    num_emitted: all output tokens, prefill's included. counters: sums over all sequences.
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
    num_steps: int = 0
