"""Mistral's tool calls, in the older and the newer format.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]
[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}
"""

from __future__ import annotations

import re

from jspec.text.calls.call_list import CallListParser, Place
from jspec.text.calls.call_reader import ArgumentsReader
from jspec.text.calls.events import Event
from jspec.text.calls.json_scan import BLANKS

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\]([A-Za-z0-9]+))?", re.ASCII)


class MistralParser(CallListParser):
    _place = Place.OUTSIDE

    def _outside(self) -> list[Event] | None:
        found = self._until(OPEN)
        if self._raw:
            self._place = Place.OPENED
        return found

    def _item(self, char: str) -> list[Event] | None:
        if self._place is Place.OPENED and _HEAD.match(char):
            return self._named()
        return super()._item(char)

    def _named(self) -> list[Event] | None:
        num_blanks = self._num_blanks()
        head = _HEAD.match(self._rest, num_blanks)
        assert head is not None
        name, call_id = head.groups()
        tail = self._rest[head.end() :]
        if not tail:  # name and id may be incomplete
            if call_id is not None or any(known.startswith(name) for known in self._names):
                return None
        elif name in self._names:
            after = tail.removeprefix(ARGS).lstrip(BLANKS)
            if after.startswith("{"):
                self._look(len(self._rest) - len(after))
                self._is_list = False
                self._reader = ArgumentsReader(name, call_id)
                return []
            marks = (ARGS,) if call_id else (ARGS, CALL_ID)
            if not after or any(mark.startswith(tail) for mark in marks):
                return None
        self._place = Place.OUTSIDE
        return self._give_up()
