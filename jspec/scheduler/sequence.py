"""One request on its way through the engine: what the scheduler remembers about it.

A Sequence lives from submit to its last chunk. A Tenancy is one stay of it in a slot: retraction
ends a tenancy, not the sequence. Both are mutable and owned by the scheduler alone. Nothing here
knows the queue, the pool, or the device.

The cut also lives here: the one place where a round's ids are shortened, from which text, ids and
counters all derive.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field

from jspec.config.limits import SpeculativeConfig
from jspec.errors import InvariantError
from jspec.messages.grammar import Constraint
from jspec.messages.plan import Admission, RowRef
from jspec.messages.protocols import StopWatch, TextCut, TextStream
from jspec.messages.request import DEFAULT_VERSION, FinishKind, FinishReason, Request
from jspec.messages.step_options import StepOptions
from jspec.scheduler.outputs.cut import Cut, first_stop
from jspec.scheduler.outputs.draft_trees import constraint_of, tree_after
from jspec.scheduler.outputs.hidden import SequenceHidden
from jspec.scheduler.outputs.logprobs import SequenceLogprobs
from jspec.scheduler.outputs.token_history import Origin, Piece, TokenHistory
from jspec.scheduler.pages import budget
from jspec.scheduler.pages.cached_page import CachedPage
from jspec.scheduler.row_table import RowTable


class SequenceState(enum.Enum):
    """RUNNING begins when the final prefill chunk is dispatched: the device then has the root."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class Tenancy:
    """A sequence's stay in a slot, named (slot, epoch) in plans.

    table: the columns of the row's numbers. fill_ids: prompt and what had been emitted at
    admission. page_ids: in order of position, first those of the prefix cache. num_filled: fill
    tokens dispatched, or cached. cached_len: those that were cached at admission. namespace,
    last_cached: where in the cache the row is, and the last page that it holds there (None: it
    keeps nothing). num_cached: how many of page_ids are in the cache.
    """

    row: RowRef
    sequence: Sequence
    table: RowTable
    fill_ids: tuple[int, ...]
    page_ids: list[int]
    num_filled: int = 0
    cached_len: int = 0
    namespace: Hashable = None
    last_cached: CachedPage | None = None
    num_cached: int = 0

    @classmethod
    def begin(cls, row: RowRef, sequence: Sequence, table: RowTable) -> Tenancy:
        """Without pages yet; the row's numbers are written to `table`."""
        fill_ids, request = sequence.fill_ids, sequence.request
        table.seat(
            row.slot,
            fill=len(fill_ids),
            left=sequence.num_tokens_left,
            last=budget.last_committed(sequence.prompt_len, sequence.max_new_tokens),
            stop_ids=request.stop_ids,
            is_cut=(sequence.text_stream is not None and sequence.watch is None)
            or request.sampling.return_logprob
            or request.sampling.return_hidden_states
            or sequence.constraint is not None,
            drafts=request.sampling.speculative,
            is_watched=sequence.watch is not None,
        )
        return cls(row=row, sequence=sequence, table=table, fill_ids=fill_ids, page_ids=[])

    @property
    def steps_in_flight(self) -> int:
        """Dispatched, uncollected steps that name the row, whose slot and pages they keep taken."""
        return int(self.table.steps[self.row.slot])

    @property
    def rounds_in_flight(self) -> int:
        """Rounds of the decodes among them."""
        return int(self.table.rounds[self.row.slot])

    @property
    def tokens_in_flight(self) -> int:
        """Most tokens that those rounds can emit."""
        return int(self.table.ahead[self.row.slot])

    @property
    def drafted_len(self) -> int:
        """Of known_len, the tokens that the drafter has been told of as well."""
        told = self.known_len - int(self.table.pending[self.row.slot])
        return max(told, min(self.known_len, len(self.fill_ids)))

    @property
    def ended(self) -> bool:
        return bool(self.table.ended[self.row.slot])

    @property
    def num_emitted(self) -> int:
        """Ids that came in this tenancy."""
        return int(self.table.emitted[self.row.slot])

    @property
    def is_prefill_read(self) -> bool:
        """The final chunk emits the first id of a tenancy."""
        return self.num_emitted > 0

    def ids_from(self, begin: int) -> tuple[int, ...]:
        """Fill and what came since, from token `begin` on."""
        begin_out = max(begin - len(self.fill_ids), 0)
        return (*self.fill_ids[begin:], *self.table.output(self.row.slot, begin=begin_out))

    @property
    def admission(self) -> Admission:
        """The message that writes this row to the device; it rides with the first chunk."""
        return Admission(
            row=self.row,
            request=self.sequence.request,
            prompt_len=self.sequence.prompt_len,
            fill_ids=self.fill_ids,
            page_ids=tuple(self.page_ids),
            cached_len=self.cached_len,
        )

    @property
    def is_prefill_dispatched(self) -> bool:
        return self.num_filled == len(self.fill_ids)

    @property
    def committed_len(self) -> int:
        """L as far as the host has read: KV of positions 0..L-1 is valid, the root is token L.

        The fill's length while its prefill is unread (the device will have written all of it),
        then one less than the tokens known, since the root's KV is not written.
        """
        if not self.is_prefill_read:
            return len(self.fill_ids)
        return self.sequence.num_tokens - 1

    @property
    def known_len(self) -> int:
        """What L is at least, whichever dispatched steps have run: no later step of the row has a
        query before it. During a prefill this is what was dispatched, which is exact.
        """
        return self.committed_len if self.is_prefill_read else self.num_filled

    @property
    def emitting_in_flight(self) -> int:
        """What is unread and emits at least one token each: rounds and the final chunk."""
        awaits_root = self.is_prefill_dispatched and not self.is_prefill_read
        return self.rounds_in_flight + awaits_root


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One request: its output so far and, while it has a slot, its tenancy.

    arrival: order of submission, kept through retraction. max_new_tokens: the request's, clipped
    to what the engine can hold. text_stream: what may end it by its text, None where nothing can.
    watch: the same if that needs no text, else None: its reader makes the text where there is a
    watch, or no text_stream. history: its reader's. former_ids: emitted before the present
    tenancy. features: what its steps must have, asked for at every plan.
    num_losses: times that it ran when the runner failed, or an invariant.
    cached_tokens: of the prompt, found in the prefix cache when the weights that answer first
    admitted it; None before.
    weight_version: of the weights when it was last admitted. constraint: where its grammar stands
    after the output so far, or who watches its trees; None without either.
    """

    request: Request
    arrival: int
    max_new_tokens: int
    text_stream: TextStream | StopWatch | None
    history: TokenHistory
    watch: StopWatch | None = None
    state: SequenceState = SequenceState.WAITING
    tenancy: Tenancy | None = None
    former_ids: list[int] = field(default_factory=list)
    num_retractions: int = 0
    num_losses: int = 0
    cached_tokens: int | None = None
    weight_version: str = DEFAULT_VERSION
    features: StepOptions = field(init=False)
    constraint: Constraint | None = field(init=False)
    logprobs: SequenceLogprobs = field(init=False)
    hidden: SequenceHidden = field(init=False)

    def __post_init__(self) -> None:
        self.features = self.request.sampling.features
        self.constraint = constraint_of(self.request)
        self.logprobs = SequenceLogprobs(self.request)
        self.hidden = SequenceHidden(self.request)

    @classmethod
    def begin(
        cls,
        request: Request,
        *,
        arrival: int,
        max_new_tokens: int,
        stream: TextStream,
        spec: SpeculativeConfig,
    ) -> Sequence:
        """A new one. Its text is made by its reader, unless it is needed to find a stop string."""
        params = request.sampling
        cuts = bool(params.stop or params.stop_regex)
        # The reader is not told which ids are too early to stop at.
        watch = stream.watch() if cuts and not params.min_new_tokens else None
        return cls(
            request=request,
            arrival=arrival,
            max_new_tokens=max_new_tokens,
            text_stream=(watch or stream) if cuts else None,
            history=TokenHistory(request, spec, stream=stream if watch or not cuts else None),
            watch=watch,
        )

    @property
    def origin(self) -> Origin:
        """Of what comes of its tenancy."""
        return Origin(self.num_retractions, self.cached_tokens or 0, self.weight_version)

    @property
    def held_tenancy(self) -> Tenancy:
        """The tenancy of a sequence that must have one."""
        if self.tenancy is None:
            raise InvariantError(
                f"request {self.request.request_id!r} is {self.state.value} and has no slot; "
                f"expected a sequence that holds one"
            )
        return self.tenancy

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_emitted(self) -> int:
        """Output tokens so far."""
        return len(self.former_ids) + (0 if self.tenancy is None else self.tenancy.num_emitted)

    @property
    def emitted_ids(self) -> list[int]:
        """The output so far; a copy."""
        if self.tenancy is None:
            return list(self.former_ids)
        return self.former_ids + self.tenancy.table.output(self.tenancy.row.slot)

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_len + self.num_emitted

    @property
    def num_tokens_left(self) -> int:
        return self.max_new_tokens - self.num_emitted

    @property
    def fill_ids(self) -> tuple[int, ...]:
        """What a prefill has to run: the prompt and, after a retraction, the output too."""
        if not self.num_emitted:
            return self.request.prompt_ids
        return (*self.request.prompt_ids, *self.emitted_ids)

    def leave(self) -> Tenancy:
        """Gives up its tenancy, and keeps what came in it."""
        tenancy, self.former_ids = self.held_tenancy, self.emitted_ids
        self.tenancy = None
        return tenancy

    def forget_prompt(self) -> None:
        """Drop what former weights computed of the prompt, unless it went out with a token."""
        if not self.num_emitted:
            self.logprobs = SequenceLogprobs(self.request)
            self.hidden, self.cached_tokens = SequenceHidden(self.request), None

    @property
    def sharable_ids(self) -> tuple[int, ...]:
        """The part of the fill that may come out of the prefix cache, all but its last token.

        A prompt token of which a log-probability is asked for is preceded by one that is run, and
        one whose hidden state is asked for is run.
        """
        firsts = self.logprobs.computed_from, self.hidden.computed_from
        asked = [first for first in firsts if first is not None]
        return self.fill_ids[: min(asked) + 1] if asked else self.fill_ids

    def absorb(self, ids: tuple[int, ...]) -> Cut:
        """Cuts one round's ids once and appends what is left to the output.

        Order of the rules: a stop string, then a stop token or EOS, then the length. A stop token
        on the last token allowed is a stop. A stop token is kept as an id and has no text (but for
        Request.shows), unless the text before it, flushed, ends in a stop string. Neither a stop
        token nor a stop string counts among the first min_new_tokens tokens, but for the EOS of a
        grammar, which is there only where nothing else may follow.
        """
        num_out, low = self.num_emitted, self.request.sampling.min_new_tokens
        kept = ids[: self.num_tokens_left]
        stop = first_stop(kept, self.request.ends_with, begin=low - num_out)
        if self.request.grammar is not None:
            stop = min(stop, first_stop(kept, self.request.eos_token_ids.__contains__, begin=0))
        num_shown = stop + (self.request.shows(kept[stop]) if stop < len(kept) else 0)
        is_last = stop < len(kept) or len(kept) == self.num_tokens_left
        text, matched = None, None
        if self.text_stream is not None:
            pushed = self._push(self.text_stream, kept[:num_shown], num_barred=low - num_out)
            # After a stop string nothing may follow; otherwise what was held back is now final.
            held_back = is_last and pushed.matched is None
            text = pushed.text + (self.text_stream.flush() if held_back else "")
            matched = self.text_stream.matched
            if matched is not None:
                kept = kept[: pushed.num_ids]
        if matched is not None:
            finish = FinishReason(kind=FinishKind.STOP, matched=matched)
        elif stop < len(kept):
            kept = kept[: stop + 1]
            finish = FinishReason(kind=FinishKind.STOP, matched=kept[stop])
        elif is_last:
            finish = FinishReason(kind=FinishKind.LENGTH, length=num_out + len(kept))
        else:
            finish = None
        if self.constraint is not None:
            if finish is None:
                self.constraint.accept(kept)
            if self.constraint.failed:
                why = f"the grammar cannot go on: {self.constraint.failed}"
                finish = FinishReason(kind=FinishKind.ABORT, message=why)
                kept, text, num_shown = (), None if text is None else "", 0
        self._record(kept)
        text = text if self.watch is None else None
        return Cut(ids=kept, text=text, num_shown=num_shown, finish=finish)

    def _record(self, ids: tuple[int, ...]) -> None:
        if self.tenancy is None:
            self.former_ids += ids
        else:
            self.tenancy.table.append(self.tenancy.row.slot, ids)

    @staticmethod
    def _push(stream: TextStream | StopWatch, ids: tuple[int, ...], *, num_barred: int) -> TextCut:
        """Pushes ids into the text; the first num_barred of them cannot complete a stop string."""
        split = max(num_barred, 0)
        num_ids, text = 0, ""
        for part, allow_stop in ((ids[:split], False), (ids[split:], True)):
            if not part:
                continue
            cut = stream.push(part, allow_stop=allow_stop)
            num_ids, text = num_ids + cut.num_ids, text + cut.text
            if cut.matched is not None:
                return TextCut(num_ids=num_ids, text=text, matched=cut.matched)
        return TextCut(num_ids=num_ids, text=text)

    def piece(
        self,
        cut: Cut,
        *,
        num_emitted: int = 0,
        num_proposed: int | None = None,
        ids: tuple[int, ...] = (),
    ) -> Piece:
        """What the reader gets of `cut`. num_emitted, num_proposed: ids and drafts of the
        verification, if it was one. ids: the round's, before the cut."""
        return Piece(
            self.history,
            cut.ids,
            num_emitted,
            self.origin,
            finish=cut.finish,
            text=cut.text,
            num_shown=cut.num_shown,
            logprobs=self.logprobs.of_ids(len(cut.ids)),
            prompt_logprobs=self.logprobs.of_prompt(),
            hidden_states=self.hidden.of_ids(len(cut.ids)),
            num_proposed=num_proposed,
            draft_tree=tree_after(self.constraint, ids),
        )

    def abort(self, why: str) -> Piece:
        """The last piece of a sequence that ends before its time: what was held back."""
        finish = FinishReason(kind=FinishKind.ABORT, message=why)
        stream = self.text_stream if self.watch is None else None
        text = None if stream is None else stream.flush()
        return self.piece(Cut(ids=(), text=text, num_shown=0, finish=finish))

    def broken(self, why: str) -> Piece:
        """The last piece of a sequence whose text raised; nothing more is asked of its text."""
        finish = FinishReason(kind=FinishKind.ABORT, message=why)
        return self.piece(Cut(ids=(), text="", num_shown=0, finish=finish))
