"""The loss of a draft head over all its depths: its predictions against the target's distribution.

At depth i, weighing 0.8**i, it is the cross entropy to the target's distribution, restricted to the
draft vocabulary and renormalised, where the target's argmax is in it; plus `overlap_weight` times
the mass that the two distributions do not share, 1 - sum_v min(p_v, q_v), which with shared noise
decides acceptance; plus, for a head that predicts features, `feature_weight` times the smooth L1
distance to the target's next feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jspec.models.decoder import Params
from jspec.spec.model_spec import ModelSpec
from jspec.training.dense import attention_backend, causal_attend, forward, lm_logits
from jspec.training.heads.draft_head import DraftHead, Guess, TargetFeatures
from jspec.training.loop import Loss, Metrics

STEP_DECAY = 0.8
Batch = dict[str, jax.Array]  # ids i32[B, T], weights f32[B, T]; hidden and aux, if stored
FeaturesOf = Callable[[Params, Batch], TargetFeatures]
Unrolled = Callable[[Params, Params, Batch], tuple[TargetFeatures, jax.Array, list[Guess]]]


def make_frozen(target_params: Params, draft_ids: Any) -> Params:
    return {
        "target": jax.tree.map(jnp.asarray, target_params),
        "draft_ids": jnp.asarray(draft_ids),
    }


def features_on_the_fly(
    target: ModelSpec, head: DraftHead, *, length: int, dtype: Any
) -> FeaturesOf:
    attend = causal_attend(attention_backend(target, length=length, dtype=dtype))

    def features(target_params: Params, batch: Batch) -> TargetFeatures:
        hidden, aux = forward(
            target,
            target_params,
            batch["ids"],
            dtype=dtype,
            attend=attend,
            aux_layer_ids=head.aux_layer_ids,
        )
        return TargetFeatures(hidden=hidden, aux=aux)

    return features


def stored_features(target_params: Params, batch: Batch) -> TargetFeatures:
    del target_params
    return TargetFeatures(hidden=batch["hidden"], aux=batch["aux"])


def make_unrolled(
    head: DraftHead, features_of: FeaturesOf, *, num_depths: int, dtype: Any
) -> Unrolled:
    """Return (trained params, frozen, batch) -> (features, target logits [B, T, V], guesses)."""

    def run(
        params: Params, frozen: Params, batch: Batch
    ) -> tuple[TargetFeatures, jax.Array, list[Guess]]:
        features = jax.lax.stop_gradient(features_of(frozen["target"], batch))
        logits = jax.lax.stop_gradient(lm_logits(frozen["target"], features.hidden))
        cast = jax.tree.map(lambda x: x.astype(dtype) if x.ndim >= 2 else x, params)
        whole = head.whole(cast, frozen["target"], frozen["draft_ids"])
        guesses = head.guesses(whole, batch["ids"], features, num_depths=num_depths, dtype=dtype)
        return features, logits, guesses

    return run


def draft_loss(run: Unrolled, *, overlap_weight: float = 0.0, feature_weight: float = 0.0) -> Loss:
    """Return the sum of the loss over depths, weighted by `weights`.

    weights[b, p] is for the target's prediction at position p, which is token p + 1. Metrics by
    depth: the shared mass `overlap` (at most 1) over the whole vocabulary, and `accuracy`, the
    agreement with the target's argmax (one outside the draft vocabulary is a miss).
    """

    def loss(params: Params, frozen: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Metrics]:
        del key
        features, target_logits, guesses = run(params, frozen, batch)
        draft_ids = frozen["draft_ids"]
        best = jnp.argmax(target_logits, axis=-1)
        in_draft = jnp.zeros((target_logits.shape[-1],), bool).at[draft_ids].set(True)
        is_in_draft = jnp.take(in_draft, best, mode="clip").astype(jnp.float32)
        probs = jax.nn.softmax(target_logits, axis=-1)
        probs = jnp.take(probs, draft_ids, axis=-1, mode="clip")
        teacher = probs / jnp.maximum(jnp.sum(probs, axis=-1, keepdims=True), 1e-20)
        total, by_depth = jnp.zeros(()), []
        for i, guess in enumerate(guesses):
            weights = batch["weights"][:, 1 + i :]
            log_q = jax.nn.log_softmax(guess.logits, axis=-1)
            cross = -jnp.sum(teacher[:, 1 + i :] * log_q, axis=-1)
            shared = jnp.sum(jnp.minimum(probs[:, 1 + i :], jnp.exp(log_q)), axis=-1)
            guessed = jnp.take(draft_ids, jnp.argmax(guess.logits, axis=-1), mode="clip")
            metrics = {
                "accuracy": _mean((guessed == best[:, 1 + i :]).astype(jnp.float32), weights),
                "overlap": _mean(shared, weights),
            }
            step_loss = _mean(is_in_draft[:, 1 + i :] * cross, weights)
            step_loss = step_loss + overlap_weight * (1.0 - metrics["overlap"])
            if guess.feature is not None:
                wanted = features.hidden[:, 1 + i :]
                metrics["feature"] = _mean(_feature_distance(guess.feature, wanted), weights)
                step_loss = step_loss + feature_weight * metrics["feature"]
            total = total + STEP_DECAY**i * step_loss
            by_depth.append(metrics)
        return total, jax.tree.map(lambda *values: jnp.stack(values), *by_depth)

    return loss


def _mean(values: Float[Array, "B R"], weights: Float[Array, "B R"]) -> jax.Array:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def _feature_distance(
    found: Float[Array, "B R E"], wanted: Float[Array, "B R E"]
) -> Float[Array, "B R"]:
    wide = (x.astype(jnp.float32) for x in (found, wanted))
    return jnp.mean(optax.huber_loss(*wide, delta=1.0), axis=-1)
