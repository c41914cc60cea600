"""Answers of /v1/messages: a message's content blocks as its text grows, and its events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from http import HTTPStatus
from typing import Any

from jspec.errors import RequestFailedError
from jspec.messages.request import FinishKind
from jspec.messages.response import Completion
from jspec.text.calls.events import CallArguments, CallBegin, Content, Event

Json = dict[str, Any]
ERROR_TYPES: Mapping[int, str] = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def message_error(message: str, status: int, code: str | None = None) -> Json:
    """Return Anthropic's error body, which has no code."""
    del code
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageBlocks:
    """One message; methods yield the stream events of a change. head: id and model."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = {**head, "type": "message", "role": "assistant"}
        self._blocks: list[Json] = []
        self._arguments = ""  # of the open tool_use block
        self._is_open = False

    def begin(self, completion: Completion) -> Iterator[Json]:
        usage = {**_usage(completion), "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**message, "usage": usage}}

    def add(self, events: Iterable[tuple[Event, str]]) -> Iterator[Json]:
        """Add model output. Each event comes with an id to use if its call has none."""
        for event, call_id in events:
            if isinstance(event, CallArguments):
                self._arguments += event.text
                yield self._delta("input_json_delta", "partial_json", event.text)
            elif isinstance(event, CallBegin):
                yield from self._close()
                call = {"id": event.call_id or call_id, "name": event.name, "input": {}}
                yield self._open("tool_use", call)
            else:
                is_text = isinstance(event, Content)
                kind, field = ("text", "text") if is_text else ("thinking", "thinking")
                if not self._is_open or self._blocks[-1]["type"] != kind:
                    yield from self._close()
                    yield self._open(kind, {field: ""} if is_text else {field: "", "signature": ""})
                self._blocks[-1][field] += event.text
                yield self._delta(f"{kind}_delta", field, event.text)

    def end(self, completion: Completion) -> Iterator[Json]:
        yield from self._close()
        delta = self._ending(completion)
        yield {"type": "message_delta", "delta": delta, "usage": _usage(completion)}
        yield {"type": "message_stop"}

    def to_json(self, completion: Completion) -> Json:
        """Return the whole message. Raises RequestFailedError if it was aborted."""
        body = {**self._head, "content": self._blocks, **self._ending(completion)}
        return {**body, "usage": _usage(completion)}

    def _open(self, kind: str, fields: Json) -> Json:
        block = {"type": kind, **fields}
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        return self._event("content_block_start", content_block=deepcopy(block))

    def _close(self) -> Iterator[Json]:
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _arguments(self._arguments)
        yield self._event("content_block_stop")

    def _delta(self, kind: str, field: str, text: str) -> Json:
        return self._event("content_block_delta", delta={"type": kind, field: text})

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}

    def _ending(self, completion: Completion) -> Json:
        finish = completion.finish
        if finish is None or finish.kind is FinishKind.ABORT:
            why = None if finish is None else finish.message
            raise RequestFailedError(f"the message was aborted: {why or 'by request'}", "")
        matched = finish.matched if isinstance(finish.matched, str) else None
        reason = "end_turn" if matched is None else "stop_sequence"
        if finish.kind is FinishKind.LENGTH:
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched}


def _arguments(text: str) -> Any:
    """Return a call's input; incomplete JSON is returned as text under "partial"."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"partial": text}


def _usage(completion: Completion) -> Json:
    cached = completion.cached_tokens
    return {
        "input_tokens": completion.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(completion.output_ids),
    }
