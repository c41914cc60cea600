"""Text and counters of a sequence, made by its reader from committed pieces: the ids after the cut,
and the reason if the sequence ends. No step waits for its text, unless that may end the row."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import repeat
from typing import NamedTuple

import numpy as np

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.messages.protocols import TextStream
from jspec.messages.request import (
    DEFAULT_VERSION,
    FinishReason,
    PromptToken,
    Request,
    SpecCounters,
    StreamChunk,
    TokenLogprob,
)
from jspec.messages.verified_tree import VerifiedTree


class Origin(NamedTuple):
    """Fields of `StreamChunk` that are constant during a tenancy."""

    num_retractions: int = 0
    cached_tokens: int = 0
    weight_version: str = DEFAULT_VERSION


class Piece(NamedTuple):
    """The addition of one round to one sequence. Call `chunk` once for each, in order."""

    history: TokenHistory
    ids: Ordered[int]  # after the cut; in a verification only the first num_emitted are defined
    num_emitted: int = 0  # by the verification, before the cut; 0: no verification
    origin: Origin = Origin()
    num_proposed: int | None = None  # drafts verified; 0: a plain step; None: N - 1
    finish: FinishReason | None = None
    text: str | None = None  # None: the reader makes it from the shown ids
    num_shown: int | None = None  # leading ids that have text; None: all
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptToken, ...] = ()
    hidden_states: tuple[np.ndarray, ...] = ()
    draft_tree: VerifiedTree | None = None

    def chunk(self) -> StreamChunk:
        return self.history.chunk(self)

    @classmethod
    def of_whole_rows(
        cls,
        histories: Iterable[TokenHistory],
        ids: Iterable[list[int]],
        counts: Iterable[int],
        origins: Iterable[Origin],
        *,
        num_proposed: int | None,
    ) -> list[Piece]:
        """Make the pieces of rows that continue, fast, since planning waits for it."""
        rest = (repeat(default) for default in tuple(cls._field_defaults.values())[3:])
        rows = zip(histories, ids, counts, origins, repeat(num_proposed), *rest, strict=False)
        return list(map(tuple.__new__, repeat(cls), rows))


class TokenHistory:
    """One sequence as its reader knows it. stream: None if every piece has its text."""

    def __init__(
        self, request: Request, draft_shape: SpeculativeConfig, *, stream: TextStream | None
    ) -> None:
        self.request_id = request.request_id
        self._prompt_tokens = len(request.prompt_ids)
        self._stream = stream
        self._tally = Tally(draft_shape)

    def chunk(self, piece: Piece) -> StreamChunk:
        ids = tuple(piece.ids[: piece.num_emitted] if piece.num_emitted else piece.ids)
        num_accepted = 0
        if piece.num_emitted:
            num_accepted = surviving_drafts(piece.num_emitted, len(ids))
            self._tally.add(
                num_emitted=piece.num_emitted, num_kept=len(ids), num_proposed=piece.num_proposed
            )
        return StreamChunk(
            request_id=self.request_id,
            new_ids=ids,
            num_accepted=num_accepted,
            text=self._text(piece, ids) if piece.text is None else piece.text,
            finish=piece.finish,
            prompt_tokens=self._prompt_tokens,
            num_retractions=piece.origin.num_retractions,
            cached_tokens=piece.origin.cached_tokens,
            weight_version=piece.origin.weight_version,
            counters=self._tally.counters,
            logprobs=piece.logprobs,
            prompt_logprobs=piece.prompt_logprobs,
            hidden_states=piece.hidden_states,
            draft_tree=piece.draft_tree,
        )

    def _text(self, piece: Piece, ids: tuple[int, ...]) -> str:
        if self._stream is None:
            return ""
        shown = ids if piece.num_shown is None else ids[: piece.num_shown]
        text = self._stream.push(shown).text if shown else ""
        return text if piece.finish is None else text + self._stream.flush()


class Tally:
    """Verification counters of one sequence or of all. Plain decoding verifies nothing.

    Accepted drafts survived the cut. A truncated step (num_kept < num_emitted, always a sequence's
    last) does not count in the `full_` counters.
    """

    def __init__(self, draft_shape: SpeculativeConfig) -> None:
        self._is_plain = draft_shape.algorithm == Algorithm.NONE
        self._num_drafts = draft_shape.num_draft_tokens - 1
        self._histogram = [0] * draft_shape.max_emitted
        self._verify_ct = self._num_accepted = self._num_proposed = 0
        self._full_verify_ct = self._full_num_emitted = 0

    def add(self, *, num_emitted: int, num_kept: int, num_proposed: int | None = None) -> None:
        """Count one verification that emitted `num_emitted` ids, of which the cut kept `num_kept`.
        num_proposed: drafts that it verified; 0: a plain step; None: N - 1."""
        if num_proposed == 0:
            return
        num_accepted = surviving_drafts(num_emitted, num_kept)
        self._histogram[num_accepted] += 1
        self._verify_ct += 1
        self._num_accepted += num_accepted
        self._num_proposed += self._num_drafts if num_proposed is None else num_proposed
        if num_kept == num_emitted:
            self._full_verify_ct += 1
            self._full_num_emitted += num_emitted

    def add_whole(
        self, num_verifications: Ordered[int], *, num_proposed: int | None = None
    ) -> None:
        """Count num_verifications[n] verifications that emitted n ids each, all kept."""
        if num_proposed == 0:
            return
        of_each = self._num_drafts if num_proposed is None else num_proposed
        self._num_proposed += sum(num_verifications) * of_each
        for num_emitted, count in enumerate(num_verifications):
            if count:
                self._histogram[num_emitted - 1] += count
                self._verify_ct += count
                self._num_accepted += count * (num_emitted - 1)
                self._full_verify_ct += count
                self._full_num_emitted += count * num_emitted

    @property
    def counters(self) -> SpecCounters:
        if self._is_plain:
            return NO_COUNTERS
        return SpecCounters(
            verify_ct=self._verify_ct,
            num_accepted=self._num_accepted,
            num_proposed=self._num_proposed,
            accept_histogram=tuple(self._histogram),
            full_verify_ct=self._full_verify_ct,
            full_num_emitted=self._full_num_emitted,
        )


NO_COUNTERS = SpecCounters()


def surviving_drafts(num_emitted: int, num_kept: int) -> int:
    """Return the accepted drafts among the first num_kept of num_emitted ids, the last of which is
    the bonus token. Emitted a1 a2 y: kept 3 → 2, kept 2 → 2, kept 1 → 1."""
    return min(num_emitted - 1, num_kept)
