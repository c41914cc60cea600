"""Grammar fields of OpenAI's and vLLM's clients, converted to SGLang's sampling parameters.

response_format: {"type": "text", "json_object", "json_schema" or "structural_tag", ...}
structured_outputs (vLLM): {"json", "regex", "choice", "grammar", ...: ...}
guided_json, guided_regex, guided_choice, guided_grammar: vLLM's older names
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jspec.errors import RequestError, shown_json
from jspec.server.http.fields import JsonObject, as_object

GRAMMAR_FIELDS = frozenset(
    {
        "response_format",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
    }
)
ANY_OBJECT = {"type": "object"}
TYPES = "text, json_object, json_schema or structural_tag"
# vLLM's key -> the sampling parameter.
PARAMETERS = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


def grammar_parameters(values: JsonObject) -> dict[str, Any]:
    """Return the sampling parameters of the grammar fields. Raises RequestError, also for two."""
    asked: dict[str, dict[str, Any]] = {}
    for name in sorted(GRAMMAR_FIELDS & values.keys()):
        found = {} if values[name] in (None, []) else _read(name, values[name])
        if found:
            asked[name] = found
    kinds = list(asked.values())
    if any(kind != kinds[0] for kind in kinds):  # guidance's client sends one under two names
        raise RequestError(f"{' and '.join(asked)} are given; expected one grammar at most")
    return next(iter(asked.values()), {})


def _read(name: str, value: object) -> dict[str, Any]:
    if name == "response_format":
        return _of_response_format(as_object(value, name))
    if name == "structured_outputs":
        return _of_structured_outputs(as_object(value, name))
    word = name.removeprefix("guided_")
    return _choice(name, value) if word == "choice" else {PARAMETERS[word]: value}


def _of_response_format(given: JsonObject) -> dict[str, Any]:
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    if kind == "structural_tag":
        return {"structural_tag": {k: v for k, v in given.items() if k != "type"}}
    if kind != "json_schema":
        raise RequestError(f"response_format.type is {shown_json(kind)}; expected {TYPES}")
    wrapped = as_object(given.get("json_schema"), "response_format.json_schema")
    schema = wrapped.get("schema", wrapped.get("schema_"))
    if not isinstance(schema, Mapping | bool):
        raise RequestError(
            f"response_format.json_schema.schema is {shown_json(schema)}; expected a JSON schema"
        )
    return {"json_schema": schema}


def _of_structured_outputs(given: JsonObject) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, value in given.items():
        if value is None or value is False:
            continue
        if word in PARAMETERS:
            found[PARAMETERS[word]] = value
        elif word == "choice":
            found |= _choice("structured_outputs.choice", value)
        elif word == "json_object":
            found["json_schema"] = ANY_OBJECT
        else:
            raise RequestError(
                f"structured_outputs.{word} is {shown_json(value)}; expected one of "
                f"{', '.join([*PARAMETERS, 'choice', 'json_object'])}"
            )
    return found


def _choice(name: str, value: object) -> dict[str, Any]:
    texts = value if isinstance(value, list) else []
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} is {shown_json(value)}; expected a list of texts, none empty")
    return {"ebnf": "start: " + " | ".join(json.dumps(text) for text in texts)}
