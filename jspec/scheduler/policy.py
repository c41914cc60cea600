"""Why a request waits: whose turn it is, who is admitted, and who has to give way.

Pure decisions over sequences and numbers. Nothing here changes a sequence, the queue or the pool;
the scheduler does what these functions say.

The rules:
  - First come, first served: the head of the queue is admitted when a slot is free and the pages
    of its whole fill and of its first decode are; nobody overtakes it. A newcomer that would run
    beside others also leaves the pages that it and they need for the next few steps.
  - Prefill and decode steps alternate while both are pending.
  - A prefill step packs chunks in order of arrival until it is out of tokens or of rows.
  - A decode row short of pages waits while a step in flight may still help it: by ending its
    uncertainty (its own unread steps) or by returning pages (of rows that ended). Otherwise the
    newest running sequence is retracted: that one has waited least and loses least.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from jspec.core.config import ServeLimits
from jspec.core.plan import PrefillChunk, StepKind
from jspec.scheduler import budget
from jspec.scheduler.sequence import Sequence, SequenceState, Tenancy


def kinds_to_try(last: StepKind) -> tuple[StepKind, StepKind]:
    """Which kind of step to plan first: the one that did not run last."""
    if last is StepKind.PREFILL:
        return StepKind.DECODE, StepKind.PREFILL
    return StepKind.PREFILL, StepKind.DECODE


@dataclass(slots=True)
class ChunkPacker:
    """Fills one prefill step: at most `limits.prefill_rows` rows and `limits.chunk_size` tokens."""

    limits: ServeLimits
    num_rows: int = 0
    num_tokens: int = 0

    @property
    def has_room(self) -> bool:
        return self.num_rows < self.limits.prefill_rows and self.num_tokens < self.limits.chunk_size

    def pack(self, tenancy: Tenancy) -> PrefillChunk:
        """The next chunk of a row whose prefill is not all dispatched, as long as it may be.

        Worked example: chunk_size 8, 5 tokens already packed, a fill of 10 of which 4 are
        dispatched: start 4, tokens 4..6, next_id is fill token 7.
        """
        start, fill_ids = tenancy.num_filled, tenancy.fill_ids
        end = min(len(fill_ids), start + self.limits.chunk_size - self.num_tokens)
        self.num_rows += 1
        self.num_tokens += end - start
        next_id = fill_ids[end] if end < len(fill_ids) else None
        return PrefillChunk(
            row=tenancy.row, start=start, token_ids=fill_ids[start:end], next_id=next_id
        )


def may_admit(
    limits: ServeLimits, newcomer: Sequence, running: Ordered[Sequence], *, num_free_pages: int
) -> bool:
    """Whether `newcomer` gets its pages (`budget.pages_for_admission`) beside `running`."""
    needed = budget.pages_for_admission(
        limits, newcomer.num_tokens, num_tokens_left=newcomer.num_tokens_left
    )
    if running:
        ahead = budget.pages_ahead(limits, newcomer.num_tokens, last=_last_committed(newcomer))
        others = sum(pages_missing_ahead(limits, sequence) for sequence in running)
        needed = max(needed, ahead) + others
    return needed <= num_free_pages


def pages_missing(limits: ServeLimits, sequence: Sequence) -> int:
    """Pages that a running sequence still lacks for its next decode step."""
    tenancy = sequence.held_tenancy
    needed = budget.pages_for_decode(
        limits,
        tenancy.committed_len,
        unread_rounds=tenancy.rounds_in_flight,
        last=_last_committed(sequence),
    )
    return max(needed - len(tenancy.page_ids), 0)


def pages_missing_ahead(limits: ServeLimits, sequence: Sequence) -> int:
    """Pages that a running sequence still lacks for the rounds of the headroom."""
    tenancy = sequence.held_tenancy
    last = _last_committed(sequence)
    ahead = budget.pages_ahead(limits, tenancy.committed_len, last=last)
    return max(ahead - len(tenancy.page_ids), 0)


def _last_committed(sequence: Sequence) -> int:
    return budget.last_committed(sequence.prompt_len, sequence.max_new_tokens)


def may_decode(sequence: Sequence) -> bool:
    """Whether the row's next decode can be dispatched, pages aside.

    Its final chunk must be dispatched (the device then knows the root, read or not), and the
    rounds in flight, of which each emits at least one token, must leave a token to emit.
    """
    tenancy = sequence.tenancy
    if tenancy is None or sequence.state is not SequenceState.RUNNING:
        return False
    return tenancy.emitting_in_flight < sequence.num_tokens_left


def choose_victim(running: Ordered[Sequence]) -> Sequence:
    """Whom to retract: the newest arrival. The caller never asks about the last sequence."""
    return max(running, key=lambda sequence: sequence.arrival)
