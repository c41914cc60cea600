"""Search for the stop string that a growing text completes first, holding back possible starts, by
one automaton step per character (Aho and Corasick, "Efficient string matching", 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jspec.errors import RequestError
from jspec.text.stop.stop_regex import StopPattern, stop_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAutomaton:
    """All prefixes of all stop strings as states; state 0 is the empty prefix.

    The state after a text is its longest suffix that is a prefix of a stop string. Stop strings
    "END" and "ND!": after "xEND" the state is "END", completed is "END", and num_held is 2, since
    "ND" may still become "ND!" where "END" is not allowed to stop.
    """

    children: tuple[dict[str, int], ...]  # by character, the prefix one character longer
    fallback: tuple[int, ...]  # the longest proper suffix that is also a prefix
    completed: tuple[str | None, ...]  # the longest stop string that it ends with
    num_held: tuple[int, ...]  # length of the longest suffix that may become a stop string
    patterns: tuple[StopPattern, ...] = ()  # regular expressions that also end the text

    @classmethod
    def from_strings(cls, stop: Sequence[str], regexes: Sequence[str] = ()) -> StopAutomaton:
        """Build the automaton in linear time. Raises RequestError for an invalid string."""
        if isinstance(stop, str):
            raise RequestError(f"stop is the string {stop!r}; expected a sequence of strings")
        children: list[dict[str, int]] = [{}]
        completed: list[str | None] = [None]
        for text in stop:
            if not text:
                raise RequestError(f"stop holds {text!r}; expected non-empty strings")
            state = 0
            for char in text:
                if char not in children[state]:
                    children[state][char] = len(children)
                    children.append({})
                    completed.append(None)
                state = children[state][char]
            completed[state] = text
        fallback, num_held = _link(children, completed)
        return cls(
            children=tuple(children),
            fallback=tuple(fallback),
            completed=tuple(completed),
            num_held=tuple(num_held),
            patterns=tuple(map(stop_pattern, regexes)),
        )

    def advance(self, state: int, char: str) -> int:
        while state and char not in self.children[state]:
            state = self.fallback[state]
        return self.children[state].get(char, 0)


def _link(
    children: Sequence[dict[str, int]], completed: list[str | None]
) -> tuple[list[int], list[int]]:
    """Return fallback and num_held of every state, shortest prefixes first; extends `completed`."""
    fallback = [0] * len(children)
    num_held = [0] * len(children)
    queue = deque((child, 0, char, 1) for char, child in children[0].items())
    while queue:
        state, parent, char, length = queue.popleft()
        if parent:
            suffix = fallback[parent]
            while suffix and char not in children[suffix]:
                suffix = fallback[suffix]
            fallback[state] = children[suffix].get(char, 0)
        if completed[state] is None:
            completed[state] = completed[fallback[state]]
        num_held[state] = length if children[state] else num_held[fallback[state]]
        queue.extend((child, state, c, length + 1) for c, child in children[state].items())
    return fallback, num_held


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchStep:
    """The result of a push. Matches of regular expressions are not trimmed."""

    text: str  # can no longer be part of a stop string
    matched: str | None = None  # the completed stop string, or the matching regular expression
    trimmed: str = ""  # the stop string, which was removed


class StopMatcher:
    """One sequence's search.

    The returned texts add up to the text before the stop string, or through the first end of a
    match of a regular expression, however the text is split into pushes. The stop string whose last
    character comes first wins, and among several that end there, the longest.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._state = 0
        self._held = ""
        self._places = [pattern.first for pattern in automaton.patterns]

    @property
    def automaton(self) -> StopAutomaton:
        return self._automaton

    @property
    def held(self) -> str:
        return self._held

    @property
    def has_strings(self) -> bool:
        return bool(self._automaton.children[0] or self._automaton.patterns)

    def passes(self, text: str) -> bool:
        """Return True if `text` can be emitted unchanged. Does not change the state."""
        if self._automaton.patterns:
            return False
        return not self._state and self._automaton.children[0].keys().isdisjoint(text)

    def push(self, text: str, *, allow_stop: bool = True) -> MatchStep:
        """Append text; not after a match. With allow_stop False, only a stop string that is
        completed in a later push counts."""
        automaton = self._automaton
        if not (automaton.children[0] or automaton.patterns):
            return MatchStep(text=text)
        text_so_far = self._held + text
        num_old = len(self._held)
        for char_idx, char in enumerate(text):
            self._state = automaton.advance(self._state, char)
            matched = automaton.completed[self._state]
            if matched is not None and allow_stop:
                self._held = ""
                # held "xE", text "ND!", matched "END" at char_idx 1: 2 + 1 + 1 - 3 keeps "x".
                num_kept = num_old + char_idx + 1 - len(matched)
                return MatchStep(text=text_so_far[:num_kept], matched=matched, trimmed=matched)
            pattern = self._advance(char) if automaton.patterns else None
            if pattern is not None and allow_stop:
                self._held = ""
                return MatchStep(text=text_so_far[: num_old + char_idx + 1], matched=pattern)
        num_final = len(text_so_far) - automaton.num_held[self._state]
        self._held = text_so_far[num_final:]
        return MatchStep(text=text_so_far[:num_final])

    def _advance(self, char: str) -> str | None:
        ended = None
        for i, pattern in enumerate(self._automaton.patterns):
            self._places[i], ends = pattern.advance(self._places[i], char)
            if ends and ended is None:
                ended = pattern.pattern
        return ended

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
