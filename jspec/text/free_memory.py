"""Return of freed memory to the operating system: glibc keeps what a tokenizer freed (a hundred
times the text's size) in the arena of its thread."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # other C libraries keep less
        return None
    return found


def give_back_freed_memory() -> None:
    trim = _trim()
    if trim is not None:
        trim(0)
