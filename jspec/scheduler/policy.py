"""Why a request waits: whose turn it is, who is admitted, and who has to give way.

Pure decisions over sequences and numbers. Nothing here changes a sequence, the queue or the pool;
the scheduler does what these functions say.

The rules:
  - First come, first served, or by priority (`waiting.py`): the head of the queue is admitted when
    a slot is free and the pages of its whole fill and of its first decode are; nobody overtakes
    it. A newcomer that would run beside others also leaves the pages that it and they need for the
    next few steps.
  - Prompts are computed as soon as they are there, but rows that decode wait for a bounded number
    of their tokens: `prefill_room`.
  - A prefill step packs chunks in order of arrival until it is out of tokens or of rows. While
    several prompts wait it is short, so that the first of them need not wait for the last. One
    that fills many steps leaves half of each to shorter ones.
  - A decode row short of pages waits while a step in flight may still help it: by ending its
    uncertainty (its own unread steps) or by returning pages (of rows that ended). Otherwise the
    newest running sequence, of those of the lowest rank, is retracted: that one has waited least
    and loses least.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from jspec.config.limits import ServeLimits
from jspec.messages.plan import PrefillChunk
from jspec.scheduler.pages import budget
from jspec.scheduler.sequence import Sequence, SequenceState, Tenancy
from jspec.scheduler.waiting import rank_of
from jspec.spec import indexing

# Found by benchmarks/simulate_load.py and on a card (decision 21). While (WAVE times) more prompts
# wait than rows decode, those wait longer, up to MOST_SHARES budgets: a burst is over sooner, and
# who decodes then does so together.
WAVE = 8
MOST_SHARES = 12
# A step takes a budget's STEPS-th part, or what waits in as many as STEPS_OF_WAVE steps.
STEPS = 2
STEPS_OF_WAVE = 2
# Less than this part of a budget is not worth a step of its own.
SCRAPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfilled:
    """Prompts that are not all dispatched: running ones, and waiting ones for which slots are free.

    num_tokens: of them that are not dispatched.
    """

    num_rows: int
    num_tokens: int


def prefill_room(
    limits: ServeLimits,
    unfilled: Unfilled,
    *,
    num_decoding: int,
    since_decode: int,
    timed: int | None = None,
) -> int:
    """Prompt tokens of the next step if it is a prefill; 0: those that decode come first.

    since_decode: prompt tokens dispatched since the last decode step. Between two of those there
    are at most limits.prefill_budget tokens, and more in a burst:

        budget 2048, 40 rows decode, 5 prompts wait: 8 * 4 / 40 < 1, 2048 tokens
        20 rows decode, 11 prompts wait: 8 * 10 / 20 = 4 times as many; 12 times at most

    timed: instead of that budget, what fits the time that prompts may take; no more in a burst.
    """
    budget = limits.prefill_budget if timed is None else timed
    step = _step_tokens(limits, unfilled, budget)
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
    # What has waited for a decode step does not wait for another.
    return _unpadded(limits, step) or (0 if since_decode else step)


def _step_tokens(limits: ServeLimits, unfilled: Unfilled, budget: int) -> int:
    if unfilled.num_rows <= 1 or budget >= limits.chunk_size:
        return limits.chunk_size
    step = max(budget // STEPS, unfilled.num_tokens // STEPS_OF_WAVE, 1)
    return indexing.bucket(min(step, limits.chunk_size), limits.prefill_buckets)


def _unpadded(limits: ServeLimits, room: int) -> int:
    """Most tokens within `room` that pad nothing; 0 if that leaves more than half of it unused."""
    sizes = [size for size in limits.prefill_buckets if size <= room]
    return sizes[-1] if sizes and 2 * sizes[-1] >= room else 0


@dataclass(slots=True)
class ChunkPacker:
    """Fills one prefill step: at most `limits.prefill_rows` rows and `room` tokens.

    leaves_half: a row that would fill the step and more takes half of what is left.
    """

    limits: ServeLimits
    room: int
    leaves_half: bool = False
    num_rows: int = 0
    num_tokens: int = 0

    @property
    def has_room(self) -> bool:
        return self.num_rows < self.limits.prefill_rows and self.num_tokens < self.room

    def pack(self, tenancy: Tenancy) -> PrefillChunk:
        """The next chunk of a row whose prefill is not all dispatched, as long as it may be.

        Worked example: room 8, 5 tokens already packed, a fill of 10 of which 4 are dispatched:
        start 4, tokens 4..6, next_id is fill token 7.
        """
        start, fill_ids = tenancy.num_filled, tenancy.fill_ids
        most = self.room - self.num_tokens
        if self.leaves_half and len(fill_ids) - start > self.room:
            most = -(-most // 2)
        end = min(len(fill_ids), start + most)
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
        unread_tokens=tenancy.tokens_in_flight,
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


def by_claim(limits: ServeLimits, running: Iterable[Sequence]) -> list[Sequence]:
    """In the order in which rows get pages: by rank, then by arrival. Who gives way is the last, so
    never one that got its pages before."""
    return sorted(running, key=lambda sequence: (-rank_of(limits, sequence), sequence.arrival))


def choose_victim(limits: ServeLimits, running: Iterable[Sequence]) -> Sequence:
    """Whom to retract: the newest arrival of the lowest rank. The caller never asks about the last
    sequence."""
    return by_claim(limits, running)[-1]
