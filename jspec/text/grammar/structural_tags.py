"""SGLang's structural tags: free text in which each trigger starts one of the tags."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from jspec.errors import shown_json


@dataclass(frozen=True, slots=True)
class StructuralTag:
    trigger: str  # the start of `begin`
    begin: str
    schema: Any
    end: str


def read_tags(text: str) -> list[StructuralTag]:
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("expected a JSON object")
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError("expected lists `structures` (not empty) and `triggers`")
    tags = []
    for tag in structures:
        if not isinstance(tag, dict) or not isinstance(tag.get("begin"), str):
            raise ValueError("expected each of `structures` to have begin, schema and end")
        begin = tag["begin"]
        fitting = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
        if not fitting:
            raise ValueError(f"no trigger begins {begin!r}; expected one of {shown_json(triggers)}")
        end = tag.get("end", "")
        if not isinstance(end, str):
            raise ValueError(f"end is {shown_json(end)}; expected a text")
        tags.append(StructuralTag(fitting[0], begin, tag.get("schema", {}), end))
    return tags
