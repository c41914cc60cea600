"""Scheduling policy: prefill budget, admission and retraction. Pure functions.

- Requests are ordered by priority and share slots between callers (`waiting.py`). The head of the
  queue is admitted when a slot is free and there are pages for its whole fill and first decode. No
  request overtakes it. If other rows run, their and its needs for the next few steps must also fit.
- Prompts are prefilled as soon as they arrive, but decoding rows wait for a bounded number of
  prompt tokens only (`prefill_room`).
- A prefill step packs chunks in order of arrival. While several prompts wait, steps are short, and
  a prompt that fills many steps leaves half of each to shorter ones.
- A decode row short of pages waits while a step in flight may help. Otherwise the newest running
  sequence of the lowest rank is retracted, since it waited least and loses least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from jspec.config.limits import ProgramLimits, SchedulingLimits, ServeLimits
from jspec.messages.plan import PrefillChunk
from jspec.scheduler.pages import budget
from jspec.scheduler.sequence import Sequence, Tenancy
from jspec.scheduler.waiting import rank_of
from jspec.spec import indexing

# Tuned with benchmarks/simulate_load.py and on a GPU (decision 21). While WAVE times the waiting
# prompts outnumber the decoding rows, these wait for up to MOST_SHARES budgets. The burst then ends
# sooner, and its rows decode in one batch.
WAVE = 8
MOST_SHARES = 12
# A step takes the larger of 1 / STEPS of a budget and 1 / STEPS_OF_WAVE of the waiting tokens.
STEPS = 2
STEPS_OF_WAVE = 2
# Less than 1 / SCRAPS of a budget is not worth its own step.
SCRAPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfilled:
    """Prompts not fully dispatched: running ones, and waiting ones with a free slot."""

    num_rows: int
    num_tokens: int  # not yet dispatched


def prefill_room(
    limits: ServeLimits,
    unfilled: Unfilled,
    *,
    num_decoding: int,
    since_decode: int,  # prompt tokens dispatched since the last decode step
    timed: int | None = None,  # tokens that fit a time limit, which replaces budget and burst
) -> int:
    """Return the prompt tokens that a prefill may take next; 0: decode first.

    Between two decode steps it is at most limits.prefill_budget, and more in a burst:

        budget 2048, 40 rows decode, 5 prompts wait: 8 * 4 / 40 < 1, 2048 tokens
        20 rows decode, 11 prompts wait: 8 * 10 / 20 = 4 times as many; 12 times at most
    """
    budget = limits.scheduling.prefill_budget if timed is None else timed
    step = _step_tokens(limits.programs, unfilled, budget)
    if num_decoding:
        wave = min(max(WAVE * (unfilled.num_rows - 1), num_decoding), MOST_SHARES * num_decoding)
        if timed is not None:
            wave = num_decoding
        room = budget * wave // num_decoding - since_decode
        if room < max(budget // SCRAPS, 1):
            return 0
        step = min(step, room)
    if unfilled.num_tokens <= step:
        return step
    # Prompts that have waited for one decode step do not wait for another.
    return _unpadded(limits.programs, step) or (0 if since_decode else step)


def _step_tokens(programs: ProgramLimits, unfilled: Unfilled, budget: int) -> int:
    if unfilled.num_rows <= 1 or budget >= programs.chunk_size:
        return programs.chunk_size
    step = max(budget // STEPS, unfilled.num_tokens // STEPS_OF_WAVE, 1)
    return indexing.bucket(min(step, programs.chunk_size), programs.prefill_buckets)


def _unpadded(programs: ProgramLimits, room: int) -> int:
    """Return the largest bucket within `room`, or 0 if it uses less than half of it."""
    sizes = [size for size in programs.prefill_buckets if size <= room]
    return sizes[-1] if sizes and 2 * sizes[-1] >= room else 0


@dataclass(slots=True)
class ChunkPacker:
    """Packs one prefill step: at most `prefill_rows` rows and `room` tokens."""

    programs: ProgramLimits
    room: int
    leaves_half: bool = False  # a row longer than the step takes half of the room
    num_rows: int = 0
    num_tokens: int = 0

    @property
    def has_room(self) -> bool:
        return self.num_rows < self.programs.prefill_rows and self.num_tokens < self.room

    def pack(
        self, tenancy: Tenancy, *, cut: Callable[[Tenancy, int], int] | None = None
    ) -> PrefillChunk:
        """Return the longest possible next chunk of a row whose prefill is not fully dispatched.

        cut: maps the position that the chunk could reach to the one where it ends.

        In:  room 8, 5 tokens already packed, a fill of 10 of which 4 are dispatched
        Out: start 4, tokens 4..6, next_id is fill token 7
        """
        start, fill_ids = tenancy.num_filled, tenancy.fill_ids
        most = self.room - self.num_tokens
        if self.leaves_half and len(fill_ids) - start > self.room:
            most = -(-most // 2)
        end = min(len(fill_ids), start + most)
        end = end if cut is None else cut(tenancy, end)
        self.num_rows += 1
        self.num_tokens += end - start
        next_id = fill_ids[end] if end < len(fill_ids) else None
        return PrefillChunk(
            row=tenancy.row, start=start, token_ids=fill_ids[start:end], next_id=next_id
        )


def may_admit(
    limits: ServeLimits, newcomer: Sequence, running: Ordered[Sequence], *, num_free_pages: int
) -> bool:
    needed = budget.pages_for_admission(
        limits, newcomer.num_tokens, num_tokens_left=newcomer.num_tokens_left
    )
    if running:
        ahead = budget.pages_ahead(limits, newcomer.num_tokens, last=newcomer.last_committed)
        others = sum(pages_missing_ahead(limits, sequence) for sequence in running)
        needed = max(needed, ahead) + others
    return needed <= num_free_pages


def pages_missing_ahead(limits: ServeLimits, sequence: Sequence) -> int:
    tenancy = sequence.active_tenancy
    ahead = budget.pages_ahead(limits, tenancy.committed_len, last=sequence.last_committed)
    return max(ahead - len(tenancy.page_ids), 0)


def by_claim(scheduling: SchedulingLimits, running: Iterable[Sequence]) -> list[Sequence]:
    """Return sequences in the order in which they get pages: by rank, then arrival."""
    return sorted(running, key=lambda sequence: (-rank_of(scheduling, sequence), sequence.arrival))


def choose_victim(scheduling: SchedulingLimits, running: Iterable[Sequence]) -> Sequence:
    return by_claim(scheduling, running)[-1]
