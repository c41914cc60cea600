"""OpenAI's POST /v1/completions, with SGLang's extensions, and the fields that chats share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jspec.errors import RequestError, shown_json
from jspec.messages.adapter import LORA_NAMES, adapter_names
from jspec.messages.request import (
    MAX_TOP_LOGPROBS,
    SAMPLING_FIELDS,
    SamplingParams,
)
from jspec.messages.sampling_fields import Integer
from jspec.server.http.fields import (
    EXTRA_KEYS,
    NO_DEFAULTS,
    Hints,
    JsonObject,
    Neutral,
    as_object,
    check_list,
    check_number_of_prompts,
    check_text,
    expand_rid,
    get_bool,
    get_rid,
    read_body,
    without_neutral,
)
from jspec.server.native.generate_schema import NEUTRAL_SAMPLING, common_fields
from jspec.server.openai.response_formats import GRAMMAR_FIELDS, grammar_parameters
from jspec.text.intake import Prompt

DEFAULT_MAX_TOKENS = 16
# OpenAI's name → SamplingParams' name.
SAMPLING_NAMES: Mapping[str, str] = {p.openai: p.name for p in SAMPLING_FIELDS}
CLIENT_NAMES = {**SAMPLING_NAMES, "prompt": "input_ids"}  # all names in an engine's errors
# Other names of parameters: OpenAI's newer name of a chat's length, and jspec's and llama.cpp's
# names of vLLM's reasoning budget.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_completion_tokens",),
    "thinking_token_budget": ("max_thinking_tokens", "thinking_budget_tokens"),
}
# OpenAI's fields that identify a caller, as text. The first one given is the caller for fair
# sharing of slots; prompt_cache_key has no effect.
CALLER_FIELDS = ("user", "safety_identifier", "prompt_cache_key")
# SGLang's fields, whose results OpenAI's answers can only return in meta_info.
RETURNED_IN_META = ("return_logprob", "return_hidden_states", "return_draft_trees")
ANSWER_FIELDS = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "rid",
        "priority",
        *EXTRA_KEYS,
        *LORA_NAMES,
        *CALLER_FIELDS,
        *OTHER_NAMES["thinking_token_budget"],
        "metadata",
        "return_meta_info",
        "return_spec_tokens_details",
    }
)
COMPLETION_FIELDS = (
    frozenset(SAMPLING_NAMES)
    | ANSWER_FIELDS
    | GRAMMAR_FIELDS
    | {"prompt", "best_of", "echo", "logprobs"}
)
TOP_LOGPROBS = Integer(0, MAX_TOP_LOGPROBS)
NEUTRAL_OPENAI: Neutral = {
    **{
        name: values
        for name, values in NEUTRAL_SAMPLING.items()
        if name not in {"best_of", *GRAMMAR_FIELDS}
    },
    "store": (None, False, True),  # answers are not stored
    "service_tier": (None, "auto", "default"),
    "return_routed_experts": (False,),
    "return_cached_tokens_details": (False,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "data_parallel_rank": (None,),
    "kv_transfer_params": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "add_special_tokens": (None, True),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
}
NEUTRAL_COMPLETION: Neutral = {
    **NEUTRAL_OPENAI,
    "suffix": (None, ""),
    "prompt_embeds": (None, []),
}
COMPLETION_HINTS: Hints = {
    **{inner: repr(outer) for outer, inner in SAMPLING_NAMES.items() if inner != outer},
    "max_completion_tokens": "'max_tokens'",
    "sampling_params": "its fields at the top level",
    "text": "'prompt'",
    "input_ids": "'prompt'",
    "messages": "'prompt'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    stream: bool
    include_usage: bool  # in a stream's last event, of all sequences
    continuous_usage: bool  # in each event, of its own sequence
    return_meta_info: bool
    return_spec_tokens_details: bool
    model: str | None  # the name that the client used, if any
    logprobs: bool = False
    echo: bool = False  # the text starts with the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    prompts: tuple[Prompt, ...]
    options: AnswerOptions
    group: str | None


def parse_completion(body: object, defaults: Mapping[str, Any] = NO_DEFAULTS) -> CompletionCall:
    values = read_body(
        body, read=COMPLETION_FIELDS, neutral=NEUTRAL_COMPLETION, hints=COMPLETION_HINTS
    )
    num_top, echo = values.get("logprobs"), get_bool(values, "echo")
    options = replace(answer_options(values), logprobs=num_top is not None, echo=echo)
    rid = get_rid(values)
    if num_top is not None:
        TOP_LOGPROBS.check("logprobs", num_top)
        values |= logprob_fields(num_top, of_prompt=echo)
    sampling = sampling_of(values, {**defaults, "max_new_tokens": DEFAULT_MAX_TOKENS})
    _check_best_of(values.get("best_of"), sampling.n)
    sources = _sources(values.get("prompt"))
    names = expand_rid(rid, len(sources), is_list=len(sources) > 1)
    loras = adapter_names(values, len(sources))
    return CompletionCall(
        prompts=tuple(
            Prompt(**source, sampling=sampling, request_id=name, lora=lora, **common_fields(values))
            for source, name, lora in zip(sources, names, loras, strict=True)
        ),
        options=options,
        group=rid,
    )


def logprob_fields(num_top: int, *, of_prompt: bool) -> dict[str, Any]:
    """Return SGLang's fields for OpenAI's log-probabilities."""
    return {
        "return_logprob": True,
        "top_logprobs_num": num_top,
        "logprob_start_len": 0 if of_prompt else -1,
    }


def _check_best_of(best_of: object, n: int) -> None:
    """Raise RequestError unless best_of is n, since unreturned candidates are not made."""
    if best_of is None:
        return
    Integer(1, expected=f"n, which is {n}, or leave it out").check("best_of", best_of)
    if best_of != n:
        raise RequestError(f"best_of is {best_of}; expected n, which is {n}, or leave it out")


def sampling_of(values: JsonObject, defaults: Mapping[str, Any]) -> SamplingParams:
    given = {inner: values.get(outer) for outer, inner in SAMPLING_NAMES.items()}
    for outer, others in OTHER_NAMES.items():
        named = {name: values[name] for name in (outer, *others) if values.get(name) is not None}
        for name, value in named.items():
            first = next(iter(named))
            if value != named[first]:
                raise RequestError(
                    f"{first} is {shown_json(named[first])} and {name} {shown_json(value)}; "
                    "expected one of them"
                )
            given[SAMPLING_NAMES[outer]] = value
    for name, grammar in grammar_parameters(values).items():
        if given.get(name) is not None:
            raise RequestError(f"{name} is given twice; expected one grammar at most")
        given[name] = grammar
    with openai_names():
        return SamplingParams.from_mapping(given, defaults=defaults)


def answer_options(values: JsonObject) -> AnswerOptions:
    for name in ("model", *CALLER_FIELDS):
        if values.get(name) is not None:
            check_text(name, values[name])
    if values.get("metadata") is not None:
        as_object(values["metadata"], "metadata")
    for name in RETURNED_IN_META:
        if values.get(name) is True and not get_bool(values, "return_meta_info"):
            raise RequestError(
                f"{name} is true without return_meta_info; expected return_meta_info true, since "
                "meta_info has the result"
            )
    return AnswerOptions(
        stream=get_bool(values, "stream"),
        **_usage_options(values),
        return_meta_info=get_bool(values, "return_meta_info"),
        return_spec_tokens_details=get_bool(values, "return_spec_tokens_details"),
        model=values.get("model"),
    )


@contextmanager
def openai_names() -> Iterator[None]:
    """Translate field names in a RequestError that starts with one into the client's names."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        if message.split(" ", 1)[0] not in CLIENT_NAMES.values():
            raise
        for outer, inner in CLIENT_NAMES.items():
            message = re.sub(rf"\b{inner}\b", outer, message)
        raise type(error)(message) from None


def _sources(prompt: object) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"text": check_text("prompt", prompt)}]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            f"prompt is {shown_json(prompt)}; expected text, a list of texts, a list of token ids, "
            f"or a list of such lists"
        )
    if isinstance(prompt[0], str | list):
        check_number_of_prompts("prompt", prompt)
    if isinstance(prompt[0], str):
        return [{"text": check_text("prompt", item)} for item in prompt]
    if isinstance(prompt[0], list):
        return [{"input_ids": check_list("prompt", item)} for item in prompt]
    return [{"input_ids": check_list("prompt", prompt)}]


def _usage_options(values: JsonObject) -> dict[str, bool]:
    names = {"include_usage": "include_usage", "continuous_usage": "continuous_usage_stats"}
    options = values.get("stream_options")
    if options is None:
        return dict.fromkeys(names, False)
    if not get_bool(values, "stream"):
        raise RequestError("stream_options is given without stream; expected stream true")
    checked = without_neutral(
        "stream_options",
        as_object(options, "stream_options"),
        read=frozenset(names.values()),
        neutral={"include_obfuscation": (False,)},
    )
    found = {name: get_bool(checked, given) for name, given in names.items()}
    if found["continuous_usage"] and not found["include_usage"]:
        raise RequestError(
            "continuous_usage_stats is true without include_usage; expected include_usage true"
        )
    return found
