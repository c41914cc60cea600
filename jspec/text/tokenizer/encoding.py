"""Tokenization of a text or a list of texts."""

from __future__ import annotations

from collections.abc import Sequence

from jspec.errors import RequestError, shown
from jspec.text.tokenizer.tokenizer import Tokenizer


def encoded(
    tokenizer: Tokenizer, text: str | Sequence[str], *, add_special_tokens: bool
) -> list[int] | list[list[int]]:
    if isinstance(text, str):
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    if not isinstance(text, Sequence):
        raise RequestError(f"text is {shown(text)}; expected text or a list of texts")
    for index, each in enumerate(text):
        if not isinstance(each, str):
            raise RequestError(f"text {index}, counted from 0, is {shown(each)}; expected text")
    return [list(tokenizer.encode(each, add_special_tokens=add_special_tokens)) for each in text]
