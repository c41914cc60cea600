"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jspec.text.tokenizer.tokenizer import Tokenizer


class TokenTexts:
    """The text that each id adds; special tokens have their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        return self._tokenizer.all_bytes[token_id]

    def text(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def bytes_in(self, token_id: int, text: bytes, begin: int) -> bytes:
        """Return the token's bytes in a text in which earlier tokens had `begin` bytes."""
        if begin == 0:
            (found,) = self._tokenizer.alphabet.at_start([token_id])
        else:
            found = self.bytes_of(token_id)
        is_hidden = self._tokenizer.is_special(token_id) and not text.startswith(found, begin)
        return b"" if is_hidden else found


def num_tokens_in(passages: Sequence[str], text: str, ids: Iterable[int], texts: TokenTexts) -> int:
    """Return how many ids have a byte in an (ordered) passage of a text, or lie between such ids.

    ["Hm."] in "<think>Hm.</think>Yes", ids of "<think>" "H" "m.</" "think>" "Yes" → 2
    """
    spans, char, byte, data = list[tuple[int, int]](), 0, 0, text.encode()
    for passage in passages:
        begin = text.find(passage, char)
        if begin < 0:
            break
        first = byte + len(text[char:begin].encode())
        char, byte = begin + len(passage), first + len(passage.encode())
        spans.append((first, byte))
    found = end = at = 0
    for token_id in ids:
        begin, end = end, end + len(texts.bytes_in(token_id, data, end))
        while at < len(spans) and spans[at][1] <= begin:
            at += 1
        if at == len(spans):
            break
        found += end > spans[at][0]
    return found
