"""Tool calls with each argument between marks, of Qwen3-Coder, GLM-4.5, MiniMax-M2 and
DeepSeek-V3.2.

    <tool_call><function=get_weather><parameter=city>Paris</parameter></function></tool_call>
    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>
    <minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>
    </minimax:tool_call>
    <｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city"
    string="true">Paris</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>

The last two may have several calls between their outer marks. Lines may break between marks and,
but for DeepSeek's, around a value. Values are plain text; the tool's schema determines their types
(`value_of`), and arguments are returned as JSON. DeepSeek says with each value whether it is text
or JSON, and the empty line before its block is part of the block (source: the checkpoint's
encoding/encoding_dsv32.py).
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jspec.text.calls.events import CallArguments, CallBegin, Event
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import CallMachine, num_undecided

NAME = ""  # in a head: characters that are not part of a mark
_NAME = re.compile(r"[^<>\n]+")
# A name with its type; `read_head` has removed the quotes around the whole.
_TYPED = re.compile(r'([^"]+)"\s+string="(true|false)')


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlMarks:
    open: str  # starts a call
    head: tuple[str, ...]  # parts before a call's arguments, with NAME for its name
    key: tuple[str, ...]  # parts before a value, with NAME for its key
    value_end: str
    call_end: str  # ends the arguments
    close: str = ""  # may follow the arguments
    has_several: bool = False  # another head may follow the arguments
    lead: str = ""  # blanks before `open` that are part of it
    has_padded_values: bool = True  # one line break on each side of a value is no part of it
    has_types: bool = False  # string="true" or "false" after an argument's name: text or JSON


QWEN3_CODER = XmlMarks(
    open="<tool_call>",
    head=("<function=", NAME, ">"),
    key=("<parameter=", NAME, ">"),
    value_end="</parameter>",
    call_end="</function>",
    close="</tool_call>",
)
GLM45 = XmlMarks(
    open="<tool_call>",
    head=(NAME,),
    key=("<arg_key>", NAME, "</arg_key>", "<arg_value>"),
    value_end="</arg_value>",
    call_end="</tool_call>",
)


MINIMAX = XmlMarks(
    open="<minimax:tool_call>",
    head=("<invoke name=", NAME, ">"),
    key=("<parameter name=", NAME, ">"),
    value_end="</parameter>",
    call_end="</invoke>",
    close="</minimax:tool_call>",
    has_several=True,
)
DSML = "｜DSML｜"
DEEPSEEK_V32 = XmlMarks(
    open=f"<{DSML}function_calls>",
    head=(f"<{DSML}invoke name=", NAME, ">"),
    key=(f"<{DSML}parameter name=", NAME, ">"),
    value_end=f"</{DSML}parameter>",
    call_end=f"</{DSML}invoke>",
    close=f"</{DSML}function_calls>",
    has_several=True,
    lead="\n\n",
    has_padded_values=False,
    has_types=True,
)


class _Place(enum.Enum):
    OUTSIDE = "outside"
    HEAD = "before a name"
    BETWEEN = "between values"
    VALUE = "in a value"
    CLOSING = "after a call"


class Head(enum.Enum):
    UNDECIDED = "undecided"
    BAD = "bad"


def read_head(text: str, parts: tuple[str, ...]) -> tuple[int, str] | Head:
    """Return the end of a head at the start of `text`, and its name. Blanks may separate parts."""
    at, name = 0, ""
    for part in parts:
        at = len(text) - len(text[at:].lstrip(BLANKS))
        if part == NAME:
            found = _NAME.match(text, at)
            if found is None:
                return Head.UNDECIDED if at == len(text) else Head.BAD
            at, name = found.end(), found[0].strip(BLANKS).strip('"')
            if at == len(text):
                return Head.UNDECIDED
        elif text.startswith(part, at):
            at += len(part)
        else:
            return Head.UNDECIDED if part.startswith(text[at:]) else Head.BAD
    return at, name


class XmlCallParser(CallMachine):
    """Parses these formats. names: the tools, or a mapping to their parameters' schemas."""

    def __init__(self, names: Collection[str], marks: XmlMarks) -> None:
        super().__init__(names)
        self._schemas = names if isinstance(names, Mapping) else {}
        self._marks = marks
        self._place = _Place.OUTSIDE
        self._properties: Mapping[str, Any] = {}
        self._schema: Any = None
        self._num_values = 0
        self._is_text = self._is_at_start = False  # of the value

    def _step(self) -> list[Event] | None:
        match self._place:
            case _Place.OUTSIDE:
                found = self._until(self._marks.lead + self._marks.open, self._marks.open)
                if self._raw:
                    self._place = _Place.HEAD
                return found
            case _Place.HEAD:
                return self._begin()
            case _Place.BETWEEN:
                return self._between()
            case _Place.VALUE:
                return self._value()
        return self._close()

    def _begin(self) -> list[Event] | None:
        found = read_head(self._rest, self._marks.head)
        if found is Head.UNDECIDED and self._may_be_name():
            return None
        if isinstance(found, Head) or found[1] not in self._names:
            self._place = _Place.OUTSIDE
            return self._give_up()
        end, name = found
        self._look(end)
        self._raw = self._blanks = ""
        self._has_calls = self._is_at_edge = True
        self._place, self._num_values = _Place.BETWEEN, 0
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        return [CallBegin(name)]

    def _may_be_name(self) -> bool:
        mark = self._marks.head[0]
        begun = self._rest.lstrip(BLANKS).removeprefix(mark).strip(BLANKS).lstrip('"')
        is_mark = mark != NAME and mark.startswith(self._rest.lstrip(BLANKS))
        return is_mark or any(name.startswith(begun.rstrip('">')) for name in self._names)

    def _between(self) -> list[Event] | None:
        marks, text = self._marks, self._rest.lstrip(BLANKS)
        if text.startswith(marks.call_end):
            self._rest, self._place = text[len(marks.call_end) :], _Place.CLOSING
            return [CallArguments("}" if self._num_values else "{}")]
        found = read_head(text, marks.key)
        if found is Head.UNDECIDED or marks.call_end.startswith(text):
            return None
        if isinstance(found, Head):  # arguments already returned stay
            self._place = _Place.OUTSIDE
            return []
        end, key = found
        self._rest = text[end:]
        key, self._is_text = self._typed(key)
        self._schema = self._properties.get(key)
        self._is_at_start = self._marks.has_padded_values
        self._place = _Place.VALUE
        begin = ", " if self._num_values else "{"
        self._num_values += 1
        quote = '"' if self._is_text else ""
        return [CallArguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: {quote}")]

    def _typed(self, key: str) -> tuple[str, bool]:
        """Return the argument's name, and whether its value is text."""
        found = _TYPED.fullmatch(key) if self._marks.has_types else None
        if found is not None:
            return found[1], found[2] == "true"
        return key, is_text(self._properties.get(key))

    def _value(self) -> list[Event] | None:
        if self._is_at_start:
            self._rest, self._is_at_start = self._rest.removeprefix("\n"), False
            return []
        mark, pad = self._marks.value_end, "\n" if self._marks.has_padded_values else ""
        end = self._rest.find(mark)
        if end >= 0:
            text, self._rest = self._rest[:end].removesuffix(pad), self._rest[end + len(mark) :]
            self._place = _Place.BETWEEN
            said = f'{escaped(text)}"' if self._is_text else value_of(text, self._schema)
            return [CallArguments(said)]
        if not self._is_text:  # its type is known at its end
            return None
        size = len(self._rest) - num_undecided(self._rest, (mark, pad + mark))
        text, self._rest = self._rest[:size], self._rest[size:]
        return [CallArguments(escaped(text))] if text else None

    def _close(self) -> list[Event] | None:
        text, mark = self._rest.lstrip(BLANKS), self._marks.close
        if self._marks.has_several and text.startswith(self._marks.head[0]):
            self._rest, self._place = text, _Place.HEAD
            return []
        ends = (mark, self._marks.head[0]) if self._marks.has_several else (mark,)
        if text != mark and any(end.startswith(text) for end in ends):
            return None
        self._place = _Place.OUTSIDE
        self._rest = text.removeprefix(mark) if mark and text.startswith(mark) else self._rest
        return []

    def flush(self) -> list[Event]:
        text, found = self._rest, []
        marks = (*self._marks.key[:1], self._marks.call_end)
        if self._place is _Place.VALUE:
            found = [CallArguments(escaped(text) if self._is_text else text)] if text else []
            self._rest = ""
        elif self._place is _Place.BETWEEN:
            if any(mark.startswith(text.strip(BLANKS)) for mark in marks):
                self._rest = ""
        elif self._place is _Place.CLOSING and self._marks.close.startswith(text.strip(BLANKS)):
            self._rest = ""
        return [*found, *super().flush()]

    def _call_ended(self, *, is_whole: bool) -> None:
        """Do nothing, since the arguments are not JSON and have no reader."""


def is_text(schema: Any) -> bool:
    """Return True if every value of this schema is text, as without a schema."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind is None and isinstance(schema, Mapping):
        return not {"anyOf", "oneOf", "allOf", "$ref", "enum", "const"} & schema.keys()
    return kind is None or kind == "string"


def value_of(text: str, schema: Any) -> str:
    """Return a value as JSON: unchanged if it is JSON that the schema allows, else as text."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    word = text.strip(BLANKS)
    if word in ("True", "False", "None"):  # the models' templates write Python's
        word = {"True": "true", "False": "false", "None": "null"}[word]
    try:
        value = json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kinds = kind if isinstance(kind, list) else [kind]
    choices = schema.get("enum", ()) if isinstance(schema, Mapping) else ()
    takes_text = "string" in kinds or text in choices
    if takes_text and isinstance(value, int | float) and not isinstance(value, bool):
        is_number = {"integer", "number"} & set(kinds)
        return word if is_number else json.dumps(text, ensure_ascii=False)
    return word


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
