"""The caches of a model as data: groups of layers with the same entry and window.

Groups key compiled programs. Groups that keep the same tokens form a page space: one allocator, one
page table, one budget. The full space is first and always exists; without groups it only counts
tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from jspec.errors import ConfigError
from jspec.spec.cache_entry import CacheEntry, CacheLayout, State, Unit, bytes_per_unit


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """num_layers layers with equal entries. Arrays are in the groups' order: two groups of 2 and 1
    layers are arrays 0, 1, 2."""

    name: str
    num_layers: int
    entry: CacheEntry
    window: int | None = None  # keys that a query sees, itself included; None: all

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigError(
                f"cache group {self.name} has {self.num_layers} layers; expected at least 1"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"cache group {self.name} has a window of {self.window}; expected at least 1"
            )


@dataclass(frozen=True, slots=True)
class PageSpace:
    """Groups whose pages are allocated and freed together."""

    window: int | None  # None: the full space
    groups: tuple[CacheGroup, ...]


def page_spaces(
    groups: tuple[CacheGroup, ...], *, windows: Collection[int] | None = None
) -> tuple[PageSpace, ...]:
    """Return the full space, then one space per window, from the narrowest on.

    windows: those with their own space; None: all. Groups of other windows are in the full space,
    where all their tokens are kept, which is also correct.

        In:  windows 8, None, 8, 4 of groups a, b, c, d
        Out: (None: b), (4: d), (8: a, c); with windows = {8}: (None: b, d), (8: a, c)
    """
    apart = {g.window for g in groups if g.window is not None}
    if windows is not None:
        apart &= set(windows)
    groups = tuple(g for g in groups if g.entry.unit is Unit.PAGE)
    full = PageSpace(None, tuple(g for g in groups if g.window not in apart))
    return full, *(PageSpace(w, tuple(g for g in groups if g.window == w)) for w in sorted(apart))


def cache_bytes(groups: tuple[CacheGroup, ...], layout: CacheLayout) -> int:
    """Return the bytes of a unit of every group in all its layers, over all shards."""
    return sum(g.num_layers * bytes_per_unit(g.entry, layout) for g in groups)


def slot_groups(groups: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    return tuple(g for g in groups if g.entry.unit is Unit.SLOT)


def snapshot_groups(groups: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    return tuple(
        replace(group, entry=group.entry.snapshot)
        for group in groups
        if isinstance(group.entry, State)
    )


def groups_of_layers(groups: tuple[CacheGroup, ...]) -> tuple[CacheGroup, ...]:
    return tuple(group for group in groups for _ in range(group.num_layers))
