"""DeepSeek's tool calls: a name, and its arguments as JSON.

V3 and R1 (a line break between two calls):

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 (on one line):

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from jspec.text.calls.call_reader import ArgumentsReader
from jspec.text.calls.events import Event
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import CallMachine

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKERS = (ALL_BEGIN, ALL_END, BEGIN, SEPARATOR, END)
FENCE = "```"
_KIND = "function"


class DeepseekParser(CallMachine):
    """Parses V3's calls. Closing marks and the code block's fences may be missing."""

    _all_begin, _begin = ALL_BEGIN, BEGIN
    _ends: tuple[str, ...] = (FENCE, END, ALL_END)  # marks that may follow a call, in this order
    _closing: tuple[str, ...] = ()  # marks that may still follow the last call

    def _step(self) -> list[Event] | None:
        if self._reader is not None:
            return self._read(self._reader)
        if self._closing:
            return self._close()
        return self._head() if self._raw else self._until(self._all_begin, self._begin)

    def _head(self) -> list[Event] | None:
        text, blanks = self._rest.lstrip(BLANKS), self._num_blanks()
        if self._raw.endswith(self._all_begin):
            if text.startswith(self._begin):
                self._look(blanks + len(self._begin))
                return []
            return None if self._begin.startswith(text) else self._give_up()
        return self._named()

    def _named(self) -> list[Event] | None:
        before = _KIND + SEPARATOR
        if not self._rest.startswith(before):
            return None if before.startswith(self._rest) else self._give_up()
        name, line_end, tail = self._rest[len(before) :].partition("\n")
        if not line_end:
            may_be = any(known.startswith(name.rstrip(BLANKS)) for known in self._names)
            return None if may_be else self._give_up()
        if name.rstrip(BLANKS) not in self._names:
            return self._give_up()
        fenced = tail.lstrip(BLANKS)
        after = fenced.removeprefix(f"{FENCE}json").removeprefix(FENCE).lstrip(BLANKS)
        is_open = not after or f"{FENCE}json".startswith(fenced)
        return self._arguments(name.rstrip(BLANKS), after, is_open=is_open)

    def _arguments(
        self, name: str, after: str, *, is_open: bool, call_id: str | None = None
    ) -> list[Event] | None:
        """Start the arguments. after: _rest from their brace on. is_open: it may still come."""
        if after.startswith("{"):
            self._look(len(self._rest) - len(after))
            self._reader = ArgumentsReader(name, call_id)
            return []
        return None if is_open else self._give_up()

    def _close(self) -> list[Event] | None:
        text = self._rest.lstrip(BLANKS)
        for index, mark in enumerate(self._closing):
            if text.startswith(mark):
                self._rest, self._closing = text[len(mark) :], self._closing[index + 1 :]
                return []
        if any(mark.startswith(text) for mark in self._closing):
            return None
        self._closing = ()
        return []

    def _call_ended(self, *, is_whole: bool) -> None:
        self._closing = self._ends if is_whole else ()

    def flush(self) -> list[Event]:
        rest = self._rest.strip(BLANKS)
        if any(mark.startswith(rest) for mark in self._closing):
            self._rest = ""
        return super().flush()


class Deepseek31Parser(DeepseekParser):
    _ends = (END, ALL_END)

    def _named(self) -> list[Event] | None:
        name, separator, tail = self._rest.partition(SEPARATOR)
        if not separator:
            may_be = any((known + SEPARATOR).startswith(name) for known in self._names)
            return None if may_be else self._give_up()
        if name not in self._names:
            return self._give_up()
        after = tail.lstrip(BLANKS)
        return self._arguments(name, after, is_open=not after)
