"""A loaded LoRA adapter, as requests name it and as the device finds its weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Equal only to itself: a later one of the same name, or in the same slot, has another number.

    So cached prefixes of a former adapter are never those of a later one.
    """

    name: str
    path: str  # as given
    slot: int  # of the stacked weights, from 1
    number: int  # of all that were ever loaded
