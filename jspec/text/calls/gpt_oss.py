"""The channels of gpt-oss (OpenAI's harmony format): reasoning, calls and answer as messages.

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>commentary
    to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The prompt ends with <|start|>assistant, so an answer starts inside a message's head.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from jspec.text.calls.call_reader import ArgumentsReader
from jspec.text.calls.events import Content, Event, Reasoning
from jspec.text.calls.json_scan import BLANKS
from jspec.text.calls.machine import CallMachine, num_undecided

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, MESSAGE, *ENDS)
CONSTRAIN = "<|constrain|>"  # in a head, ends a tool's name
MAX_HEAD = 256  # characters; longer text is not a head
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."


def _head_length(text: str) -> int | None:
    """Return the length of a message's head with its last mark; -1: no head, None: unknown."""
    message = text.find(MESSAGE)
    others = [found for mark in ENDS if (found := text.find(mark)) >= 0]
    if message >= 0:
        is_head = message <= MAX_HEAD and all(message < other for other in others)
        return message + len(MESSAGE) if is_head else -1
    return -1 if others or len(text) >= MAX_HEAD + len(MESSAGE) else None


class HarmonyParser(CallMachine):
    """Parses channels; without `splits_reasoning`, reasoning is content. A message to an unknown
    recipient, or in an unknown channel, is content, including its head."""

    def __init__(self, names: Collection[str], *, splits_reasoning: bool) -> None:
        super().__init__(names)
        self._splits_reasoning = splits_reasoning
        self._is_in_head, self._is_reasoning = True, False
        self._is_at_edge = False  # keep the blanks of a message

    def _step(self) -> list[Event] | None:
        if self._reader is not None:
            return self._read(self._reader)
        return self._head() if self._is_in_head else self._body()

    def _head(self) -> list[Event] | None:
        text = self._rest.lstrip(BLANKS)
        for end in ENDS:
            if text.startswith(end):
                self._rest = text[len(end) :]
                return []
        marks = (START, CHANNEL, "to=")
        if any(mark.startswith(text) and mark != text for mark in (*marks, *ENDS)):
            return None
        mark = next((mark for mark in marks if text.startswith(mark)), "")
        length = _head_length(text) if mark else -1
        if length is None:
            return None
        if length >= 0:
            self._look(self._num_blanks() + length)
            return self._message(self._raw)
        self._is_in_head = self._is_reasoning = False
        if mark:
            self._look(self._num_blanks() + len(mark))
        return self._give_up()

    def _message(self, head: str) -> list[Event]:
        self._is_in_head = False
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        name = "" if channel is None else channel[1]
        if recipient is not None:
            tool = recipient[1].removeprefix(_FUNCTIONS)
            if recipient[1].startswith(_FUNCTIONS) and tool in self._names:
                self._reader = ArgumentsReader(tool)
                return []
        elif name in ("analysis", "commentary", "final"):
            self._is_reasoning = self._splits_reasoning and name == "analysis"
            self._raw = ""
            return []
        self._is_reasoning = False
        return self._give_up()

    def _body(self) -> list[Event] | None:
        rest = self._rest
        begins = [(rest.find(mark), mark) for mark in MARKERS if mark in rest]
        if not begins:
            end = len(rest) - num_undecided(rest, MARKERS)
            text, self._rest = rest[:end], rest[end:]
            return self._said(text) if text else None
        begin, mark = min(begins)
        if begin == 0 and mark is MESSAGE:  # without a head
            self._rest = rest[len(MESSAGE) :]
            return self._said(MESSAGE)
        self._rest = rest[begin:]
        self._is_in_head = mark is not MESSAGE
        return self._said(rest[:begin])

    def _said(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Reasoning(text) if self._is_reasoning else Content(text)]

    def _call_ended(self, *, is_whole: bool) -> None:
        self._is_in_head, self._is_reasoning = is_whole, False

    def flush(self) -> list[Event]:
        if self._is_reasoning and not self._is_in_head:
            text, self._rest = self._rest, ""
            return self._said(text)
        return super().flush()
