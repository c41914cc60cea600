"""Declared tools, and the schema of an answer that must call one."""

from __future__ import annotations

from typing import Any

import pytest

from jspec.errors import RequestError
from jspec.text.calls.tools import MAX_TOOLS, Choice, calls_schema, check_tools

POINT = {"type": "object", "properties": {"x": {"type": "number"}}}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_what_is_checked_is_what_a_template_gets() -> None:
    use = check_tools([tool("f", description=None, parameters=POINT)], None, None)
    assert use.choice is Choice.AUTO
    assert use.shown_tools == [tool("f", parameters=POINT)]
    assert use.names == {"f"}
    none = check_tools([tool("f")], "none", False)
    assert (none.shown_tools, none.names, none.parallel) == (None, frozenset(), False)
    assert check_tools([], "auto", True).tools == ()


def test_the_schema_of_an_answer_that_must_call() -> None:
    use = check_tools([tool("f", parameters=POINT), tool("g")], "required", None)
    one, other = calls_schema(use)["items"]["anyOf"]
    assert one["properties"] == {"name": {"const": "f"}, "arguments": POINT}
    assert other["properties"]["arguments"] == {"type": "object"}
    assert "maxItems" not in calls_schema(use)


def test_one_call_where_one_is_asked_for() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    schema = calls_schema(check_tools([tool("f"), tool("g")], choice, None))
    assert [item["properties"]["name"]["const"] for item in schema["items"]["anyOf"]] == ["g"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert calls_schema(check_tools([tool("f")], "required", False))["maxItems"] == 1


def test_definitions_move_to_the_root_under_their_tools_name() -> None:
    inner = {"$ref": "#/$defs/node"}
    node = {"type": "object", "properties": {"next": inner}}
    parameters = {"type": "object", "properties": {"root": inner}, "$defs": {"node": node}}
    use = check_tools([tool(name, parameters=parameters) for name in "fg"], "required", None)
    schema = calls_schema(use)
    assert sorted(schema["$defs"]) == ["f.node", "g.node"]
    assert schema["$defs"]["g.node"]["properties"]["next"] == {"$ref": "#/$defs/g.node"}
    arguments = schema["items"]["anyOf"][0]["properties"]["arguments"]
    assert arguments == {"type": "object", "properties": {"root": {"$ref": "#/$defs/f.node"}}}
    assert parameters["properties"] == {"root": inner}  # the user's own stays as it was


def test_too_many_tools_are_refused() -> None:
    with pytest.raises(RequestError, match=f"tools is a list of {MAX_TOOLS + 1}; expected at most"):
        check_tools([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], None, None)
