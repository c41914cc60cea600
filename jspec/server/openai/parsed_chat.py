"""Chat answers split into content, calls and reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jspec.errors import RequestError
from jspec.messages.request import FinishKind, FinishReason, SamplingParams
from jspec.messages.response import Completion
from jspec.server.openai.answers import ChatShape, ending
from jspec.server.openai.chat_schema import ChatCall
from jspec.text.calls.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    PlainParser,
    Reasoning,
)
from jspec.text.calls.registry import CALL_FORMATS, AnswerFormat
from jspec.text.calls.thinking import prompt_end
from jspec.text.calls.tools import ToolUse, calls_schema
from jspec.text.intake import Prompt
from jspec.text.tokenizer.token_texts import TokenTexts, num_tokens_in
from jspec.text.tokenizer.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"


def with_calls_grammar(sampling: SamplingParams, use: ToolUse) -> SamplingParams:
    """Constrain the answer to a list of calls. Raises RequestError if there is another grammar."""
    if sampling.grammar is not None:
        raise RequestError(
            f"tool_choice is {_asked(use)} with {sampling.grammar.kind.value} (or a "
            "response_format); expected one of them, since each determines the whole answer"
        )
    # else a weak model may write whitespace only
    compact = {"x-guidance": {"whitespace_flexible": False}}
    return replace(sampling, json_schema=json.dumps({**calls_schema(use), **compact}))


def _asked(use: ToolUse) -> str:
    return "'required'" if use.only is None else f"the tool {use.only!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReading:
    new_parser: Callable[[], AnswerParser]
    new_id: Callable[[], str]
    most_calls: int | None  # further calls are dropped; None: no limit
    has_reasoning: bool


def check_answerable(call: ChatCall, style: AnswerFormat) -> None:
    if call.tools.names and not call.tools.is_forced and style.calls is None:
        raise RequestError(
            f"tools has {len(call.tools.tools)} and the server was started without "
            f"--tool-call-parser; expected one of {', '.join(CALL_FORMATS)} there, or tool_choice "
            "none"
        )


def prepare(
    call: ChatCall, prompt: Prompt, style: AnswerFormat, tokenizer: Tokenizer
) -> tuple[Prompt, ChatReading | None]:
    """Return the prompt to run, and how to read its answers; None for plain text."""
    use = call.tools
    goes_on = bool(call.template_options["continue_final_message"])
    splits = call.separate_reasoning and not goes_on
    has_reasoning = splits and style.reasoning is not None
    sampling = prompt.sampling
    assert isinstance(sampling, SamplingParams)
    end = prompt_end(prompt.input_ids or (), tokenizer)
    marks = None if goes_on else style.reasoning_marks(end)
    if sampling.max_thinking_tokens is not None and style.has_channels:
        raise RequestError(
            f"max_thinking_tokens is {sampling.max_thinking_tokens} and the model reasons in "
            "channels (gpt-oss); expected none, reasoning_effort decides how long it reasons"
        )
    if use.is_forced or sampling.grammar is not None or sampling.max_thinking_tokens is not None:
        prompt = replace(prompt, reasoning=marks)
    if not (use.names or has_reasoning or style.has_channels):
        return prompt, None
    if use.is_forced:
        if style.may_reason(end) and (marks is None or not splits):
            raise RequestError(
                f"tool_choice is {_asked(use)} and the server has --reasoning-parser "
                f"{style.reasoning}: the answer would be a call from its first token on, without "
                "the reasoning; expected auto or none, or a prompt that ends the reasoning "
                "(as many templates do for chat_template_kwargs {'enable_thinking': false})"
            )
        sampling = with_calls_grammar(sampling, use)
    elif sampling.json_schema is not None and marks is None:  # the answer starts with the JSON
        splits = has_reasoning = False
    reads_calls = bool(use.names) or style.has_channels
    markers = style.markers(calls=reads_calls, reasoning=has_reasoning or style.has_channels)
    ids = {tokenizer.token_to_id(marker) for marker in markers}
    shown_ids = frozenset(i for i in ids if i is not None and tokenizer.is_special(i))

    def new_parser() -> AnswerParser:
        return style.parser(
            use.schemas, splits_reasoning=splits, is_forced=use.is_forced, prompt_end=end
        )

    reading = ChatReading(
        new_parser=new_parser,
        new_id=style.new_id,
        most_calls=None if use.parallel else 1,
        has_reasoning=has_reasoning,
    )
    return replace(prompt, sampling=sampling, shown_ids=shown_ids), reading


PLAIN_READING = ChatReading(
    new_parser=PlainParser, new_id=AnswerFormat().new_id, most_calls=None, has_reasoning=False
)


class AnswerParts:
    def __init__(self, reading: ChatReading) -> None:
        self._reading = reading
        self._parser = reading.new_parser()
        self._num_calls = 0
        self.reasoning: list[str] = []  # passages, separated by other output
        self._is_reasoning = False

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def new_id(self) -> str:
        return self._reading.new_id()

    def take(self, text: str, *, is_last: bool) -> list[tuple[int, Event]]:
        """Parse new text; return the certain events, each with the index of its call."""
        events = self._parser.push(text)
        if is_last:
            events = [*events, *self._parser.flush()]
        for event in events:
            self._note(event)
        return list(self._wanted(events))

    def _note(self, event: Event) -> None:
        if not isinstance(event, Reasoning):
            self._is_reasoning = False
            return
        if not self._is_reasoning:
            self._is_reasoning = True
            self.reasoning.append("")
        self.reasoning[-1] += event.text

    def _wanted(self, events: Iterable[Event]) -> Iterable[tuple[int, Event]]:
        most = self._reading.most_calls
        for event in events:
            self._num_calls += isinstance(event, CallBegin)
            is_of_call = isinstance(event, CallBegin | CallArguments)
            if not is_of_call or most is None or self._num_calls <= most:
                yield self._num_calls - 1, event


def note_reasoning(completion: Completion, passages: Sequence[str], texts: TokenTexts) -> None:
    if passages:
        completion.reasoning_tokens = num_tokens_in(
            passages, completion.text, completion.output_ids, texts
        )


class AnswerItems(Protocol):
    """An answer in parts that grow one after the other; methods yield a change's events."""

    def begin(self, completion: Completion) -> Iterable[dict[str, Any]]: ...

    def add(self, events: Iterable[tuple[Event, str]]) -> Iterable[dict[str, Any]]:
        """Add model output. Each event comes with an id to use if its call has none."""

    def end(self, completion: Completion) -> Iterable[dict[str, Any]]: ...


