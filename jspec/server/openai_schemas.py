"""OpenAI's POST /v1/completions, with SGLang's extensions: JSON in, a checked call out, and what
chats have in common with it: options, usage, and the shapes of answers.

It does not tokenize and it asks no engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from jspec.core.errors import RequestError
from jspec.core.request import SAMPLING_FIELDS, FinishReason, SamplingParams
from jspec.core.response import Completion, spec_fields
from jspec.server.fields import (
    NO_DEFAULTS,
    Hints,
    JsonObject,
    Neutral,
    as_object,
    check_ids,
    check_number_of_prompts,
    check_rid,
    check_text,
    expand_rid,
    get_bool,
    get_priority,
    shorten,
    without_neutral,
)
from jspec.server.schemas import NEUTRAL_SAMPLING, PromptCall

DEFAULT_MAX_TOKENS = 16
# OpenAI's name → SamplingParams' name.
SAMPLING_NAMES: Mapping[str, str] = {p.openai: p.name for p in SAMPLING_FIELDS}
ANSWER_FIELDS = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "rid",
        "priority",
        "user",
        "return_meta_info",
        "return_spec_tokens_details",
    }
)
COMPLETION_FIELDS = frozenset(SAMPLING_NAMES) | ANSWER_FIELDS | {"prompt"}
NEUTRAL_OPENAI: Neutral = {
    **NEUTRAL_SAMPLING,
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "extra_key": (None,),
    "cache_salt": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
}
NEUTRAL_COMPLETION: Neutral = {
    **NEUTRAL_OPENAI,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (None,),
    "suffix": (None, ""),
}
COMPLETION_HINTS: Hints = {
    **{inner: repr(outer) for outer, inner in SAMPLING_NAMES.items() if inner != outer},
    "max_completion_tokens": "'max_tokens'",
    "sampling_params": "its fields beside 'prompt'",
    "text": "'prompt'",
    "input_ids": "'prompt'",
    "messages": "'prompt'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How a call is answered; model is the name that the client used, if any."""

    stream: bool
    include_usage: bool
    return_meta_info: bool
    return_spec_tokens_details: bool
    model: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A checked POST /v1/completions."""

    prompts: tuple[PromptCall, ...]
    options: AnswerOptions
    group: str | None


def parse_completion(body: object, defaults: Mapping[str, Any] = NO_DEFAULTS) -> CompletionCall:
    """Raises RequestError naming the field, its value and what was expected."""
    where = "the request body"
    values = without_neutral(
        where,
        as_object(body, where),
        read=COMPLETION_FIELDS,
        neutral=NEUTRAL_COMPLETION,
        hints=COMPLETION_HINTS,
    )
    options = answer_options(values)
    rid = None if values.get("rid") is None else check_rid(values["rid"])
    sampling = sampling_of({"max_tokens": DEFAULT_MAX_TOKENS, **_given(values)}, defaults)
    sources = _sources(values.get("prompt"))
    names = expand_rid(rid, len(sources), is_list=len(sources) > 1)
    return CompletionCall(
        prompts=tuple(
            PromptCall(**source, sampling=sampling, rid=name, priority=get_priority(values))
            for source, name in zip(sources, names, strict=True)
        ),
        options=options,
        group=rid,
    )


def _given(values: JsonObject) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def sampling_of(values: JsonObject, defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters among the fields of a call. Raises RequestError."""
    given = {inner: values.get(outer) for outer, inner in SAMPLING_NAMES.items()}
    with openai_names():
        return SamplingParams.from_mapping(given, defaults=defaults)


def answer_options(values: JsonObject) -> AnswerOptions:
    """ANSWER_FIELDS but for rid. Raises RequestError."""
    for name in ("model", "user"):
        if values.get(name) is not None:
            check_text(name, values[name])
    return AnswerOptions(
        stream=get_bool(values, "stream"),
        include_usage=_include_usage(values),
        return_meta_info=get_bool(values, "return_meta_info"),
        return_spec_tokens_details=get_bool(values, "return_spec_tokens_details"),
        model=values.get("model"),
    )


