"""Anthropic's POST /v1/messages (docs.anthropic.com/en/api/messages): JSON in, a chat out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jspec.errors import RequestError, shown_json
from jspec.server.http.fields import (
    EXTRA_KEYS,
    NO_DEFAULTS,
    Hints,
    JsonObject,
    Neutral,
    as_object,
    check_text,
    get_bool,
    read_body,
    without_neutral,
)
from jspec.server.openai.chat_schema import ChatCall, parse_chat

# Fields with the same name and meaning in a chat. The second row is jspec's own.
SAME_FIELDS = frozenset(
    {
        *("model", "stream", "temperature", "top_p", "top_k", "max_tokens"),
        *("seed", "min_p", "rid", "priority", "chat_template_kwargs", *EXTRA_KEYS),
    }
)
MESSAGE_FIELDS = SAME_FIELDS | {
    "messages",
    "system",
    "stop_sequences",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "metadata",
}
NEUTRAL_MESSAGE: Neutral = {
    "service_tier": (None, "auto", "standard_only"),
    "container": (None,),
    "context_management": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
}
MESSAGE_HINTS: Hints = {
    "max_completion_tokens": "'max_tokens'",
    "stop": "'stop_sequences'",
    "response_format": "'output_config'",
}
_NEUTRAL_CONFIG: Neutral = {}
_OTHER_NAMES = (
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
    (re.compile(r"\bthinking_token_budget\b"), "thinking.budget_tokens"),
    (re.compile(r"\bstop\b(?=( is| holds|\[))"), "stop_sequences"),
)


def parse_message(
    body: object, defaults: Mapping[str, Any] = NO_DEFAULTS, *, needs_length: bool = True
) -> ChatCall:
    """Parse a body. Raises RequestError. needs_length: max_tokens is required."""
    values = read_body(body, read=MESSAGE_FIELDS, neutral=NEUTRAL_MESSAGE, hints=MESSAGE_HINTS)
    if needs_length and values.get("max_tokens") is None:
        raise RequestError("max_tokens is missing; expected the most tokens of the answer")
    messages = _messages(values)
    choice, parallel = _choice(values.get("tool_choice"))
    config = as_object(values.get("output_config") or {}, "output_config")
    check = without_neutral(
        "output_config", config, read=frozenset({"format", "effort"}), neutral=_NEUTRAL_CONFIG
    )
    chat: dict[str, Any] = {name: values[name] for name in SAME_FIELDS if name in values}
    chat |= {
        "messages": messages,
        "user": _user(values.get("metadata")),
        "stop": values.get("stop_sequences"),
        "tools": _tools(values.get("tools")),
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "continue_final_message": messages[-1]["role"] == "assistant",
        "response_format": _format(check.get("format")),
        "reasoning_effort": check.get("effort"),
        **_thinking(values),
    }
    try:
        return parse_chat(chat, defaults)
    except RequestError as error:
        message = str(error)
        for other, own in _OTHER_NAMES:
            message = other.sub(own, message)
        raise RequestError(message) from None


parse_count = partial(parse_message, needs_length=False)  # of /v1/messages/count_tokens


def _user(metadata: object) -> str | None:
    user = None if metadata is None else as_object(metadata, "metadata").get("user_id")
    return None if user is None else check_text("metadata.user_id", user)


def _messages(values: JsonObject) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if values.get("system") is not None:
        found.append({"role": "system", "content": _text(values["system"], "system")})
    given = values.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestError(f"messages is {shown_json(given)}; expected a list of messages")
    for i, item in enumerate(given):
        where = f"messages[{i}]"
        fields = as_object(item, where)
        role, content = fields.get("role"), fields.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}.role is {shown_json(role)}; expected user or assistant")
        if isinstance(content, str):
            found.append({"role": role, "content": check_text(f"{where}.content", content)})
        elif not isinstance(content, list) or not content:
            raise RequestError(
                f"{where}.content is {shown_json(content)}; expected text or a list of blocks"
            )
        elif role == "assistant":
            found.append(_answer(content, f"{where}.content"))
        else:
            found += _turn(role, content, f"{where}.content")
    return found


def _turn(role: str, blocks: Sequence[object], where: str) -> list[dict[str, Any]]:
    """Return each of a turn's tool results as a message, and then its text."""
    results, texts = [], []
    for i, block in enumerate(blocks):
        fields = as_object(block, f"{where}[{i}]")
        if fields.get("type") == "tool_result":
            call_id = check_text(f"{where}[{i}].tool_use_id", fields.get("tool_use_id"))
            content = _text(fields.get("content") or "", f"{where}[{i}].content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            texts.append(_text([block], where, first=i))
    return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts else [])]


