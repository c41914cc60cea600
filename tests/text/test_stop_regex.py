"""Stop expressions against Python's `re`."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.errors import RequestError
from jspec.text.stop.stop_matcher import StopAutomaton, StopMatcher
from jspec.text.stop.stop_regex import StopPattern

ATOMS = st.sampled_from(
    ["a", "b", "\\n", ".", "[ab]", "[^a]", "[b-c]", "\\d", "\\S", "\\W", "^", "\\.", "[\\d.]", "-"]
)
COUNTS = st.sampled_from(["", "", "", "*", "+", "?", "+?", "{2}", "{1,2}", "{2,}", "{,2}"])


def pieces(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("({})".format, inner) | st.builds("(?:{})".format, inner)
    one = ATOMS | group
    many = st.lists(st.builds("{}{}".format, one, COUNTS), min_size=1, max_size=3).map("".join)
    return st.lists(many, min_size=1, max_size=2).map("|".join)


PATTERNS = st.recursive(ATOMS, pieces, max_leaves=5)
FLAGS = st.sampled_from(["", "(?i)", "(?s)"])


def first_end(pattern: str, text: str) -> int | None:
    """Return the length of the shortest prefix in which `re` finds the pattern."""
    known = re.compile(pattern, re.ASCII)
    return next((n for n in range(len(text) + 1) if known.search(text[:n])), None)


@settings(max_examples=200)
@given(FLAGS, PATTERNS, st.text("abAcd1.-\n ", max_size=12))
def test_it_ends_where_re_first_finds_it(flags: str, pattern: str, text: str) -> None:
    pattern = flags + pattern
    try:
        re.compile(pattern)
    except re.error:  # ^ cannot be repeated
        return
    expected = first_end(pattern, text)
    if re.compile(pattern).search(""):
        with pytest.raises(RequestError, match="matches the empty text"):
            StopPattern(pattern)
        return
    found = StopPattern(pattern)
    state, end = found.first, None
    for i, char in enumerate(text):
        state, is_match = found.advance(state, char)
        if is_match:
            end = i + 1
            break
    assert end == expected


BAD = {
    "a(": "without its )",
    "a)": "has ')' at 1",
    "[a": "without its ]",
    "*a": "has '*' at 0",
    "a**": "has '*' at 2",
    "a$": "a text that grows has no end yet",
    "(?=a)": "begins with (?",
    "(a)\\1": "has \\1, which is not implemented",
    "\\bword": "has \\b, which is not implemented",
    "a*": "matches the empty text",
    "[z-a]": "whose end is before",
    "a{3,2}": "an ascending range",
    "(a{90}){90}": "too large",
    "(" * 40 + "a" + ")" * 40: "32 deep",
    "\\x4": "expected hexadecimal digits",
}


@pytest.mark.parametrize("pattern", BAD)
def test_what_is_not_known_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"^stop_regex holds ") as caught:
        StopPattern(pattern)
    assert BAD[pattern] in str(caught.value)


def test_no_pattern_makes_a_character_slow() -> None:
    """Backtracking takes 2**40 steps here."""
    found = StopPattern("(a+)+b|(a|a)*c|[\\w]{1,50}!")
    state, started = found.first, time.perf_counter()
    for _ in range(20_000):
        state, is_match = found.advance(state, "a")
        assert not is_match
    assert time.perf_counter() - started < 5


@given(st.lists(st.integers(0, 14), max_size=6), st.booleans())
def test_pushes_make_no_difference_and_a_match_stays(cuts: list[int], allow_first: bool) -> None:
    """Also with a partly held back stop string when the expression matches."""
    text = "x1 EN22 END 3"
    automaton = StopAutomaton.from_strings(("END",), ("\\d\\d",))
    matcher, out, edges = StopMatcher(automaton), "", sorted({0, *cuts, len(text)})
    for low, high in itertools.pairwise(edges):
        step = matcher.push(text[low:high], allow_stop=allow_first or low >= 8)
        out += step.text
        if step.matched is not None:
            break
    if allow_first:
        assert (out, step.matched, step.trimmed) == ("x1 EN22", "\\d\\d", "")
    elif 8 in edges:
        assert (out, step.matched, step.trimmed) == ("x1 EN22 ", "END", "END")
