"""Checks on a head's tensors alone: zeros, non-finite numbers, quantization, vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jspec.cli.diagnosis.agreement import Evidence
from jspec.models.placement import path_of

MIN_LEVELS = 32  # of a column; 4 bits give 16
COARSE = 8  # distinct numbers per output, zero and both signs included: 3 bits give 7 or 8
LONG = 64  # length at which trained numbers always have more than COARSE distinct values
MOST_ZEROS = 0.25  # share; trained matrices have none, a pruned head has a pattern of them


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    name: str
    shape: tuple[int, ...]
    zeros: float
    levels: int  # most distinct numbers of the inspected columns
    fewest: int | None = None  # the smaller such number of columns and rows; None: too short
    is_finite: bool
    mean: float
    std: float


def facts_of(params: Any) -> tuple[TensorFact, ...]:
    found = []
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = [str(part) for part in path_of(path)]
        if names[0] in ("embed", "draft_ids"):
            continue
        array = np.asarray(value).astype(np.float32)
        found.append(
            TensorFact(
                name=".".join(names),
                shape=array.shape,
                zeros=float(np.mean(array == 0)),
                levels=_levels(_columns(array)),
                fewest=_fewest(array),
                is_finite=bool(np.isfinite(array).all()),
                mean=float(array.mean()),
                std=float(array.std()),
            )
        )
    return tuple(found)


def _columns(array: np.ndarray) -> np.ndarray:
    """Return a few of a matrix's columns (outputs) as rows; a vector as one row."""
    return array.reshape(-1, array.shape[-1]).T[:8] if array.ndim > 1 else array[None]


def _levels(lines: np.ndarray) -> int:
    return max(len(np.unique(line)) for line in lines)


def _fewest(array: np.ndarray) -> int | None:
    """Return the fewest distinct numbers per output or input, either of which may have a scale."""
    if array.ndim < 2:
        return None
    rows = array.reshape(-1, array.shape[-1])[:8]
    found = [_levels(x) for x in (rows, _columns(array)) if x.shape[-1] >= LONG]
    return min(found, default=None)


def coarse_levels(facts: tuple[TensorFact, ...]) -> int | None:
    """Return the distinct numbers per output of the head's matrices if at most COARSE, else None. 4
    bits have 15 or 16 per group; fewer mean repeated rounding."""
    found = sorted(fact.fewest for fact in facts if fact.fewest is not None)
    if not found or (middle := found[len(found) // 2]) > COARSE:
        return None
    return middle


def suspicious(facts: tuple[TensorFact, ...]) -> tuple[str, ...]:
    """Return a sentence for each tensor that cannot be a trained one."""
    found = [
        f"{fact.name} holds numbers that are not finite" for fact in facts if not fact.is_finite
    ]
    found += [
        f"{100 * fact.zeros:.0f}% of {fact.name} {list(fact.shape)} is zero"
        for fact in facts
        if fact.zeros > MOST_ZEROS
        and fact.levels >= MIN_LEVELS  # zeros of a quantized tensor are rounded numbers
        and not fact.name.endswith("bias")
    ]
    return tuple(found)


def coverage(draft_ids: Any, evidence: Evidence) -> float:
    index = np.arange(evidence.token_ids.shape[1])[None, :]
    is_output = (index >= evidence.prompt_lens[:, None]) & (index < evidence.lens[:, None])
    chosen = evidence.chosen_ids[is_output]
    return float(np.isin(chosen, np.asarray(draft_ids)).mean()) if len(chosen) else 0.0
