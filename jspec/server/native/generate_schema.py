"""The native request, SGLang's POST /generate: from JSON to a checked call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jspec.config.peer_parameters import PEER_PARAMETERS
from jspec.errors import RequestError, shown_json
from jspec.messages.adapter import LORA_NAMES, adapter_names
from jspec.messages.request import SAMPLING_FIELDS, SamplingParams
from jspec.server.http.fields import (
    EXTRA_KEYS,
    NO_DEFAULTS,
    Hints,
    JsonObject,
    Neutral,
    as_object,
    check_list,
    check_number_of_prompts,
    check_rid,
    check_text,
    expand_rid,
    get_bool,
    get_extra_key,
    get_rid,
    read_body,
    without_neutral,
)
from jspec.text.intake import Prompt, in_list

# Sampling parameters at the top level of a body: one value, or a list with one per prompt.
OUTPUT_FIELDS = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "return_draft_trees",
)
MAX_CALLER_CHARS = 256  # longer names are cut
GENERATE_FIELDS = frozenset(
    {
        "text",
        "input_ids",
        "sampling_params",
        "rid",
        "model",
        "stream",
        "return_spec_tokens",
        "return_text_in_logprobs",
        "priority",
        *EXTRA_KEYS,
        *LORA_NAMES,
        *OUTPUT_FIELDS,
    }
)
NEUTRAL_GENERATE: Neutral = {
    "input_embeds": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
    "modalities": (None, []),
    "return_routed_experts": (False,),
    "return_sampling_mask": (None, False),
    "log_metrics": (True,),
    "background": (False,),
    "no_logs": (False, True),
    "lora_id": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "conversation_id": (None,),
    "data_parallel_rank": (None,),
    "bootstrap_host": (None,),
    "bootstrap_port": (None,),
    "bootstrap_room": (None,),
    "bootstrap_pair_key": (None,),
    "decode_tp_size": (None,),
    "routing_key": (None,),
    "custom_labels": (None, {}),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "need_wait_for_image": (None, False),
}
SAMPLING_NAMES = frozenset(parameter.name for parameter in SAMPLING_FIELDS)
NEUTRAL_SAMPLING: Neutral = {
    "spaces_between_special_tokens": (True, False),  # for slow tokenizers, which are not used
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "prompt_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
    "detokenize": (True,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    # A backend or its options: any that is named compiles the same grammar.
    "guided_decoding_backend": (
        *(None, "auto", "xgrammar", "guidance", "llguidance", "outlines", "lm-format-enforcer"),
    ),
    "guided_whitespace_pattern": (None,),
    "best_of": (1,),
    "structured_outputs": (None,),
    "logits_processors": (None, []),
    "vllm_xargs": (None, {}),
    "custom_params": (None, {}),
}
# Other APIs' names of sampling parameters are not ignored here. If max_tokens were ignored, for
# example, the text would have another length.
NEUTRAL_NATIVE_SAMPLING: Neutral = {
    **dict.fromkeys(PEER_PARAMETERS, (None,)),
    **NEUTRAL_SAMPLING,
    "do_sample": (None, True),
    "num_return_sequences": (None, 1),
}
GENERATE_HINTS: Hints = {
    **{name: f"{name!r} in sampling_params" for name in SAMPLING_NAMES},
    **{name: f"{meant} in sampling_params" for name, meant in PEER_PARAMETERS.items()},
    "prompt": "'text'",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    prompts: tuple[Prompt, ...]
    is_list: bool  # the answer is a list (it also is if n > 1)
    stream: bool
    return_spec_tokens: bool
    return_text_in_logprobs: bool
    group: str | None = None  # id of the whole call, if one was given for a list
    model: str | None = None  # the name that the client used, if any


def parse_generate(body: object, defaults: Mapping[str, Any] = NO_DEFAULTS) -> GenerateCall:
    values = read_body(body, read=GENERATE_FIELDS, neutral=NEUTRAL_GENERATE, hints=GENERATE_HINTS)
    sources, is_list = _sources(values)
    sampling = _sampling(
        values.get("sampling_params"), len(sources), defaults=defaults, is_list=is_list
    )
    sampling = _with_outputs(values, sampling, is_list=is_list)
    rids = _rids(values, len(sources), is_list=is_list)
    rid, common = values.get("rid"), common_fields(values)
    loras = adapter_names(values, len(sources))
    return GenerateCall(
        prompts=tuple(
            Prompt(**source, sampling=params, request_id=name, lora=lora, **common)
            for source, params, name, lora in zip(sources, sampling, rids, loras, strict=True)
        ),
        is_list=is_list,
        stream=get_bool(values, "stream"),
        return_spec_tokens=get_bool(values, "return_spec_tokens"),
        return_text_in_logprobs=get_bool(values, "return_text_in_logprobs"),
        group=rid if is_list and isinstance(rid, str) else None,
        model=None if values.get("model") is None else check_text("model", values["model"]),
    )


def common_fields(values: JsonObject) -> dict[str, Any]:
    """Return Prompt fields with one value per call. Raises RequestError."""
    priority = values.get("priority")
    user = values.get("user") or values.get("safety_identifier")
    return {
        "priority": 0 if priority is None else priority,
        "extra_key": get_extra_key(values),
        "caller": user[:MAX_CALLER_CHARS] if user else None,
    }


def _sources(values: JsonObject) -> tuple[list[dict[str, Any]], bool]:
    text, ids = values.get("text"), values.get("input_ids")
    if (text is None) == (ids is None):
        raise RequestError("expected exactly one of text and input_ids")
    if text is not None:
        if not isinstance(text, list):
            return [{"text": check_text("text", text)}], False
        _check_number("text", text)
        return [{"text": check_text("text", item)} for item in text], True
    if not isinstance(ids, list):
        raise RequestError(f"input_ids is {shown_json(ids)}; expected a list of token ids")
    if not ids or isinstance(ids[0], list):
        _check_number("input_ids", ids)
        return [{"input_ids": check_list("input_ids", row)} for row in ids], True
    return [{"input_ids": check_list("input_ids", ids)}], False


def _check_number(name: str, items: list[Any]) -> None:
    if not items:
        raise RequestError(f"{name} is an empty list; expected at least one item")
    check_number_of_prompts(name, items)


def _sampling(
    value: object, num_prompts: int, *, defaults: Mapping[str, Any], is_list: bool
) -> list[SamplingParams]:
    if isinstance(value, list):
        if not is_list or len(value) != num_prompts:
            expected = f"a list of {num_prompts}" if is_list else "one object"
            raise RequestError(f"sampling_params is a list of {len(value)}; expected {expected}")
        found = []
        for index, item in enumerate(value):
            with in_list(index, num_prompts):
                found.append(sampling_params(item, defaults))
        return found
    return [sampling_params(value, defaults)] * num_prompts


def _with_outputs(
    values: JsonObject, sampling: list[SamplingParams], *, is_list: bool
) -> list[SamplingParams]:
    by_prompt: list[dict[str, Any]] = [{} for _ in sampling]
    for parameter in SAMPLING_FIELDS:
        name = parameter.name
        value = values.get(name) if name in OUTPUT_FIELDS else None
        if value is None:
            continue
        # a flat list is one value, nested lists are one per prompt
        deep = isinstance(parameter.default, tuple)
        is_each = isinstance(value, list) and (not deep or any(isinstance(x, list) for x in value))
        if is_each and (not is_list or len(value) != len(sampling)):
            expected = f"one, or a list of {len(sampling)}" if is_list else "one"
            raise RequestError(f"{name} is a list of {len(value)}; expected {expected}")
        for own, each in zip(by_prompt, value if is_each else [value] * len(sampling), strict=True):
            if each is not None:
                own[name] = each
    for own, params in zip(by_prompt, sampling, strict=True):
        # Without output the log-probabilities can only be the prompt's (sgl.select).
        if own.get("return_logprob") is True and params.max_new_tokens == 0:
            own.setdefault("logprob_start_len", max(params.logprob_start_len, 0))
    return [
        replace(params, **own) if own else params
        for params, own in zip(sampling, by_prompt, strict=True)
    ]


def sampling_params(value: object, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
    """Return checked sampling parameters of one prompt; null: all defaults. Raises RequestError."""
    if value is None:
        value = {}
    where = "sampling_params"
    values = without_neutral(
        where,
        as_object(value, where),
        read=SAMPLING_NAMES,
        neutral=NEUTRAL_NATIVE_SAMPLING,
        hints=PEER_PARAMETERS,
    )
    return SamplingParams.from_mapping(values, defaults=defaults)


def _rids(values: JsonObject, num_prompts: int, *, is_list: bool) -> list[str | None]:
    value = values.get("rid")
    if isinstance(value, list):
        if not is_list or len(value) != num_prompts:
            expected = f"a list of {num_prompts}, or text" if is_list else "text"
            raise RequestError(f"rid is a list of {len(value)}; expected {expected}")
        return [check_rid(item) for item in value]
    return expand_rid(get_rid(values), num_prompts, is_list=is_list)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCall:
    rid: str | None  # None: all requests


def parse_abort(body: object) -> AbortCall:
    """Parse a body. Raises RequestError, also for an empty rid, which would match nothing."""
    values = read_body(
        body, read=frozenset({"rid", "abort_all"}), neutral={"abort_message": (None,)}
    )
    rid = values.get("rid")
    if get_bool(values, "abort_all"):
        if rid:
            raise RequestError(f"rid is {shown_json(rid)} with abort_all; expected one of them")
        return AbortCall(rid=None)
    if rid is None:
        raise RequestError("expected rid, or abort_all true")
    return AbortCall(rid=check_rid(rid))
