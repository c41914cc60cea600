"""A model's vocabulary as packages for grammars ask for it."""

from __future__ import annotations

from jspec.text.tokenizer.tokenizer import Tokenizer


class Vocabulary:
    """tokens: the bytes of each of the model's ids, none for an id without a token."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        known = range(min(vocab_size, tokenizer.vocab_size))
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in known]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_ids = eos_token_ids
        # llguidance's names for two of the tokenizer's own.
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self.bos_token_id = tokenizer.bos_token_id

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
