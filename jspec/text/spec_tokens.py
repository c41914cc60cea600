"""Attribution of a sequence's text to accepted draft tokens and the target's own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from jspec.messages.request import FinishKind, SpecCounters, StreamChunk
from jspec.text.tokenizer.detokenizer import new_detokenizer
from jspec.text.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecToken:
    text: str
    accepted: bool  # an accepted draft token
    # Number of the verification that emitted it; 0: none (a prompt's first token, or no drafting).
    step: int = 0
    proposed: int = 0  # drafts in that verification

    def to_json(self) -> dict[str, Any]:
        origin = {"accepted": self.accepted, "step": self.step, "proposed": self.proposed}
        return {"text": self.text, **origin}


class _Step(NamedTuple):
    number: int = 0
    proposed: int = 0


class SpecTokenTracker:
    """Splits each chunk's text by origin; the pieces add up to the chunk's text.

    A character belongs to the id that completed it. The stream may hold back text that could start
    a stop string, so characters are queued with their origin until a chunk has their text.

        ids      "ab" (accepted)   "c" (target's)      stop string "cx"
        chunk 1  text "ab"     →   [("ab", accepted)]  queued: 1 character, target's
        chunk 2  ids "y", text "cy" →   [("c", target's), ("y", ...)]
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = new_detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids
        )
        # (number of characters, accepted, step)
        self._queued: deque[tuple[int, bool, _Step]] = deque()
        self._counters = SpecCounters()
        self._step = _Step()  # of the last ids

    def push(self, chunk: StreamChunk) -> tuple[SpecToken, ...]:
        finish = chunk.finish
        # A stop token is kept as an id and has no text.
        is_stop_id = (
            finish is not None
            and finish.kind is FinishKind.STOP
            and isinstance(finish.matched, int)
        )
        ids = chunk.new_ids[:-1] if is_stop_id else chunk.new_ids
        if chunk.new_ids:
            self._step = self._step_of(chunk.counters)
        for index, token_id in enumerate(ids):
            text = self._detokenizer.push(token_id)
            self._queued.append((len(text), index < chunk.num_accepted, self._step))
        if finish is not None:
            self._queued.append((len(self._detokenizer.flush()), False, self._step))
        return self._take(chunk.text)

    def to_json(self, chunk: StreamChunk) -> list[dict[str, Any]]:
        return [piece.to_json() for piece in self.push(chunk)]

    def _step_of(self, counters: SpecCounters) -> _Step:
        before, self._counters = self._counters, counters
        if counters.verify_ct == before.verify_ct:
            return _Step()
        return _Step(counters.verify_ct, counters.num_proposed - before.num_proposed)

    def _take(self, text: str) -> tuple[SpecToken, ...]:
        pieces: list[SpecToken] = []
        begin = 0
        while begin < len(text):
            known = self._queued.popleft() if self._queued else (len(text), False, _Step())
            num_chars, accepted, step = known
            end = min(begin + num_chars, len(text))
            if end > begin:
                number, proposed = step
                pieces.append(
                    SpecToken(
                        text=text[begin:end], accepted=accepted, step=number, proposed=proposed
                    )
                )
            if begin + num_chars > end:
                self._queued.appendleft((begin + num_chars - end, accepted, step))
            begin = end
        return tuple(pieces)
