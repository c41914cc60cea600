"""One sequence's events as JSON, with each character escaped once: a cumulative stream repeats all
earlier output, so its encoded bytes are kept. They equal those of `encode_event`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from jspec.messages.response import GROWING, Completion

# json.dumps would make an encoder for every call with options.
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def encode_event(body: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event (HTML standard, section 9.2)."""
    return b"data: " + _encode(body) + b"\n\n"


class EventJson:
    """The events of one sequence, such as {"text": "ab", "output_ids": [1, 2], "meta_info":
    {...}}."""

    def __init__(self, completion: Completion, *, keeps_all: bool, index: int | None) -> None:
        # keeps_all: events are cumulative, not deltas. index: the sequence's index among several.
        self._completion, self._keeps_all, self._index = completion, keeps_all, index
        self._text = bytearray()
        self._ids = bytearray()
        self._lists: dict[str, bytearray] = {}

    def take(self) -> bytes:
        """Return the next event, in time linear in the new output."""
        completion = self._completion
        text, sent = completion.take()
        self._add(text, completion.output_ids[sent.ids :])
        meta = completion.meta_info(sent=sent)
        if self._keeps_all and completion.logprob_form is not None:
            # count the cumulative list of this event
            meta["output_token_logprobs_length"] += sent.ids
        named = b"" if self._index is None else b'"index": %d, ' % self._index
        parts: list[bytes | bytearray] = [b"data: {", named, b'"text": "', self._text]
        parts += (b'", "output_ids": [', self._ids)
        parts += (b'], "meta_info": ', *self._meta(meta))
        spec_tokens = completion.spec_tokens(sent=sent)
        if spec_tokens is not None:
            parts += (b', "spec_tokens": ', *self._grown("spec_tokens", spec_tokens))
        event = b"".join((*parts, b"}\n\n"))
        if not self._keeps_all:
            self._text.clear()
            self._ids.clear()
            self._lists.clear()
        return event

    def _add(self, text: str, ids: Sequence[int]) -> None:
        if text:
            self._text += encode_basestring(text)[1:-1].encode("utf-8")
        if ids:
            if self._ids:
                self._ids += b", "
            self._ids += str(list(ids))[1:-1].encode("ascii")

    def _meta(self, meta_info: Mapping[str, Any]) -> list[bytes | bytearray]:
        if GROWING.isdisjoint(meta_info):
            return [_encode(meta_info)]
        parts: list[bytes | bytearray] = []
        for key, value in meta_info.items():
            parts.append(b'%s"%s": ' % (b", " if parts else b"{", key.encode("ascii")))
            parts += self._grown(key, value) if key in GROWING else (_encode(value),)
        return [*parts, b"}"]

    def _grown(self, name: str, items: Sequence[Any]) -> tuple[bytes, bytearray, bytes]:
        kept = self._lists.setdefault(name, bytearray())
        if items:
            if kept:
                kept += b", "
            kept += _encode(items)[1:-1]
        return b"[", kept, b"]"


def _encode(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8")