@contextmanager
def openai_names() -> Iterator[None]:
    """Lets a RequestError that begins with a field's name speak of the client's name for it."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        if message.split(" ", 1)[0] not in SAMPLING_NAMES.values():
            raise
        for outer, inner in SAMPLING_NAMES.items():
            message = re.sub(rf"\b{inner}\b", outer, message)
        raise RequestError(message) from None


def _sources(prompt: object) -> list[dict[str, Any]]:
    """The prompts as keyword arguments: text, list of text, list of ids, or list of those."""
    if isinstance(prompt, str):
        return [{"text": check_text("prompt", prompt)}]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            f"prompt is {shorten(prompt)}; expected text, a list of texts, a list of token ids, "
            f"or a list of such lists"
        )
    if isinstance(prompt[0], str | list):
        check_number_of_prompts("prompt", prompt)
    if isinstance(prompt[0], str):
        return [{"text": check_text("prompt", item)} for item in prompt]
    if isinstance(prompt[0], list):
        return [{"input_ids": check_ids("prompt", item)} for item in prompt]
    return [{"input_ids": check_ids("prompt", prompt)}]


def _include_usage(values: JsonObject) -> bool:
    options = values.get("stream_options")
    if options is None:
        return False
    if not get_bool(values, "stream"):
        raise RequestError("stream_options is given without stream; expected stream true")
    checked = without_neutral(
        "stream_options",
        as_object(options, "stream_options"),
        read=frozenset({"include_usage"}),
        neutral={"continuous_usage_stats": (False,), "include_obfuscation": (False,)},
    )
    return get_bool(checked, "include_usage")


class AnswerShape(Protocol):
    """What tells a completion's answer from a chat's. prefix: of ids; the names are of `object`."""

    prefix: str
    object_name: str
    stream_object_name: str

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """One element of `choices`."""
        ...

    def delta(
        self, index: int, text: str, finish: FinishReason | None, *, is_first: bool
    ) -> dict[str, Any]:
        """One element of an event's `choices`: what is new. is_first: of its sequence."""
        ...


class TextShape:
    """/v1/completions."""

    prefix = "cmpl"
    object_name = stream_object_name = "text_completion"

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """See AnswerShape."""
        return {"index": index, "text": text, "logprobs": None, **_ending(finish)}

    def delta(
        self,
        index: int,
        text: str,
        finish: FinishReason | None,
        *,
        is_first: bool,
    ) -> dict[str, Any]:
        """See AnswerShape."""
        del is_first
        return self.choice(index, text, finish)


class ChatShape:
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    object_name = "chat.completion"
    stream_object_name = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """See AnswerShape."""
        message = {"role": "assistant", "content": text, "refusal": None, "tool_calls": None}
        return {"index": index, "message": message, "logprobs": None, **_ending(finish)}

    def delta(
        self, index: int, text: str, finish: FinishReason | None, *, is_first: bool
    ) -> dict[str, Any]:
        """See AnswerShape; the first delta of a sequence has the role."""
        delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
        if text or is_first:
            delta["content"] = text
        return {"index": index, "delta": delta, "logprobs": None, **_ending(finish)}


def _ending(finish: FinishReason | None) -> dict[str, Any]:
    """SGLang's matched_stop says what ended it."""
    return {
        "finish_reason": None if finish is None else finish.kind.value,
        "matched_stop": None if finish is None else finish.matched,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What every object of one answer begins with. created: seconds since the epoch."""

    answer_id: str
    created: int
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


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object; a prompt counts once, however many choices it has.

    Details are there if any of the prompt was cached, as SGLang has it.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens} if cached_tokens else None,
    }


def usage_of(completions: Sequence[Completion], prompt_idxs: Sequence[int]) -> dict[str, Any]:
    """The usage of a whole answer; prompt_idxs says which prompt each completion is of."""
    pairs = tuple(zip(prompt_idxs, completions, strict=True))
    first = dict(reversed(pairs))
    return usage(
        sum(c.prompt_tokens for c in first.values()),
        sum(len(c.output_ids) for c in completions),
        sum(c.cached_tokens for c in first.values()),
    )


def spec_details(completions: Sequence[Completion]) -> list[dict[str, Any] | None]:
    """SGLang's spec_tokens_details, one a choice; None where nothing was verified."""
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


def model_card(name: str, *, created: int, root: str, max_model_len: int) -> dict[str, Any]:
    """One element of GET /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jspec",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }
