"""Readers of a tool call, {"name": ..., "arguments": {...}}, or of its arguments alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Protocol

from jspec.text.calls.events import CallArguments, CallBegin, Event
from jspec.text.calls.json_scan import BLANKS, JsonScanner, Scan

ARGUMENTS = ("arguments", "parameters")
_TEXTS = ("name", "id", "type")
_ID = re.compile(r"[\w-]{1,64}", re.ASCII)


class Reader(Protocol):
    """Reads one call. After `has_begun`, its CallBegin was returned and its text is not content."""

    @property
    def has_begun(self) -> bool: ...

    def feed(self, text: str) -> tuple[int, Scan, list[Event]]:
        """Return (the call's length, state, certain events). BAD refers to the next character."""
        ...


class ArgumentsReader:
    """Reads the arguments of a call whose name came before, from their brace on."""

    def __init__(self, name: str, call_id: str | None = None) -> None:
        self._begin = CallBegin(name, call_id)
        self._scanner = JsonScanner()
        self.has_begun = False

    def feed(self, text: str) -> tuple[int, Scan, list[Event]]:
        num_chars, scan = 0, Scan.MORE
        for char in text:
            scan = self._scanner.feed(char)
            if scan is Scan.BAD:
                break
            num_chars += 1
            if scan is Scan.DONE:
                break
        piece = text[:num_chars] if self.has_begun else text[:num_chars].lstrip(BLANKS)
        if not piece:
            return num_chars, scan, []
        begin: list[Event] = [] if self.has_begun else [self._begin]
        self.has_begun = True
        return num_chars, scan, [*begin, CallArguments(piece)]


class CallReader:
    """Reads a whole call of one of the tools in `names`. Arguments before the name wait for it; an
    id after both is dropped."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self._seen: set[str] = set()
        self._name: str | None = None
        self._call_id: str | None = None
        self._begin: CallBegin | None = None
        self._value = ""
        self._arguments = ""  # not returned yet
        self._has_arguments = False
        self.has_begun = False

    def feed(self, text: str) -> tuple[int, Scan, list[Event]]:
        num_chars, scan = 0, Scan.MORE
        for char in text:
            scan = self._scanner.feed(char)
            if scan is Scan.BAD or not self._take(char):
                scan = Scan.BAD
                break
            num_chars += 1
            if scan is Scan.DONE:
                break
        if scan is Scan.DONE and not self._has_arguments and self._name is not None:
            self._has_arguments, self._arguments = True, "{}"
            self._decide()
        return num_chars, *self._certain(scan)

    def _certain(self, scan: Scan) -> tuple[Scan, list[Event]]:
        if self._begin is None:
            return (Scan.BAD if scan is Scan.DONE else scan), []
        events: list[Event] = [] if self.has_begun else [self._begin]
        self.has_begun = True
        if self._arguments:
            events.append(CallArguments(self._arguments))
            self._arguments = ""
        return scan, events

    def _decide(self) -> None:
        if self._begin is None and self._name is not None and self._has_arguments:
            self._begin = CallBegin(self._name, self._call_id)

    def _take(self, char: str) -> bool:
        scanner = self._scanner
        if not scanner.in_value:
            return True
        key = scanner.key
        if not self._value:
            if not self._may_begin(key, char):
                return False
            self._has_arguments |= key in ARGUMENTS
            self._decide()
        if key in ARGUMENTS:
            self._arguments += char
            self._value = "" if scanner.has_ended_value else "{"
            return True
        self._value += char
        return self._end_text(key) if scanner.has_ended_value else True

    def _may_begin(self, key: str, char: str) -> bool:
        kind = "arguments" if key in ARGUMENTS else key
        if kind in self._seen or (key not in ARGUMENTS and key not in _TEXTS):
            return False
        self._seen.add(kind)
        return char == ("{" if key in ARGUMENTS else '"')

    def _end_text(self, key: str) -> bool:
        text, self._value = json.loads(self._value), ""
        if key == "name":
            if text not in self._names:
                return False
            self._name = text
            self._decide()
        elif key == "id":
            self._call_id = text if _ID.fullmatch(text) else None
        return True
