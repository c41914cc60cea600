"""Lengths of packed rows, as a hypothesis strategy."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


@st.composite
def row_lengths(draw: st.DrawFn, *, batch: int, queries: int, slots: int) -> Any:
    """Row lengths that fit, and prefixes: empty, page-aligned or not."""
    lengths, prefixes, left = [], [], queries
    for _ in range(batch):
        length = draw(st.sampled_from([0, 1, 15, 16, 17, 40]) | st.integers(0, queries))
        lengths.append(min(length, left))
        left -= lengths[-1]
        prefix = draw(st.sampled_from([0, 16, 128, 144]) | st.integers(0, slots))
        prefixes.append(min(prefix, slots - lengths[-1]))
    return lengths, prefixes
