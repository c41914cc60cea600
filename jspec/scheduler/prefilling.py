"""The rows whose prompt is not fully dispatched, and the token budget of the next prefill."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from jspec.config.limits import ServeLimits
from jspec.messages.plan import PrefillChunk, StepPlan
from jspec.scheduler import policy
from jspec.scheduler.prefill_pace import PrefillPace
from jspec.scheduler.sequence import Sequence, SequenceState, Tenancy
from jspec.spec import indexing


class Prefilling:
    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._rows: dict[str, Sequence] = {}  # in order of admission
        self._since_decode = 0  # prompt tokens dispatched after the last decode step
        self._pace = PrefillPace(limits.programs.prefill_buckets)
        self._nothing = policy.ChunkPacker(limits.programs, 0)  # never has room

    @property
    def tenancies(self) -> list[Tenancy]:
        return [sequence.active_tenancy for sequence in self._rows.values()]

    def add(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.PREFILLING
        self._rows[sequence.request.request_id] = sequence

    def drop(self, sequence: Sequence) -> None:
        self._rows.pop(sequence.request.request_id, None)

    def packers(
        self, waiting: Iterable[Sequence], *, num_running: int, num_free_slots: int
    ) -> tuple[policy.ChunkPacker, policy.ChunkPacker]:
        """Return a data rank's packers to try before a decode step, and after it if none ran."""
        tokens = [len(each.fill_ids) - each.num_filled for each in self.tenancies]
        tokens += [sequence.num_tokens for sequence in islice(waiting, num_free_slots)]
        if not tokens:
            return self._nothing, self._nothing
        # All ranks run together, so a step takes from each rank what an average rank has.
        num_ranks = self._limits.pool.num_ranks
        unfilled = policy.Unfilled(
            num_rows=-(-len(tokens) // num_ranks), num_tokens=-(-sum(tokens) // num_ranks)
        )
        room = policy.prefill_room(
            self._limits,
            unfilled,
            num_decoding=-(-(num_running - len(self._rows)) // num_ranks),
            since_decode=self._since_decode,
            timed=self._timed_budget(),
        )
        later = 0
        if not room:
            later = policy.prefill_room(self._limits, unfilled, num_decoding=0, since_decode=0)
        shortest = min(tokens)
        first, last = (
            policy.ChunkPacker(self._limits.programs, size, leaves_half=2 * shortest <= size)
            for size in (room, later)
        )
        return first, last

    def count(self, plan: StepPlan) -> None:
        if not plan.is_prefill:
            self._since_decode = 0
        num_tokens = self._longest(plan)
        if (
            num_tokens and self._limits.scheduling.prefill_seconds is not None
        ):  # padding takes time, too
            num_tokens = indexing.bucket(num_tokens, self._limits.programs.prefill_buckets)
        self._since_decode += num_tokens

    def timed(self, plan: StepPlan, seconds: float) -> None:
        if plan.is_prefill and self._limits.scheduling.prefill_seconds is not None:
            self._pace.see(self._longest(plan), seconds)

    def _longest(self, plan: StepPlan) -> int:
        return max(plan.prefill_tokens_by_rank(self._limits.pool))

    def _timed_budget(self) -> int | None:
        if self._limits.scheduling.prefill_seconds is None:
            return None
        return (
            self._pace.tokens_within(self._limits.scheduling.prefill_seconds)
            or self._limits.scheduling.prefill_budget
        )

    def advance(self, tenancy: Tenancy, chunk: PrefillChunk) -> None:
        tenancy.num_filled += len(chunk.token_ids)
        if chunk.is_final:
            tenancy.sequence.state = SequenceState.RUNNING
            self.drop(tenancy.sequence)
