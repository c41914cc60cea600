"""One request on its way through the engine: what the scheduler remembers about it.

A Sequence lives from submit to its last chunk. A Tenancy is one stay of it in a slot: retraction
ends a tenancy, not the sequence. Both are mutable and owned by the scheduler alone. Nothing here
knows the queue, the pool, or the device.

The cut also lives here: the one place where a round's ids are shortened, from which text, ids and
counters all derive.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from jspec.cache.prefix_cache import CachedPage
from jspec.core.config import Algorithm, SpeculativeConfig
from jspec.core.errors import InvariantError
from jspec.core.features import StepFeatures
from jspec.core.plan import Admission, RowRef
from jspec.core.protocols import TextCut, TextStream
from jspec.core.request import (
    FinishKind,
    FinishReason,
    Request,
    SpecCounters,
    StreamChunk,
)
from jspec.scheduler.logprobs import SequenceLogprobs


class SequenceState(enum.Enum):
    """RUNNING begins when the final prefill chunk is dispatched: the device then has the root."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True)
class Tenancy:
    """A sequence's stay in a slot, named (slot, epoch) in plans.

    fill_ids: prompt and what had been emitted at admission. page_ids: the row's, in order of
    position: first those of the prefix cache. num_filled: fill tokens dispatched, or cached.
    steps_in_flight: dispatched, uncollected steps that name the row; until it is 0, slot and pages
    stay taken, also when `ended`. rounds_in_flight: rounds of the decodes among them.
    cached_len: fill tokens that were cached at admission. namespace, last_cached: where in the
    cache the row is, and the last page that it holds there (None: it keeps nothing).
    num_cached: how many of page_ids are in the cache.
    """

    row: RowRef
    sequence: Sequence
    fill_ids: tuple[int, ...]
    page_ids: list[int]
    num_filled: int = 0
    cached_len: int = 0
    namespace: Hashable = None
    last_cached: CachedPage | None = None
    num_cached: int = 0
    steps_in_flight: int = 0
    rounds_in_flight: int = 0
    is_prefill_read: bool = False
    ended: bool = False

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is left of one round's ids: the ids, their text, and why the sequence ends, if so."""

    ids: tuple[int, ...]
    text: str
    finish: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One request: its output so far and, while it has a slot, its tenancy.

    arrival: order of submission, kept through retraction. max_new_tokens: the request's, clipped
    to what the engine can hold. features: what its steps must have, asked for at every plan.
    cached_tokens: of the prompt, found in the prefix cache when it was first admitted.
    """

    request: Request
    arrival: int
    max_new_tokens: int
    text_stream: TextStream
    counters: SpecCounters
    state: SequenceState = SequenceState.WAITING
    tenancy: Tenancy | None = None
    emitted_ids: list[int] = field(default_factory=list)
    num_retractions: int = 0
    cached_tokens: int = 0
    features: StepFeatures = field(init=False)
    logprobs: SequenceLogprobs = field(init=False)

    def __post_init__(self) -> None:
        self.features = self.request.sampling.features
        self.logprobs = SequenceLogprobs(self.request)

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
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_len + len(self.emitted_ids)

    @property
    def num_tokens_left(self) -> int:
        return self.max_new_tokens - len(self.emitted_ids)

    @property
    def fill_ids(self) -> tuple[int, ...]:
        """What a prefill has to run: the prompt and, after a retraction, the output too."""
        if not self.emitted_ids:
            return self.request.prompt_ids
        return (*self.request.prompt_ids, *self.emitted_ids)

    @property
    def sharable_ids(self) -> tuple[int, ...]:
        """The part of the fill that may come out of the prefix cache, all but its last token.

        A prompt token of which a log-probability is asked for is preceded by one that is run.
        """
        computed_from = self.logprobs.computed_from
        return self.fill_ids if computed_from is None else self.fill_ids[: computed_from + 1]

    def absorb(self, ids: tuple[int, ...]) -> Cut:
        """Cuts one round's ids once and appends what is left to the output.

        Order of the rules: a stop string, then a stop token or EOS, then the length. A stop token
        on the last token allowed is a stop. A stop token is kept as an id and has no text (but for
        Request.shows), unless the text before it, flushed, ends in a stop string. Neither a stop
        token nor a stop string counts among the first min_new_tokens tokens.
        """
        num_out, low = len(self.emitted_ids), self.request.sampling.min_new_tokens
        kept = ids[: self.num_tokens_left]
        stop = first_stop(kept, self.request.ends_with, begin=low - num_out)
        num_pushed = stop + (self.request.shows(kept[stop]) if stop < len(kept) else 0)
        text = self._push(kept[:num_pushed], num_barred=low - num_out)
        is_last = stop < len(kept) or len(kept) == self.num_tokens_left
        # After a stop string nothing may follow; otherwise what was held back is now final.
        held_back = self.text_stream.flush() if is_last and text.matched is None else ""
        matched = self.text_stream.matched
        if matched is not None:
            kept = kept[: text.num_ids]
            finish = FinishReason(kind=FinishKind.STOP, matched=matched)
        elif stop < len(kept):
            kept = kept[: stop + 1]
            finish = FinishReason(kind=FinishKind.STOP, matched=kept[stop])
        elif is_last:
            finish = FinishReason(kind=FinishKind.LENGTH, length=num_out + len(kept))
        else:
            finish = None
        self.emitted_ids.extend(kept)
        return Cut(ids=kept, text=text.text + held_back, finish=finish)

    def _push(self, ids: tuple[int, ...], *, num_barred: int) -> TextCut:
        """Pushes ids into the text; the first num_barred of them cannot complete a stop string."""
        split = max(num_barred, 0)
        num_ids, text = 0, ""
        for part, allow_stop in ((ids[:split], False), (ids[split:], True)):
            if not part:
                continue
            cut = self.text_stream.push(part, allow_stop=allow_stop)
            num_ids, text = num_ids + cut.num_ids, text + cut.text
            if cut.matched is not None:
                return TextCut(num_ids=num_ids, text=text, matched=cut.matched)
        return TextCut(num_ids=num_ids, text=text)

    def chunk(self, cut: Cut, *, num_accepted: int = 0) -> StreamChunk:
        """The message to the consumer about `cut`."""
        return StreamChunk(
            request_id=self.request.request_id,
            new_ids=cut.ids,
            num_accepted=num_accepted,
            text=cut.text,
            finish=cut.finish,
            prompt_tokens=self.prompt_len,
            completion_tokens=len(self.emitted_ids),
            num_retractions=self.num_retractions,
            cached_tokens=self.cached_tokens,
            counters=self.counters,
            logprobs=self.logprobs.of_ids(len(cut.ids)),
            prompt_logprobs=self.logprobs.of_prompt(),
        )


def first_stop(ids: tuple[int, ...], is_stop: Callable[[int], bool], *, begin: int) -> int:
    """Index of the first stop id at or after `begin`; len(ids) without one.

    Worked example: min_new_tokens 3 with 2 tokens out gives begin = 1, since ids[0] is the third
    token and ids[1] the first one that may end the text.
    """
    for index in range(max(begin, 0), len(ids)):
        if is_stop(ids[index]):
            return index
    return len(ids)


def empty_counters(spec: SpeculativeConfig) -> SpecCounters:
    """Counters before the first verification; plain decoding has no histogram."""
    if spec.algorithm is Algorithm.NONE:
        return SpecCounters()
    return SpecCounters(accept_histogram=(0,) * (spec.num_steps + 1))


def count_verification(
    counters: SpecCounters, spec: SpeculativeConfig, *, num_emitted: int, num_kept: int
) -> SpecCounters:
    """Adds one verification that emitted `num_emitted` ids, of which the cut left `num_kept`.

    Accepted drafts are those that survived the cut. A truncated step (num_kept < num_emitted,
    always a sequence's last) is left out of the two `full_` counters, hence of the acceptance
    length. Plain decoding verifies nothing and counts nothing.
    """
    if spec.algorithm is Algorithm.NONE:
        return counters
    num_accepted = surviving_drafts(num_emitted, num_kept)
    histogram = list(counters.accept_histogram)
    histogram[num_accepted] += 1
    is_full = num_kept == num_emitted
    return replace(
        counters,
        verify_ct=counters.verify_ct + 1,
        num_accepted=counters.num_accepted + num_accepted,
        num_proposed=counters.num_proposed + spec.num_draft_tokens - 1,
        accept_histogram=tuple(histogram),
        full_verify_ct=counters.full_verify_ct + is_full,
        full_num_emitted=counters.full_num_emitted + (num_emitted if is_full else 0),
    )


def surviving_drafts(num_emitted: int, num_kept: int) -> int:
    """Accepted drafts among the first num_kept of num_emitted ids: all but the bonus, which is
    the last. Emitted a1 a2 y: kept 3 → 2, kept 2 → 2, kept 1 → 1.
    """
    return min(num_emitted - 1, num_kept)
