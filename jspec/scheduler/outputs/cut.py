"""Where a sequence ends among the ids of a round, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jspec.messages.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What is left of one round's ids, and why the sequence ends, if so.

    num_shown: of the ids, those that have text. text: theirs, None if the reader makes it.
    """

    ids: tuple[int, ...]
    text: str | None
    num_shown: int
    finish: FinishReason | None = None


def first_stop(ids: tuple[int, ...], is_stop: Callable[[int], bool], *, begin: int) -> int:
    """Index of the first stop id at or after `begin`; len(ids) without one.

    Worked example: min_new_tokens 3 with 2 tokens out gives begin = 1, since ids[0] is the third
    token and ids[1] the first one that may end the text.
    """
    for index in range(max(begin, 0), len(ids)):
        if is_stop(ids[index]):
            return index
    return len(ids)
