"""What a head's tensors say by themselves: zeros, what is no number, the draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jspec.diagnosis.agreement import Evidence
from jspec.models.placement import path_of

MIN_LEVELS = 32  # of a column; 4 bits make 16
MOST_ZEROS = 0.25  # trained matrices have none; a pruned head has a pattern of them


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFact:
    """One tensor of the head. mean: of a norm's scale, near 1 where it was not trained.

    levels: distinct numbers of a column, at most, of those looked at: few where it was quantised.
    """

    name: str
    shape: tuple[int, ...]
    zeros: float
    levels: int
    is_finite: bool
    mean: float
    std: float


def facts_of(params: Any) -> tuple[TensorFact, ...]:
    """Of every tensor of numbers; embedding and ids are not the head's own."""
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
                levels=max(len(np.unique(column)) for column in _columns(array)),
                is_finite=bool(np.isfinite(array).all()),
                mean=float(array.mean()),
                std=float(array.std()),
            )
        )
    return tuple(found)


def _columns(array: np.ndarray) -> np.ndarray:
    """A few of a matrix's columns (outputs), as rows; of a vector, all of it."""
    return array.reshape(-1, array.shape[-1]).T[:8] if array.ndim > 1 else array[None]


def suspicious(facts: tuple[TensorFact, ...]) -> tuple[str, ...]:
    """A sentence for each tensor that cannot be a trained one's."""
    found = [
        f"{fact.name} holds numbers that are not finite" for fact in facts if not fact.is_finite
    ]
    found += [
        f"{100 * fact.zeros:.0f}% of {fact.name} {list(fact.shape)} is zero"
        for fact in facts
        if fact.zeros > MOST_ZEROS
        and fact.levels >= MIN_LEVELS  # zeros of a quantised one are rounded numbers
        and not fact.name.endswith("bias")
    ]
    return tuple(found)


def coverage(draft_ids: Any, evidence: Evidence) -> float:
    """Share of the target's choices after the prompts that the head can draft at all."""
    index = np.arange(evidence.token_ids.shape[1])[None, :]
    is_output = (index >= evidence.prompt_lens[:, None]) & (index < evidence.lens[:, None])
    chosen = evidence.chosen_ids[is_output]
    return float(np.isin(chosen, np.asarray(draft_ids)).mean()) if len(chosen) else 0.0