def _answer(blocks: Sequence[object], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        fields = as_object(block, f"{where}[{i}]")
        kind = fields.get("type")
        if kind == "thinking":
            thoughts.append(check_text(f"{where}[{i}].thinking", fields.get("thinking")))
        elif kind == "tool_use":
            names = ("id", "name")
            call_id, name = (check_text(f"{where}[{i}].{key}", fields.get(key)) for key in names)
            given = as_object(fields.get("input"), f"{where}[{i}].input")
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            texts.append(_text([block], where, first=i))
    if texts:
        message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: object, where: str, *, first: int = 0) -> str:
    """Join text blocks; cache_control has no effect. first: the first one's index, for errors."""
    if isinstance(content, str):
        return check_text(where, content)
    if not isinstance(content, list):
        raise RequestError(f"{where} is {shown_json(content)}; expected text or a list of blocks")
    texts = []
    for i, block in enumerate(content, first):
        if not isinstance(block, Mapping) or block.get("type") != "text":
            raise RequestError(
                f"{where}[{i}] is {shown_json(block)}; expected a block of type text, thinking, "
                "tool_use or tool_result at its place: others are not served"
            )
        texts.append(check_text(f"{where}[{i}].text", block.get("text")))
    return "\n".join(texts)


def _tools(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    found = []
    for i, tool in enumerate(tools):
        fields = as_object(tool, f"tools[{i}]")
        if fields.get("type") not in (None, "custom"):
            raise RequestError(
                f"tools[{i}].type is {shown_json(fields['type'])}; expected 'custom': tools that a "
                "server runs are not supported"
            )
        function = {"name": fields.get("name"), "parameters": fields.get("input_schema")}
        if fields.get("description") is not None:
            function["description"] = fields["description"]
        found.append({"type": "function", "function": function})
    return found


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _choice(choice: object) -> tuple[object, bool | None]:
    if choice is None:
        return None, None
    fields = as_object(choice, "tool_choice")
    kind = fields.get("type")
    parallel = False if get_bool(fields, "disable_parallel_tool_use") else None
    if kind == "tool":
        name = check_text("tool_choice.name", fields.get("name"))
        return {"type": "function", "function": {"name": name}}, parallel
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(
            f"tool_choice.type is {shown_json(kind)}; expected auto, any, tool or none"
        )
    return _CHOICES[kind], parallel


def _format(given: object) -> Mapping[str, Any] | None:
    if given is None:
        return None
    fields = as_object(given, "output_config.format")
    if fields.get("type") != "json_schema":
        raise RequestError(
            f"output_config.format.type is {shown_json(fields.get('type'))}; expected 'json_schema'"
        )
    schema = {"name": "answer", "schema": fields.get("schema")}
    return {"type": "json_schema", "json_schema": schema}


def _thinking(values: JsonObject) -> dict[str, Any]:
    """Return a chat's fields for `thinking`: a budget, and the template's variables."""
    # Most templates read the variable enable_thinking.
    given: Any = values.get("chat_template_kwargs")
    if values.get("thinking") is None:
        return {"chat_template_kwargs": given}
    fields = as_object(values["thinking"], "thinking")
    kind, budget = fields.get("type"), fields.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise RequestError(
            f"thinking.type is {shown_json(kind)}; expected enabled, disabled or adaptive"
        )
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise RequestError(
            f"thinking.budget_tokens is {shown_json(budget)}; expected a number of tokens"
        )
    variables = as_object(given or {}, "chat_template_kwargs")
    return {
        "chat_template_kwargs": {"enable_thinking": kind != "disabled", **variables},
        "thinking_token_budget": budget,
    }
