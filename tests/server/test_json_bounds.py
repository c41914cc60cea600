"""The cost of a body's structure is bounded before it is parsed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.errors import RequestError
from jspec.server.hardening.json_bounds import (
    BOUNDS,
    MAX_CONTAINERS,
    MAX_KEYS,
    MAX_VALUES,
    check_structure,
    outside_of_strings,
)

from .helpers import longest_pause


def outside(body: bytes) -> bytes:
    """Return the text outside of strings, byte by byte."""
    found, is_inside, is_escaped = bytearray(), False, False
    for i in range(len(body)):
        byte = body[i : i + 1]
        if is_escaped:
            is_escaped = False
        elif byte == b"\\":
            is_escaped = True
        elif byte == b'"':
            is_inside = not is_inside
        elif not is_inside:
            found += byte
    return bytes(found)


PARTS = st.sampled_from("[{,:1") | st.text('"\\[{,:x').map(json.dumps)


@given(st.lists(PARTS), st.integers(1, 9))
def test_what_is_outside_of_strings_does_not_depend_on_pieces(parts: list[str], size: int) -> None:
    body = "".join(parts).encode()
    assert b"".join(outside_of_strings(body, piece_size=size)) == outside(body)


def test_a_string_is_not_counted() -> None:
    assert list(outside_of_strings(rb'["a\",[", 1]', piece_size=4)) == [b"[", b"", b", 1]"]
    text = '[{"\\' * MAX_CONTAINERS + ":" * MAX_KEYS + "," * MAX_VALUES
    check_structure(json.dumps({"text": text}).encode())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b"]", f"than {MAX_CONTAINERS} lists and obj"),
        (b"{" + b",".join([b'"a":1'] * (MAX_KEYS + 1)) + b"}", f"more than {MAX_KEYS} keys"),
        (b"[" + b",".join([b"1"] * (MAX_VALUES + 2)) + b"]", f"more than {MAX_VALUES} values"),
    ],
    ids=[what for _, _, what in BOUNDS],
)
def test_too_much_is_refused_by_what_it_is(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=f"{message}.*; expected at most"):
        check_structure(body)
    check_structure(body[:-12])  # one less of each


def test_others_run_while_it_counts() -> None:
    body = b'"' * 10_000_000 + b"[" * (MAX_CONTAINERS + 1)

    def check() -> None:
        with pytest.raises(RequestError):
            check_structure(body)

    worst, whole = longest_pause(check)
    assert worst < whole / 2
