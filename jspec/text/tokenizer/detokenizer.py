"""Incremental detokenization: every `push` and the final `flush` concatenate to
`tokenizer.decode(ids)`, and the cost of a push does not grow with the sequence."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from jspec.text.tokenizer.decoders import DecoderKind, byte_of
from jspec.text.tokenizer.tokenizer import Tokenizer

# Longest context of WindowDetokenizer. One or two tokens suffice, unless tokens without any text
# repeat.
MAX_ANCHOR_IDS = 8


class Detokenizer(Protocol):
    """One sequence's text as it grows; no push may follow flush."""

    def push(self, token_id: int) -> str:
        """Append one id and return the text that became final (often none)."""
        ...

    def push_all(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str:
        """Return the remaining text at the end; an incomplete character is U+FFFD."""
        ...


def new_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    shown_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """Return a detokenizer. shown_ids: special tokens that always have text."""
    hidden = tokenizer.hidden_ids(skip_special_tokens=skip_special_tokens, shown_ids=shown_ids)
    if tokenizer.decoder_kind is DecoderKind.BYTE_LEVEL:
        return ByteLevelDetokenizer(tokenizer, hidden)
    return WindowDetokenizer(tokenizer, hidden)


class ByteLevelDetokenizer:
    """For vocabularies of bytes: an incremental UTF-8 decoder, which keeps at most 3 bytes. It
    replaces each maximal invalid part by one U+FFFD (Unicode, section 3.9)."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._bytes = tokenizer.bytes_without(hidden)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes[token_id])

    def push_all(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes.__getitem__, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For vocabularies of text pieces: decodes a short window and returns its new text.

    Such decoders treat the first piece differently (they drop its leading space). So an id is
    decoded after an anchor, the shortest run of ids before it with any text, whose text is
    subtracted.

        pieces    ▁def   ▁f    (         window            text      minus     new text
        push 0    ▁def                   ▁def              def                 def
        push 1           ▁f              ▁def ▁f           def f     def       " f"
        push 2                 (         ▁f (              f(        f         (

    Byte tokens are decoded only when their run ends: one invalid byte turns the whole run into
    U+FFFD, so none of its text is final earlier.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._has_byte_tokens = tokenizer.decoder_kind is DecoderKind.BYTE_FALLBACK
        self._anchor_ids: tuple[int, ...] = ()
        self._anchor_text = ""
        self._waiting_ids: list[int] = []

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden:
            return ""
        self._waiting_ids.append(token_id)
        if self._has_byte_tokens and byte_of(token) is not None:
            return ""
        return self._release()

    def push_all(self, ids: Sequence[int]) -> str:
        return "".join(map(self.push, ids))

    def flush(self) -> str:
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
