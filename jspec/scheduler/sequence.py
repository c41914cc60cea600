"""The scheduler's state of one request: a Sequence, from submission to its last chunk, and its
Tenancy of a slot, which a retraction ends. Both are mutable and owned by the scheduler."""

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
from jspec.scheduler.pages.page_space import RowPages
from jspec.scheduler.pages.prefix_cache import Node
from jspec.scheduler.row_table import RowTable


class SequenceState(enum.Enum):
    """State of a sequence. It is RUNNING once its final prefill chunk is dispatched."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class Tenancy:
    """A sequence's stay in a slot, identified as (slot, epoch) in plans."""

    row: RowRef
    sequence: Sequence
    table: RowTable
    fill_ids: tuple[int, ...]  # prompt, and output up to the admission
    pages: tuple[RowPages, ...] = ()  # by space id
    num_filled: int = 0  # fill tokens dispatched or cached
    cached_len: int = 0  # fill tokens cached at admission
    # Snapshots of its state that are not in the tree yet, by depth in pages.
    pending_snapshots: dict[int, int] = field(default_factory=dict)
    namespace: Hashable = None  # of the prefix cache
    last_cached: Node | None = None  # last node of its text there; None: it caches nothing

    @classmethod
    def begin(cls, row: RowRef, sequence: Sequence, table: RowTable) -> Tenancy:
        fill_ids, request = sequence.fill_ids, sequence.request
        table.seat(
            row.slot,
            fill=len(fill_ids),
            left=sequence.num_tokens_left,
            last=sequence.last_committed,
            stop_ids=request.stop_ids,
            is_cut=(sequence.text_stream is not None and sequence.watch is None)
            or request.sampling.return_logprob
            or request.sampling.return_hidden_states
            or sequence.constraint is not None,
            drafts=request.sampling.speculative,
            is_watched=sequence.watch is not None,
        )
        return cls(row=row, sequence=sequence, table=table, fill_ids=fill_ids)

    @property
    def steps_in_flight(self) -> int:
        """Dispatched, uncollected steps that name the row; its slot and pages stay taken."""
        return int(self.table.steps[self.row.slot])

    @property
    def rounds_in_flight(self) -> int:
        return int(self.table.rounds[self.row.slot])

    @property
    def page_ids(self) -> list[int]:
        return self.pages[0].pages

    @property
    def drafted_len(self) -> int:
        """Tokens of known_len that were also given to the drafter."""
        drafted = self.known_len - int(self.table.pending[self.row.slot])
        return max(drafted, min(self.known_len, len(self.fill_ids)))

    @property
    def ended(self) -> bool:
        return bool(self.table.ended[self.row.slot])

    @property
    def num_emitted(self) -> int:
        return int(self.table.emitted[self.row.slot])

    @property
    def is_prefill_read(self) -> bool:
        return self.num_emitted > 0

    def ids_between(self, begin: int, end: int) -> tuple[int, ...]:
        first, last = (max(each - len(self.fill_ids), 0) for each in (begin, end))
        return (*self.fill_ids[begin:end], *self.table.output(self.row.slot, begin=first, end=last))

    @property
    def admission(self) -> Admission:
        return Admission(
            row=self.row,
            request=self.sequence.request,
            prompt_len=self.sequence.prompt_len,
            fill_ids=self.fill_ids,
            cached_len=self.cached_len,
        )

    @property
    def committed_len(self) -> int:
        """L as far as the host has read: KV of positions 0..L-1 is valid, the root is token L.

        It is the length of the fill while the prefill is unread, then one less than the known
        tokens.
        """
        if not self.is_prefill_read:
            return len(self.fill_ids)
        return self.sequence.num_tokens - 1

    @property
    def known_len(self) -> int:
        """A lower bound of L, whichever dispatched steps have run; exact during a prefill."""
        return self.committed_len if self.is_prefill_read else self.num_filled


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One request: its output so far and, while it has a slot, its tenancy."""

    request: Request
    arrival: int  # order of submission, kept through retraction
    max_new_tokens: int  # the request's, clipped to what the engine can store
    # Finds stop strings, if there are any. If it is None or a watch, the reader makes the text.
    text_stream: TextStream | StopWatch | None
    history: TokenHistory  # the reader's side
    caller: Hashable = None  # for fair sharing of slots (`waiting.py`)
    watch: StopWatch | None = None  # text_stream, if it needs no text to find stop strings
    state: SequenceState = SequenceState.WAITING
    tenancy: Tenancy | None = None
    former_ids: list[int] = field(default_factory=list)  # emitted before this tenancy
    num_retractions: int = 0
    num_losses: int = 0  # times that it was in a lost step or suspected of an error
    # Prompt tokens found in the prefix cache at the first admission with the answering weights.
    cached_tokens: int | None = None
    weight_version: str = DEFAULT_VERSION  # at the last admission
    options: StepOptions = field(init=False)  # needed in its steps
    constraint: Constraint | None = field(init=False)  # grammar state, tree watcher, or both
    logprobs: SequenceLogprobs = field(init=False)
    hidden: SequenceHidden = field(init=False)

    def __post_init__(self) -> None:
        self.options = self.request.sampling.options
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
        draft_shape: SpeculativeConfig,
        caller: Hashable = None,
    ) -> Sequence:
        """Make a sequence. The reader makes its text unless stop strings must be found here."""
        params = request.sampling
        cuts = bool(params.stop or params.stop_regex)
        # The reader does not know which ids come too early to end the text.
        watch = stream.watch() if cuts and not params.min_new_tokens else None
        sequence = cls(
            request=request,
            arrival=arrival,
            caller=caller,
            max_new_tokens=max_new_tokens,
            text_stream=(watch or stream) if cuts else None,
            history=TokenHistory(
                request, draft_shape, stream=stream if watch or not cuts else None
            ),
            watch=watch,
        )
        if request.former_ids:
            sequence._go_on_after(request.former_ids, stream)
        return sequence

    def _go_on_after(self, ids: tuple[int, ...], stream: TextStream) -> None:
        """Become a retracted sequence that has emitted `ids`, whose text was already sent."""
        self.former_ids, self.num_retractions = list(ids), 1
        self._push(stream, ids, num_barred=self.request.sampling.min_new_tokens)
        if self.watch is not None:
            self.watch.push(ids)
        if self.constraint is not None:
            self.constraint.accept(ids)

    @property
    def origin(self) -> Origin:
        return Origin(self.num_retractions, self.cached_tokens or 0, self.weight_version)

    @property
    def active_tenancy(self) -> Tenancy:
        if self.tenancy is None:
            raise InvariantError(
                f"request {self.request.request_id!r} is {self.state.value} and has no slot; "
                f"expected a sequence in a slot"
            )
        return self.tenancy

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def last_committed(self) -> int:
        return budget.last_committed(self.prompt_len, self.max_new_tokens)

    @property
    def num_emitted(self) -> int:
        return len(self.former_ids) + (0 if self.tenancy is None else self.tenancy.num_emitted)

    @property
    def emitted_ids(self) -> list[int]:
        if self.tenancy is None:
            return list(self.former_ids)
        return self.former_ids + self.tenancy.table.output(self.tenancy.row.slot)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.num_emitted

    @property
    def num_tokens_left(self) -> int:
        return self.max_new_tokens - self.num_emitted

    @property
    def fill_ids(self) -> tuple[int, ...]:
        if not self.num_emitted:
            return self.request.prompt_ids
        return (*self.request.prompt_ids, *self.emitted_ids)

    def leave(self) -> Tenancy:
        tenancy, self.former_ids = self.active_tenancy, self.emitted_ids
        self.tenancy = None
        return tenancy

    def forget_prompt(self) -> None:
        """Drop prompt values of earlier weights, unless a token was already emitted."""
        if not self.num_emitted:
            self.logprobs = SequenceLogprobs(self.request)
            self.hidden, self.cached_tokens = SequenceHidden(self.request), None

    @property
    def sharable_ids(self) -> tuple[int, ...]:
        """The part of the fill that may come from the prefix cache, plus one token."""
        # Tokens that produce requested prompt log-probabilities or hidden states must be computed.
        # A log-probability is produced by the token before.
        firsts = self.logprobs.computed_from, self.hidden.computed_from
        asked = [first for first in firsts if first is not None]
        return self.fill_ids[: min(asked) + 1] if asked else self.fill_ids

    def absorb(self, ids: tuple[int, ...]) -> Cut:
        """Cut one round's ids and append the rest to the output: text, ids and counters derive from
        this cut.

        The first rule that applies decides: stop string, then stop token or EOS, then length. A
        stop token is kept as an id without text (except for Request.shows), unless the text before
        it, flushed, ends in a stop string. Stops are ignored in the first min_new_tokens tokens,
        except the EOS of a grammar where nothing else can follow.
        """
        num_out, low = self.num_emitted, self.request.sampling.min_new_tokens
        kept = ids[: self.num_tokens_left]
        stop = first_stop(kept, self.request.ends_with, begin=low - num_out)
        if self.request.sampling.grammar is not None:
            stop = min(stop, first_stop(kept, self.request.eos_token_ids.__contains__, begin=0))
        num_shown = stop + (self.request.shows(kept[stop]) if stop < len(kept) else 0)
        is_last = stop < len(kept) or len(kept) == self.num_tokens_left
        text, matched = None, None
        if self.text_stream is not None:
            pushed = self._push(self.text_stream, kept[:num_shown], num_barred=low - num_out)
            # Without a stop string, the withheld text is now final.
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
        """Make the reader's piece of `cut`. ids: those of the round, before the cut."""
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
        finish = FinishReason(kind=FinishKind.ABORT, message=why)
        stream = self.text_stream if self.watch is None else None
        text = None if stream is None else stream.flush()
        return self.piece(Cut(ids=(), text=text, num_shown=0, finish=finish))

    def broken(self, why: str) -> Piece:
        """Return the last piece of a sequence whose text stream raised and must not be used."""
        finish = FinishReason(kind=FinishKind.ABORT, message=why)
        return self.piece(Cut(ids=(), text="", num_shown=0, finish=finish))
