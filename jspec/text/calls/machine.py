"""The common part of call parsers: pending text, the call being read, blanks at edges. A `_step`
sees only the pending text, so it does not matter how text is split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable

from jspec.text.calls.call_reader import CallReader, Reader
from jspec.text.calls.events import Content, Event
from jspec.text.calls.json_scan import BLANKS, Scan


def num_undecided(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest end of `text` that may start a marker: "a <tool" with
    "<tool_call>" → 5."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if marker.startswith(text[-length:]):
                longest = length
                break
    return longest


class CallMachine(ABC):
    """An AnswerParser whose calls, of the tools in `names`, are read by a Reader."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        # _rest: text not looked at yet. _raw: text looked at, content if it becomes no call.
        # _blanks: blanks between two calls, content if something else follows.
        self._rest = self._raw = self._blanks = ""
        self._reader: Reader | None = None
        self._has_calls = False
        self._is_at_edge = True  # of the answer or a call

    @abstractmethod
    def _step(self) -> list[Event] | None:
        """Take a part of _rest; return None if more text is needed."""

    @abstractmethod
    def _call_ended(self, *, is_whole: bool) -> None:
        """Handle a call that was read to its end, or up to an invalid character."""

    def push(self, text: str) -> list[Event]:
        self._rest += text
        found: list[Event] = []
        while self._rest and (events := self._step()) is not None:
            found += events
        return found

    def flush(self) -> list[Event]:
        found = self._content(self._raw + self._rest)
        self._raw = self._rest = ""
        if self._blanks and not self._has_calls:
            found.append(Content(self._blanks))
        self._blanks = ""
        return found

    def _content(self, text: str) -> list[Event]:
        if self._is_at_edge:
            text, self._blanks = self._blanks + text, ""
            if not text.strip(BLANKS):
                self._blanks = text
                return []
            self._is_at_edge = False
        return [Content(text)] if text else []

    def _give_up(self) -> list[Event]:
        raw, self._raw = self._raw, ""
        return self._content(raw)

    def _look(self, length: int) -> None:
        self._raw += self._rest[:length]
        self._rest = self._rest[length:]

    def _num_blanks(self) -> int:
        return len(self._rest) - len(self._rest.lstrip(BLANKS))

    def _until(self, *markers: str) -> list[Event] | None:
        """Move the first marker to _raw; return the text before it, None if it needs more text."""
        found = {self._rest.find(marker): marker for marker in markers}
        begin = min((place for place in found if place >= 0), default=-1)
        if begin < 0:
            end = len(self._rest) - num_undecided(self._rest, markers)
            text, self._rest = self._rest[:end], self._rest[end:]
            return self._content(text) if text else None
        text, self._rest = self._rest[:begin], self._rest[begin:]
        self._look(len(found[begin]))
        return self._content(text)

    def _read_call(self) -> None:
        self._reader = CallReader(self._names)

    def _read(self, reader: Reader) -> list[Event]:
        num_chars, scan, events = reader.feed(self._rest)
        self._look(num_chars)
        if reader.has_begun:
            self._raw = self._blanks = ""
            self._has_calls = self._is_at_edge = True
        if scan is not Scan.MORE:
            self._reader = None
            events = [*events, *self._give_up()]
            self._call_ended(is_whole=scan is Scan.DONE)
        return events
