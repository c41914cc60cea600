"""JSON schemas of request bodies, from the tables that the endpoints check them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.messages.adapter import LORA_NAMES
from jspec.messages.request import SAMPLING_FIELDS
from jspec.messages.sampling_fields import (
    Accepts,
    Biases,
    Flag,
    Integer,
    Integers,
    Number,
    SamplingField,
    Source,
    Switch,
    Texts,
)
from jspec.server.anthropic import schema as message_schema
from jspec.server.control import control_endpoints
from jspec.server.http.fields import EXTRA_KEYS, Neutral
from jspec.server.native import generate_schema, score_endpoint
from jspec.server.openai import chat_schema, completion_schema, responses_schema
from jspec.server.openai.completion_schema import CALLER_FIELDS
from jspec.text.template.chat_messages import ROLES

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": ["boolean", "null"]}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
NAME: Schema = {"type": ["string", "null"], "minLength": 1}
TEXTS: Schema = {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}}
COUNT: Schema = {"type": ["integer", "null"], "minimum": 0}
ANY: Schema = {"type": "object"}
# Body fields other than sampling parameters.
OTHERS: Mapping[str, Schema] = {
    "add_generation_prompt": FLAG,
    "apply_softmax": FLAG,
    "best_of": {"type": ["integer", "null"], "minimum": 1},
    "chat_template_kwargs": {"type": ["object", "null"]},
    "continue_final_message": FLAG,
    "echo": FLAG,
    "guided_choice": TEXTS,
    "guided_grammar": {"type": ["string", "null"]},
    "guided_json": {"type": ["object", "string", "boolean", "null"]},
    "guided_regex": {"type": ["string", "null"]},
    **{name: {"type": ["string", "null"], "minLength": 1} for name in EXTRA_KEYS},
    "input": {"anyOf": [TEXT, {"type": "array", "minItems": 1, "items": ANY}]},
    "input_ids": {"anyOf": [IDS, {"type": "array", "items": IDS}]},
    "item_first": FLAG,
    "items": {"anyOf": [TEXT, {"type": "array", "items": TEXT}, {"type": "array", "items": IDS}]},
    "label_token_ids": {**IDS, "minItems": 1},
    "instructions": {"type": ["string", "null"]},
    **{
        name: {"anyOf": [TEXT, {"type": "array", "items": NAME}, {"type": "null"}]}
        for name in LORA_NAMES
    },
    "max_completion_tokens": COUNT,
    "max_output_tokens": COUNT,
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [TEXT, {"type": "array"}, {"type": "null"}]},
            },
        },
    },
    "metadata": {"type": ["object", "null"]},
    **{name: {"type": ["string", "null"]} for name in CALLER_FIELDS},
    "reasoning": {"type": ["object", "null"]},
    "reasoning_effort": {"anyOf": [{"enum": list(chat_schema.EFFORTS)}, {"type": "null"}]},
    "model": {"type": ["string", "null"]},
    "parallel_tool_calls": FLAG,
    "priority": {"type": ["integer", "null"]},
    "prompt": {
        "anyOf": [TEXT, {"type": "array", "items": TEXT}, IDS, {"type": "array", "items": IDS}]
    },
    "query": {"anyOf": [TEXT, IDS]},
    "return_meta_info": FLAG,
    "return_spec_tokens": FLAG,
    "return_spec_tokens_details": FLAG,
    "return_text_in_logprobs": FLAG,
    "response_format": {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
            "json_schema": {"type": "object", "properties": {"schema": ANY}},
        },
    },
    "rid": {"anyOf": [TEXT, {"type": "array", "items": TEXT}, {"type": "null"}]},
    "separate_reasoning": FLAG,
    "stream": FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": FLAG, "continuous_usage_stats": FLAG},
    },
    "structured_outputs": {"type": ["object", "null"]},
    "text": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    "tool_choice": {
        "anyOf": [{"enum": ["none", "auto", "required"]}, {"type": ["object", "null"]}]
    },
    "tools": {"type": ["array", "null"], "items": ANY},
}


def value_schema(accepts: Accepts) -> Schema:
    match accepts:
        case Integer(low=low, high=high):
            return {
                "type": "integer",
                "minimum": low,
                **({} if high is None else {"maximum": high}),
            }
        case Number(low=low, high=high, with_low=with_low):
            least = "minimum" if with_low else "exclusiveMinimum"
            return {"type": "number", least: low, "maximum": high}
        case Switch():
            return {"anyOf": [{"type": "boolean"}, {"enum": ["on", "off"]}]}
        case Flag():
            return {"type": "boolean"}
        case Source(most_chars=most, as_json=kinds):
            text = {"type": "string", "minLength": 1, "maxLength": most}
            return {"anyOf": [text, {"type": list(kinds)}]} if kinds else text
        case Texts(most=most):
            each = {"type": "string", "minLength": 1}
            return {"anyOf": [each, {"type": "array", "items": each, "maxItems": most}]}
        case Integers(each=each, most=most):
            return {"type": "array", "items": value_schema(each), "maxItems": most}
        case Biases(bias=bias):
            ids = {"pattern": "^[0-9]{1,9}$"}
            return {
                "type": "object",
                "propertyNames": ids,
                "additionalProperties": value_schema(bias),
            }
    return {}


def field_schema(field: SamplingField) -> Schema:
    found: Schema = {"anyOf": [value_schema(field.accepts), {"type": "null"}]}
    if field.default is not None:
        empty: Any = {} if isinstance(field.accepts, Biases) else []
        found["default"] = empty if field.default == () else field.default
    return found


def neutral_schema(values: Sequence[Any]) -> Schema:
    return {"enum": [*dict.fromkeys(map(_hashable, (None, *values)))], "description": "neutral"}


def _hashable(value: Any) -> Any:
    return None if isinstance(value, list | dict) else value


def body_schema(
    read: frozenset[str],
    neutral: Neutral,
    *,
    sampling: Mapping[str, SamplingField],
    others: Mapping[str, Schema] = OTHERS,
    required: Sequence[str] = (),
) -> Schema:
    """Return an object schema of the known fields. A field without a schema allows anything."""
    of_field = {name: field_schema(sampling[name]) for name in read if name in sampling}
    properties = {name: of_field.get(name) or others.get(name) or {} for name in sorted(read)}
    properties |= {
        name: neutral_schema(values) for name, values in sorted(neutral.items()) if name not in read
    }
    found: Schema = {"type": "object", "properties": properties}
    return {**found, "required": list(required)} if required else found


def bodies() -> dict[str, Schema]:
    return {"/generate": _native_body(), **_openai_bodies(), **_other_bodies()}


def _native_body() -> Schema:
    native = {field.name: field for field in SAMPLING_FIELDS}
    sampling = body_schema(
        generate_schema.SAMPLING_NAMES, generate_schema.NEUTRAL_NATIVE_SAMPLING, sampling=native
    )
    of_prompts = {
        **OTHERS,
        "sampling_params": {"anyOf": [sampling, {"type": "array", "items": sampling}]},
        **{name: {} for name in generate_schema.OUTPUT_FIELDS},  # one value, or one per prompt
    }
    return body_schema(
        generate_schema.GENERATE_FIELDS,
        generate_schema.NEUTRAL_GENERATE,
        sampling={},
        others=of_prompts,
    )


def _openai_bodies() -> dict[str, Schema]:
    openai = {field.openai: field for field in SAMPLING_FIELDS}
    counts = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"type": "null"}]}
    return {
        "/v1/completions": body_schema(
            completion_schema.COMPLETION_FIELDS,
            completion_schema.NEUTRAL_COMPLETION,
            sampling=openai,
            others={**OTHERS, "logprobs": counts},
            required=("prompt",),
        ),
        "/v1/chat/completions": body_schema(
            chat_schema.CHAT_FIELDS,
            chat_schema.NEUTRAL_CHAT,
            sampling=openai,
            others={**OTHERS, "logprobs": FLAG, "top_logprobs": counts},
            required=("messages",),
        ),
        "/v1/responses": body_schema(
            responses_schema.RESPONSE_FIELDS,
            responses_schema.NEUTRAL_RESPONSE,
            sampling=openai,
            others={**OTHERS, "text": {"type": ["object", "null"]}},
            required=("input",),
        ),
        "/v1/messages": _message_body(required=("max_tokens", "messages")),
        "/v1/messages/count_tokens": _message_body(required=("messages",)),
    }


def _message_body(*, required: Sequence[str]) -> Schema:
    blocks: Schema = {"anyOf": [TEXT, {"type": "array", "items": ANY}]}
    turn = {"type": "object", "required": ["role", "content"], "properties": {"content": blocks}}
    others = {
        **OTHERS,
        "max_tokens": COUNT,
        "messages": {"type": "array", "minItems": 1, "items": turn},
        "system": {"anyOf": [*blocks["anyOf"], {"type": "null"}]},
        "stop_sequences": TEXTS,
        "tool_choice": {"type": ["object", "null"]},
        "thinking": {"type": ["object", "null"]},
        "output_config": {"type": ["object", "null"]},
    }
    return body_schema(
        message_schema.MESSAGE_FIELDS,
        message_schema.NEUTRAL_MESSAGE,
        sampling={field.openai: field for field in SAMPLING_FIELDS},
        others=others,
        required=required,
    )


def _other_bodies() -> dict[str, Schema]:
    texts_and_ids: Schema = {
        "type": "object",
        "properties": {
            "prompt": OTHERS["text"],
            "add_special_tokens": FLAG,
            "model": TEXT,
            **{name: OTHERS[name] for name in sorted(control_endpoints.CHAT_PROMPT_FIELDS)},
        },
    }
    ids: Schema = {
        "type": "object",
        "properties": {"tokens": OTHERS["input_ids"], "skip_special_tokens": FLAG, "model": TEXT},
        "required": ["tokens"],
    }
    return {
        "/v1/score": body_schema(
            score_endpoint.SCORE_FIELDS,
            score_endpoint.NEUTRAL_SCORE,
            sampling={},
            required=("query", "items", "label_token_ids"),
        ),
        "/abort_request": {"type": "object", "properties": {"rid": TEXT, "abort_all": FLAG}},
        "/tokenize": texts_and_ids,
        "/v1/tokenize": texts_and_ids,
        "/detokenize": ids,
        "/v1/detokenize": ids,
        "/pause_generation": {
            "type": "object",
            "properties": {"mode": {"enum": ["abort", "in_place"]}},
        },
    }
