"""The forms in which adapters are named: SGLang's flag, and its lists and mappings in Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from jspec.errors import ConfigError

MAX_NAME_CHARS = 256
_KEYS = {"lora_name", "lora_path", "pinned"}
_FORMS = 'NAME=PATH, PATH, or {"lora_name": NAME, "lora_path": PATH}'


def as_texts(given: Any) -> Any:
    """Return lists and mappings of adapters as a tuple of texts, and other values unchanged."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(f"{name}={os.fspath(path)}" for name, path in given.items())
    if not isinstance(given, list | tuple):
        return given
    return tuple(
        json.dumps(dict(each))
        if isinstance(each, Mapping)
        else os.fspath(each)
        if isinstance(each, os.PathLike)
        else each
        for each in given
    )


def named_paths(texts: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (name, path) of each adapter; a path alone is its own name. Raises ConfigError."""
    found = [_named(text) for text in texts]
    names = [name for name, _ in found]
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise ConfigError(f"lora_paths names {name!r} twice; expected different names")
    return tuple(found)


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(
            f"lora_name is {name!r}; expected text of 1 to {MAX_NAME_CHARS} characters"
        )
    return name


def _named(text: str) -> tuple[str, str]:
    if not text.lstrip().startswith("{"):
        name, sign, path = text.partition("=")
        name, path = (name, path) if sign else (text, text)
        if not name or not path:
            raise ConfigError(f"lora_paths has {text!r}; expected {_FORMS}")
        return name, path
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"lora_paths has {text!r}; expected {_FORMS} ({error})") from None
    name, path = values.get("lora_name"), values.get("lora_path")
    is_whole = isinstance(name, str) and isinstance(path, str) and bool(name) and bool(path)
    if not is_whole or not _KEYS.issuperset(values):
        raise ConfigError(f"lora_paths has {text!r}; expected {_FORMS}")
    return name, path


def check_loras(args: Any) -> None:
    """Raise ConfigError for `EngineArgs` of LoRA adapters that contradict each other."""
    count, most = len(args.named_lora_paths), args.max_loras_per_batch
    if count > most:
        raise ConfigError(
            f"lora_paths has {count} adapters; expected at most max_loras_per_batch {most}"
        )
    for name in ("max_lora_rank", "lora_target_modules"):
        if getattr(args, name) and not args.has_loras:
            raise ConfigError(
                f"{name} is {getattr(args, name)!r}, but enable_lora is False; expected it "
                "True, or lora_paths"
            )
