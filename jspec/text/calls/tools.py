"""Validation of tools in OpenAI's format, and the schema of a list of calls."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jspec.errors import RequestError, shown_json
from jspec.messages.unknown_fields import refuse_or_ignore

MAX_TOOLS = 128  # OpenAI's
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION = "{type: 'function', function: {name, description, parameters}}"
_FIELDS = {"name", "description", "parameters", "strict"}
_POINTER = re.compile(r"#/(\$defs|definitions)/(.*)")
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


class Choice(enum.Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    tools: tuple[Mapping[str, Any], ...] = ()  # in the form that templates expect
    choice: Choice = Choice.NONE
    only: str | None = None  # with REQUIRED, the one tool that must be called
    parallel: bool = True  # more than one call is allowed

    @property
    def names(self) -> frozenset[str]:
        if self.choice is Choice.NONE:
            return frozenset()
        names = frozenset(tool["function"]["name"] for tool in self.tools)
        return names if self.only is None else names & {self.only}

    @property
    def schemas(self) -> Mapping[str, Any]:
        functions = {tool["function"]["name"]: tool["function"] for tool in self.tools}
        return {name: functions[name].get("parameters") for name in sorted(self.names)}

    @property
    def is_forced(self) -> bool:
        return self.choice is Choice.REQUIRED

    @property
    def shown_tools(self) -> list[Mapping[str, Any]] | None:
        return None if self.choice is Choice.NONE else list(self.tools)


def check_tools(tools: object, choice: object, parallel: object) -> ToolUse:
    """Check `tools`, `tool_choice` and `parallel_tool_calls`. Raises RequestError."""
    if parallel is not None and not isinstance(parallel, bool):
        raise RequestError(f"parallel_tool_calls is {shown_json(parallel)}; expected true or false")
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise RequestError(f"tool_choice is {shown_json(choice)} without tools; expected tools")
        return ToolUse()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise RequestError(f"tools is {shown_json(tools)}; expected a list of {_FUNCTION}")
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools is a list of {len(tools)}; expected at most {MAX_TOOLS}")
    checked = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"tools[{i}].function.name is {name!r}; expected each name once")
    kind, only = _choice(choice, names)
    return ToolUse(tools=checked, choice=kind, only=only, parallel=parallel is not False)


def _choice(choice: object, names: Sequence[str]) -> tuple[Choice, str | None]:
    if choice is None:
        return Choice.AUTO, None
    if isinstance(choice, str) and choice in Choice._value2member_map_:
        return Choice(choice), None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None or not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise RequestError(
            f"tool_choice is {shown_json(choice)}; expected none, auto, required, or "
            "{type: 'function', function: {name}}"
        )
    if name not in names:
        raise RequestError(
            f"tool_choice names {shown_json(name)}; expected one of the tools: {', '.join(names)}"
        )
    return Choice.REQUIRED, name


def _tool(tool: object, where: str) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{where} is {shown_json(tool)}; expected {_FUNCTION}")
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type is {shown_json(tool.get('type'))}; expected 'function'")
    for known, given, place in (
        ({"type", "function"}, tool, where),
        (_FIELDS, function, f"{where}.function"),
    ):
        for field in given:
            if field not in known:
                refuse_or_ignore(place, str(field), known)
    where = f"{where}.function"
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name is {shown_json(name)}; expected 1 to 64 letters, digits, _, - or ."
        )
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.description is {shown_json(description)}; expected text")
    if function.get("strict") not in (None, True, False):
        raise RequestError(
            f"{where}.strict is {shown_json(function['strict'])}; expected a boolean"
        )
    if function.get("parameters") is not None:
        _check_parameters(function["parameters"], f"{where}.parameters")
    given = {k: v for k, v in function.items() if k in _FIELDS and v is not None}
    return {"type": "function", "function": given}


def _check_parameters(schema: object, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where} is {shown_json(schema)}; expected a JSON schema of an object")
    if schema.get("type", "object") != "object":
        raise RequestError(f"{where}.type is {shown_json(schema['type'])}; expected 'object'")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"{where}.properties is {shown_json(properties)}; expected an object")
    for name, value in properties.items():
        if not isinstance(value, Mapping | bool):
            raise RequestError(
                f"{where}.properties.{name} is {shown_json(value)}; expected a JSON schema"
            )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required is {shown_json(required)}; expected a list of names")


def calls_schema(use: ToolUse) -> dict[str, Any]:
    """Return the JSON schema of a list of calls, with the tools' definitions at its root."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in use.tools:
        name = tool["function"]["name"]
        if name not in use.names:
            continue
        schema = _moved(tool["function"].get("parameters", _ANY_ARGUMENTS), name)
        for place in ("$defs", "definitions"):
            for key, value in schema.pop(place, {}).items():
                definitions[f"{name}.{key}"] = value
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if use.only is not None or not use.parallel:
        whole["maxItems"] = 1
    return {**whole, "$defs": definitions} if definitions else whole


def _moved(schema: Any, name: str) -> Any:
    if isinstance(schema, list):
        return [_moved(item, name) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, name) for key, value in schema.items()}
    pointer = moved.get("$ref")
    found = _POINTER.fullmatch(pointer) if isinstance(pointer, str) else None
    if found is not None:
        moved["$ref"] = f"#/$defs/{name}.{found[2]}"
    return moved
