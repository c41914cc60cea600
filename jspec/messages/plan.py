"""Messages between the scheduler and the runner: frozen, picklable, host only. A plan names rows by
(slot, epoch), and results for a slot's former tenant are dropped."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jspec.config.limits import PoolLimits, SchedulingLimits, SpeculativeConfig
from jspec.config.shared_prefixes import SharedPrefix
from jspec.messages.grammar import Constraint
from jspec.messages.request import Request, SamplingParams, TokenLogprob
from jspec.messages.step_options import StepOptions


@dataclass(frozen=True, slots=True, order=True)
class RowRef:
    """One tenancy of a slot. Slot 0 is the dummy and has none."""

    slot: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A new row, written to the device's state before its step; its pages are in the same plan."""

    row: RowRef
    request: Request
    prompt_len: int  # of the prompt alone
    fill_ids: tuple[int, ...]  # the prompt and, after a retraction, the output
    # Tokens of fill_ids whose KV is in the row's first pages already, a multiple of the page size.
    # These pages are shared and read-only; the first chunk starts after them.
    cached_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens fill_ids[start : start + len(token_ids)] of one row."""

    row: RowRef
    start: int
    token_ids: tuple[int, ...]
    next_id: int | None  # fill token after the chunk; None: the device samples it

    @property
    def is_final(self) -> bool:
        return self.next_id is None


@dataclass(frozen=True, slots=True, order=True)
class PageGrant:
    """Set page_table[slot, index + i] = pages[i] before the step runs.

    Entry i has positions [i * page_size, (i + 1) * page_size). Space i > 0 is that of
    `PoolLimits.windows[i - 1]`, 0 the full one.
    """

    slot: int
    index: int
    pages: tuple[int, ...]
    space: int = 0


@dataclass(frozen=True, slots=True, order=True)
class SnapshotCopy:
    """A copy between the recurrent state of a slot and a snapshot slot."""

    slot: int
    snapshot: int


class StepKind(enum.Enum):
    """Kind of a step (`engine.steps.table.STEPS`). The value starts the names of its programs,
    which end with their bucket: B rows or T tokens."""

    __hash__ = object.__hash__  # fast, as in StepOption

    PREFILL = "prefill T"
    DECODE = "decode B"
    CACHED_DRAFT_PREFILL = "cached draft prefill T"  # draft prefill of cached tokens
    RESTORE = "restore B"  # states of admitted rows, from snapshots
    SAVE = "save B"  # states of rows, to snapshots
    DRAFT_PREFILL = "draft prefill B"  # of the tokens that plain decodes left pending
    # A decode in three programs, if a row follows a grammar.
    PROPOSE = "propose B"
    SCORE = "score B"
    SETTLE = "settle B"


@dataclass(frozen=True, slots=True)
class StepRun:
    kind: StepKind
    shape: SpeculativeConfig
    chunks: tuple[PrefillChunk, ...] = ()  # of a CACHED_DRAFT_PREFILL, at most one per row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One device step: a prefill of `admissions` and `chunks`, or a decode of `rows`, those of data
    rank 0 first, then those of rank 1, and so on."""

    step: int
    runs: tuple[StepRun, ...]  # programs in order; the last one that emits gives the result
    options: StepOptions  # union of what the rows need
    admissions: tuple[Admission, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    rows: tuple[RowRef, ...] = ()
    grants: tuple[PageGrant, ...] = ()  # of all spaces
    restores: tuple[SnapshotCopy, ...] = ()  # before a prefill, to the states of admitted rows
    saves: tuple[SnapshotCopy, ...] = ()  # after a prefill, to snapshots
    # One per row of `row_refs`, or empty. A row with a grammar has no unread results.
    constraints: tuple[Constraint | None, ...] = ()
    pending: tuple[int, ...] = ()  # each row's tokens for a draft prefill before this decode
    shared: tuple[SharedPrefix, ...] = ()  # each row's shared prefix in a decode, if worth it

    @property
    def kind(self) -> StepKind:
        return StepKind.PREFILL if self.is_prefill else self.runs[-1].kind

    @property
    def is_prefill(self) -> bool:
        return StepKind.PREFILL in [run.kind for run in self.runs]

    @property
    def shape(self) -> SpeculativeConfig:
        return self.runs[-1].shape

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def prefill_tokens_by_rank(self, pool: PoolLimits) -> list[int]:
        slots = [chunk.row.slot for chunk in self.chunks]
        return pool.by_rank(slots, [len(chunk.token_ids) for chunk in self.chunks])

    def decode_rounds(self, scheduling: SchedulingLimits) -> tuple[int, int]:
        """Return the number of rounds and the most tokens a row can emit; (0, 0) for a prefill."""
        if self.is_prefill:
            return 0, 0
        num_rounds = self.num_rounds(scheduling)
        return num_rounds, num_rounds * self.shape.max_emitted

    def num_rounds(self, scheduling: SchedulingLimits) -> int:
        """Return the verifications per row; 1 with a grammar, since the host reads every tree."""
        return 1 if self.is_prefill or self.constraints else scheduling.num_rounds

    @property
    def row_refs(self) -> tuple[RowRef, ...]:
        """Rows in the order of the result: one per chunk of a prefill, else `rows`."""
        return tuple(chunk.row for chunk in self.chunks) if self.is_prefill else self.rows


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    """A step's log-probabilities [rows, M, .]; see `messages.layout.output_columns`."""

    logprobs: np.ndarray  # f32
    top_logprobs: np.ndarray  # f32
    top_ids: np.ndarray  # i32
    watched_logprobs: np.ndarray  # f32

    def of_row(self, row: int, count: int, sampling: SamplingParams) -> tuple[TokenLogprob, ...]:
        return self._tokens((row, slice(count)), sampling)

    def of_rows(self, first: int, end: int, sampling: SamplingParams) -> tuple[TokenLogprob, ...]:
        """Return the requested log-probabilities of the first token of rows `first` to `end`."""
        return self._tokens((slice(first, end), 0), sampling)

    def _tokens(
        self, at: tuple[int | slice, int | slice], sampling: SamplingParams
    ) -> tuple[TokenLogprob, ...]:
        num_top, num_watched = sampling.top_logprobs_num, len(sampling.token_ids_logprob)
        tops = self.top_logprobs[at][:, :num_top].tolist()
        ids = self.top_ids[at][:, :num_top].tolist()
        watched = self.watched_logprobs[at][:, :num_watched].tolist()
        return tuple(
            TokenLogprob(logprob, tuple(zip(tops[i], ids[i], strict=True)), tuple(watched[i]))
            for i, logprob in enumerate(self.logprobs[at].tolist())
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoundResult:
    """The result of one round, with rows in the order of `StepPlan.row_refs`. Fields are None if
    the plan lacks their option."""

    # i32[rows]; num_accepted + 1 in a decode. In a prefill 1 for a row's last chunk, else 0.
    num_emitted: np.ndarray
    ids: np.ndarray  # i32[rows, M]; undefined after the first num_emitted
    logprobs: StepLogprobs | None = None  # of the ids, [rows, M, .]
    # They belong to the prompt id after each token of the chunks: [tokens of all chunks, 1, .].
    prompt_logprobs: StepLogprobs | None = None
    hidden: np.ndarray | None = None  # f32[rows, M, E], the state that chose each id
    prompt_hidden: np.ndarray | None = None  # f32[tokens of all chunks, E]

    @classmethod
    def of(cls, emitted_ids: Sequence[Sequence[int]]) -> RoundResult:
        counts = [len(ids) for ids in emitted_ids]
        table = np.zeros((len(counts), max(counts, default=0)), np.int32)
        for row, ids in zip(table, emitted_ids, strict=True):
            row[: len(ids)] = ids
        return cls(num_emitted=np.array(counts, np.int32), ids=table)

    @property
    def emitted_ids(self) -> tuple[tuple[int, ...], ...]:
        rows = zip(self.num_emitted.tolist(), self.ids.tolist(), strict=True)
        return tuple(tuple(ids[:count]) for count, ids in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    step: int
    rounds: tuple[RoundResult, ...]
