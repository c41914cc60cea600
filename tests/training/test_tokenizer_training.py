"""The trained tokenizer is lossless and keeps indentation in one token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jspec.errors import ConfigError
from recipes.bundled_pair import tokenizer_training

CODE = (
    "class Box:\n    def get(self, x):\n        if x is None:\n            return self.value[10]\n"
)


def trained() -> Tokenizer:
    return tokenizer_training.train_tokenizer([CODE] * 50, vocab_size=400)


TOKENIZER = trained()


@given(st.text())
def test_decoding_an_encoding_gives_the_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text.replace("<|endoftext|>", "")


def test_indentation_is_one_token_and_a_prompt_may_end_in_it() -> None:
    whole = TOKENIZER.encode("if x is None:\n            return self").tokens
    assert "Ġ" * 12 in whole
    prompt = TOKENIZER.encode("if x is None:\n            ").tokens
    assert whole[: len(prompt)] == prompt


def test_end_of_text_is_special_and_first(tmp_path: Path) -> None:
    tokenizer_training.save_tokenizer(TOKENIZER, tmp_path, max_length=64)
    again = tokenizer_training.load_tokenizer(tmp_path)
    assert again.encode(CODE).ids == TOKENIZER.encode(CODE).ids
    assert tokenizer_training.end_of_text_id(again) == 0
    assert again.encode("<|endoftext|>").ids == [0]


def test_a_foreign_tokenizer_is_refused() -> None:
    from tokenizers import models

    with pytest.raises(ConfigError, match="endoftext"):
        tokenizer_training.end_of_text_id(Tokenizer(models.BPE()))
