"""Values in messages are short, whatever they are."""

from __future__ import annotations

from typing import Any

from jspec.errors import SHOWN_CHARS, shown


def test_a_long_value_is_cut_in_messages() -> None:
    assert shown("x" * 1000) == "'" + "x" * (SHOWN_CHARS - 4) + "..."
    assert shown(3) == "3"


def test_a_value_without_a_text_is_named_by_its_type() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list that cannot be shown"
    assert shown(10**5000) == "a int that cannot be shown"
