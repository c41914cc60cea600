"""Unknown fields of a request: an error, or ignored with a warning.

Python calls and batch lines refuse them, a server only with --strict-requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jspec.errors import SHOWN_CHARS, RequestError, nearest, shown, unknown_field

LOGGER = logging.getLogger("jspec.server")
MAX_REPORTED = 256  # names


class IgnoredFields:
    """Reports each unknown field once, at most MAX_REPORTED, which bounds the log."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._lock = threading.Lock()  # long bodies are parsed in threads

    def ignore(self, where: str, name: str, suggest: Callable[[], str]) -> None:
        """Report an ignored field. suggest: returns the intended field, or ""."""
        name = name[:SHOWN_CHARS]
        if name in self._names or len(self._names) > MAX_REPORTED:
            return
        with self._lock:
            if name in self._names or len(self._names) > MAX_REPORTED:
                return
            self._names.add(name)
            is_last = len(self._names) > MAX_REPORTED
        if is_last:
            LOGGER.warning("further unknown fields of requests are ignored without a line")
            return
        hint = suggest()
        LOGGER.warning(
            "%s has the unknown field %s, which was ignored%s (logged once a name; "
            "--strict-requests refuses such requests)",
            *(where, shown(name), f"; did you mean {hint}?" if hint else ""),
        )


_IGNORED: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)


@contextmanager
def ignoring(fields: IgnoredFields | None) -> Iterator[None]:
    before = _IGNORED.set(fields)
    try:
        yield
    finally:
        _IGNORED.reset(before)


def refuse_or_ignore(
    where: str, name: str, known: Collection[str], suggest: Callable[[], str] | None = None
) -> None:
    """Raise RequestError for an unknown field, unless such fields are ignored.

    suggest: returns the intended field, or ""; by default the nearest known name.
    """
    fields = _IGNORED.get()
    if fields is not None:
        fields.ignore(where, name, suggest or (lambda: nearest(name[:SHOWN_CHARS], known)))
        return
    raise RequestError(unknown_field(where, name, known, hint=suggest() if suggest else ""))
