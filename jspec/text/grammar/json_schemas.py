"""JSON schemas before compilation: removal of unenforced parts, and endless recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from jspec.errors import shown

_VALUES = frozenset({"enum", "const", "default", "example", "examples"})  # hold no schemas
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def without_unenforced(
    schema: Any, is_known_format: Callable[[str], bool]
) -> tuple[Any, tuple[str, ...]]:
    """Return the schema without uniqueItems and unknown formats, and the names of these."""
    left_out: dict[str, None] = {}

    def cut(schema: Any) -> Any:
        if isinstance(schema, list):
            return [cut(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        found = {}
        for key, value in schema.items():
            if key in _VALUES:
                found[key] = value
            elif key in _MAPS and isinstance(value, dict):
                found[key] = {name: cut(inner) for name, inner in value.items()}
            elif key == "uniqueItems" and isinstance(value, bool):
                left_out.update({key: None} if value else {})
            elif key == "format" and isinstance(value, str) and not is_known_format(value):
                left_out[f"format {shown(value)}"] = None
            else:
                found[key] = cut(value)
        return found

    return cut(schema), tuple(left_out)


def endless_recursion(schema: Any) -> str:
    """Return the $ref that makes every instance contain itself, or ""."""
    node, last_reference = _Requirements(schema).root, ""
    seen: set[int] = set()
    while not node.can_end and id(node) not in seen:
        seen.add(id(node))
        endless = [(path, part) for path, part in node.parts if not part.can_end]
        if not endless:  # an instance is impossible for another reason
            return ""
        path, node = endless[0]
        last_reference = path if path.endswith("/$ref") else last_reference
    return "" if node.can_end else f"{last_reference} leads back to {node.path}"


class _Node:
    """A schema, or alternatives. It can end once `need` of its parts can."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.need = 0
        self.parts: list[tuple[str, _Node]] = []
        self.dependents: list[_Node] = []
        self.can_end = False


class _Requirements:
    """A graph of schemas that a finite instance needs. Keywords that only forbid are ignored."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._nodes: dict[int, _Node] = {}
        self._all: list[_Node] = []
        self._unread: list[tuple[_Node, Mapping[str, Any]]] = []  # recursion might be too deep
        self.root = self._node("#", schema)
        while self._unread:
            node, inner = self._unread.pop()
            self._require(node, list(self._parts(node.path, inner)))
        ready = [node for node in self._all if not node.need]
        for node in ready:
            node.can_end = True
        while ready:
            for above in ready.pop().dependents:
                above.need -= 1
                if not above.need:
                    above.can_end = True
                    ready.append(above)

    def _node(self, path: str, schema: Any) -> _Node:
        if not isinstance(schema, dict):
            node = self._new(path)
            node.need = int(schema is False)
            return node
        if id(schema) not in self._nodes:
            node = self._nodes[id(schema)] = self._new(path)
            self._unread.append((node, schema))
        return self._nodes[id(schema)]

    def _new(self, path: str) -> _Node:
        self._all.append(_Node(path))
        return self._all[-1]

    def _require(
        self, node: _Node, parts: list[tuple[str, _Node]], need: int | None = None
    ) -> None:
        node.parts, node.need = parts, len(parts) if need is None else need
        for _, part in parts:
            part.dependents.append(node)

    def _parts(self, path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, _Node]]:
        if "enum" in schema or "const" in schema:
            return
        target = schema.get("$ref")
        if isinstance(target, str) and (found := self._at(target)) is not None:
            yield f"{path}/$ref", self._node(target or "#", found)
        for i, part in enumerate(_list_of(schema.get("allOf"))):
            yield f"{path}/allOf/{i}", self._node(f"{path}/allOf/{i}", part)
        for key in ("anyOf", "oneOf"):
            if options := _list_of(schema.get(key)):
                either, place = self._new(path), f"{path}/{key}"
                paths = [f"{place}/{i}" for i in range(len(options))]
                ways = [
                    (each, self._node(each, inner))
                    for each, inner in zip(paths, options, strict=True)
                ]
                self._require(either, ways, need=1)
                yield place, either
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        makers = {"object": self._object, "array": self._array}
        if kinds and all(kind in tuple(makers) for kind in kinds):
            either = self._new(path)
            self._require(either, [(path, makers[kind](path, schema)) for kind in kinds], need=1)
            yield path, either

    def _object(self, path: str, schema: Mapping[str, Any]) -> _Node:
        node = self._new(path)
        parts: list[tuple[str, _Node]] = []
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        others = schema.get("additionalProperties", True)
        for name in filter(lambda name: isinstance(name, str), _list_of(schema.get("required"))):
            place = f"properties/{_escaped(name)}" if name in known else "additionalProperties"
            inner = known.get(name, others)
            if name in known or not schema.get("patternProperties"):
                parts.append((f"{path}/{place}", self._node(f"{path}/{place}", inner)))
        least = schema.get("minProperties", 0)
        is_bounded = others is False and not schema.get("patternProperties")
        if isinstance(least, int) and least > len(parts) and not is_bounded and others is not True:
            place = f"{path}/additionalProperties"
            ways = [(place, self._node(place, others))]
            for key in ("properties", "patternProperties"):
                inner = schema.get(key)
                for name, option in inner.items() if isinstance(inner, dict) else ():
                    ways.append((f"{path}/{key}/{_escaped(name)}", self._node(path, option)))
            more = self._new(path)
            self._require(more, ways, need=1)
            parts.append((path, more))
        self._require(node, parts)
        return node

    def _array(self, path: str, schema: Mapping[str, Any]) -> _Node:
        node = self._new(path)
        parts: list[tuple[str, _Node]] = []
        first, rest = _list_of(schema.get("prefixItems")), schema.get("items", True)
        name = "prefixItems"
        if isinstance(rest, list):  # an older draft
            first, rest, name = rest, schema.get("additionalItems", True), "items"
        least = schema.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        for i, item in enumerate(first[: max(0, least)]):
            parts.append((f"{path}/{name}/{i}", self._node(f"{path}/{name}/{i}", item)))
        if least > len(first):
            parts.append((f"{path}/items", self._node(f"{path}/items", rest)))
        self._require(node, parts)
        return node

    def _at(self, pointer: str) -> Any:
        """Return the part of the schema that a reference names; None for other references."""
        if pointer not in ("", "#") and not pointer.startswith("#/"):
            return None
        found = self._schema
        for word in pointer.split("/")[1:]:
            word = unquote(word).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and word in found:
                found = found[word]
            elif isinstance(found, list) and word.isdecimal() and int(word) < len(found):
                found = found[int(word)]
            else:
                return None
        return found


def _escaped(name: object) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
