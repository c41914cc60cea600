"""A model's vocabulary in the form that llguidance expects: the bytes that a client sees.

With text-piece vocabularies, an answer's first token may have other bytes than inside a text
(Llama's decoder strips the leading space), so llguidance gets another token with these bytes.
"""

from __future__ import annotations

import functools

import numpy as np

from jspec.messages.grammar import WORD_BITS, num_words
from jspec.text.tokenizer.decoders import DecoderKind
from jspec.text.tokenizer.token_bytes import TokenAlphabet
from jspec.text.tokenizer.tokenizer import Tokenizer

_SPACE = "\u2581"  # a space in SentencePiece


class Vocabulary:
    """The vocabulary. Attributes without a comment are those that llguidance reads."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self.bos_token_id = tokenizer.bos_token_id
        # An end of sequence is not part of a grammar's text, even if the tokenizer shows its name.
        self.special_token_ids = sorted({*tokenizer.special_ids, *eos_token_ids})
        known = range(min(vocab_size, tokenizer.vocab_size))
        # Bytes of each of the model's ids inside a text; empty for an id without a token.
        self.own_tokens = tokenizer.alphabet.inside(known)
        self.own_tokens += [b""] * (vocab_size - len(self.own_tokens))
        self.first: FirstTokens | None = None
        self.tokens = self.own_tokens
        if tokenizer.decoder_kind is not DecoderKind.BYTE_LEVEL:
            self.first = FirstTokens(tokenizer.alphabet, self) or None
        if self.first is not None:
            padding = num_words(vocab_size) * WORD_BITS - vocab_size
            self.tokens = [*self.own_tokens, *[b""] * padding, *self.first.spellings]

    def __call__(self, text: str) -> list[int]:
        """Return ids whose bytes are this text; llguidance allows only these for forced text."""
        backend = self._tokenizer.backend
        if self._tokenizer.decoder_kind is DecoderKind.BYTE_LEVEL:
            ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        else:  # without the step that adds a leading space
            ids = [token.id for token in backend.model.tokenize(text.replace(" ", _SPACE))]
        wanted = text.encode()
        if self._has_special(ids) or b"".join(self._tokenizer.all_bytes[i] for i in ids) != wanted:
            return self._longest(wanted)
        return ids

    def _has_special(self, ids: list[int]) -> bool:
        return not set(ids).isdisjoint(self.special_token_ids)

    def _longest(self, text: bytes) -> list[int]:
        most, ids, at = max(map(len, self.id_of)), list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + most), at, -1)
            end = next((end for end in ends if text[at:end] in self.id_of), None)
            if end is not None:
                ids.append(self.id_of[text[at:end]])
            at = at + 1 if end is None else end
        return ids

    @functools.cached_property
    def id_of(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        ids = range(len(self.own_tokens) - 1, -1, -1)
        return {self.own_tokens[i]: i for i in ids if self.own_tokens[i] and i not in special}


class FirstTokens:
    """Tokens with other bytes as the first of a text than inside it; false if empty."""

    def __init__(self, alphabet: TokenAlphabet, vocabulary: Vocabulary) -> None:
        inside, special = vocabulary.own_tokens, frozenset(vocabulary.special_token_ids)
        ids = [i for i, text in enumerate(inside) if text and i not in special]
        shown = zip(ids, alphabet.at_start(ids), strict=True)
        differing = {i: text for i, text in shown if text != inside[i]}
        id_of = dict(vocabulary.id_of) if differing else {}
        begin = num_words(len(inside)) * WORD_BITS
        # Bytes that no token has inside a text. Each gets an id for llguidance, from the first
        # whole mask word after V on.
        self.spellings: list[bytes] = []
        for text in differing.values():
            if text and text not in id_of:
                id_of[text] = begin + len(self.spellings)
                self.spellings.append(text)
        self._inside_ids = {i: id_of[text] for i, text in differing.items() if text}
        # Only ids that leave nothing to strip, since a decoder may strip two spaces.
        blank = [i for i, text in differing.items() if not text]
        twice = zip(blank, alphabet.at_start_twice(blank), strict=True)
        # Ids without text as the first token; the next token is then inside the text.
        self.blank = frozenset(i for i, text in twice if text == inside[i])
        self._arrays = [
            np.array(list(each), np.int64)
            for each in (differing, self._inside_ids, self._inside_ids.values(), self.blank)
        ]

    def __bool__(self) -> bool:
        return bool(self._inside_ids or self.blank)

    def inside_id(self, token_id: int) -> int:
        return self._inside_ids.get(token_id, token_id)

    def allow(self, row: np.ndarray, wide: np.ndarray) -> None:
        """Write the mask of the first token, u32[W]. wide: llguidance's mask with its extra ids."""
        differing, ids, inside_ids, blank = self._arrays
        bits = np.unpackbits(wide.view(np.uint8), bitorder="little")
        first = bits[: row.size * WORD_BITS].copy()
        first[differing] = 0
        first[ids] = bits[inside_ids]
        first[blank] = 1
        row[:] = np.packbits(first, bitorder="little").view(np.uint32)
