from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.errors import RequestError
from jspec.text.stop.stop_matcher import StopAutomaton, StopMatcher

SHORT = st.text("ab\n", max_size=20)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def matcher_of(*stop: str) -> StopMatcher:
    return StopMatcher(StopAutomaton.from_strings(stop))


def run(stop: Sequence[str], pushes: Sequence[str]) -> tuple[str, str | None]:
    """Return all text, flush included, and the match."""
    matcher = matcher_of(*stop)
    text = ""
    for push in pushes:
        step = matcher.push(push)
        text += step.text
        if step.matched is not None:
            return text, step.matched
    return text + matcher.flush(), None


def first_completed(stop: Sequence[str], text: str) -> tuple[str, str | None]:
    """Try every end: the first one wins, then the longest string."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=250)
@given(stop=STOPS, pushes=st.lists(SHORT, max_size=6))
def test_any_pushes_give_the_first_completed_match(stop: list[str], pushes: list[str]) -> None:
    assert run(stop, pushes) == first_completed(stop, "".join(pushes))


@settings(deadline=None, max_examples=200)
@given(stop=STOPS, pushes=st.lists(SHORT, max_size=6))
def test_exactly_what_may_become_a_stop_string_is_held(stop: list[str], pushes: list[str]) -> None:
    matcher = matcher_of(*stop)
    text = given_out = ""
    for push in pushes:
        text += push
        given_out += matcher.push(push, allow_stop=False).text
        prefixes = {s[:n] for s in stop for n in range(len(s))}
        held = max((p for p in prefixes if text.endswith(p)), key=len, default="")
        assert matcher.held == held
        assert given_out + held == text
    assert given_out + matcher.flush() == text


def test_a_stop_string_that_is_not_allowed_is_text() -> None:
    matcher = matcher_of("END", "ND!")
    step = matcher.push("xEND", allow_stop=False)
    assert (step.text, step.matched, matcher.held) == ("xE", None, "ND")
    step = matcher.push("!")
    assert (step.text, step.matched) == ("", "ND!")


def test_bad_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="''"):
        StopAutomaton.from_strings(["a", ""])
    with pytest.raises(RequestError, match="'END'"):
        StopAutomaton.from_strings("END")


def test_a_near_miss_holds_back_no_more_than_the_stop_string() -> None:
    stop = "a" * 2000 + "b"
    matcher = matcher_of(stop)
    text = "".join(matcher.push("aaaa").text for _ in range(5000))
    assert len(text) == 5000 * 4 - 2000
    assert matcher.push("b").matched == stop
