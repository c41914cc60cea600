"""Tool calls of Hermes, Qwen 2.5 and Qwen 3.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from jspec.text.calls.events import Event
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import CallMachine

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallMachine):
    _open, _close_mark = OPEN, CLOSE
    _is_closing = False

    def _step(self) -> list[Event] | None:
        if self._reader is not None:
            return self._read(self._reader)
        if self._is_closing:
            return self._close()
        found = self._until(self._open)
        if self._raw:
            self._read_call()
        return found

    def _close(self) -> list[Event] | None:
        text = self._rest.lstrip(BLANKS)
        close = self._close_mark
        if close.startswith(text) and text != close:
            return None
        self._is_closing = False
        if text.startswith(close):
            self._rest = text[len(close) :]
        return []

    def _call_ended(self, *, is_whole: bool) -> None:
        self._is_closing = is_whole

    def flush(self) -> list[Event]:
        if self._is_closing and self._close_mark.startswith(self._rest.strip(BLANKS)):
            self._rest = ""
        return super().flush()
