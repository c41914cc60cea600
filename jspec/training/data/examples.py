"""A user's JSONL as rows of tokens, and a mask of the tokens to learn.

A line is {"text": ...}, a chat {"messages": [{"role", "content"}, ...]} or {"conversations": ...}
(the same, or ShareGPT's {"from", "value"}), or {"input_ids": [...]}. Other keys are ignored, except
a chat's `tools` and the message keys that the template renders. If a template renders a reply
differently once others follow it, the reply becomes a separate example that ends with it. An
example longer than a row continues in the next one; padding has no weight.

    length 4, tokens a b c d e f, all learnt: rows [a b c d] and [e f . .]
    weights of the prediction at each position: [1 1 1 1] (d is followed by e) and [1 0 0 0]
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from jspec.errors import ConfigError, JspecError, shown
from jspec.files.json_files import json_fault, json_of
from jspec.text.template.chat_messages import ROLES
from jspec.text.template.chat_templates import ChatTemplates
from jspec.text.tokenizer.tokenizer import Tokenizer, check_unicode

KINDS = ("text", "messages", "conversations", "input_ids")
SHAREGPT = {"human": "user", "gpt": "assistant"}
EVERY = 20  # one of this many lines is held out
SHORTEST = 3  # tokens: a pair of token and feature, and one token to guess


class LossOn(enum.Enum):
    ALL = "all"
    ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The tokens of a line, or of a chat up to one reply."""

    ids: np.ndarray  # i32[n]
    is_learnt: np.ndarray  # bool[n]
    line: int | None = None  # shared by the parts of one line


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    ids: np.ndarray  # i32[R, T], 0 for padding
    lens: np.ndarray  # i32[R]
    weights: np.ndarray  # f32[R, T]

    def part(self, rows: np.ndarray) -> RowTable:
        return RowTable(ids=self.ids[rows], lens=self.lens[rows], weights=self.weights[rows])

    def batch(self, rows: np.ndarray | slice) -> dict[str, np.ndarray]:
        return {"ids": self.ids[rows], "weights": self.weights[rows]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    tokenizer: Tokenizer
    template: ChatTemplates | None
    vocab_size: int  # the target's; ids must be below it
    loss_on: LossOn
    skips: bool = False  # skip bad lines and print their number; else the first is an error

    def read(self, path: Path) -> list[Example]:
        return self.read_lines(_lines(path), where=str(path))

    def read_lines(self, lines: Iterable[tuple[int, bytes]], *, where: str) -> list[Example]:
        examples, faults, count = [], [], 0
        for number, line in lines:
            count += 1
            try:
                examples += [replace(each, line=number) for each in self.examples(line)]
            except ConfigError as error:
                fault = ConfigError(f"{where}, line {number}: {error}")
                if not self.skips:
                    raise fault from error
                faults.append(fault)
        if faults:
            print(
                f"{where}: {len(faults)} of {count} lines are skipped, the first: {faults[0]}",
                flush=True,
            )
        if len(faults) == count:
            raise (
                faults[0]
                if faults
                else ConfigError(f"{where} has no line; expected JSON, one example a line")
            )
        return examples

    def examples(self, line: bytes) -> list[Example]:
        """Return the examples of a line, several if the template needs them. Raises ConfigError."""
        try:
            return self._examples(json_of(line))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{error.msg} at character {error.pos + 1}; expected a whole JSON object on every "
                "line"
            ) from error
        except ConfigError:
            raise
        except JspecError as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:
            raise ConfigError(json_fault(error)) from error
        except RecursionError as error:
            raise ConfigError("is nested too deeply; expected a plain JSON object") from error

    def _examples(self, record: Any) -> list[Example]:
        kinds = [kind for kind in KINDS if isinstance(record, dict) and kind in record]
        if len(kinds) != 1:
            what = shown(list(record) if isinstance(record, dict) else record)
            raise ConfigError(f"has {what}; expected an object with one of {', '.join(KINDS)}")
        value = record[kinds[0]]
        if kinds[0] in ("messages", "conversations"):
            chat = self._chat(_messages(value), record.get("tools"))
            return [self._checked(example) for example in chat]
        if self.loss_on is LossOn.ASSISTANT:
            raise ConfigError(
                f"has {kinds[0]}, without an assistant's message; expected messages or "
                "conversations, or a loss on all tokens"
            )
        ids = self._text_ids(value) if kinds[0] == "text" else _ids(value)
        return [self._checked(Example(ids=ids, is_learnt=np.ones(len(ids), bool)))]

    def _text_ids(self, text: object) -> np.ndarray:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"text is {shown(text)}; expected some")
        return np.asarray(self.tokenizer.encode(text), np.int32)

    def _chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[Example]:
        if self.template is None:
            raise ConfigError("has messages, but the target has no chat template; expected one")
        if not isinstance(tools, list | None):
            raise ConfigError(f"tools is {shown(tools)}; expected a list")
        render = partial(self.template.render, tools=tools)
        text = render(messages, add_generation_prompt=False)
        if self.loss_on is LossOn.ALL:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            return [Example(ids=np.asarray(ids, np.int32), is_learnt=np.ones(len(ids), bool))]
        spans: dict[str, list[tuple[int, int]]] = {}
        for through, first in _replies(render, messages):
            whole = text if text.startswith(through) else through
            spans.setdefault(whole, []).append((first, len(through)))
        if not spans:
            raise ConfigError("there is no assistant's message; expected at least one")
        return [self._marked(whole, spoken) for whole, spoken in spans.items()]

    def _marked(self, text: str, spans: Iterable[tuple[int, int]]) -> Example:
        check_unicode(text)
        encoded = self.tokenizer.backend.encode(text, add_special_tokens=False)
        begins = np.asarray([begin for begin, _ in encoded.offsets], np.int64)
        is_learnt = np.zeros(len(begins), bool)
        for first, last in spans:
            is_learnt |= (begins >= first) & (begins < last)
        return Example(ids=np.asarray(encoded.ids, np.int32), is_learnt=is_learnt)

    def _checked(self, example: Example) -> Example:
        outside = (example.ids < 0) | (example.ids >= self.vocab_size)
        if outside.any():
            raise ConfigError(
                f"has the token id {example.ids[outside][0]}; expected ids in "
                f"[0, {self.vocab_size}), the target's vocabulary"
            )
        return example


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if not path.is_file():
        raise ConfigError(f"{path} is no file; expected one with JSON lines")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _ids(value: object) -> np.ndarray:
    if not isinstance(value, list) or not all(
        type(item) is int and abs(item) < 2**63 for item in value
    ):
        raise ConfigError(f"input_ids is {shown(value)}; expected a list of token ids")
    return np.asarray(value, np.int64)


def _messages(value: object) -> list[dict[str, Any]]:
    """Return messages in the template's keys; a tool call without content gets an empty one."""
    found = []
    for item in value if isinstance(value, list) else []:
        given: dict[str, Any] = item if isinstance(item, dict) else {}
        role, content = given.get("role", given.get("from")), given.get("content")
        content = given.get("value") if content is None else content
        content = "" if content is None and given.get("tool_calls") else content
        if not isinstance(role, str) or not isinstance(content, str):
            raise ConfigError(
                f"has the message {shown(item)}; expected role and content, or from and value, "
                "both text"
            )
        rest = {key: each for key, each in given.items() if key not in ("from", "value")}
        if role not in (*ROLES, *SHAREGPT):
            raise ConfigError(
                f"has a message of the role {shown(role)}; expected one of "
                f"{', '.join((*ROLES, *SHAREGPT))}"
            )
        found.append({**rest, "role": SHAREGPT.get(role, role), "content": content})
    if not found:
        raise ConfigError(f"has the messages {shown(value)}; expected a list of some")
    return found


def _replies(
    render: Callable[..., str], messages: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, int]]:
    """Yield (the chat through each reply, the character where the reply starts)."""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:i], add_generation_prompt=True) if i else ""
        through = render(messages[: i + 1], add_generation_prompt=False)
        if not through.startswith(before):
            raise ConfigError(
                f"the chat template changes the messages before number {i + 1} with it, so "
                "the assistant's text cannot be located; expected a loss on all tokens"
            )
        yield through, len(before)


def rows_of(examples: Sequence[Example], *, length: int) -> RowTable:
    parts = [
        (example, start)
        for example in examples
        for start in range(0, len(example.ids), length)
        if len(example.ids) - start >= SHORTEST
    ]
    ids = np.zeros((len(parts), length), np.int32)
    weights = np.zeros((len(parts), length), np.float32)
    lens = np.zeros(len(parts), np.int32)
    for row, (example, start) in enumerate(parts):
        own = example.ids[start : start + length]
        following = example.is_learnt[start + 1 : start + 1 + length]
        ids[row, : len(own)], weights[row, : len(following)] = own, following
        lens[row] = len(own)
    if not weights.sum():
        raise ConfigError(
            f"{len(examples)} examples have no token to learn; expected some of at least "
            f"{SHORTEST} tokens"
        )
    return RowTable(ids=ids, lens=lens, weights=weights)


def held_out_from(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Hold out one line in EVERY, at least one. Raises ConfigError for a single line."""
    lines = [list(own) for _, own in groupby(examples, key=lambda each: each.line or id(each))]
    if len(lines) < 2:
        raise ConfigError(
            "the data has 1 example; expected at least 2, since one is held out, or a file "
            "with held-out ones as well"
        )
    last = min(EVERY, len(lines)) - 1
    train = [example for i, own in enumerate(lines) if i % EVERY != last for example in own]
    return train, [example for i, own in enumerate(lines) if i % EVERY == last for example in own]
