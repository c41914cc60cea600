"""One sequence's events as JSON, of which each character is escaped once.

A cumulative stream repeats all that was said before. To write all of it anew in each event would
cost as much as the whole answer at every step; here what was written stays, and is copied. The
bytes are those of `encode_event` for the same object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

# Made once: json.dumps makes an encoder for every call with options.
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def encode_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event (HTML standard, section 9.2)."""
    return b"data: " + _ENCODER.encode(body).encode("utf-8") + b"\n\n"


class EventJson:
    """Text and ids of one sequence, growing. keeps_all: every event has all so far, else the new.

    {"index": 0, "text": "ab", "output_ids": [1, 2], "meta_info": {...}}
    """

    def __init__(self, *, keeps_all: bool) -> None:
        self._keeps_all = keeps_all
        self._text = bytearray()
        self._ids = bytearray()

    def add(self, text: str, ids: Sequence[int]) -> None:
        """What came."""
        if text:
            self._text += encode_basestring(text)[1:-1].encode("utf-8")
        if ids:
            if self._ids:
                self._ids += b", "
            self._ids += str(list(ids))[1:-1].encode("ascii")

    def event(self, meta_info: Mapping[str, Any], *, index: int | None) -> bytes:
        """The event; index: of the sequence among those of its call, if there are several."""
        named = b"" if index is None else b'"index": %d, ' % index
        meta = _ENCODER.encode(meta_info).encode("utf-8")
        parts = (b"data: {", named, b'"text": "', self._text, b'", "output_ids": [', self._ids)
        event = b"".join((*parts, b'], "meta_info": ', meta, b"}\n\n"))
        if not self._keeps_all:
            self._text.clear()
            self._ids.clear()
        return event
