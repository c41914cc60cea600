"""Gemma 4's tool calls, with keys without quotes and special marks around texts.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Arguments are returned as JSON. A text has no escapes; numbers, true, false and null are as in JSON.
"""

from __future__ import annotations

import json
import re

from jspec.text.calls.events import CallArguments, CallBegin, Event
from jspec.text.calls.hermes import HermesParser
from jspec.text.calls.json_scan import BLANKS, MAX_DEPTH, Scan

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
_HEAD = re.compile(rf"[{BLANKS}]*call:[{BLANKS}]*([\w.-]+)[{BLANKS}]*", re.ASCII)
_KEY = re.compile(r"[\w.$-]+", re.ASCII)
_WORD_CHARS = frozenset("+-.0123456789eEtrufalsn")


class ArgumentsReader:
    """Reads the arguments of a call whose name came before, from their brace on."""

    def __init__(self, name: str) -> None:
        self._begin = CallBegin(name)
        self.has_begun = False
        self._open = ""  # a brace or bracket for each level
        # One of: {, key, colon, value, text, end (a comma, or the end of the level).
        self._awaits = "{"
        self._held = ""  # an incomplete key, word or mark
        self._is_key = False  # the text is a key
        self._may_close = False

    def feed(self, text: str) -> tuple[int, Scan, list[Event]]:
        num_chars, scan, written = 0, Scan.MORE, ""
        for char in text:
            scan, piece = self._take(char)
            if scan is Scan.BAD:
                break
            written += piece
            num_chars += 1
            if scan is Scan.DONE:
                break
        if not written:
            return num_chars, scan, []
        begin: list[Event] = [] if self.has_begun else [self._begin]
        self.has_begun = True
        return num_chars, scan, [*begin, CallArguments(written)]

    def _take(self, char: str) -> tuple[Scan, str]:
        """Return the state after a character, and the JSON that it completes."""
        if self._awaits == "text":
            return self._in_text(char)
        if self._held.startswith("<"):
            return self._mark(char)
        if self._awaits == "value" and self._held:
            return self._word(char)
        if self._awaits == "key" and (self._held or _KEY.fullmatch(char)):
            return self._bare_key(char)
        if char in BLANKS:
            return Scan.MORE, ""
        return self._between(char)

    def _between(self, char: str) -> tuple[Scan, str]:
        awaits, is_object = self._awaits, self._open.endswith("{")
        if awaits == "{":
            return self._opened(char) if char == "{" else (Scan.BAD, "")
        if awaits == "colon":
            self._awaits, self._may_close = "value", False
            return (Scan.MORE, ":") if char == ":" else (Scan.BAD, "")
        if char in "}]":
            return self._closed(char)
        if awaits == "end":
            self._awaits, self._may_close = "key" if is_object else "value", False
            return (Scan.MORE, ",") if char == "," else (Scan.BAD, "")
        if char == "<":
            self._held, self._is_key = char, awaits == "key"
            return Scan.MORE, ""
        if awaits == "key":
            return Scan.BAD, ""
        if char in "{[":
            return self._opened(char)
        self._held = char
        return (Scan.MORE, "") if char in _WORD_CHARS else (Scan.BAD, "")

    def _opened(self, char: str) -> tuple[Scan, str]:
        if len(self._open) == MAX_DEPTH:
            return Scan.BAD, ""
        self._open += char
        self._awaits, self._may_close = "key" if char == "{" else "value", True
        return Scan.MORE, char

    def _closed(self, char: str) -> tuple[Scan, str]:
        fits = self._open.endswith("{" if char == "}" else "[")
        if not fits or not (self._awaits == "end" or self._may_close):
            return Scan.BAD, ""
        self._open, self._awaits = self._open[:-1], "end"
        return (Scan.MORE if self._open else Scan.DONE), char

    def _bare_key(self, char: str) -> tuple[Scan, str]:
        if _KEY.fullmatch(char):
            self._held += char
            return Scan.MORE, ""
        key, self._held, self._awaits = json.dumps(self._held), "", "colon"
        if char in BLANKS:
            return Scan.MORE, key
        scan, colon = self._between(char)
        return scan, key + colon

    def _word(self, char: str) -> tuple[Scan, str]:
        if char in _WORD_CHARS:
            self._held += char
            return Scan.MORE, ""
        word, self._held, self._awaits = self._held, "", "end"
        try:
            json.loads(word)
        except ValueError:
            return Scan.BAD, ""
        if char in BLANKS:
            return Scan.MORE, word
        scan, after = self._between(char)
        return scan, word + after

    def _mark(self, char: str) -> tuple[Scan, str]:
        self._held += char
        if not QUOTE.startswith(self._held):
            return Scan.BAD, ""
        if self._held != QUOTE:
            return Scan.MORE, ""
        self._held, self._awaits = "", "text"
        return Scan.MORE, '"'

    def _in_text(self, char: str) -> tuple[Scan, str]:
        self._held += char
        if self._held == QUOTE:
            self._held, self._awaits = "", "colon" if self._is_key else "end"
            return Scan.MORE, '"'
        length = next(
            n for n in range(len(self._held), -1, -1) if QUOTE.startswith(self._held[-n:] * (n > 0))
        )
        end = len(self._held) - length
        text, self._held = self._held[:end], self._held[end:]
        return Scan.MORE, json.dumps(text, ensure_ascii=False)[1:-1]


class Gemma4Parser(HermesParser):
    _open, _close_mark = OPEN, CLOSE

    def _step(self) -> list[Event] | None:
        if self._raw and self._reader is None and not self._is_closing:
            return self._named()
        return super()._step()

    def _read_call(self) -> None:
        """Do nothing, since the name must come first."""

    def _named(self) -> list[Event] | None:
        head = _HEAD.match(self._rest)
        if head is None:
            may_be = "call:".startswith(self._rest.lstrip(BLANKS)[:5])
            return None if may_be else self._give_up()
        name, tail = head[1], self._rest[head.end() :]
        if not tail:
            is_open = any(known.startswith(name) for known in self._names)
            return None if is_open else self._give_up()
        if name not in self._names or not tail.startswith("{"):
            return self._give_up()
        self._look(head.end())
        self._reader = ArgumentsReader(name)
        return []
