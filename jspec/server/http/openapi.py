"""The OpenAPI document and its page, from routes, endpoint docstrings and field tables."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.routing import BaseRoute, Route

from jspec import __version__
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
JSON = "application/json"
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

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


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    of_path, paths = bodies(), dict[str, dict[str, Any]]()
    for route in routes:
        if not isinstance(route, Route):
            continue
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            body = of_path.get(path, ANY) if method in ("POST", "PUT") else None
            paths.setdefault(path, {})[method.lower()] = _operation(route, path, body)
    error = {"$ref": "#/components/schemas/Error"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jspec", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {
                "Error": {
                    "type": "object",
                    "required": ["object", "message", "type", "code"],
                    "properties": {
                        "object": {"const": "error"},
                        "message": TEXT,
                        "type": TEXT,
                        "param": {},
                        "code": {"type": "integer"},
                    },
                }
            },
            "responses": {
                "Error": {
                    "description": "The problem, and what was expected",
                    "content": {JSON: {"schema": error}},
                }
            },
        },
    }


def _operation(route: Route, path: str, body: Schema | None) -> dict[str, Any]:
    said = (route.endpoint.__doc__ or "").strip().split("\n\n")[0]
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    found: dict[str, Any] = {
        "summary": " ".join(said.split()),
        "responses": {
            "200": {"description": "The answer; a stream of events if stream is true"},
            "4XX": {"$ref": "#/components/responses/Error"},
            "503": {"$ref": "#/components/responses/Error"},
        },
    }
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in names
        ]
    if body is not None:
        is_needed = bool(body.get("required")) or path == "/generate"
        found["requestBody"] = {"required": is_needed, "content": {JSON: {"schema": body}}}
    return found


def page(found: Mapping[str, Any]) -> str:
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>jspec: HTTP</title><style>"
        "body{font:15px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "code{background:#8882;padding:0 .2em}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
        "h2{font-size:1rem;margin:1.6rem 0 0}p,table{margin:.2rem 0}:root{color-scheme:light dark}"
        "</style><h1>jspec: HTTP</h1><p><a href=./>Try it</a>, or read this as "
        "<a href=openapi.json>openapi.json</a>.</p>"
    ]
    for path, methods in found["paths"].items():
        names = ", ".join(method.upper() for method in methods)
        parts.append(f"<h2><code>{names} {html.escape(path)}</code></h2>")
        for summary in dict.fromkeys(each["summary"] for each in methods.values()):
            said = _LINE.sub("", summary).strip()
            parts.append(f"<p>{html.escape(said[:1].upper() + said[1:])}</p>" if said else "")
        bodies = [each["requestBody"] for each in methods.values() if "requestBody" in each]
        parts += map(_fields, bodies[:1])  # the same for each method
    return "".join(parts)


_LINE = re.compile(r"^[A-Z]+ /[^\s:,]*[:,.]?")  # "POST /generate, " of a docstring


def _fields(body: Mapping[str, Any]) -> str:
    schema = body["content"][JSON]["schema"]
    rows = [
        f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(_in_words(field))}"
        for name, field in schema.get("properties", {}).items()
    ]
    if not rows:
        return ""
    return f"<details><summary>{len(rows)} fields</summary><table>{''.join(rows)}</table></details>"


def _in_words(schema: Schema) -> str:
    if "anyOf" in schema:
        words = " or ".join(filter(None, map(_in_words, schema["anyOf"])))
    elif "enum" in schema:
        words = " or ".join(map(repr, schema["enum"]))
    else:
        kind = schema.get("type", "any value")
        words = " or ".join(kind) if isinstance(kind, list) else kind
        bounds = (("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"))
        said = [f"{text} {schema[name]:g}" for name, text in bounds if name in schema]
        words += f" ({', '.join(said)})" if said else ""
        if "items" in schema:
            words += f" of {_in_words(schema['items'])}"
    return words + (f"; default {schema['default']!r}" if "default" in schema else "")
