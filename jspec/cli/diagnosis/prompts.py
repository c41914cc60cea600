"""Prompts to replay: a user's file, or the examples that come with jspec.

.jsonl     {"prompt": "..."} or {"messages": [...]} or {"input_ids": [...]}, optionally with
           {"sampling_params": {...}}; also a line of OpenAI's batch format
others     text, one prompt per line
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jspec.errors import ConfigError, RequestError, shown
from jspec.files.json_files import utf8_fault
from jspec.messages.request import Request
from jspec.serving.engine import Engine

KINDS = ("prompt", "text", "messages", "input_ids")
EXAMPLES = (
    "def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for name in sorted(os.listdir(path)):\n    if name.endswith('.py'):\n        ",
    "try:\n    import json\nexcept ImportError:\n    ",
    "with open(filename, encoding='utf-8') as file:\n    for line in file:\n        ",
    "class TestQueue(unittest.TestCase):\n    def test_empty(self):\n        ",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    ",
    '"""Helpers for dates.\n\nThis module',
    "    def __repr__(self):\n        return ",
    "@dataclass\nclass Point:\n    x: int\n    y: int\n\n    def distance(self, other):\n",
    "# The cache maps a key to its value and the time at which",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    number: int  # of its line, from 1
    kind: str  # its field, one of KINDS
    given: Any
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def request(self, engine: Engine, **sampling: Any) -> Request:
        """Build a request; `sampling` has defaults. Raises RequestError naming the line."""
        params = {name: value for name, value in sampling.items() if value is not None}
        params |= self.sampling
        try:
            request = self._made(engine, params)
            if request.sampling.grammar is not None:
                kind = request.sampling.grammar.kind.value
                raise RequestError(f"{kind} is given; expected none: no mask is scored again")
        except RequestError as error:
            raise RequestError(f"prompt {self.number}: {error}") from error
        return request

    def _made(self, engine: Engine, params: Mapping[str, Any]) -> Request:
        if self.kind == "messages":
            ids, made = engine.chat_prompt(self.given, params)
            return engine.requests(input_ids=ids, sampling_params=made)[0]
        if self.kind == "input_ids":
            return engine.requests(input_ids=self.given, sampling_params=params)[0]
        return engine.requests(prompt=self.given, sampling_params=params)[0]


def examples() -> tuple[Prompt, ...]:
    return tuple(
        Prompt(number=i, kind="prompt", given=text) for i, text in enumerate(EXAMPLES, start=1)
    )


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read all prompts of a file. Raises ConfigError naming an invalid line."""
    name = f"prompt file {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{name}: {error.strerror}; expected a text file, a prompt a line, or .jsonl"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} {utf8_fault(error)}; expected text or JSON lines") from error
    lines = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"{name} is empty; expected a prompt a line")
    if path.suffix in (".jsonl", ".json"):
        return tuple(_parse(name, number, line) for number, line in lines)
    return tuple(Prompt(number=i, kind="prompt", given=line) for i, line in lines)


def _parse(name: str, number: int, line: str) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} line {number} is not JSON: {error}") from error
    if isinstance(found, str):
        return Prompt(number=number, kind="prompt", given=found)
    if isinstance(found, dict) and isinstance(found.get("body"), dict):
        found = found["body"]
    kinds = [kind for kind in KINDS if isinstance(found, dict) and found.get(kind) is not None]
    if len(kinds) != 1:
        raise ConfigError(
            f"{name} line {number} is {shown(found)}; expected an object with one of "
            f"{', '.join(KINDS)}"
        )
    sampling = found.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise ConfigError(
            f"{name} line {number}: sampling_params is {shown(sampling)}; expected an object"
        )
    return Prompt(number=number, kind=kinds[0], given=found[kinds[0]], sampling=sampling)


def first_of(prompts: Sequence[Prompt], most: int) -> Iterable[Prompt]:
    if len(prompts) <= most:
        return prompts
    return [prompts[i * len(prompts) // most] for i in range(most)]
