"""The bytes that single tokens add to a text, for every kind of vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tokenizers

from jspec.text.tokenizer.decoders import DecoderKind, byte_of


class TokenBytes(dict[int, bytes]):
    """Bytes by id, looked up on first use; empty for hidden ids and ids without a token. Threads
    may share it: concurrent writers write equal values."""

    def __init__(
        self,
        look_up: Callable[[Sequence[int]], Sequence[bytes]],
        *,
        hidden: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._look_up = look_up
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        found = b"" if token_id in self._hidden else self._look_up([token_id])[0]
        self[token_id] = found
        return found


class TokenAlphabet:
    """The text of one vocabulary's tokens; special tokens have their names.

    A decoder of text pieces may treat the ends of a text differently: Llama's strips the leading
    space. So a piece is decoded between two tokens of letters, whose text is then removed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, kind: DecoderKind) -> None:
        self._backend, self._kind = backend, kind

    def inside(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes that each id adds inside a text; empty for an id without a token."""
        return self._bytes_of(ids, [self._letters])

    def at_start(self, ids: Sequence[int]) -> list[bytes]:
        return self._bytes_of(ids, [])

    def at_start_twice(self, ids: Sequence[int]) -> list[bytes]:
        """Return each id's first bytes in a text that starts with it twice."""
        return self._texts([[i, i] for i in ids], 0)

    @functools.cached_property
    def _letters(self) -> int:
        vocab = self._backend.get_vocab(with_added_tokens=False)
        words = [(len(token), i) for token, i in vocab.items() if token.isalnum()]
        return min(words)[1] if words else 1 + max(vocab.values(), default=0)

    def _bytes_of(self, ids: Sequence[int], before: list[int]) -> list[bytes]:
        tokens = [self._backend.id_to_token(i) for i in ids]
        if self._kind is DecoderKind.BYTE_LEVEL:
            return [byte_level_bytes(token) for token in tokens]
        start = len(self._backend.decode(before, skip_special_tokens=False))
        found = self._texts([[*before, i] for i in ids], start)
        for n, token in enumerate(tokens):
            byte = byte_of(token) if token and self._kind is DecoderKind.BYTE_FALLBACK else None
            if token is None:
                found[n] = b""
            elif byte is not None and byte >= 0x80:  # not a character by itself
                found[n] = bytes([byte])
        return found

    def _texts(self, rows: Sequence[list[int]], start: int) -> list[bytes]:
        """Return each row's text from character `start` on, as if more text follows."""
        letters = self._letters
        once, twice = (
            len(self._backend.decode([letters] * n, skip_special_tokens=False)) for n in (1, 2)
        )
        # A batch call lets other threads run.
        texts = self._backend.decode_batch(
            [[*row, letters] for row in rows], skip_special_tokens=False
        )
        return [text[start : len(text) - (twice - once)].encode() for text in texts]


def byte_level_bytes(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes(map(_CHAR_TO_BYTE.__getitem__, token))
    except KeyError:  # an added token in plain text, e.g. one with a space
        return token.encode("utf-8")


def _char_to_byte() -> dict[str, int]:
    """Return the byte of each character in byte-level tokens (GPT-2's alphabet)."""
    # Bytes with a visible Latin-1 character are that character; the other 68 are the code points
    # from 256 on, in order: byte 0 is U+0100, and the space, the 33rd of them, is U+0120.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return table


_CHAR_TO_BYTE: Mapping[str, int] = _char_to_byte()
