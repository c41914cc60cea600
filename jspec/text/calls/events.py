"""Events of a parsed answer: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    name: str
    call_id: str | None = None  # the model's id, if its format has one


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the latest call's arguments: the model's JSON, never empty."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class AnswerParser(Protocol):
    """A parser of one sequence's growing text. No push may follow flush.

    Joined events (`join`) do not depend on how the text is split. Only a possible marker, or a call
    without its name, is held back. Text is returned as written, except the marks of calls and
    blanks around them.
    """

    def push(self, text: str) -> list[Event]: ...

    def flush(self) -> list[Event]: ...


class PlainParser:
    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def flush(self) -> list[Event]:
        return []


class Pipeline:
    def __init__(self, outer: AnswerParser, inner: AnswerParser) -> None:
        self._outer, self._inner = outer, inner

    def push(self, text: str) -> list[Event]:
        return self._through(self._outer.push(text))

    def flush(self) -> list[Event]:
        return [*self._through(self._outer.flush()), *self._inner.flush()]

    def _through(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._inner.push(event.text) if isinstance(event, Content) else [event]
        return found


def join(events: Iterable[Event]) -> list[Event]:
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(last.text + event.text)
        else:
            joined.append(event)
    return joined
