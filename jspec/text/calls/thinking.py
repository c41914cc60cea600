"""Reasoning between marks at the start of an answer: <think> and </think> (DeepSeek-R1, Qwen 3),
<|channel>thought and <channel|> (Gemma 4), [THINK] and [/THINK] (Mistral)."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from jspec.messages.grammar import ReasoningMarks
from jspec.text.calls.events import Content, Event, Reasoning
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import num_undecided
from jspec.text.tokenizer.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkMarks:
    """The marks around reasoning. The header follows the opening mark and is not reasoning."""

    open: str = OPEN
    close: str = CLOSE
    header: str = ""

    def is_open(self, end: str) -> bool:
        """Return whether a prompt's end, without blanks, opens the reasoning."""
        return end.endswith((self.open, self.open + self.header))


THINK = ThinkMarks()
GEMMA4 = ThinkMarks(open="<|channel>", close="<channel|>", header="thought")
MISTRAL = ThinkMarks(open="[THINK]", close="[/THINK]")
PROMPT_END_IDS = 16  # the last ids of a prompt, searched for a template's reasoning mark


def prompt_end(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(ids[-PROMPT_END_IDS:], skip_special_tokens=False)


def marks_after(end: str, marks: ThinkMarks = THINK) -> ReasoningMarks | None:
    """Return the marks of reasoning that may follow a prompt's end; None if it is over."""
    end = end.rstrip()
    if end.endswith(marks.close):
        return None
    return ReasoningMarks(marks.close, open=None if marks.is_open(end) else marks.open)


class _Place(enum.Enum):
    START = "start"
    OPENED = "opened"
    HEADED = "after the header"
    INSIDE = "inside"
    CLOSED = "closed"
    OUTSIDE = "outside"


class ThinkParser:
    """Separates reasoning. starts_inside: the opening mark may be missing."""

    def __init__(self, *, starts_inside: bool, marks: ThinkMarks = THINK) -> None:
        self._starts_inside = starts_inside
        self._marks = marks
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
        if self._place in (_Place.OPENED, _Place.HEADED):
            return []
        return [Content(text)]

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
        if place is _Place.OPENED and self._marks.header:
            return self._header(text)
        is_inside = place in (_Place.OPENED, _Place.HEADED)
        self._place = _Place.INSIDE if is_inside else _Place.OUTSIDE
        return []

    def _header(self, text: str) -> list[Event] | None:
        header = self._marks.header
        if header.startswith(text) and text != header:
            return None
        self._rest = text.removeprefix(header)
        self._place = _Place.HEADED if text.startswith(header) else _Place.INSIDE
        return []

    def _start(self, text: str) -> list[Event] | None:
        opening = self._marks.open
        if text.startswith(opening):
            self._rest, self._place = text[len(opening) :], _Place.OPENED
        elif opening.startswith(text):
            return None
        elif self._starts_inside:
            self._rest, self._place = text, _Place.INSIDE
        else:
            self._place = _Place.OUTSIDE
        return []

    def _inside(self) -> list[Event] | None:
        close = self._marks.close
        end = self._rest.find(close)
        if end >= 0:
            text, self._rest = self._rest[:end].rstrip(BLANKS), self._rest[end + len(close) :]
            self._place = _Place.CLOSED
            return [Reasoning(text)] if text else []
        certain = self._rest[: len(self._rest) - num_undecided(self._rest, [close])]
        certain = certain.rstrip(BLANKS)
        self._rest = self._rest[len(certain) :]
        return [Reasoning(certain)] if certain else None
