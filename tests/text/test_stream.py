from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.messages.protocols import TextCut, TextStream
from jspec.text.stream import TokenizedStream
from jspec.text.tokenizer.detokenizer import new_detokenizer
from jspec.text.tokenizer.tokenizer import Tokenizer

KINDS = ("byte_level", "sentencepiece", "metaspace")
Outcome = tuple[str, int, str | None]


def run(stream: TokenizedStream, pushes: Sequence[tuple[tuple[int, ...], bool]]) -> Outcome:
    """Text (flush included), ids kept, and match, as the scheduler would see them."""
    text, num_ids = "", 0
    for ids, allow_stop in pushes:
        cut = stream.push(ids, allow_stop=allow_stop)
        text += cut.text
        num_ids += cut.num_ids
        if cut.matched is not None:
            break
    return text + stream.flush(), num_ids, stream.matched


def expected_outcome(
    tokenizer: Tokenizer, ids: Sequence[int], stop: Sequence[str], allowed: Sequence[bool]
) -> Outcome:
    """The definition: final characters with the id they came from, then every end tried in turn."""
    detokenizer = new_detokenizer(tokenizer)
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
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_every_grouping_into_pushes_gives_the_same(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids, stop = data.draw(ids_and_stops(tokenizer))
    # As with min_new_tokens: the first few ids may not stop; a push never mixes the two.
    num_barred = data.draw(st.just(0) | st.integers(0, len(ids)))
    inner = data.draw(st.sets(st.integers(0, len(ids))))
    edges = sorted({0, len(ids), num_barred} | inner)
    pushes = [(ids[a:b], a >= num_barred) for a, b in itertools.pairwise(edges)]
    allowed = [i >= num_barred for i in range(len(ids))]
    outcome = run(TokenizedStream(tokenizer, stop=stop), pushes)
    assert outcome == expected_outcome(tokenizer, ids, stop, allowed)
    if num_barred == 0:
        cut = [tokenizer.decode(ids).find(s) for s in set(stop)]
        if len(cut) == 1 and cut[0] >= 0:
            assert outcome[0] == tokenizer.decode(ids)[: cut[0]]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_without_stop_strings_the_text_is_decode(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tuple(data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=20)))
    for skip in (True, False):
        stream = TokenizedStream(tokenizer, skip_special_tokens=skip)
        expected = tokenizer.decode(ids, skip_special_tokens=skip)
        assert run(stream, [(ids, True)]) == (expected, len(ids), None)


def ids_by_character(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(i for char in text for i in tokenizer.encode(char))


def test_the_completing_id_is_the_last_one_kept(byte_level: Tokenizer) -> None:
    ids = ids_by_character(byte_level, "ab\n\ncd")
    stream: TextStream = TokenizedStream(byte_level, stop=["\n\n"])
    assert stream.push(ids) == TextCut(num_ids=4, text="ab", matched="\n\n")
    assert stream.flush() == ""


def test_text_that_may_become_a_stop_string_waits(byte_level: Tokenizer) -> None:
    ids = ids_by_character(byte_level, "abEN")
    stream = TokenizedStream(byte_level, stop=("END",))
    assert stream.push(ids) == TextCut(num_ids=4, text="ab")
    assert stream.push(ids_by_character(byte_level, "d")) == TextCut(num_ids=1, text="ENd")
    assert stream.push(ids_by_character(byte_level, "E")) == TextCut(num_ids=1, text="")
    assert stream.flush() == "E"
    assert stream.matched is None


def test_after_a_match_no_id_is_kept(byte_level: Tokenizer) -> None:
    ids = ids_by_character(byte_level, "a.b")
    stream = TokenizedStream(byte_level, stop=(".",))
    assert stream.push(ids).num_ids == 2
    assert stream.push(ids) == TextCut(num_ids=0, text="", matched=".")


def test_flush_completes_a_stop_string_of_waiting_bytes(sentencepiece: Tokenizer) -> None:
    id_of = sentencepiece.backend.get_vocab()
    ids = tuple(id_of[f"<0x{byte:02X}>"] for byte in "🙂!".encode())
    stream = TokenizedStream(sentencepiece, stop=("!",))
    assert stream.push(ids) == TextCut(num_ids=5, text="")
    assert stream.flush() == "🙂"
    assert stream.matched == "!"
    barred = TokenizedStream(sentencepiece, stop=("!",))
    barred.push(ids, allow_stop=False)
    assert (barred.flush(), barred.matched) == ("🙂!", None)


def test_push_after_flush_is_an_error_and_flush_is_not(byte_level: Tokenizer) -> None:
    stream = TokenizedStream(byte_level)
    assert stream.flush() == stream.flush() == ""
    with pytest.raises(RuntimeError, match="after flush"):
        stream.push((1,))


def test_the_room_imports_no_jax() -> None:
    code = "import sys, jspec.text.stream; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
