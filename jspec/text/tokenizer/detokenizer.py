"""Ids to text one id at a time, such that the pieces add up to what `decode` makes of them all.

It knows nothing about stop strings, requests or when a sequence ends. Law: the concatenation of
every `push` and the final `flush` equals `tokenizer.decode(ids)`, no piece ever changes what was
already given out, and the cost of a push does not grow with the sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from jspec.text.tokenizer.decoders import DecoderKind, byte_of
from jspec.text.tokenizer.tokenizer import Tokenizer

# Longest context that WindowDetokenizer keeps. One or two tokens do, unless a vocabulary has
# tokens without any text and a sequence repeats them.
MAX_ANCHOR_IDS = 8


class Detokenizer(Protocol):
    """One sequence's text as it grows. Not shared between sequences; no push after flush."""

    def push(self, token_id: int) -> str:
        """Appends one id and returns the text that became final by it (often none)."""
        ...

    def push_all(self, ids: Sequence[int]) -> str:
        """As `push` of each, in one piece."""
        ...

    def flush(self) -> str:
        """The text of what is left when no more ids will come; a torn character is U+FFFD."""
        ...


def new_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    shown_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """The detokenizer that fits the tokenizer's decoder, for one new sequence.

    shown_ids: special tokens that have text also where others are skipped.
    """
    hidden = tokenizer.hidden_ids(skip_special_tokens=skip_special_tokens, shown_ids=shown_ids)
    if tokenizer.decoder_kind is DecoderKind.BYTE_LEVEL:
        return ByteLevelDetokenizer(tokenizer, hidden)
    return WindowDetokenizer(tokenizer, hidden)


class ByteLevelDetokenizer:
    """For vocabularies whose tokens are bytes: an incremental UTF-8 decoder, at most 3 bytes kept.

    Both this decoder and the tokenizer's replace each maximal invalid part by one U+FFFD (Unicode
    standard, section 3.9), so invalid bytes inside a text agree as well.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes = tokenizer.bytes_without(hidden)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        return self._utf8.decode(self._bytes[token_id])

    def push_all(self, ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return self._utf8.decode(b"".join(map(self._bytes.__getitem__, ids)))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies of text pieces: decodes a short window and gives out what is new in it.

    Such decoders treat the first piece apart (they drop its leading space), so an id is never
    decoded alone but after an anchor: the shortest run of ids before it that has any text. The
    anchor absorbs what happens to a first piece, and its own text is subtracted.

        pieces    ▁def   ▁f    (         window            text      minus     new text
        push 0    ▁def                   ▁def              def                 def
        push 1           ▁f              ▁def ▁f           def f     def       " f"
        push 2                 (         ▁f (              f(        f         (

    Byte tokens wait until the run of them ends, and are not decoded before that: one invalid byte
    turns the whole run into U+FFFD, so no text of it is final earlier.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._has_byte_tokens = tokenizer.decoder_kind is DecoderKind.BYTE_FALLBACK
        self._anchor_ids: tuple[int, ...] = ()
        self._anchor_text = ""
        self._waiting_ids: list[int] = []

    def push(self, token_id: int) -> str:
        """See Detokenizer."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden:
            return ""
        self._waiting_ids.append(token_id)
        if self._has_byte_tokens and byte_of(token) is not None:
            return ""
        return self._release()

    def push_all(self, ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join(map(self.push, ids))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._release() if self._waiting_ids else ""

    def _release(self) -> str:
        window_ids = (*self._anchor_ids, *self._waiting_ids)
        new_text = self._decode(window_ids)[len(self._anchor_text) :]
        self._waiting_ids.clear()
        for num_ids in range(1, min(len(window_ids), MAX_ANCHOR_IDS) + 1):
            self._anchor_ids = window_ids[-num_ids:]
            self._anchor_text = self._decode(self._anchor_ids)
            if self._anchor_text:
                break
        return new_text

    def _decode(self, ids: tuple[int, ...]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
