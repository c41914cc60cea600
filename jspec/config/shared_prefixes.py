"""Prefixes shared by rows of a decode, as the host plans them for the device.

They are a hint: a kernel may read the shared pages once for all of these rows (cascade attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UNIT = 128  # keys; shared prefixes are multiples, whole blocks in every kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingLimits:
    """When a decode uses shared prefixes.

    rows_a_pack: rows for which a kernel reads a prefix at once
    pays_from: least number of keys saved, over all rows, for which sharing pays
    least_rows: smallest batch with programs for sharing
    """

    rows_a_pack: int
    pays_from: int
    least_rows: int
    unit: int = UNIT


class SharedPrefix(NamedTuple):
    """Shared prefix of one row of a plan.

    leader: the first row of the plan that starts in the same pages, possibly itself
    num_keys: length of the prefix, equal for all rows with that leader
    """

    leader: int
    num_keys: int
