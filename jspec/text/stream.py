"""One sequence's text as ids arrive: the detokenizer and the stop matcher in series.

Implements `TextStream` of the protocols. Streams know nothing about steps or EOS: the
scheduler says which ids to push, and which of them may end the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from jspec.messages.protocols import StopWatch, TextCut, TextStream
from jspec.messages.request import Request
from jspec.text.stop.stop_matcher import StopAutomaton, StopMatcher
from jspec.text.tokenizer.detokenizer import new_detokenizer
from jspec.text.tokenizer.tokenizer import Tokenizer


class IdsOnlyStream:
    """A TextStream without text, for an engine without a tokenizer: every id is kept."""

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Keeps all ids."""
        del allow_stop
        return TextCut(num_ids=len(ids), text="")

    def flush(self) -> str:
        """Nothing is ever held back."""
        return ""

    @property
    def matched(self) -> str | None:
        """Nothing to match in."""
        return None

    def watch(self) -> None:
        """There is nothing to watch for."""


class TokenizedStream:
    """Law: text, ids kept and match do not depend on how the ids are grouped into pushes.

    Without a match the texts of all pushes and of flush add up to `tokenizer.decode(ids)`; with
    one, to that text cut before the stop string that is completed first, or after it if
    `no_stop_trim`.
    stop: the strings, or what was made of them for several sequences.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] | StopAutomaton = (),
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        no_stop_trim: bool = False,
    ) -> None:
        hidden = tokenizer.hidden_ids(skip_special_tokens=skip_special_tokens, shown_ids=shown_ids)
        self._stop_tables = tokenizer.stop_tables(hidden)
        self._detokenizer = new_detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids
        )
        if not isinstance(stop, StopAutomaton):
            stop = StopAutomaton.from_strings(stop)
        self._matcher = StopMatcher(stop)
        self._no_stop_trim = no_stop_trim
        self._matched: str | None = None
        self._allow_stop = True
        self._flushed = False

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, whether push or flush completed it."""
        return self._matched

    def watch(self) -> StopWatch | None:
        """See TextStream: where tokens are bytes."""
        tables = self._stop_tables
        return None if tables is None else tables.watch(self._matcher.automaton)

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Appends ids, one by one, so that the id which completes a stop string is exact.

        That id is the one whose push made the last character final: bytes of a character that
        is not complete yet complete nothing. After a match further ids are not kept
        (num_ids is 0). Raises RuntimeError after flush.
        """
        if self._flushed:
            raise RuntimeError(f"push of {ids} came after flush; expected no more ids")
        if self._matched is not None:
            return TextCut(num_ids=0, text="", matched=self._matched)
        if ids:
            self._allow_stop = allow_stop
        if not self._matcher.has_strings:
            return TextCut(num_ids=len(ids), text=self._detokenizer.push_all(ids))
        texts = [self._detokenizer.push(token_id) for token_id in ids]
        whole = "".join(texts)
        if self._matcher.passes(whole):
            return TextCut(num_ids=len(ids), text=whole)
        final = []
        for num_ids, text in enumerate(texts, start=1):
            step = self._matcher.push(text, allow_stop=allow_stop)
            final.append(step.text)
            if step.matched is not None:
                self._matched = step.matched
                final.append(step.trimmed if self._no_stop_trim else "")
                return TextCut(num_ids=num_ids, text="".join(final), matched=step.matched)
        return TextCut(num_ids=len(ids), text="".join(final))

    def flush(self) -> str:
        """Text still held back; "" after a match, and when called again.

        A torn character, or a run of byte tokens, becomes text only here. If that completes a
        stop string (and the last push allowed it), the text is cut and `matched` says so.
        """
        if self._flushed or self._matched is not None:
            self._flushed = True
            return ""
        self._flushed = True
        step = self._matcher.push(self._detokenizer.flush(), allow_stop=self._allow_stop)
        self._matched = step.matched
        kept = step.trimmed if self._no_stop_trim else ""
        return step.text + kept + self._matcher.flush()


def stream_of(tokenizer: Tokenizer | None, request: Request) -> TextStream:
    """The text of one request; without a tokenizer there is none."""
    if tokenizer is None:
        return IdsOnlyStream()
    params = request.sampling
    automaton: StopAutomaton | None = request.stop_matching
    return TokenizedStream(
        tokenizer,
        stop=automaton or StopAutomaton.from_strings(params.stop, params.stop_regex),
        skip_special_tokens=params.skip_special_tokens,
        shown_ids=request.shown_ids,
        no_stop_trim=params.no_stop_trim,
    )
