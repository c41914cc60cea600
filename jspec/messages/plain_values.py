"""Convert numbers and arrays of numpy and other libraries to plain Python, which can be pickled,
compared and written as JSON."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

_PLAIN = frozenset({int, float, bool, str, type(None)})


def plain(value: Any) -> Any:
    """Return a number or a numpy bool as int, float or bool, and any other value unchanged."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def plain_items(values: Iterable[Any]) -> tuple[Any, ...]:
    """Apply `plain` to each item. Plain items, and items of one numpy integer type, are fast."""
    found = tuple(values)
    if _PLAIN.issuperset(kinds := set(map(type, found))):
        return found
    if len(kinds) == 1 and issubclass(kinds.pop(), np.integer):  # mixed: floats
        return tuple(np.array(found).tolist())
    return tuple(map(plain, found))


def is_array(value: Any) -> bool:
    return hasattr(value, "__array__") and bool(getattr(value, "ndim", 0))


def listed(value: Any) -> Any:
    """Return an array as a nested list of Python numbers, and any other value unchanged."""
    return np.asarray(value).tolist() if is_array(value) else value
