"""Training of any kind of draft head over a frozen target, from rows of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.layer import Params
from jspec.training.data.roots import rooted, with_roots
from jspec.training.data.token_stream import BatchAt
from jspec.training.data_parallel import Placement
from jspec.training.draft_loss import (
    FeaturesOf,
    LossWeights,
    draft_loss,
    make_frozen,
    make_unrolled,
)
from jspec.training.heads.draft_head import DraftHead
from jspec.training.loop import LoopConfig, Result, mean_metrics, train

Evaluation = Callable[[Params], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecipe:
    loop: LoopConfig
    batch_size: int = 32
    length: int = 1024
    num_depths: int = 5  # tokens ahead to predict
    sample_share: float = 0.875  # share of a batch sampled from the target (bundled pair)
    num_roots: int = 0  # blocks per row, for a head that drafts blocks
    loss_weights: LossWeights = field(default_factory=LossWeights)
    compute_dtype: Any = jnp.bfloat16


def draft_vocabulary(tables: list[np.ndarray], *, vocab_size: int, size: int) -> np.ndarray:
    """Return i32[size], ascending: the most frequent ids over all tables (ties: lower id first)."""
    counts = sum(np.bincount(table.ravel(), minlength=vocab_size) for table in tables)
    return np.sort(np.argsort(-np.asarray(counts), kind="stable")[:size]).astype(np.int32)


def all_count(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"ids": ids, "weights": np.ones(ids.shape, np.float32)}


def train_head(
    head: DraftHead,
    target_params: Params,
    recipe: HeadRecipe,
    *,
    features_of: FeaturesOf,
    draft_ids: np.ndarray,
    batch_at: BatchAt,
    held_out: dict[str, np.ndarray],
    checkpoint_dir: Path | None = None,
    placement: Placement | None = None,
    also: Evaluation | None = None,
) -> Result:
    """Train; the loss on held_out [R, ...] selects the parameters. also: further measurements."""
    placement = placement or Placement.single()
    run = make_unrolled(head, features_of, num_depths=recipe.num_depths, dtype=recipe.compute_dtype)
    loss = draft_loss(run, recipe.loss_weights)
    if recipe.num_roots:
        count, seed = recipe.num_roots, recipe.loop.seed
        batch_at = with_roots(batch_at, count=count, seed=seed)
        held_out = rooted(held_out, count=count, seed=(seed,))
    frozen = placement.whole(make_frozen(target_params, draft_ids))
    jitted = jax.jit(lambda params, frozen, batch: loss(params, frozen, batch, jax.random.key(0)))

    def measure(params: Params) -> dict[str, Any]:
        found = mean_metrics(
            lambda batch: jitted(params, frozen, placement.batch(batch)),
            held_out,
            batch_size=recipe.batch_size,
        )
        return {**found, **(also(params) if also else {})}

    return train(
        "head",
        config=recipe.loop,
        loss=loss,
        initial=head.init(target_params, draft_ids, seed=recipe.loop.seed),
        frozen=frozen,
        batch_at=batch_at,
        evaluate=measure,
        checkpoint_dir=checkpoint_dir,
        placement=placement,
        tokens_a_step=recipe.batch_size * recipe.length,
    )
