"""Tool calls of Llama 3.1, 3.2 and 3.3: the answer is one or several JSON objects.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}

An object is a call at the start of the answer, after another call, and after the mark.
"""

from __future__ import annotations

from jspec.text.calls.events import Event
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import CallMachine

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(CallMachine):
    _may_be_call = True

    def _step(self) -> list[Event] | None:
        if self._reader is not None:
            return self._read(self._reader)
        if self._may_be_call:
            return self._begin()
        found = self._until(PYTHON_TAG)
        self._may_be_call = bool(self._raw)
        return found

    def _begin(self) -> list[Event] | None:
        text = self._rest.lstrip(BLANKS)
        if self._has_calls and text.startswith(";") and ";" not in self._raw:
            self._look(self._num_blanks() + 1)
            return []
        if not text or (PYTHON_TAG.startswith(text) and text != PYTHON_TAG):
            return None
        self._may_be_call = False
        if text.startswith("{"):
            self._look(self._num_blanks())
            self._read_call()
            return []
        if text.startswith(PYTHON_TAG) and not self._raw.endswith(PYTHON_TAG):
            self._look(self._num_blanks() + len(PYTHON_TAG))
            self._may_be_call = True
            return []
        return self._give_up()

    def _call_ended(self, *, is_whole: bool) -> None:
        self._may_be_call = is_whole
