"""Prompts of a load: random, from a file, or source code of the Python standard library."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jspec.errors import ConfigError, shown
from jspec.files.json_files import utf8_fault
from jspec.training.data.corpus import Split, public_name, split_of

HELD_OUT_SHARE = 0.05  # as in the bundled pair's recipe
TEXT_NAMES = ("prompt", "text", "question", "input")
LENGTH_NAMES = ("max_new_tokens", "max_tokens", "output_len")


class Encoder(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    content: str | tuple[int, ...]
    length: int  # in tokens, if known
    new_tokens: int | None = None  # from its line in a file


def python_prompts(
    tokenizer: Encoder, *, count: int, lengths: Sequence[int], seed: int, as_text: bool
) -> list[Prompt]:
    """Return excerpts of modules held out from the bundled pair's training. Raises ConfigError."""
    streams = [tokenizer.encode(text, add_special_tokens=False) for text in _held_out_texts()]
    streams = [ids for ids in streams if len(ids) > max(lengths)]
    if not streams:
        raise ConfigError(
            f"random_input_len is {max(lengths)}; expected fewer tokens: no held-out module of "
            f"this Python has as many (or --dataset-name random)"
        )
    rng = random.Random(seed)
    prompts = []
    for index in range(count):
        ids = streams[index % len(streams)]
        length = lengths[index % len(lengths)]
        start = rng.randrange(len(ids) - length)
        stretch = tuple(ids[start : start + length])
        content = tokenizer.decode(stretch) if as_text else stretch
        prompts.append(Prompt(content=content, length=length))
    return prompts


def _held_out_texts() -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(folder.glob("*.py"))
        if split_of(public_name(path.stem), held_out_share=HELD_OUT_SHARE) is Split.HELD_OUT
    ]
    return [path.read_text(encoding="utf-8", errors="ignore") for path in files]


def read_prompts(path: Path, *, count: int, seed: int, fallback_length: int) -> list[Prompt]:
    """Read prompts from JSON lines or one JSON list; sampled if there are more, repeated if fewer.

    A line is a string, or an object with `prompt`, `text`, `messages` (the user's first) or
    ShareGPT's `conversations`; its own `max_new_tokens` applies. Raises ConfigError.
    """
    lines = _objects(path)
    if not lines:
        raise ConfigError(f"dataset_path is {str(path)!r}, which is empty; expected JSON lines")
    picked = lines if len(lines) <= count else random.Random(seed).sample(lines, count)
    prompts = [_prompt_of(path, number, line, fallback_length) for number, line in picked]
    return [prompts[index % len(prompts)] for index in range(count)]


def _objects(path: Path) -> list[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it {utf8_fault(error)}"
        raise ConfigError(f"dataset_path is {str(path)!r}: {why}") from error
    if text.lstrip().startswith("["):
        try:
            return list(enumerate(json.loads(text), start=1))
        except ValueError as error:
            raise ConfigError(f"dataset_path is {str(path)!r}, no JSON: {error}") from error
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append((number, json.loads(line)))
        except ValueError as error:
            raise ConfigError(f"{path} line {number} is no JSON: {error}") from error
    return found


def _prompt_of(path: Path, number: int, line: Any, fallback_length: int) -> Prompt:
    text = _text_of(line)
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"{path} line {number} is {shown(line)}; expected text, or an object with prompt, "
            f"text, messages or conversations"
        )
    length = None
    if isinstance(line, Mapping):
        given = [line[name] for name in LENGTH_NAMES if line.get(name) is not None]
        length = given[0] if given else None
        if length is not None and (not isinstance(length, int) or length < 1):
            raise ConfigError(f"{path} line {number} wants {shown(length)} tokens; expected 1 up")
    return Prompt(content=text, length=fallback_length, new_tokens=length)


def _text_of(line: Any) -> Any:
    if not isinstance(line, Mapping):
        return line
    for name in TEXT_NAMES:
        if isinstance(line.get(name), str):
            return line[name]
    for name, text in (("messages", "content"), ("conversations", "value")):
        turns = line.get(name)
        if isinstance(turns, list) and turns:
            asked = [turn for turn in turns if isinstance(turn, Mapping) and _is_user(turn)]
            return (asked or [{}])[0].get(text)
    return None


def _is_user(turn: Mapping[str, Any]) -> bool:
    return turn.get("role", turn.get("from")) in ("user", "human")
