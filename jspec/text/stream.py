"""A sequence's text as ids arrive: a detokenizer followed by a stop matcher."""

from __future__ import annotations

from collections.abc import Sequence

from jspec.messages.protocols import StopWatch, TextCut, TextStream
from jspec.messages.request import Request
from jspec.text.stop.stop_matcher import StopAutomaton, StopMatcher
from jspec.text.tokenizer.detokenizer import new_detokenizer
from jspec.text.tokenizer.tokenizer import Tokenizer


class IdsOnlyStream:
    """A TextStream without text, for an engine without a tokenizer; every id is kept."""

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        del allow_stop
        return TextCut(num_ids=len(ids), text="")

    def flush(self) -> str:
        return ""

    @property
    def matched(self) -> str | None:
        return None

    def watch(self) -> None:
        """Return None, since there is no text to watch."""


class TokenizedStream:
    """A TextStream with a tokenizer. stop: the strings, or an automaton shared by sequences.

    Text, kept ids and match do not depend on how ids are grouped into pushes. Without a match, the
    texts of all pushes and flush add up to `tokenizer.decode(ids)`. With one, they are that text up
    to the stop string that is completed first, including it if `no_stop_trim`.
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
        return self._matched

    def watch(self) -> StopWatch | None:
        tables = self._stop_tables
        return None if tables is None else tables.watch(self._matcher.automaton)

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        """Append ids one by one, to find the exact id that completes a stop string. Ids after a
        match are not kept. Raises RuntimeError after flush."""
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
        """Return the text still held back, or "" after a match or another flush.

        An incomplete character, or a run of byte tokens, becomes text only here, and may complete a
        stop string.
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
