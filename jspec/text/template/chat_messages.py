"""Validation of chat messages (OpenAI's format), and their conversion for a template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.errors import RequestError, shown_json
from jspec.messages.unknown_fields import refuse_or_ignore

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of any message, and further ones by role.
FIELDS = {"role", "content", "name"}
ROLE_FIELDS: Mapping[str, set[str]] = {
    "assistant": {"tool_calls", "reasoning_content"},
    "tool": {"tool_call_id"},
}
# Fields that OpenAI's clients return with an answer's message, and their allowed values.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "refusal": (None,),
    "audio": (None,),
    "function_call": (None,),
    "annotations": (None, []),
}


class Arguments(dict[str, Any]):
    """A call's arguments: an object for `tojson`, its JSON where printed or added (DeepSeek's)."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text if isinstance(text, str) else NotImplemented

    def __radd__(self, text: str) -> str:
        return text + str(self) if isinstance(text, str) else NotImplemented


class Messages(tuple[Message, ...]):
    """Checked messages."""


def check_messages(messages: object) -> Messages:
    """Return the messages with text as content (parts joined by a newline, as in vLLM) and
    arguments of tool calls as objects. Raises RequestError naming the field."""
    if isinstance(messages, Messages):
        return messages
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"messages is {shown_json(messages)}; expected a list of at least one message"
        )
    return Messages(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{where} is {shown_json(value)}; expected an object with role and content"
        )
    role = value.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {shown_json(role)}; expected one of {', '.join(ROLES)}"
        )
    known = FIELDS | ROLE_FIELDS.get(role, set())
    message: Message = {}
    for field, item in value.items():
        if field in NEUTRAL:
            if item not in NEUTRAL[field]:
                raise RequestError(
                    f"{where}.{field} is {shown_json(item)}, which is not implemented; expected "
                    f"{' or '.join(map(shown_json, NEUTRAL[field]))}, or leave it out"
                )
        elif field not in known:
            refuse_or_ignore(where, str(field), known)
        elif item is not None:
            message[field] = item
    calls = message.get("tool_calls")
    if calls is not None:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    for field in ("name", "reasoning_content", "tool_call_id"):
        if field in message:
            _check_text(message[field], f"{where}.{field}")
    content = message.get("content")
    if content is None and not calls and not message.get("reasoning_content"):
        raise RequestError(f"{where}.content is null; expected text or a list of parts")
    message["content"] = "" if content is None else _text(content, f"{where}.content")
    return message


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return _check_text(content, where)
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} is {shown_json(content)}; expected text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(
                f"{where}[{i}] is {shown_json(part)}; expected a part of type text: nothing else "
                "is served"
            )
        texts.append(_check_text(part.get("text"), f"{where}[{i}].text"))
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where} is {shown_json(calls)}; expected a list")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}[{i}] is {shown_json(call)}; expected an object whose function has a name"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _object(arguments, f"{where}[{i}].function.arguments")
        if arguments is not None and not isinstance(arguments, Mapping):
            raise RequestError(
                f"{where}[{i}].function.arguments is {shown_json(arguments)}; expected a JSON "
                "object as text"
            )
        given = Arguments(arguments or {})
        checked.append({**call, "function": {**function, "arguments": given}})
    return checked


def _object(text: str, where: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{where} is {shown_json(text)}; expected a JSON object as text")
    return value


def _check_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} is {shown_json(value)}; expected text")
    try:
        value.encode("utf-8")  # JSON can contain lone surrogates, UTF-8 cannot
    except UnicodeEncodeError:
        raise RequestError(f"{where} holds a lone surrogate; expected Unicode text") from None
    return value
