from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jspec.text.tokenizer.detokenizer import (
    MAX_ANCHOR_IDS,
    new_detokenizer,
)
from jspec.text.tokenizer.tokenizer import Tokenizer

KINDS = (
    "byte_level",
    "sentencepiece",
    "llama",
    "strip_two",
    "gemma",
    "bytes_then_metaspace",
    "metaspace",
    "metaspace_never",
    "word_piece",
    "bpe_suffix",
    "none",
)


def pieces_of(
    tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True
) -> list[str]:
    """Return the text of every push and of flush."""
    detokenizer = new_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_pieces_add_up_to_decode_for_any_ids(
    tokenizers_by_kind: Mapping[str, Tokenizer],
    kind: str,
    data: st.DataObject,
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    # Few distinct ids make runs, repeats and torn characters likely; ids past the end occur too.
    any_id = st.integers(0, tokenizer.vocab_size + 2)
    some_ids = data.draw(st.lists(any_id, min_size=1, max_size=4) | st.just(range(16)))
    ids = data.draw(st.lists(st.sampled_from(some_ids) | any_id, max_size=30))
    skip = data.draw(st.booleans())
    pieces = pieces_of(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(raw=st.binary(max_size=40))
@example(raw=b"\xed\xa0\x80\xf4\x90\xc0\x80\xe4\xbd")
def test_any_bytes_agree_with_decode(byte_level: Tokenizer, raw: bytes) -> None:
    id_of_byte = {byte_level.all_bytes[i]: i for i in range(byte_level.vocab_size)}
    ids = [id_of_byte[bytes([byte])] for byte in raw]
    assert "".join(pieces_of(byte_level, ids)) == byte_level.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(deadline=None)
@given(
    text=st.text(st.sampled_from("def f(x):\n 你好é🙂👩\u200d👧") | st.characters(codec="utf-8"))
)
@example(text="  你好 🙂")
@example(text="🙂" * 20)
def test_no_piece_holds_half_a_character(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_out_with_its_last_byte(byte_level: Tokenizer) -> None:
    id_of_byte = {byte_level.all_bytes[i]: i for i in range(byte_level.vocab_size)}
    ids = [id_of_byte[bytes([byte])] for byte in "🙂a".encode()]
    assert pieces_of(byte_level, ids) == ["", "", "", "🙂", "a", ""]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountingTokenizer(Tokenizer):
    """Record how many ids each decode was given."""

    num_decoded: list[int] = field(default_factory=list)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> CountingTokenizer:
        return cls(**{f.name: getattr(tokenizer, f.name) for f in fields(Tokenizer) if f.init})

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded.append(len(ids))
        return Tokenizer.decode(self, ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["llama", "metaspace", "word_piece", "none"])
def test_cost_of_a_push_does_not_grow(
    tokenizers_by_kind: Mapping[str, Tokenizer], kind: str
) -> None:
    tokenizer = CountingTokenizer.from_tokenizer(tokenizers_by_kind[kind])
    ids = [i % 14 for i in range(2000)]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizers_by_kind[kind].decode(ids)
    assert 0 < max(tokenizer.num_decoded) <= MAX_ANCHOR_IDS + 1
    assert sum(tokenizer.num_decoded) < 10 * len(ids)


def test_a_long_run_of_byte_tokens_is_decoded_once(
    tokenizers_by_kind: Mapping[str, Tokenizer],
) -> None:
    tokenizer = CountingTokenizer.from_tokenizer(tokenizers_by_kind["llama"])
    first = tokenizer.backend.get_vocab()["<0x61>"]
    pieces = pieces_of(tokenizer, [first] * 2000)
    assert pieces == [""] * 2000 + ["a" * 2000]
    assert sum(tokenizer.num_decoded) < 2010


def test_byte_level_needs_no_decode_at_all(byte_level: Tokenizer) -> None:
    tokenizer = CountingTokenizer.from_tokenizer(byte_level)
    assert "".join(pieces_of(tokenizer, byte_level.encode("def f(x): 你"))) == "def f(x): 你"
    assert tokenizer.num_decoded == []
