"""Groups of decode rows with the same first pages, whose keys are then read once. The groups
minimize reads and change only when rows start or end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

import numpy as np

from jspec.config.limits import PoolLimits
from jspec.config.shared_prefixes import SharedPrefix, SharingLimits
from jspec.scheduler.row_table import Ints
from jspec.scheduler.sequence import Tenancy

Pages = Sequence[int]
Shared = tuple[tuple[SharedPrefix, ...], int]
Group = tuple[int, int, int]  # rows [begin, end) of the given ones, and the pages they share


def common_length(first: Pages, second: Pages) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def group_rows(tables: Sequence[Pages], *, rows_a_pack: int) -> list[Group]:
    """Return the groups of sorted page tables that save the most page reads.

    In:  1 2 3 4 | 1 2 3 5 | 1 6 | 7, two rows a pack
    Out: [(0, 2, 3)], which saves 3 pages; page 1 in packs of two, (0, 3, 1), would save 1

    Works bottom up over the tree of texts. At each branching, either all rows below read their
    common prefix together, or the rows of each branch read their longer one.
    """
    common = [common_length(a, b) for a, b in pairwise(tables)]
    # pages, begin, saved, groups
    stack: list[tuple[int, int, int, list[Group]]] = [(0, 0, 0, [])]
    for end, pages_next in enumerate((*common, 0), start=1):
        begin, found = end - 1, (0, list[Group]())
        while stack[-1][0] > pages_next:
            pages, begin, saved, groups = stack.pop()
            saved, groups = saved + found[0], groups + found[1]
            whole = saved_rows(end - begin, rows_a_pack=rows_a_pack) * pages
            found = (whole, [(begin, end, pages)]) if whole >= saved else (saved, groups)
        if stack[-1][0] < pages_next:
            stack.append((pages_next, begin, *found))
        else:
            pages, first, saved, groups = stack.pop()
            stack.append((pages, first, saved + found[0], groups + found[1]))
    return stack[0][3]


def saved_rows(count: int, *, rows_a_pack: int) -> int:
    """Return the reads saved when `count` rows share a prefix. In: 5 rows, 4 a pack   Out: 3"""
    return count - -(-count // rows_a_pack)


class PrefixSharing:
    """The groups of the running rows, by slot. Call `regroup` when a row starts or ends."""

    def __init__(self, pool: PoolLimits, sharing: SharingLimits) -> None:
        self._pool = pool
        self._sharing = sharing
        self._group = np.zeros(pool.all_slots, np.int64)
        self._keys = np.zeros(pool.all_slots, np.int64)
        self._found: tuple[Ints, Shared] | None = None  # of a decode, mostly the next one's

    def regroup(self, tenancies: Collection[Tenancy]) -> None:
        self._keys[:], self._found = 0, None
        unit = self._sharing.unit
        by_first: dict[tuple[int, int], list[Tenancy]] = {}
        for tenancy in tenancies:
            first = self._pool.rank_of(tenancy.row.slot), tenancy.page_ids[0]
            by_first.setdefault(first, []).append(tenancy)
        group = 0
        for family in by_first.values():
            if len(family) == 1:
                continue
            family.sort(key=lambda tenancy: tenancy.page_ids)
            tables = [tenancy.page_ids for tenancy in family]
            for begin, end, pages in group_rows(tables, rows_a_pack=self._sharing.rows_a_pack):
                group += 1
                slots = [tenancy.row.slot for tenancy in family[begin:end]]
                self._group[slots] = group
                self._keys[slots] = pages * self._pool.page_size // unit * unit

    def among(self, slots: Ints) -> Shared:
        """Return (each row's shared prefix, keys saved). Do not change `slots` afterwards."""
        if self._found is None or self._found[0] is not slots:
            self._found = slots, self._among(slots)
        return self._found[1]

    def _among(self, slots: Ints) -> Shared:
        keys = self._keys[slots]
        if not keys.any():
            return (), 0
        # A row without a prefix is its own group, which saves nothing.
        names = np.where(keys > 0, self._group[slots], -1 - np.arange(len(slots)))
        _, first, inverse, counts = np.unique(
            names, return_index=True, return_inverse=True, return_counts=True
        )
        packs = -(-counts // self._sharing.rows_a_pack)
        saved = int(((counts - packs) * keys[first]).sum())
        if saved < self._sharing.pays_from:
            return (), 0
        keys = np.where(counts[inverse] > 1, keys, 0)
        leaders = first[inverse]
        return tuple(map(SharedPrefix, leaders.tolist(), keys.tolist())), saved
