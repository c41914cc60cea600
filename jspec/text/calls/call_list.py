"""Calls as a JSON list: [{"name": "get_weather", "arguments": {"city": "Paris"}}, ...].

A grammar enforces this format where `tool_choice` requires a call, whatever the model's own format.
"""

from __future__ import annotations

import enum

from jspec.text.calls.events import Event
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import CallMachine


class Place(enum.Enum):
    OUTSIDE = "outside"
    OPENED = "before the list"
    ITEM = "before a call"
    NEXT = "after a call"


class CallListParser(CallMachine):
    """Parses an answer that is such a list or a single call; anything else is content."""

    _place = Place.OPENED
    _is_list = False

    def _step(self) -> list[Event] | None:
        if self._reader is not None:
            return self._read(self._reader)
        if self._place is Place.OUTSIDE:
            return self._outside()
        text = self._rest.lstrip(BLANKS)
        if not text:
            return None
        return self._next(text[0]) if self._place is Place.NEXT else self._item(text[0])

    def _outside(self) -> list[Event] | None:
        text, self._rest = self._rest, ""
        return self._content(text)

    def _item(self, char: str) -> list[Event] | None:
        if char == "[" and self._place is Place.OPENED:
            self._look(self._num_blanks() + 1)
            self._place = Place.ITEM
            return []
        if char == "{":
            self._look(self._num_blanks())
            self._is_list = self._place is Place.ITEM
            self._read_call()
            return []
        self._place = Place.OUTSIDE
        return self._give_up()

    def _next(self, char: str) -> list[Event] | None:
        if char == ",":
            self._look(self._num_blanks() + 1)
            self._place = Place.ITEM
            return []
        self._place = Place.OUTSIDE
        if char == "]":
            self._rest = self._rest.lstrip(BLANKS)[1:]
        return []

    def _call_ended(self, *, is_whole: bool) -> None:
        self._place = Place.NEXT if is_whole and self._is_list else Place.OUTSIDE
