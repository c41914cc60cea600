"""Search for stop strings by token ids, for vocabularies of bytes, without making text. Each
token's transition is cached for all sequences with equal stop strings."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jspec.messages.protocols import TextCut
from jspec.text.stop.stop_matcher import StopAutomaton
from jspec.text.tokenizer.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"  # replaces invalid bytes, so it cannot be found by bytes
COMPLETED = -1
MAX_TABLES, MAX_KNOWN = 16, 1 << 15  # cached sets of stop strings, and (state, token) pairs of each
_ID_BITS = 32


class StopTable:
    """Transitions by token. Threads may share it: concurrent writers write equal values."""

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str]) -> None:
        self._bytes = token_bytes
        # Latin-1 has a character for every byte.
        self._automaton = StopAutomaton.from_strings([_as_chars(text) for text in stop])
        self._known: dict[int, int] = {}

    def after(self, state: int, token_id: int) -> int:
        key = state << _ID_BITS | token_id
        found = self._known.get(key)
        if found is None:
            found, matched = self.walk(state, token_id)
            found = found if matched is None else COMPLETED
            if len(self._known) >= MAX_KNOWN:
                self._known = {}
            self._known[key] = found
        return found

    def walk(self, state: int, token_id: int) -> tuple[int, str | None]:
        """Return the state after a token, and the first stop string that its bytes complete."""
        matched = None
        for char in self._bytes[token_id].decode("latin-1"):
            state = self._automaton.advance(state, char)
            if matched is None:
                matched = self._automaton.completed[state]
        return state, None if matched is None else matched.encode("latin-1").decode()

    def pass_all(self, state: int, ids: Iterable[int]) -> int:
        known = self._known
        for token_id in ids:
            found = known.get(state << _ID_BITS | token_id)
            state = self.after(state, token_id) if found is None else found
            if state == COMPLETED:
                return COMPLETED
        return state


class ByteStopWatch:
    """One sequence's search; implements `messages.protocols.StopWatch` with empty texts."""

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._state = 0
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        return self._matched

    def passes(self, ids: Sequence[int]) -> bool:
        state = self._table.pass_all(self._state, ids)
        if state == COMPLETED:
            return False
        self._state = state
        return True

    def push(self, ids: tuple[int, ...], *, allow_stop: bool = True) -> TextCut:
        if self._matched is not None:
            return TextCut(num_ids=0, text="", matched=self._matched)
        for num_ids, token_id in enumerate(ids, start=1):
            self._state, matched = self._table.walk(self._state, token_id)
            if matched is not None and allow_stop:
                self._matched = matched
                return TextCut(num_ids=num_ids, text="", matched=matched)
        return TextCut(num_ids=len(ids), text="")

    def flush(self) -> str:
        return ""


class StopTables:
    def __init__(self, token_bytes: TokenBytes) -> None:
        self.token_bytes = token_bytes
        self._tables: OrderedDict[tuple[str, ...], StopTable] = OrderedDict()
        self._lock = threading.Lock()

    def watch(self, automaton: StopAutomaton) -> ByteStopWatch | None:
        """Return a watch; None for regular expressions, and strings that bytes cannot identify."""
        stop = tuple(sorted({text for text in automaton.completed if text is not None}))
        if automaton.patterns or not all(map(_is_of_bytes, stop)):
            return None
        with self._lock:
            table = self._tables.get(stop)
            if table is None:
                table = self._tables[stop] = StopTable(self.token_bytes, stop)
            self._tables.move_to_end(stop)
            if len(self._tables) > MAX_TABLES:
                self._tables.popitem(last=False)
        return ByteStopWatch(table)


def _is_of_bytes(text: str) -> bool:
    return REPLACEMENT not in text and not any("\ud800" <= char <= "\udfff" for char in text)


def _as_chars(text: str) -> str:
    return text.encode("utf-8").decode("latin-1")
