"""Regular expressions that end a growing text, in bounded time.

A pattern becomes an automaton of positions (Thompson, "Regular expression search algorithm", 1968),
all of which advance together, so the pattern's size bounds the cost of a character. Python's `re`
backtracks and would let one request stall all others.

Supported: characters, `.`, classes, `\\d \\w \\s` and their opposites, groups, `|`, `* + ? {m,n}`
    (lazy ones behave alike here), `^` for the start of the text, leading `(?i)` and `(?s)`.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from jspec.errors import RequestError, shown

MAX_POSITIONS = 2000  # of one pattern's automaton, with repetitions expanded
MAX_KNOWN = 4096  # cached moves of a pattern
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": lambda char: char.isalnum() or char == "_",
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4}


@dataclass(frozen=True, slots=True)
class Chars:
    """A set of characters: ranges and named classes (capitals are opposites), or its complement."""

    ranges: tuple[tuple[str, str], ...] = ()
    classes: str = ""
    is_negated: bool = False

    def has(self, spellings: Iterable[str]) -> bool:
        found = any(
            any(low <= char <= high for low, high in self.ranges)
            or any(_CLASSES[name.lower()](char) == name.islower() for name in self.classes)
            for char in spellings
        )
        return found != self.is_negated


@dataclass(frozen=True, slots=True)
class Position:
    """A position of an automaton: a character, a free choice, or the start of the text."""

    to: list[int] = field(default_factory=list)  # the next positions
    chars: Chars | None = None
    is_begin: bool = False


# A part of a pattern: its first position, and the positions whose `to` is still open.
Part = tuple[int, list[int]]


class StopPattern:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        parser = _Parser(pattern)
        begin, ends = parser.parse()
        self._positions = parser.positions
        self._ignores_case = "i" in parser.flags
        self._end = parser.add()
        for end in ends:
            self._positions[end].to.append(self._end)
        self._begin = begin
        self._known: dict[tuple[frozenset[int], str], tuple[frozenset[int], bool]] = {}
        self.first = self._closed([begin], is_begin=True)
        if self._end in self.first:
            raise parser.error("matches the empty text; expected one that needs a character")

    def advance(self, state: frozenset[int], char: str) -> tuple[frozenset[int], bool]:
        found = self._known.get((state, char))
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            moved = self._closed([self._begin, *self._moved(state, char)], is_begin=False)
            found = self._known[state, char] = moved, self._end in moved
        return found

    def _moved(self, state: frozenset[int], char: str) -> list[int]:
        spellings = {char, char.lower(), char.upper()} if self._ignores_case else {char}
        spellings = {one for one in spellings if len(one) == 1}
        return [
            target
            for place in state
            if (chars := self._positions[place].chars) is not None and chars.has(spellings)
            for target in self._positions[place].to
        ]

    def _closed(self, places: Iterable[int], *, is_begin: bool) -> frozenset[int]:
        found: set[int] = set()
        pending = list(places)
        while pending:
            place = pending.pop()
            if place in found:
                continue
            found.add(place)
            position = self._positions[place]
            if position.chars is None and (is_begin or not position.is_begin):
                pending += position.to
        return frozenset(found)


@functools.lru_cache(maxsize=256)
def stop_pattern(pattern: str) -> StopPattern:
    return StopPattern(pattern)


class _Parser:
    """A recursive-descent parser; each method leaves `_at` after what it read."""

    def __init__(self, pattern: str) -> None:
        self.positions: list[Position] = []
        self.flags = ""
        self._pattern = pattern
        self._at = 0

    def error(self, reason: str) -> RequestError:
        return RequestError(f"stop_regex holds {shown(self._pattern)}, which {reason}")

    def add(
        self, to: Iterable[int] = (), *, chars: Chars | None = None, is_begin: bool = False
    ) -> int:
        if len(self.positions) >= MAX_POSITIONS:
            raise self.error(f"is too large; expected at most {MAX_POSITIONS} places")
        self.positions.append(Position(to=list(to), chars=chars, is_begin=is_begin))
        return len(self.positions) - 1

    def parse(self) -> Part:
        while self._pattern[self._at : self._at + 4] in ("(?i)", "(?s)"):
            self.flags += self._pattern[self._at + 2]
            self._at += 4
        part = self._choices(depth=0)
        if self._at < len(self._pattern):
            raise self._unexpected()
        return part

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        is_there = self._pattern.startswith(text, self._at)
        self._at += len(text) if is_there else 0
        return is_there

    def _unexpected(self) -> RequestError:
        what = shown(self._next()) if self._next() else "its end"
        return self.error(f"has {what} at {self._at}; expected something else there")

    def _choices(self, *, depth: int) -> Part:
        if depth > 32:
            raise self.error("has groups 32 deep; expected fewer")
        parts = [self._sequence(depth=depth)]
        while self._take("|"):
            parts.append(self._sequence(depth=depth))
        if len(parts) == 1:
            return parts[0]
        return self.add(to=[begin for begin, _ in parts]), [
            end for _, ends in parts for end in ends
        ]

    def _sequence(self, *, depth: int) -> Part:
        begin = self.add()
        ends = [begin]
        while self._next() not in ("", "|", ")"):
            first, first_ends = self._repeated(depth=depth)
            self._join(ends, first)
            ends = first_ends
        return begin, ends

    def _join(self, ends: list[int], begin: int) -> None:
        for end in ends:
            self.positions[end].to.append(begin)

    def _repeated(self, *, depth: int) -> Part:
        start = self._at
        part = self._one(depth=depth)
        times = self._times()
        if times is None:
            return part
        self._take("?")  # lazy
        if self._next() in ("*", "+", "?") and self._next():
            raise self._unexpected()
        after = self._at
        fewest, most = times
        begin = self.add()
        ends = [begin]
        for i in range(max(fewest, 1) if most is None else most):
            if i:
                self._at = start
                part = self._one(depth=depth)  # parse it again, for new positions
            self._join(ends, part[0])
            ends = part[1] if i < fewest else [*ends, *part[1]]
        if most is None:
            self._join(part[1], part[0])
        self._at = after
        return begin, ends

    def _times(self) -> tuple[int, int | None] | None:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        close = self._pattern.find("}", self._at)
        inside = self._pattern[self._at + 1 : close] if self._next() == "{" and close > 0 else ""
        low, comma, high = inside.partition(",")
        if inside != "," and (not (low + high).isdecimal() or len(inside) > 9):
            return None
        self._at = close + 1
        fewest = int(low or 0)
        most = fewest if not comma else int(high) if high else None
        if most is not None and most < max(fewest, 1):
            raise self.error(f"repeats {{{inside}}} times; expected an ascending range, not 0")
        return fewest, most

    def _one(self, *, depth: int) -> Part:
        if self._take("("):
            if self._take("?") and not self._take(":"):
                raise self.error("has a group that begins with (?; expected ( or (?: alone")
            part = self._choices(depth=depth + 1)
            if not self._take(")"):
                raise self.error("has a ( without its )")
            return part
        if self._take("^"):
            return self._place(is_begin=True)
        char = self._next()
        if char in ("", "*", "+", "?", "$", ")"):
            hint = "; a text that grows has no end yet" if char == "$" else ""
            raise self.error(f"has {shown(char)} at {self._at}; expected something else{hint}")
        if self._take("["):
            return self._place(chars=self._set())
        if self._take("."):
            line_end = () if "s" in self.flags else (("\n", "\n"),)
            return self._place(chars=Chars(line_end, is_negated=True))
        return self._place(chars=self._char())

    def _place(self, *, chars: Chars | None = None, is_begin: bool = False) -> Part:
        place = self.add(chars=chars, is_begin=is_begin)
        return place, [place]

    def _char(self) -> Chars:
        char = self._next()
        self._at += 1
        if char != "\\":
            return Chars(((char, char),))
        char = self._next()
        self._at += 1
        if char.lower() in _CLASSES and char:
            return Chars(classes=char)
        if char in _HEX_DIGITS:
            digits = self._pattern[self._at : self._at + _HEX_DIGITS[char]]
            if len(digits) != _HEX_DIGITS[char] or not set(digits) <= set(string.hexdigits):
                raise self.error(f"has \\{char}{digits}; expected hexadecimal digits")
            self._at += len(digits)
            char = chr(int(digits, 16))
        elif char in _CONTROLS:
            char = _CONTROLS[char]
        elif not char or char.isalnum():
            raise self.error(f"has \\{char}, which is not implemented here")
        return Chars(((char, char),))

    def _set(self) -> Chars:
        is_negated = self._take("^")
        ranges: list[tuple[str, str]] = []
        classes = ""
        begin = self._at
        while self._next() != "]" or self._at == begin:
            if not self._next():
                raise self.error("has a [ without its ]")
            one = self._char()
            classes += one.classes
            if one.ranges and self._next() == "-" and self._pattern[self._at + 1 :][:1] not in "]":
                self._at += 1
                last = self._char()
                if not last.ranges or last.ranges[0][0] < one.ranges[0][0]:
                    raise self.error("has a range whose end is before its beginning")
                ranges.append((one.ranges[0][0], last.ranges[0][1]))
            else:
                ranges += one.ranges
        self._at += 1
        return Chars(tuple(ranges), classes, is_negated)
