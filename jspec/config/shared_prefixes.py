"""Rows of a decode whose texts begin in the same pages: what the host knows, and tells the device.

It is a hint. A kernel may read such pages once for all of these rows (cascade attention); one that
does not reads the same keys of each row's own page table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UNIT = 128  # keys: a shared prefix is whole blocks of every kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingLimits:
    """When a decode is told of shared prefixes. rows_a_pack: rows of which a kernel reads a prefix
    at once. pays_from: keys that need not be read, over all rows; fewer are not worth it.
    least_rows: of a program that is told. unit: of which shared prefixes are multiples."""

    rows_a_pack: int
    pays_from: int
    least_rows: int
    unit: int = UNIT


class SharedPrefix(NamedTuple):
    """Of one row of a plan. leader: the first row of the plan that begins in the same pages, maybe
    itself. num_keys: of its prefix, as many for each row with that leader; 0: it shares none."""

    leader: int
    num_keys: int
