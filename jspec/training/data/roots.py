"""Random root positions, at which a head that drafts blocks is trained (its anchors)."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jspec.training.data.token_stream import BatchAt

Batch = dict[str, np.ndarray]


def draw_roots(
    weights: Float[np.ndarray, "B T"], *, count: int, seed: tuple[int, ...]
) -> Int[np.ndarray, "B A"]:
    """Return distinct random positions of each row whose next token is learnt, never 0, which has
    no feature before it; T in missing entries. weights: as in `RowTable`."""
    length = weights.shape[1]
    order = np.random.default_rng(seed).random(weights.shape)
    order[(weights <= 0) | (np.arange(length) == 0)] = 2.0
    found = np.argsort(order, axis=1)[:, :count]
    is_root = np.take_along_axis(order, found, axis=1) < 2.0
    return np.where(is_root, found, length).astype(np.int32)


def with_roots(batch_at: BatchAt, *, count: int, seed: int) -> BatchAt:
    """Add roots to batches, as a function of (seed, step) like the batches."""

    def batch(step: int) -> Any:
        return rooted(batch_at(step), count=count, seed=(seed, step, 1))

    return batch


def rooted(batch: Batch, *, count: int, seed: tuple[int, ...]) -> Batch:
    return {**batch, "roots": draw_roots(batch["weights"], count=count, seed=seed)}
