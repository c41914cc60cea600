"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jspec.messages.request import PromptToken


class Texts(Protocol):
    """The text and bytes of a single id (jspec.text.tokenizer.token_texts.TokenTexts)."""

    def text(self, token_id: int) -> str: ...

    def bytes_of(self, token_id: int) -> bytes: ...


def completion_logprobs(
    tokens: Sequence[PromptToken], texts: Texts, *, offset: int = 0
) -> dict[str, Any]:
    """Return the form of /v1/completions: four lists, one entry per token, null for the first.
    top_logprobs includes the token itself. offset: characters before these tokens."""
    names = [texts.text(token_id) for token_id, _ in tokens]
    offsets: list[int] = []
    tops: list[dict[str, float] | None] = []
    for name, (_, known) in zip(names, tokens, strict=True):
        offsets.append(offset)
        offset += len(name)
        if known is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for logprob, token_id in known.top:  # keep the most likely of tokens with equal text
            top.setdefault(texts.text(token_id), logprob)
        top.setdefault(name, known.logprob)
        tops.append(top)
    return {
        "tokens": names,
        "token_logprobs": [None if known is None else known.logprob for _, known in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[PromptToken], texts: Texts) -> dict[str, Any]:
    """Return the form of /v1/chat/completions: an object per token, with its (partial) bytes."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": logprob,
            "bytes": list(texts.bytes_of(token_id)),
        }

    return {
        "content": [
            {
                **entry(token_id, known.logprob),
                "top_logprobs": [entry(other, logprob) for logprob, other in known.top],
            }
            for token_id, known in tokens
            if known is not None
        ],
        "refusal": None,
    }
