"""Reasoning between <think> and </think> at the start of an answer (DeepSeek-R1, Qwen 3)."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from jspec.messages.grammar import ReasoningMarks
from jspec.text.calls.events import Content, Event, Reasoning
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import num_undecided
from jspec.text.tokenizer.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
PROMPT_END_IDS = 16  # the last ids of a prompt, searched for a template's reasoning mark


def prompt_end(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the end of a prompt's text, in which a template may open or close the reasoning."""
    return tokenizer.decode(ids[-PROMPT_END_IDS:], skip_special_tokens=False)


def marks_after(end: str) -> ReasoningMarks | None:
    """Return the marks of reasoning that may follow a prompt's end; None: it is over."""
    end = end.rstrip()
    if end.endswith(CLOSE):
        return None
    return ReasoningMarks(CLOSE, open=None if end.endswith(OPEN) else OPEN)


class _Place(enum.Enum):
    START = "start"
    OPENED = "opened"
    INSIDE = "inside"
    CLOSED = "closed"
    OUTSIDE = "outside"


class ThinkParser:
    """starts_inside: an answer without the opening mark starts with reasoning, too."""

    def __init__(self, *, starts_inside: bool) -> None:
        self._starts_inside = starts_inside
        self._place = _Place.START
        self._rest = ""

    def push(self, text: str) -> list[Event]:
        self._rest += text
        found: list[Event] = []
        while self._rest and (events := self._step()) is not None:
            found += events
        return found

    def flush(self) -> list[Event]:
        text, self._rest = self._rest, ""
        if not text or self._place is _Place.CLOSED:
            return []
        is_inside = self._place is _Place.START and self._starts_inside and text.strip(BLANKS)
        if is_inside or self._place is _Place.INSIDE:
            return [Reasoning(text)]
        return [] if self._place is _Place.OPENED else [Content(text)]

    def _step(self) -> list[Event] | None:
        place = self._place
        if place is _Place.INSIDE:
            return self._inside()
        if place is _Place.OUTSIDE:
            text, self._rest = self._rest, ""
            return [Content(text)]
        text = self._rest.lstrip(BLANKS)
        if not text:
            return None
        if place is _Place.START:
            return self._start(text)
        self._rest = text
        self._place = _Place.INSIDE if place is _Place.OPENED else _Place.OUTSIDE
        return []

    def _start(self, text: str) -> list[Event] | None:
        if text.startswith(OPEN):
            self._rest, self._place = text[len(OPEN) :], _Place.OPENED
        elif OPEN.startswith(text):
            return None
        elif self._starts_inside:
            self._rest, self._place = text, _Place.INSIDE
        else:
            self._place = _Place.OUTSIDE
        return []

    def _inside(self) -> list[Event] | None:
        end = self._rest.find(CLOSE)
        if end >= 0:
            text, self._rest = self._rest[:end].rstrip(BLANKS), self._rest[end + len(CLOSE) :]
            self._place = _Place.CLOSED
            return [Reasoning(text)] if text else []
        certain = self._rest[: len(self._rest) - num_undecided(self._rest, [CLOSE])]
        certain = certain.rstrip(BLANKS)
        self._rest = self._rest[len(certain) :]
        return [Reasoning(certain)] if certain else None
