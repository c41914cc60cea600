"""Weight updates, from the caller to the engine that reads them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Model(enum.Enum):
    """The model that an update or a lookup addresses; SGLang's names except `all`."""

    TARGET = "target"
    DRAFT = "draft"


class InFlight(enum.Enum):
    """Treatment of unfinished requests when the weights change."""

    RETRACT = "retract"  # they continue; the new weights prefill prompt and output again
    ABORT = "abort"  # they end with their output so far
    WAIT = "wait"  # they finish; newer ones wait for the update


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUpdate:
    """All weights of the target, the draft or both, each from a directory."""

    target: str | None = None
    draft: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayUpdate:
    arrays: Mapping[str, Any]
    model: Model | None = None  # None: the target's if it has the name


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUpdate:
    slot: int
    path: str | None  # a directory; None: the slot is no longer used


WeightUpdate = DiskUpdate | ArrayUpdate | AdapterUpdate
