"""Prompts of a score call, and the bound on their total length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jspec.errors import RequestError
from jspec.text.scoring import MAX_JOINED, ScoreCall


def test_query_and_items_are_joined_as_they_are() -> None:
    assert ScoreCall.of("a", ["b", "cd"], [1]).prompts == ("ab", "acd")
    assert ScoreCall.of([1, 2], [[3], []], [1], item_first=True).prompts == ((3, 1, 2), (1, 2))


def test_arrays_are_ids() -> None:
    call = ScoreCall.of(np.array([1, 2]), [np.array([3]), [np.int64(4)]], np.array([5, 6]))
    assert call.prompts == ((1, 2, 3), (1, 2, 4))
    assert call.label_token_ids == (5, 6)
    assert {type(x) for x in (*call.prompts[1], *call.label_token_ids)} == {int}
    assert ScoreCall.of([1], np.array([[3], [4]]), [1]).prompts == ((1, 3), (1, 4))
    with pytest.raises(RequestError, match=r"query holds 1\.5; expected token ids"):
        ScoreCall.of(np.array([1.5]), [[3]], [1])


@pytest.mark.parametrize(
    ("query", "items", "unit"),
    [
        ("x" * 2**20, ["y"] * 64, "characters"),
        ([7] * 2**16, [[1]] * 1024, "token ids"),
        ("", ["x" * 2**20] * 64, "characters"),
    ],
    ids=["text", "ids", "items"],
)
def test_what_is_too_long_together_is_refused_before_it_is_joined(
    query: Any, items: Any, unit: str
) -> None:
    most = f"expected at most {MAX_JOINED} {unit} in all prompts together"
    with pytest.raises(RequestError, match=rf"query and {len(items)} items make \d+; {most}"):
        ScoreCall.of(query, items, [1])
    half = len(items) // 2 - 1
    assert len(ScoreCall.of(query, items[:half], [1]).prompts) == half
