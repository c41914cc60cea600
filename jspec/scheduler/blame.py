"""Attribute an error to the request whose state caused it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from jspec.errors import SequenceError
from jspec.scheduler.sequence import Sequence


def blame(error: Exception, sequence: Sequence) -> NoReturn:
    if isinstance(error, SequenceError):
        raise error
    raise SequenceError(sequence.request.request_id, error) from error


@contextmanager
def blaming(sequence: Sequence) -> Iterator[None]:
    """Attribute errors of the block to `sequence`. It costs a microsecond: not for hot paths."""
    try:
        yield
    except Exception as error:
        blame(error, sequence)
