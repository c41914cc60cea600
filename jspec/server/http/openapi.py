"""The OpenAPI document, from routes, endpoint docstrings and body schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.routing import BaseRoute, Route

from jspec import __version__
from jspec.server.http.body_schemas import ANY, TEXT, Schema, bodies

JSON = "application/json"


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
