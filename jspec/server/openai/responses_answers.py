"""Answers of /v1/responses: a response's items as its text grows, and its stream events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from jspec.messages.request import FinishKind, FinishReason
from jspec.messages.response import Completion
from jspec.server.http.event_json import encode_event
from jspec.text.calls.events import CallArguments, CallBegin, Content, Event

Json = dict[str, Any]


class ResponseItems:
    """One response; methods yield the stream events of a change. head: its constant fields."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = head
        self._items: list[Json] = []
        self._is_open = False
        self._num_events = 0

    def begin(self, _: Completion) -> Iterator[Json]:
        for name in ("created", "in_progress"):
            yield self._event(name, response=self.to_json(None))

    def add(self, events: Iterable[tuple[Event, str]]) -> Iterator[Json]:
        for event, call_id in events:
            if isinstance(event, CallArguments):
                yield from self._grow("function_call", event.text)
                continue
            if isinstance(event, CallBegin):
                yield from self._close()
                call = {"call_id": event.call_id or call_id, "name": event.name, "arguments": ""}
                yield from self._open("function_call", "fc", call)
                continue
            is_content = isinstance(event, Content)
            kind = "message" if is_content else "reasoning"
            if not self._is_open or self._items[-1]["type"] != kind:
                yield from self._close()
                more: Json = {"role": "assistant"} if is_content else {"summary": []}
                part = _part("" if is_content else None)
                yield from self._open(kind, "msg" if is_content else "rs", more, part)
            yield from self._grow(kind, event.text)

    def end(self, completion: Completion) -> Iterator[Json]:
        yield from self._close(is_cut=_status(completion.finish) != "completed")
        status = _status(completion.finish)
        yield self._event(status, response=self.to_json(completion))

    def to_json(self, completion: Completion | None) -> Json:
        finish = None if completion is None else completion.finish
        status = "in_progress" if completion is None else _status(finish)
        body: Json = {**self._head, "status": status, "output": self._items, "error": None}
        is_cut = status == "incomplete"
        body["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        if finish is not None and status == "failed":
            body["error"] = {"code": "server_error", "message": finish.message or "aborted"}
        body["usage"] = None if completion is None else _usage(completion)
        return body

    def _open(self, kind: str, prefix: str, more: Json, part: Json | None = None) -> Iterator[Json]:
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **more}
        if part is not None:
            item["content"] = []
        self._items.append(item)
        self._is_open = True
        yield self._event("output_item.added", item=item, output_index=len(self._items) - 1)
        if part is not None:
            yield self._of_item("content_part.added", part=part, content_index=0)
            item["content"].append(part)

    def _grow(self, kind: str, text: str) -> Iterator[Json]:
        item = self._items[-1]
        if kind == "function_call":
            item["arguments"] += text
            yield self._of_item("function_call_arguments.delta", delta=text)
            return
        item["content"][0]["text"] += text
        yield self._of_item(f"{_TEXT_OF[kind]}.delta", delta=text, content_index=0, **_NO_LOGPROBS)

    def _close(self, *, is_cut: bool = False) -> Iterator[Json]:
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            texts = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("function_call_arguments.done", **texts)
        else:
            part = item["content"][0]
            name = f"{_TEXT_OF[item['type']]}.done"
            yield self._of_item(name, text=part["text"], content_index=0, **_NO_LOGPROBS)
            yield self._of_item("content_part.done", part=part, content_index=0)
        yield self._event("output_item.done", item=item, output_index=len(self._items) - 1)

    def _of_item(self, kind: str, /, **fields: Any) -> Json:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, /, **fields: Any) -> Json:
        number, self._num_events = self._num_events, self._num_events + 1
        # A snapshot: items continue to grow.
        return {"type": f"response.{kind}", "sequence_number": number, **deepcopy(fields)}


_TEXT_OF = {"message": "output_text", "reasoning": "reasoning_text"}
_NO_LOGPROBS: Mapping[str, Any] = {"logprobs": []}


def _part(text: str | None) -> Json:
    if text is None:
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(finish: FinishReason | None) -> str:
    kind = None if finish is None else finish.kind
    return {FinishKind.STOP: "completed", FinishKind.LENGTH: "incomplete"}.get(
        kind or FinishKind.ABORT, "failed"
    )


def _usage(completion: Completion) -> Json:
    num_prompt, num_out = completion.prompt_tokens, len(completion.output_ids)
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": completion.cached_tokens,
            "cache_write_tokens": 0,  # nothing is charged for
        },
        "output_tokens": num_out,
        "output_tokens_details": {"reasoning_tokens": completion.reasoning_tokens},
        "total_tokens": num_prompt + num_out,
    }


def named_events(events: Iterable[Json]) -> bytes:
    """Encode named server-sent events, like OpenAI's."""
    return b"".join(
        b"event: " + event["type"].encode("ascii") + b"\n" + encode_event(event) for event in events
    )
