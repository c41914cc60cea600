"""What weights are to become: host data, from whoever asks to the engine that reads them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Model(enum.Enum):
    """Whose weights; SGLang's names of a selector, beside `all`."""

    TARGET = "target"
    DRAFT = "draft"


class InFlight(enum.Enum):
    """What becomes of requests that are there when the weights change."""

    RETRACT = "retract"  # they go on, prompt and output filled anew by the new weights
    ABORT = "abort"  # they end, with what they have
    WAIT = "wait"  # they end by themselves, and newer ones wait for the update


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUpdate:
    """All weights of target, draft or both, each out of a directory."""

    target: str | None = None
    draft: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayUpdate:
    """Some weights, by their published names. model: whose; None: the target's if it has one of
    that name, else the draft's."""

    arrays: Mapping[str, Any]
    model: Model | None = None


WeightUpdate = DiskUpdate | ArrayUpdate
