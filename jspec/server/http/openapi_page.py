"""The page of an OpenAPI document: each path and its body fields, in words."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from jspec.server.http.body_schemas import Schema
from jspec.server.http.openapi import JSON

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_LINE = re.compile(r"^[A-Z]+ /[^\s:,]*[:,.]?")  # "POST /generate, " of a docstring


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