class ItemsAnswer:
    def __init__(self, items: AnswerItems, reading: ChatReading | None, texts: TokenTexts) -> None:
        self._items, self._parts = items, AnswerParts(reading or PLAIN_READING)
        self._texts = texts
        self._has_begun = False

    def take(self, completion: Completion) -> list[dict[str, Any]]:
        begun = [] if self._has_begun else list(self._items.begin(completion))
        self._has_begun, is_last = True, completion.finish is not None
        said = self._parts.take(completion.take()[0], is_last=is_last)
        events = [*begun, *self._items.add((event, self._parts.new_id()) for _, event in said)]
        if not is_last:
            return events
        note_reasoning(completion, self._parts.reasoning, self._texts)
        return [*events, *self._items.end(completion)]


class ParsedChatShape(ChatShape):
    """ChatShape with `tool_calls`, and `reasoning_content` if reasoning is separated."""

    def __init__(self, reading: ChatReading) -> None:
        self._reading = reading
        self._parts: dict[int, AnswerParts] = {}

    def choice(self, index: int, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """Implement AnswerShape.choice; content is null for an answer of calls only."""
        parts = self._parts[index] = AnswerParts(self._reading)
        said = self._said(parts.take(text, is_last=True))
        calls = said.get("tool_calls")
        for call in calls or ():
            call.pop("index")
        content = said.get("content") or (None if len(said) else "")
        message = {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls}
        if self._reading.has_reasoning:
            message["reasoning_content"] = said.get("reasoning_content")
        ends = ending_of(finish, parts)
        return {"index": index, "message": message, "logprobs": None, **ends}

    def delta(
        self, index: int, text: str, finish: FinishReason | None, *, is_first: bool
    ) -> dict[str, Any] | None:
        if index not in self._parts:
            self._parts[index] = AnswerParts(self._reading)
        parts = self._parts[index]
        said = self._said(parts.take(text, is_last=finish is not None))
        if not said and finish is None:
            return None
        first = {"role": "assistant", "content": None} if is_first else {}
        ends = ending_of(finish, parts)
        return {"index": index, "delta": {**first, **said}, "logprobs": None, **ends}

    def reasoning(self, index: int) -> Sequence[str]:
        return self._parts[index].reasoning if index in self._parts else ()

    def _said(self, events: Iterable[tuple[int, Event]]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for index, event in events:
            if isinstance(event, Content):
                said["content"] = said.get("content", "") + event.text
            elif isinstance(event, Reasoning):
                said["reasoning_content"] = said.get("reasoning_content", "") + event.text
            elif isinstance(event, CallBegin):
                calls[index] = {
                    "index": index,
                    "id": event.call_id or self._reading.new_id(),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
            else:
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        if calls:
            said["tool_calls"] = list(calls.values())
        return said


def ending_of(finish: FinishReason | None, parts: AnswerParts) -> dict[str, Any]:
    """Return the finish fields; an answer with calls that was not cut ends as "tool_calls"."""
    found = ending(finish)
    if finish is not None and finish.kind is FinishKind.STOP and parts.has_calls:
        found["finish_reason"] = TOOL_CALLS
    return found
