"""A character-by-character scanner for one JSON object (RFC 8259), which finds its end."""

from __future__ import annotations

import enum
import re

BLANKS = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSER = {"{": "}", "[": "]"}
MAX_DEPTH = 128  # a limit that clients' parsers can read


class Scan(enum.Enum):
    """The result of a character: the object continues, it ended, or the character is invalid."""

    MORE = "more"
    DONE = "done"
    BAD = "bad"


class _At(enum.Enum):
    START = "start"
    FIRST_KEY = "first key"
    KEY = "key"
    COLON = "colon"
    FIRST_VALUE = "first value"
    VALUE = "value"
    AFTER = "after a value"
    STRING = "string"
    ESCAPE = "escape"
    HEX = "hex"
    NUMBER = "number"
    LITERAL = "literal"


class JsonScanner:
    """A scanner of one object, which must not be fed after BAD or DONE."""

    def __init__(self) -> None:
        self.key = ""  # the object's current member, as written between the quotes
        self.in_value = False  # the last character is part of that member's value
        self._at = _At.START
        self._open: list[str] = []
        self._is_key = False
        self._word = ""  # a number so far, or the rest of a literal or \\uXXXX

    def feed(self, char: str) -> Scan:
        at = self._at
        self.in_value = len(self._open) > 1 or (len(self._open) == 1 and self._is_value(char))
        if at in (_At.STRING, _At.ESCAPE, _At.HEX):
            return self._in_string(char)
        if at is _At.LITERAL:
            return self._in_literal(char)
        if at is _At.NUMBER:
            if char in _NUMBER_CHARS:
                self._word += char
                return Scan.MORE
            if not _NUMBER.fullmatch(self._word):
                return Scan.BAD
            self._at = _At.AFTER
        return self._between(char)

    @property
    def has_ended_value(self) -> bool:
        """True if the last character ended such a value; never for a number."""
        return self.in_value and self._at is _At.AFTER and len(self._open) == 1

    def _is_value(self, char: str) -> bool:
        if self._at in (_At.STRING, _At.ESCAPE, _At.HEX):
            return not self._is_key
        if self._at is _At.NUMBER:
            return char in _NUMBER_CHARS
        return self._at is _At.LITERAL or (self._at is _At.VALUE and char not in BLANKS)

    def _between(self, char: str) -> Scan:
        if char in BLANKS:
            return Scan.MORE
        at, opened = self._at, self._open
        if at is _At.START:
            return self._begin(char) if char == "{" else Scan.BAD
        if at is _At.COLON:
            return self._go(_At.VALUE) if char == ":" else Scan.BAD
        if at in (_At.KEY, _At.FIRST_KEY) and char == '"':
            self._is_key = True
            if len(opened) == 1:
                self.key = ""
            return self._go(_At.STRING)
        if at in (_At.VALUE, _At.FIRST_VALUE) and char != "]":
            return self._begin(char)
        if at is _At.AFTER and char == ",":
            return self._go(_At.KEY if opened[-1] == "{" else _At.VALUE)
        closes = at in (_At.AFTER, _At.FIRST_KEY, _At.FIRST_VALUE) and char == _CLOSER[opened[-1]]
        if not closes:
            return Scan.BAD
        opened.pop()
        return self._end_value() if opened else Scan.DONE

    def _begin(self, char: str) -> Scan:
        if char in _CLOSER:
            if len(self._open) == MAX_DEPTH:
                return Scan.BAD
            self._open.append(char)
            return self._go(_At.FIRST_KEY if char == "{" else _At.FIRST_VALUE)
        if char == '"':
            self._is_key = False
            return self._go(_At.STRING)
        if char in _LITERALS:
            self._word = _LITERALS[char][1:]
            return self._go(_At.LITERAL)
        if char == "-" or char in "0123456789":
            self._word = char
            return self._go(_At.NUMBER)
        return Scan.BAD

    def _in_string(self, char: str) -> Scan:
        own_key = self._is_key and len(self._open) == 1
        if self._at is _At.ESCAPE:
            if char not in '"\\/bfnrtu':
                return Scan.BAD
            self._word = "xxxx"
            self._at = _At.HEX if char == "u" else _At.STRING
        elif self._at is _At.HEX:
            if char not in "0123456789abcdefABCDEF":
                return Scan.BAD
            self._word = self._word[1:]
            self._at = _At.HEX if self._word else _At.STRING
        elif char == '"':
            return self._go(_At.COLON) if self._is_key else self._end_value()
        elif char < " ":
            return Scan.BAD
        elif char == "\\":
            self._at = _At.ESCAPE
        if own_key:
            self.key += char
        return Scan.MORE

    def _in_literal(self, char: str) -> Scan:
        if char != self._word[0]:
            return Scan.BAD
        self._word = self._word[1:]
        return Scan.MORE if self._word else self._end_value()

    def _end_value(self) -> Scan:
        return self._go(_At.AFTER)

    def _go(self, at: _At) -> Scan:
        self._at = at
        return Scan.MORE
