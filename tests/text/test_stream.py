from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.messages.protocols import TextCut
from jspec.text.stream import TokenizedStream
from jspec.text.tokenizer.detokenizer import new_detokenizer
from jspec.text.tokenizer.tokenizer import Tokenizer

KINDS = ("byte_level", "sentencepiece", "metaspace")
Outcome = tuple[str, int, str | None]


def run(stream: TokenizedStream, pushes: Sequence[tuple[tuple[int, ...], bool]]) -> Outcome:
    """Return text (flush included), number of kept ids, and match."""
    text, num_ids = "", 0
    for ids, allow_stop in pushes:
        cut = stream.push(ids, allow_stop=allow_stop)
        text += cut.text
        num_ids += cut.num_ids
        if cut.matched is not None:
            break
    return text + stream.flush(), num_ids, stream.matched


def expected_outcome(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stop: Sequence[str],
    allowed: Sequence[bool],
    *,
    skip: bool,
) -> Outcome:
    """The definition: characters with the id that made them final, then every end tried."""
    detokenizer = new_detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [*(detokenizer.push(i) for i in ids), detokenizer.flush()]
    text, end = "".join(pieces), 0
    for id_idx, piece in enumerate(pieces):
        last_idx = min(id_idx, len(ids) - 1)
        for _ in piece:
            end += 1
            matches = [s for s in stop if text[:end].endswith(s)]
            if matches and allowed[last_idx]:
                longest = max(matches, key=len)
                return text[: end - len(longest)], last_idx + 1, longest
    return text, len(ids), None


@st.composite
def ids_and_stops(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[tuple[int, ...], list[str]]:
    source = st.text("def f(x):\n 你🙂é", max_size=20).map(tokenizer.encode)
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=15).map(tuple)
    ids = draw(source | any_ids)
    text = tokenizer.decode(ids)
    stop = draw(st.lists(st.text("def \n", min_size=1, max_size=4), max_size=2))
    if text:  # parts of the text itself, so that most examples do stop
        for start in draw(st.lists(st.integers(0, len(text) - 1), max_size=2)):
            stop.append(text[start : start + draw(st.integers(1, 6))])
    return ids, stop


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_grouping_into_pushes_gives_the_same(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids, stop = data.draw(ids_and_stops(tokenizer))
    # min_new_tokens: the first ids may not stop, and a push never mixes both kinds.
    num_barred = data.draw(st.just(0) | st.integers(0, len(ids)))
    inner = data.draw(st.sets(st.integers(0, len(ids))))
    edges = sorted({0, len(ids), num_barred} | inner)
    pushes = [(ids[a:b], a >= num_barred) for a, b in itertools.pairwise(edges)]
    allowed = [i >= num_barred for i in range(len(ids))]
    skip = data.draw(st.booleans())
    outcome = run(TokenizedStream(tokenizer, stop=stop, skip_special_tokens=skip), pushes)
    assert outcome == expected_outcome(tokenizer, ids, stop, allowed, skip=skip)
    if not stop:
        assert outcome[0] == tokenizer.decode(ids, skip_special_tokens=skip)


def ids_by_character(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(i for char in text for i in tokenizer.encode(char))


def test_after_a_match_no_id_is_kept(byte_level: Tokenizer) -> None:
    ids = ids_by_character(byte_level, "a.b")
    stream = TokenizedStream(byte_level, stop=(".",))
    assert stream.push(ids).num_ids == 2
    assert stream.push(ids) == TextCut(num_ids=0, text="", matched=".")


def test_push_after_flush_is_an_error_and_flush_is_not(byte_level: Tokenizer) -> None:
    stream = TokenizedStream(byte_level)
    assert stream.flush() == stream.flush() == ""
    with pytest.raises(RuntimeError, match="after flush"):
        stream.push((1,))
