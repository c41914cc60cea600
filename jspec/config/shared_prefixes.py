"""Prefixes shared by rows of a decode: a hint, with which a kernel may read their pages once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UNIT = 128  # keys; shared prefixes are multiples of it, whole blocks in every kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingLimits:
    """When a decode uses shared prefixes."""

    rows_a_pack: int  # rows for which a kernel reads a prefix at once
    pays_from: int  # minimum number of keys saved, over all rows
    least_rows: int  # smallest batch with programs for sharing
    unit: int = UNIT


class SharedPrefix(NamedTuple):
    leader: int  # the first row of the plan that starts in the same pages
    num_keys: int  # equal for all rows with that leader
