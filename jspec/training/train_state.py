"""The state of a training run, and its form in a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax

from jspec.device.pytree import pytree
from jspec.models.layer import Params


@pytree
class TrainState:
    params: Params
    ema: Params
    opt_state: Any
    step: jax.Array  # i32[]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    curve: tuple[dict[str, Any], ...] = ()  # per evaluation: step, seconds, metrics


Resumed = tuple[TrainState, Params, Progress]  # a checkpoint: state, best EMA, the rest
