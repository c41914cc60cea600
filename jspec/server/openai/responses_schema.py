"""OpenAI's POST /v1/responses: from JSON to an equivalent chat. Answers are not stored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    read_body,
    without_neutral,
)
from jspec.server.native.generate_schema import OUTPUT_FIELDS
from jspec.server.openai.chat_schema import ChatCall, parse_chat
from jspec.server.openai.completion_schema import CALLER_FIELDS, SAMPLING_NAMES

LENGTH = "max_output_tokens"
# Fields with the same name and meaning in a chat.
SAME_FIELDS = (frozenset(SAMPLING_NAMES) - {"n", "max_tokens", *OUTPUT_FIELDS}) | {
    "model",
    "stream",
    "rid",
    "priority",
    *EXTRA_KEYS,
    *CALLER_FIELDS,
    "parallel_tool_calls",
    "chat_template_kwargs",
    "separate_reasoning",
}
RESPONSE_FIELDS = SAME_FIELDS | {
    "input",
    "instructions",
    LENGTH,
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "metadata",
}
NEUTRAL_RESPONSE: Neutral = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "store": (None, False, True),  # as OpenAI allows, the answer says that it was not stored
    "background": (None, False),
    # Reasoning is returned in plain text, which clients return like an encrypted one.
    "include": (None, [], "reasoning.encrypted_content"),
    "prompt": (None,),
    "truncation": (None, "disabled"),
    "top_logprobs": (None, 0),
    "max_tool_calls": (None,),
    "service_tier": (None, "auto", "default"),
    "stream_options": (None, {}),
    "prompt_cache_retention": (None,),
    "n": (None, 1),
}
RESPONSE_HINTS: Hints = {
    "messages": "'input'",
    "max_tokens": repr(LENGTH),
    "max_completion_tokens": repr(LENGTH),
    "response_format": "'text'",
}
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_TEXT_NEUTRAL: Neutral = {"verbosity": (None, "medium")}
# Reasoning is always returned in full; auto leaves the choice to the server.
_REASONING_NEUTRAL: Neutral = {"summary": (None, "auto"), "generate_summary": (None, "auto")}
_OTHER_EFFORT = ("reasoning_effort", "reasoning.effort")
_OTHER_FORMAT = re.compile(r"\bresponse_format(\.json_schema)?\b")
_OTHER_LENGTH = re.compile(r"\bmax_(completion_)?tokens\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCall:
    chat: ChatCall
    repeated: Mapping[str, Any]  # fields that the answer repeats


def parse_response(body: object, defaults: Mapping[str, Any] = NO_DEFAULTS) -> ResponseCall:
    values = read_body(body, read=RESPONSE_FIELDS, neutral=NEUTRAL_RESPONSE, hints=RESPONSE_HINTS)
    chat: dict[str, Any] = {name: values[name] for name in SAME_FIELDS if name in values}
    chat["messages"] = _messages(values.get("input"), values.get("instructions"))
    chat["max_completion_tokens"] = values.get(LENGTH)
    chat["tools"] = _tools(values.get("tools"))
    chat["tool_choice"] = _choice(values.get("tool_choice"))
    chat["response_format"] = _format(values.get("text"))
    chat["reasoning_effort"] = _effort(values.get("reasoning"))
    metadata = values.get("metadata")
    try:
        call = parse_chat(chat, defaults)
    except RequestError as error:
        message = _OTHER_LENGTH.sub(LENGTH, str(error)).replace(*_OTHER_EFFORT)
        raise RequestError(_OTHER_FORMAT.sub("text.format", message)) from None
    return ResponseCall(
        chat=call,
        repeated={
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get(LENGTH),
            "metadata": {} if metadata is None else as_object(metadata, "metadata"),
            "parallel_tool_calls": call.tools.parallel,
            "previous_response_id": None,
            "store": False,
            "reasoning": {"effort": chat["reasoning_effort"], "summary": None},
            "temperature": call.sampling.temperature,
            "tool_choice": values.get("tool_choice") or "auto",
            "tools": [
                {**tool, "parameters": tool.get("parameters"), "strict": bool(tool.get("strict"))}
                for tool in values.get("tools") or []
            ],
            "top_p": call.sampling.top_p,
        },
    )


def _messages(given: object, instructions: object) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        content = check_text("instructions", instructions)
        messages.append({"role": "system", "content": content})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": check_text("input", given)}]
    if not isinstance(given, list) or not given:
        raise RequestError(f"input is {shown_json(given)}; expected text or a list of items")
    thought = ""
    for i, item in enumerate(given):
        where = f"input[{i}]"
        fields = as_object(item, where)
        kind = fields.get("type", "message")
        if kind == "reasoning":
            thought = _text(fields.get("content") or fields.get("summary") or "", where)
        elif kind == "function_call":
            _add_call(messages, fields, where)
        elif kind == "function_call_output":
            output = _text(fields.get("output"), f"{where}.output")
            tool_call_id = check_text(f"{where}.call_id", fields.get("call_id"))
            messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": output})
        elif kind == "message":
            content = _text(fields.get("content"), f"{where}.content")
            messages.append({"role": fields.get("role"), "content": content})
        else:
            raise RequestError(
                f"{where}.type is {shown_json(kind)}; expected message, function_call, "
                "function_call_output or reasoning"
            )
        if thought and messages and messages[-1]["role"] == "assistant" and kind != "reasoning":
            messages[-1]["reasoning_content"], thought = thought, ""
    return messages


def _add_call(messages: list[dict[str, Any]], fields: JsonObject, where: str) -> None:
    """Add a call to the assistant message before it, or to a new one."""
    names = ("call_id", "name", "arguments")
    call_id, name, arguments = (check_text(f"{where}.{key}", fields.get(key)) for key in names)
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return check_text(where, content)
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} is {shown_json(content)}; expected text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS:
            raise RequestError(
                f"{where}[{i}] is {shown_json(part)}; expected a part of type input_text or "
                "output_text: others are not supported"
            )
        texts.append(check_text(f"{where}[{i}].text", part.get("text")))
    return "\n".join(texts)


def _format(text: object) -> Mapping[str, Any] | None:
    """Return `text.format` as a chat's response_format, whose schema is one level deeper."""
    if text is None:
        return None
    fields = without_neutral(
        "text", as_object(text, "text"), read=frozenset({"format"}), neutral=_TEXT_NEUTRAL
    )
    if fields.get("format") is None:
        return None
    given = as_object(fields["format"], "text.format")
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {k: v for k, v in given.items() if k != "type"}}


def _effort(reasoning: object) -> object:
    if reasoning is None:
        return None
    fields = without_neutral(
        "reasoning",
        as_object(reasoning, "reasoning"),
        read=frozenset({"effort"}),
        neutral=_REASONING_NEUTRAL,
    )
    return fields.get("effort")


def _tools(tools: object) -> object:
    if not isinstance(tools, list):
        return tools
    nested = []
    for i, tool in enumerate(tools):
        fields = as_object(tool, f"tools[{i}]")
        if fields.get("type") != "function":
            raise RequestError(
                f"tools[{i}].type is {shown_json(fields.get('type'))}; expected 'function': other "
                "tools are not supported"
            )
        function = {key: value for key, value in fields.items() if key != "type"}
        nested.append({"type": "function", "function": function})
    return nested


def _choice(choice: object) -> object:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice
