"""Answers of OpenAI's routes: completions and chats, usage, and the list of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jspec.messages.request import FinishReason, PromptToken
from jspec.messages.response import Completion, spec_fields
from jspec.server.http.fields import JsonObject
from jspec.server.openai.openai_logprobs import Texts, chat_logprobs, completion_logprobs


class AnswerShape(Protocol):
    """The part of an answer that differs between completions and chats."""

    prefix: str  # of answer ids
    object_name: str
    stream_object_name: str

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]: ...

    def logprobs(
        self, tokens: Sequence[PromptToken], texts: Texts, *, offset: int
    ) -> dict[str, Any]:
        """Return the log-probabilities of tokens. offset: characters before them."""
        ...

    def delta(
        self, index: int, text: str, finish: FinishReason | None, *, is_first: bool
    ) -> dict[str, Any] | None:
        """Return the new output of a sequence for an event's `choices`; None while it is uncertain.
        is_first: the sequence's first delta, with the role."""
        ...

    def reasoning(self, index: int) -> Sequence[str]:
        """Return the passages of a sequence's text so far that are reasoning."""
        ...


class TextShape:
    prefix = "cmpl"
    object_name = stream_object_name = "text_completion"

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, **ending(finish)}

    def logprobs(
        self, tokens: Sequence[PromptToken], texts: Texts, *, offset: int
    ) -> dict[str, Any]:
        return completion_logprobs(tokens, texts, offset=offset)

    def delta(
        self,
        index: int,
        text: str,
        finish: FinishReason | None,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        del is_first
        return self.choice(index, text, finish)

    def reasoning(self, index: int) -> Sequence[str]:
        del index
        return ()


class ChatShape:
    prefix = "chatcmpl"
    object_name = "chat.completion"
    stream_object_name = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": None}
        return {"index": index, "message": message, "logprobs": None, **ending(finish)}

    def logprobs(
        self, tokens: Sequence[PromptToken], texts: Texts, *, offset: int
    ) -> dict[str, Any]:
        del offset
        return chat_logprobs(tokens, texts)

    def delta(
        self, index: int, text: str, finish: FinishReason | None, *, is_first: bool
    ) -> dict[str, Any] | None:
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        return {"index": index, "delta": delta, "logprobs": None, **ending(finish)}

    def reasoning(self, index: int) -> Sequence[str]:
        del index
        return ()


def ending(finish: FinishReason | None) -> dict[str, Any]:
    return {
        "finish_reason": None if finish is None else finish.kind.value,
        "matched_stop": None if finish is None else finish.matched,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    answer_id: str
    created: int  # seconds since the epoch
    model: str
    object_name: str

    def to_json(self, choices: Sequence[JsonObject]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": self.object_name,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int
) -> dict[str, Any]:
    """Return OpenAI's usage object, with SGLang's reasoning_tokens. A prompt counts once for all
    its choices. Details are null if zero, as in SGLang."""
    details = {"reasoning_tokens": reasoning_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": details if reasoning_tokens else None,
        **details,
    }


def usage_of(completions: Sequence[Completion], prompt_idxs: Sequence[int]) -> dict[str, Any]:
    """Return the usage of a whole answer. prompt_idxs: the prompt of each completion."""
    pairs = tuple(zip(prompt_idxs, completions, strict=True))
    first = dict(reversed(pairs))
    return usage(
        sum(c.prompt_tokens for c in first.values()),
        sum(len(c.output_ids) for c in completions),
        sum(c.cached_tokens for c in first.values()),
        sum(c.reasoning_tokens for c in completions),
    )


def spec_details(completions: Sequence[Completion]) -> list[dict[str, Any] | None]:
    """Return SGLang's spec_tokens_details, one per choice; None without verifications."""
    names = (
        "spec_accept_rate",
        "spec_accept_length",
        "spec_num_correct_drafts",
        "spec_num_proposed_drafts",
        "spec_verify_ct",
        "spec_correct_drafts_histogram",
    )
    details: list[dict[str, Any] | None] = []
    for completion in completions:
        counters = completion.counters
        if not counters.verify_ct:
            details.append(None)
            continue
        values = spec_fields(counters, completion_tokens=len(completion.output_ids))
        details.append({name: values[name] for name in names})
    return details


def model_card(
    name: str, *, created: int, root: str, parent: str | None, max_model_len: int
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jspec",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
    }
