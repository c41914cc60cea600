"""All errors that jspec raises on purpose.

Each message names the field, its value and what was expected, which is enough to act on.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Collection

MAX_RETRY_SECONDS = 60.0
SHOWN_CHARS = 80  # of a value in a message


def shown(value: object) -> str:
    """Return repr(value) for a message, cut to SHOWN_CHARS."""
    if isinstance(value, str | bytes | list | tuple):
        value = value[:SHOWN_CHARS]  # before repr, which may be expensive
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer of too many digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def shown_json(value: object) -> str:
    """Return a request's value for a message: like `shown`, with JSON's true, false and null."""
    text = _json_text(value, SHOWN_CHARS)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def _json_text(value: object, num_chars: int) -> str:
    """Format at least the first `num_chars` characters, which also bounds the depth."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, list | tuple | dict) or num_chars <= 0:
        return shown(value) if num_chars > 0 else ""
    parts: list[str] = []
    num_left = num_chars - 1
    for item in value.items() if isinstance(value, dict) else value:
        if num_left <= 0:
            parts.append("...")
            break
        name = f"{shown(item[0])}: " if isinstance(value, dict) else ""
        inner = item[1] if isinstance(value, dict) else item
        parts.append(name + _json_text(inner, num_left - len(name)))
        num_left -= len(parts[-1]) + 2
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{', '.join(parts)}{closing}"


def reason_of(error: OSError) -> str:
    """Return the system's own words, without the path: No space left on device."""
    return error.strerror or str(error) or type(error).__name__


def nearest(name: str, known: Collection[str]) -> str:
    """Return the closest match in `known`, quoted; empty if none is close."""
    return "".join(map(repr, difflib.get_close_matches(name, sorted(known), n=1)))


def unknown_field(where: str, name: str, known: Collection[str], *, hint: str = "") -> str:
    """Return the message for an unknown field. hint: the intended name, else the closest."""
    shown_name, name = shown(name), name[:SHOWN_CHARS]
    if not hint:
        hint = nearest(name, known)
    did_you_mean = f"did you mean {hint}? " if hint else ""
    return (
        f"{where} has the unknown field {shown_name}; {did_you_mean}expected one of {sorted(known)}"
    )


class JspecError(Exception):
    """Base of all errors raised on purpose.

    message: for a server's clients. detail: further text for the operator, such as messages of
    other libraries, which name files and addresses.
    """

    def __init__(self, message: str = "", detail: str = "") -> None:
        super().__init__(message + detail)
        self.message = message

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without __init__, whose parameters differ between the subclasses."""
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[JspecError], words: tuple[object, ...]) -> JspecError:
    return kind.__new__(kind, *words)


class ConfigError(JspecError, ValueError):
    """Raised for a configuration (flag, TOML key, engine argument) that cannot be served."""


class CheckpointError(JspecError, ValueError):
    """Raised for a checkpoint that is missing, truncated, or does not match its configuration."""


class NoCheckpointError(CheckpointError):
    """Raised for a path without a checkpoint: the path is wrong, not a file."""


class OutputError(JspecError):
    """Raised for a file that could not be written, such as on a full disk."""


class TrainingError(JspecError):
    """Raised when a training run cannot continue."""


class RequestError(JspecError, ValueError):
    """Raised when one request is malformed or can never be served; the engine is unaffected."""


class ContextLengthError(RequestError):
    """Raised for a prompt, or a prompt and its answer, longer than the context.

    Its message ends in OpenAI's words, which clients recognize to choose a shorter prompt.
    """

    def __init__(self, message: str, *, context_length: int | None = None) -> None:
        if context_length is not None:
            message += f": this model's maximum context length is {context_length} tokens"
        super().__init__(message)


class QueueFullError(JspecError):
    """Raised when the waiting queue is full; retry after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueTimeoutError(QueueFullError):
    """Raised when a request waited `limit` seconds and no request of its call has run.

    Retry after the same time, at most MAX_RETRY_SECONDS.
    """

    def __init__(self, request_id: str, limit: float) -> None:
        super().__init__(
            f"request {request_id!r} waited for queue_time_limit, {limit:g} s, and has not run",
            retry_after_seconds=min(limit, MAX_RETRY_SECONDS),
        )


class EngineClosedError(JspecError):
    """Raised when the engine was shut down, or its loop failed, before a request finished."""


class RunnerError(JspecError):
    """Raised when a runner call failed: its device state is lost. It may be restarted."""


class RequestFailedError(JspecError):
    """Raised for a request that ran at more engine failures than it is retried."""


class InvariantError(JspecError, RuntimeError):
    """Raised for an impossible state: a bug in jspec, never the fault of a request."""


class SequenceError(InvariantError):
    """Raised for an impossible state, or an unexpected error, of one request in the scheduler."""

    def __init__(self, request_id: str, error: Exception) -> None:
        kind = "" if isinstance(error, InvariantError) else f"{type(error).__name__}: "
        super().__init__(f"request {request_id!r}: {kind}{error}")
        self.request_id = request_id


class ResultError(InvariantError):
    """Raised for a step's result that does not fit its plan: the device's state is wrong."""


def clear_frames(error: BaseException) -> None:
    """Clear the frames of finished functions in the traceback of `error` and of its causes.

    The traceback stays readable. Otherwise every reference to the error would keep their locals
    alive, such as weights and compiled programs after a failed start.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            waiting += (each.__cause__, each.__context__)
