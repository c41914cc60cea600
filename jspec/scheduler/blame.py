"""Errors that name the request in whose state an invariant does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from jspec.errors import SequenceError
from jspec.scheduler.sequence import Sequence


def blame(error: Exception, sequence: Sequence) -> NoReturn:
    """Raises `error` with the name of the request; one that names a request goes on as it is."""
    if isinstance(error, SequenceError):
        raise error
    raise SequenceError(sequence.request.request_id, error) from error


@contextmanager
def blaming(sequence: Sequence) -> Iterator[None]:
    """Any error of the block names the request. For what is rare: it costs a microsecond."""
    try:
        yield
    except Exception as error:
        blame(error, sequence)
