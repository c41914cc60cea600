"""Finds the stop string that a growing text completes first, and holds back what may become one.

It works on characters and knows nothing about ids. Cost: one automaton step a character
(Aho and Corasick, "Efficient string matching", 1975), whatever the number of stop strings; the
text held back is shorter than the longest of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jspec.errors import RequestError
from jspec.text.stop.stop_regex import StopPattern, stop_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAutomaton:
    """All prefixes of all stop strings as states; state 0 is the empty prefix.

    The state after a text is its longest suffix that is a prefix of a stop string. Per state:
    children[char]: the prefix one character longer. fallback: its longest proper suffix that is
    a prefix too. completed: the longest stop string that it ends with. num_held: length of its
    longest suffix that more text can still make into a stop string.

    Stop strings "END" and "ND!": after "xEND" the state is "END", completed is "END", and
    num_held is 2, since "ND" may still become "ND!" where "END" is not allowed to stop.
    patterns: regular expressions that end the text as well.
    """

    children: tuple[dict[str, int], ...]
    fallback: tuple[int, ...]
    completed: tuple[str | None, ...]
    num_held: tuple[int, ...]
    patterns: tuple[StopPattern, ...] = ()

    @classmethod
    def from_strings(cls, stop: Sequence[str], regexes: Sequence[str] = ()) -> StopAutomaton:
        """Builds the automaton in time linear in the strings. Raises RequestError for an empty one,
        and for a regular expression that is none.

        Without strings it has only state 0 and never completes anything.
        """
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
        """The state after one more character."""
        while state and char not in self.children[state]:
            state = self.fallback[state]
        return self.children[state].get(char, 0)


def _link(
    children: Sequence[dict[str, int]], completed: list[str | None]
) -> tuple[list[int], list[int]]:
    """Fallback and num_held of every state, shortest prefixes first; extends `completed`."""
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
    """text: what can no longer be part of a stop string; matched: the one completed, trimmed, or
    the regular expression that matched. trimmed: what the text lost by that; a match of a regular
    expression stays in it, so that nothing has to be held back for one.
    """

    text: str
    matched: str | None = None
    trimmed: str = ""


class StopMatcher:
    """One sequence's search. Law: the pieces given out add up to the text before the stop string,
    or through the first place where a match of a regular expression ends.

    The stop string whose last character comes first wins; of several that end on the same
    character, the longest. How the text is cut into pushes makes no difference.
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
        """Text pushed and not yet given out."""
        return self._held

    @property
    def has_strings(self) -> bool:
        """Whether there is anything to match."""
        return bool(self._automaton.children[0] or self._automaton.patterns)

    def passes(self, text: str) -> bool:
        """Whether `text` can be given out as it is and changes nothing: no stop string has begun,
        and none begins in it. A regular expression reads every character."""
        if self._automaton.patterns:
            return False
        return not self._state and self._automaton.children[0].keys().isdisjoint(text)

    def push(self, text: str, *, allow_stop: bool = True) -> MatchStep:
        """Appends text; after a match there is nothing left to push.

        With allow_stop False a stop string whose last character is in `text` is ordinary text;
        one that begins in it and is completed later, when allowed, still counts.
        """
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
        """The first of the regular expressions of which a match ends with this character."""
        ended = None
        for i, pattern in enumerate(self._automaton.patterns):
            self._places[i], ends = pattern.advance(self._places[i], char)
            if ends and ended is None:
                ended = pattern.pattern
        return ended

    def flush(self) -> str:
        """The text held back, which nothing can complete any more."""
        held, self._held = self._held, ""
        return held
