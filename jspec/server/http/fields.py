"""Checks of JSON objects, shared by the native and the OpenAI schemas. A field is read, neutral (it
requests nothing), not implemented (an error) or unknown (jspec.messages.unknown_fields)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jspec.errors import SHOWN_CHARS, RequestError, shown_json
from jspec.messages.unknown_fields import refuse_or_ignore

JsonObject = Mapping[str, Any]
Neutral = Mapping[str, tuple[Any, ...]]
Hints = Mapping[str, str]
NO_HINTS: Hints = {}
NO_DEFAULTS: Mapping[str, Any] = {}
BODY = "the request body"
MAX_RID_CHARS = 256
EXTRA_KEYS = ("extra_key", "cache_salt")
MAX_EXTRA_KEY_CHARS = 1024
MAX_PROMPTS = 65_536  # the queue's limit is lower


def as_object(body: object, where: str) -> JsonObject:
    if not isinstance(body, dict):
        raise RequestError(f"{where} is {shown_json(body)}; expected a JSON object")
    return body


def check_fields(
    where: str, body: JsonObject, *, read: frozenset[str], neutral: Neutral, hints: Hints = NO_HINTS
) -> None:
    """Raise RequestError for a field that is not implemented, or unknown and not ignored."""
    for name, value in body.items():
        if name in read or (name in neutral and _is_neutral(value, neutral[name])):
            continue
        if name not in neutral:
            suggest = partial(_near, name, read=read, neutral=neutral, hints=hints)
            refuse_or_ignore(where, name, read, suggest)
            continue
        allowed = " or ".join(dict.fromkeys(shown_json(v) for v in neutral[name]))
        did_you_mean = f"did you mean {hints[name]}? " if name in hints else ""
        raise RequestError(
            f"{name} is {shown_json(value)}, which is not implemented; {did_you_mean}expected "
            f"{allowed}, or leave it out"
        )


def _near(name: str, *, read: frozenset[str], neutral: Neutral, hints: Hints) -> str:
    """Return the nearest name, marked if it is not implemented, so that clients do not try it."""
    if name in hints:
        return hints[name]
    for near in difflib.get_close_matches(name[:SHOWN_CHARS], sorted({*read, *neutral}), n=1):
        return repr(near) if near in read else f"{near!r}, which is not implemented"
    return ""


def read_body(
    body: object, *, read: frozenset[str], neutral: Neutral, hints: Hints = NO_HINTS
) -> dict[str, Any]:
    return without_neutral(BODY, as_object(body, BODY), read=read, neutral=neutral, hints=hints)


def without_neutral(
    where: str, body: JsonObject, *, read: frozenset[str], neutral: Neutral, hints: Hints = NO_HINTS
) -> dict[str, Any]:
    check_fields(where, body, read=read, neutral=neutral, hints=hints)
    return {name: value for name, value in body.items() if name in read}


def _is_neutral(value: object, allowed: tuple[Any, ...]) -> bool:
    """Check one value, or a list with one per prompt, without deeper nesting."""
    if isinstance(value, list) and value:
        return all(_is_one_of(item, allowed) for item in value)
    return _is_one_of(value, allowed)


def _is_one_of(value: object, allowed: tuple[Any, ...]) -> bool:
    # 1 == True and 0 == False in Python, not in JSON.
    return value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
    )


def get_bool(body: JsonObject, name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown_json(value)}; expected true or false")
    return value


def check_text(name: str, value: object) -> str:
    """Return encodable text: JSON can contain half a surrogate pair, UTF-8 cannot."""
    if not isinstance(value, str):
        raise RequestError(f"{name} is {shown_json(value)}; expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate; expected Unicode text") from None
    return value


def get_rid(body: JsonObject) -> str | None:
    return None if body.get("rid") is None else check_rid(body["rid"])


def check_rid(value: object) -> str:
    rid = check_text("rid", value)
    if not 1 <= len(rid) <= MAX_RID_CHARS:
        raise RequestError(
            f"rid has {len(rid)} characters; expected from 1 to {MAX_RID_CHARS}, or leave it out"
        )
    return rid


def expand_rid(rid: str | None, num_prompts: int, *, is_list: bool) -> list[str | None]:
    """Return one id per prompt: rid itself, or rid_0, rid_1, ... for a list, as SGLang does."""
    if rid is None or not is_list:
        return [rid] * num_prompts
    return [f"{rid}_{index}" for index in range(num_prompts)]


def check_number_of_prompts(name: str, items: Sequence[object]) -> None:
    """Raise RequestError for a list so long that checking it would stall other requests."""
    if len(items) > MAX_PROMPTS:
        raise RequestError(f"{name} is a list of {len(items)}; expected at most {MAX_PROMPTS}")


def check_list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{name} is {shown_json(value)}; expected a list of token ids")
    return value


def get_extra_key(body: JsonObject) -> str | None:
    """Return the cache key: SGLang's extra_key or vLLM's cache_salt. Raises RequestError."""
    given = {name: body[name] for name in EXTRA_KEYS if body.get(name) is not None}
    for name, value in given.items():
        num_chars = len(check_text(name, value))
        if not 1 <= num_chars <= MAX_EXTRA_KEY_CHARS:
            raise RequestError(
                f"{name} has {num_chars} characters; expected from 1 to {MAX_EXTRA_KEY_CHARS}, or "
                f"leave it out"
            )
    if len(set(given.values())) > 1:
        raise RequestError(
            f"extra_key is {shown_json(given['extra_key'])} and cache_salt is "
            f"{shown_json(given['cache_salt'])}; expected one of them"
        )
    return next(iter(given.values()), None)
