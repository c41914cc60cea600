"""Text by origin: the pieces add up to the text, and accepted ids are marked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.messages.request import FinishKind, FinishReason, SpecCounters, StreamChunk
from jspec.text.spec_tokens import SpecTokenTracker
from jspec.text.stream import TokenizedStream
from jspec.text.tokenizer.tokenizer import Tokenizer
from tests.support.tiny_models import TinyPair

LENGTH = FinishReason(kind=FinishKind.LENGTH)


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: TinyPair) -> Tokenizer:
    return Tokenizer.from_directory(tiny_pair.target_path)


def chunk(
    ids: tuple[int, ...], text: str, num_accepted: int, finish: FinishReason | None = None
) -> StreamChunk:
    return StreamChunk(
        request_id="r", new_ids=ids, num_accepted=num_accepted, text=text, finish=finish
    )


def pairs(tracker: SpecTokenTracker, given: StreamChunk) -> list[tuple[str, bool]]:
    return [(piece.text, piece.accepted) for piece in tracker.push(given)]


def test_the_first_num_accepted_ids_are_accepted(tokenizer: Tokenizer) -> None:
    tracker = SpecTokenTracker(tokenizer)
    ids = tokenizer.encode("abc")
    assert pairs(tracker, chunk(ids, "abc", 2)) == [("a", True), ("b", True), ("c", False)]


def test_text_held_back_keeps_its_origin(tokenizer: Tokenizer) -> None:
    tracker = SpecTokenTracker(tokenizer)
    assert pairs(tracker, chunk(tokenizer.encode("abc"), "ab", 2)) == [("a", True), ("b", True)]
    assert pairs(tracker, chunk(tokenizer.encode("y"), "cy", 0)) == [("c", False), ("y", False)]


def test_a_character_belongs_to_the_id_that_completes_it(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("é")
    tracker = SpecTokenTracker(tokenizer)
    assert pairs(tracker, chunk((first,), "", 1)) == []
    assert pairs(tracker, chunk((second,), "é", 0)) == [("é", False)]


def test_a_torn_character_at_the_end(tokenizer: Tokenizer) -> None:
    first, _ = tokenizer.encode("é")
    tracker = SpecTokenTracker(tokenizer)
    assert pairs(tracker, chunk((first,), "\ufffd", 0, LENGTH)) == [("\ufffd", False)]


def test_a_stop_token_has_no_text(tokenizer: Tokenizer) -> None:
    a, z = tokenizer.encode("az")
    stop = FinishReason(kind=FinishKind.STOP, matched=z)
    assert pairs(SpecTokenTracker(tokenizer), chunk((a, z), "a", 1, stop)) == [("a", True)]


def test_text_cut_at_a_stop_string(tokenizer: Tokenizer) -> None:
    stop = FinishReason(kind=FinishKind.STOP, matched="cd")
    tracker = SpecTokenTracker(tokenizer)
    got = pairs(tracker, chunk(tokenizer.encode("abcd"), "ab", 3, stop))
    assert got == [("a", True), ("b", True)]


def counted(tokenizer: Tokenizer, text: str, counters: SpecCounters) -> StreamChunk:
    ids = tokenizer.encode(text)
    return StreamChunk(request_id="r", new_ids=ids, num_accepted=0, text=text, counters=counters)


def test_each_step_says_its_own_drafts(tokenizer: Tokenizer) -> None:
    """The shape changes: 6 drafts, then 1. Text from no verification has neither."""
    told = (
        ("a", SpecCounters()),  # the prompt's first
        ("b", SpecCounters(verify_ct=1, num_proposed=6)),
        ("c", SpecCounters(verify_ct=1, num_proposed=6)),  # a plain step, or a refill
        ("d", SpecCounters(verify_ct=2, num_proposed=7)),
    )
    tracker = SpecTokenTracker(tokenizer)
    pieces = [piece for told_of in told for piece in tracker.push(counted(tokenizer, *told_of))]
    found = [(piece.text, piece.step, piece.proposed) for piece in pieces]
    assert found == [("a", 0, 0), ("b", 1, 6), ("c", 0, 0), ("d", 2, 1)]


def test_text_flushed_by_a_chunk_without_ids_keeps_its_step(tokenizer: Tokenizer) -> None:
    first, _ = tokenizer.encode("é")
    counters, tracker = SpecCounters(verify_ct=1, num_proposed=3), SpecTokenTracker(tokenizer)
    torn = StreamChunk(request_id="r", new_ids=(first,), num_accepted=0, text="", counters=counters)
    assert tracker.push(torn) == ()
    end = StreamChunk(
        request_id="r", new_ids=(), num_accepted=0, text="\ufffd", finish=LENGTH, counters=counters
    )
    (piece,) = tracker.push(end)
    assert (piece.text, piece.step, piece.proposed) == ("\ufffd", 1, 3)


@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 319), min_size=1, max_size=4), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    ),
    stop=st.sampled_from([(), ("a",), ("ab", "\ufffd\ufffd")]),
)
def test_the_pieces_add_up_to_every_chunks_text(
    tokenizer: Tokenizer, steps: list[tuple[list[int], int]], stop: tuple[str, ...]
) -> None:
    stream, tracker = TokenizedStream(tokenizer, stop=stop), SpecTokenTracker(tokenizer)
    for index, (ids, num_accepted) in enumerate(steps):
        cut = stream.push(tuple(ids))
        is_last = index == len(steps) - 1 or cut.matched is not None
        text = cut.text + (stream.flush() if is_last else "")
        finish = LENGTH if is_last else None
        given = chunk(tuple(ids[: cut.num_ids]), text, num_accepted, finish)
        pieces = tracker.push(given)
        assert "".join(piece.text for piece in pieces) == text
        assert all(piece.text for piece in pieces)
        if is_last:
            break
