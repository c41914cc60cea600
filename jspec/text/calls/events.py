"""What an answer's text turns out to be: content, reasoning, calls of tools. Knows no format."""

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
    """Text that the model wrote for itself; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool; what follows up to the next one are its arguments.

    call_id: what the model called it, if its format has that.
    """

    name: str
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the latest call's arguments: JSON, as the model wrote it; never empty."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments


class AnswerParser(Protocol):
    """One sequence's text as it grows. No push after flush.

    Laws: joined events (`join`) do not depend on how the text is split into pushes; nothing is held
    back but what may still become a marker, or a call whose name is not known yet; and all text
    comes back, as it was written, but for the marks of calls and the blanks around them.
    """

    def push(self, text: str) -> list[Event]:
        """What became certain by this text."""
        ...

    def flush(self) -> list[Event]:
        """What is left when no more text will come."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[Event]:
        """See AnswerParser."""
        return [Content(text)] if text else []

    def flush(self) -> list[Event]:
        """See AnswerParser."""
        return []


class Pipeline:
    """`outer` splits the text; what it calls content is `inner`'s to read."""

    def __init__(self, outer: AnswerParser, inner: AnswerParser) -> None:
        self._outer, self._inner = outer, inner

    def push(self, text: str) -> list[Event]:
        """See AnswerParser."""
        return self._through(self._outer.push(text))

    def flush(self) -> list[Event]:
        """See AnswerParser."""
        return [*self._through(self._outer.flush()), *self._inner.flush()]

    def _through(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._inner.push(event.text) if isinstance(event, Content) else [event]
        return found


def join(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of one kind made one."""
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
