"""The mailboxes of all unfinished requests: delivery of pieces, and the end of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from jspec.errors import EngineClosedError, RequestFailedError, clear_frames
from jspec.scheduler.outputs.token_history import Piece
from jspec.scheduler.scheduler import ABORTED, Scheduler
from jspec.serving.recovery import MOST_LOSSES
from jspec.serving.streams.mailbox import Failure, Mailbox, Waiting, wake

LOGGER = logging.getLogger("jspec.scheduler")
SLOW_READER = "aborted: its reader left too much unread"


class Readers:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._mailboxes: dict[str, Mailbox] = {}
        self.unpublished: list[Piece] = []

    def __len__(self) -> int:
        return len(self._mailboxes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._mailboxes)

    def open(self, name: str, max_unread: int | None) -> Mailbox:
        self._mailboxes[name] = Mailbox(max_unread)
        return self._mailboxes[name]

    def has(self, name: str, mailbox: Mailbox) -> bool:
        return self._mailboxes.get(name) is mailbox

    def close(self, last: dict[str, Piece | Failure]) -> None:
        wake([self._mailboxes.pop(name).put(item) for name, item in last.items()])

    def publish(self) -> None:
        """Deliver committed pieces, and abort requests with too many unread ones."""
        pieces, self.unpublished = self.unpublished, []
        if not pieces:
            return
        readers: list[Waiting | None] = []
        slow: list[str] = []
        for piece in pieces:
            name = piece.history.request_id
            is_last = piece.finish is not None
            mailbox = self._mailboxes.pop(name) if is_last else self._mailboxes[name]
            readers.append(mailbox.put(piece))
            if mailbox.is_full and not is_last and name not in slow:
                slow.append(name)
        wake(readers)
        for name in slow:
            last = self._end(name, why=SLOW_READER, is_slow=True)
            if last is not None:
                LOGGER.warning("request %s was %s", name, SLOW_READER)
                self.close({name: last})

    def abort(self, name: str, *, why: str = ABORTED) -> bool:
        piece = self._end(name, why=why)
        if piece is None:
            return False
        self.unpublished.append(piece)  # after what was committed before it
        self.publish()
        return True

    def fail(self, name: str, why: str, detail: str = "") -> None:
        """End a request with a RequestFailedError. detail: for the log and the Python API only."""
        self._scheduler.end(name)
        self.close({name: RequestFailedError(why, detail)})

    def fail_all(self, error: Callable[[str], EngineClosedError]) -> None:
        self.publish()
        for name in self._mailboxes:
            with suppress(Exception):  # its state may be broken, but its stream must end
                self._scheduler.end(name)
        self.close({name: error(name) for name in self._mailboxes})

    def contain(self, error: Exception) -> None:
        """Recover from a broken invariant (`Scheduler.contain`): suspects end, others continue."""
        pieces, failed = self._scheduler.contain(error, most=MOST_LOSSES)
        LOGGER.error("internal error; requests that end: %s", failed or "none", exc_info=error)
        clear_frames(error)
        self.unpublished += pieces
        self.publish()
        for name in failed:
            self.fail(name, f"request {name!r} was ended by an internal error: {error}")

    def _end(self, name: str, *, why: str, is_slow: bool = False) -> Piece | None:
        try:
            return self._scheduler.end(name, why=why, is_slow=is_slow)
        except Exception as error:
            self.contain(error)
            return self._scheduler.end(name, why=why, is_slow=is_slow)
