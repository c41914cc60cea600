"""The end of a sequence among the ids of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jspec.messages.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    ids: tuple[int, ...]
    text: str | None  # None: the reader makes it
    num_shown: int  # leading ids that have text
    finish: FinishReason | None = None


def first_stop(ids: tuple[int, ...], is_stop: Callable[[int], bool], *, begin: int) -> int:
    for index in range(max(begin, 0), len(ids)):
        if is_stop(ids[index]):
            return index
    return len(ids)
