"""Kimi K2's tool calls: an id that names the function, and its arguments as JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>

(on one line). Its template repeats these ids, so they are also the calls' ids in answers.
"""

from __future__ import annotations

import re

from jspec.text.calls.deepseek import DeepseekParser
from jspec.text.calls.events import Event
from jspec.text.calls.json_scan import BLANKS

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, SEPARATOR, END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MARKERS = (ALL_BEGIN, ALL_END, BEGIN, SEPARATOR, END)
_PREFIXES = ("functions.", "")
_NUMBER = re.compile(rf":\d+[{BLANKS}]*")
_BEGUN_NUMBER = re.compile(rf":(\d+[{BLANKS}]*)?")


class KimiParser(DeepseekParser):
    _all_begin, _begin = ALL_BEGIN, BEGIN
    _ends = (END, ALL_END)

    def _named(self) -> list[Event] | None:
        before, separator, tail = self._rest.partition(SEPARATOR)
        call_id = before.strip(BLANKS)
        if not separator:
            return None if self._may_be_id(before.lstrip(BLANKS)) else self._give_up()
        name = next((x for x, rest in self._ids(call_id) if _NUMBER.fullmatch(rest)), None)
        if name is None:
            return self._give_up()
        after = tail.lstrip(BLANKS)
        return self._arguments(name, after, is_open=not after, call_id=call_id)

    def _ids(self, text: str) -> list[tuple[str, str]]:
        """Return (a tool's name, the text after it) for each that the text starts with."""
        starts = ((f"{prefix}{name}", name) for prefix in _PREFIXES for name in self._names)
        return [(name, text[len(start) :]) for start, name in starts if text.startswith(start)]

    def _may_be_id(self, text: str) -> bool:
        """Return whether more text could complete an id and the separator."""
        if any(f"{x}{name}".startswith(text) for x in _PREFIXES for name in self._names):
            return True
        found = (_BEGUN_NUMBER.match(rest) for _, rest in self._ids(text))
        ends = (match.string[match.end() :] for match in found if match is not None)
        return any(SEPARATOR.startswith(end) for end in ends)
