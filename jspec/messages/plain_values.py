"""Numbers and arrays of other libraries, numpy's above all, as Python's own.

What Python callers give is pickled, compared and written as JSON later, which other numbers are not
made for. Which values are right is not known here.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

_PLAIN = frozenset({int, float, bool, str, type(None)})


def plain(value: Any) -> Any:
    """A number, or a truth value of numpy's, as int, float or bool; anything else as it is."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def plain_items(values: Iterable[Any]) -> tuple[Any, ...]:
    """Each of them as `plain`; quick where all are so already, or of one kind of numpy's."""
    found = tuple(values)
    if _PLAIN.issuperset(kinds := set(map(type, found))):
        return found
    if len(kinds) == 1 and issubclass(kinds.pop(), np.integer):  # of two, numpy would make floats
        return tuple(np.array(found).tolist())
    return tuple(map(plain, found))


def is_array(value: Any) -> bool:
    """Whether another library's array, numpy's or jax's, with an axis at least."""
    return hasattr(value, "__array__") and bool(getattr(value, "ndim", 0))


def listed(value: Any) -> Any:
    """An array as a list of Python's own numbers (of lists, if it has more axes than one), made as
    a whole; anything else as it is."""
    return np.asarray(value).tolist() if is_array(value) else value
