"""Every error that jspec raises on purpose.

Each message names the offending field, its value, and what was expected, so that a user can act
on it without reading the source.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Collection

MAX_RETRY_SECONDS = 60.0
SHOWN_CHARS = 80  # of a value in a message: what a person reads


def shown(value: object) -> str:
    """A value for a message, cut to SHOWN_CHARS; as Python writes it."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:SHOWN_CHARS]  # before all of it is written out
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of too many digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def nearest(name: str, known: Collection[str]) -> str:
    """The nearest of `known`, quoted; empty if none is near."""
    return "".join(map(repr, difflib.get_close_matches(name, sorted(known), n=1)))


def unknown_field(where: str, name: str, known: Collection[str], *, hint: str = "") -> str:
    """The message for a field that is not in `known`.

    hint: what was meant, if that is known; else the nearest name is suggested.
    """
    shown_name, name = shown(name), name[:SHOWN_CHARS]
    if not hint:
        hint = nearest(name, known)
    did_you_mean = f"did you mean {hint}? " if hint else ""
    return (
        f"{where} has the unknown field {shown_name}; {did_you_mean}expected one of {sorted(known)}"
    )


class JspecError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(JspecError, ValueError):
    """A configuration (flag, TOML key, engine argument) that cannot be served."""


class CheckpointError(JspecError, ValueError):
    """A checkpoint that is missing, truncated, or does not match its configuration."""


class NoCheckpointError(CheckpointError):
    """A path where no checkpoint is: whoever named it asked wrongly, and no file is at fault."""


class TrainingError(JspecError):
    """A training run that cannot go on."""


class RequestError(JspecError, ValueError):
    """One request is malformed or can never be served; the engine itself is unharmed."""


class QueueFullError(JspecError):
    """The waiting queue is at its bound; try again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueTimeoutError(QueueFullError):
    """A request waited as long as it may, `limit` seconds, and neither it nor another one of its
    call has run; try again after the same time, at most MAX_RETRY_SECONDS."""

    def __init__(self, request_id: str, limit: float) -> None:
        super().__init__(
            f"request {request_id!r} waited for queue_time_limit, {limit:g} s, and has not run",
            retry_after_seconds=min(limit, MAX_RETRY_SECONDS),
        )


class EngineClosedError(JspecError):
    """The engine was shut down, or its loop died, before this request could finish."""


class RunnerError(JspecError):
    """A call of the runner failed: what it had on the device is lost. It may be begun anew."""


class RequestFailedError(JspecError):
    """A request that ran whenever the engine failed, more often than it is tried again."""


class InvariantError(JspecError, RuntimeError):
    """A state that must be impossible: a bug in jspec, never the fault of a request."""


class SequenceError(InvariantError):
    """An impossible state of one request, or an unexpected error while it was planned or read."""

    def __init__(self, request_id: str, error: Exception) -> None:
        kind = "" if isinstance(error, InvariantError) else f"{type(error).__name__}: "
        super().__init__(f"request {request_id!r}: {kind}{error}")
        self.request_id = request_id


class ResultError(InvariantError):
    """A step's result that its plan cannot have: what the runner has on the device is wrong."""


def clear_frames(error: BaseException) -> None:
    """Empties the ended functions in the traceback of `error`, and of all that led to it.

    The traceback stays readable. Without this, whoever keeps the error keeps every local of those
    functions: of a failed start, weights and compiled programs.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += (each.__cause__, each.__context__)
