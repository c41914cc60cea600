"""The bytes that the tokens of a byte-level vocabulary stand for (GPT-2's alphabet)."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class TokenBytes(dict[int, bytes]):
    """Bytes by id, looked up when an id first comes; none for an id without a token.

    hidden: ids that have no text. Shared by all sequences and threads: whoever comes second writes
    the same again.
    """

    def __init__(
        self, id_to_token: Callable[[int], str | None], *, hidden: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        found = b"" if token_id in self._hidden else bytes_of(self._id_to_token(token_id))
        self[token_id] = found
        return found


def bytes_of(token: str | None) -> bytes:
    """What a token, as the vocabulary spells it, stands for."""
    if token is None:
        return b""
    try:
        return bytes(map(_CHAR_TO_BYTE.__getitem__, token))
    except KeyError:  # an added token in plain text, such as one that holds a space
        return token.encode("utf-8")


def _char_to_byte() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's alphabet).

    Bytes with a visible Latin-1 character are that character; the other 68 take the code points
    from 256 on, in order: byte 0 is U+0100, and the space, the 33rd of them, is U+0120.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return table


_CHAR_TO_BYTE: Mapping[str, int] = _char_to_byte()
