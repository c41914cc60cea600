"""Trivial text with one character per token id, so that expected texts are easy to write by hand.

Id 0 is "a", 1 is "b", ... 25 is "z". `FakeTextStream` is the streaming half with a stop matcher;
`expected_output` implements the stop rules again, one id at a time, as an oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jspec.messages.protocols import TextCut
from jspec.messages.request import FinishKind, FinishReason, Request

VOCAB_SIZE = 26


def text_of(ids: tuple[int, ...]) -> str:
    """(7, 8) → "hi"."""
    return "".join(chr(ord("a") + token_id) for token_id in ids)


def ids_of(text: str) -> tuple[int, ...]:
    """ "hi" → (7, 8)."""
    return tuple(ord(char) - ord("a") for char in text)


class FakeTextStream:
    """The TextStream of one request: holds back a possible start of a stop string.

    Ids pushed with allow_stop False cannot be part of a match.

        stop ("bcd",), ids of "abc", then of "dz": text "a", then "" with matched "bcd" after 1 id
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = stop
        self.matched: str | None = None
        self._text = ""
        self._num_sent = 0
        self._search_start = 0

    @classmethod
    def for_request(cls, request: Request) -> FakeTextStream:
        return cls(request.sampling.stop)

    def watch(self) -> FakeTextStream:
        """Return a stream as its own watch, since ids are characters here."""
        return FakeTextStream(self._stop)

    def passes(self, ids: Sequence[int]) -> bool:
        ahead = copy.copy(self)
        if ahead.push(tuple(ids)).matched is not None:
            return False
        self.push(tuple(ids))
        return True

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        for num_ids, char in enumerate(text_of(ids), start=1):
            self._text += char
            if not allow_stop:
                self._search_start = len(self._text)
                continue
            for stop in self._stop:
                begin = len(self._text) - len(stop)
                if self._text.endswith(stop) and begin >= self._search_start:
                    self._text, self.matched = self._text[:begin], stop
                    return TextCut(num_ids=num_ids, text=self._send(begin), matched=stop)
        return TextCut(num_ids=len(ids), text=self._send(len(self._text) - self._num_held()))

    def flush(self) -> str:
        return self._send(len(self._text))

    def _send(self, end: int) -> str:
        start, self._num_sent = self._num_sent, end
        return self._text[start:end]

    def _num_held(self) -> int:
        """Length of the longest suffix that starts some stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(self._text) - self._search_start), 0, -1):
            if any(stop.startswith(self._text[-length:]) for stop in self._stop):
                return length
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedOutput:
    ids: tuple[int, ...]
    text: str
    finish: FinishReason


def expected_output(
    request: Request, token_at: Callable[[Request, int], int], *, max_new_tokens: int
) -> ExpectedOutput:
    """Return the whole output of a request whose token at position p is token_at(request, p)."""
    ids: list[int] = []
    low = request.sampling.min_new_tokens
    while True:
        token_id = token_at(request, len(request.prompt_ids) + len(ids))
        may_stop = len(ids) >= low
        before = text_of(tuple(ids))
        ids.append(token_id)
        if may_stop and token_id in request.stop_ids:
            finish = FinishReason(kind=FinishKind.STOP, matched=token_id)
            return ExpectedOutput(ids=tuple(ids), text=before, finish=finish)
        text = text_of(tuple(ids))
        for stop in request.sampling.stop:
            if may_stop and text[low:].endswith(stop):
                finish = FinishReason(kind=FinishKind.STOP, matched=stop)
                return ExpectedOutput(ids=tuple(ids), text=text.removesuffix(stop), finish=finish)
        if len(ids) == max_new_tokens:
            finish = FinishReason(kind=FinishKind.LENGTH, length=max_new_tokens)
            return ExpectedOutput(ids=tuple(ids), text=text, finish=finish)
