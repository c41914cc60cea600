"""The loss of a draft head over all its depths: its predictions against the target's distribution.

These terms of each depth are weighted by `LossWeights`:

cross       cross entropy to the target's distribution, restricted to the draft vocabulary and
            renormalised, where the target's argmax is in it
overlap     the mass that the two distributions do not share, 1 - sum_v min(p_v, q_v), which with
            shared noise decides acceptance
feature     of a head that predicts features: smooth L1 distance to the target's next feature
selector    of a DFlash2 head: cross entropy of the reranked candidates to the target's argmax,
            which replaces the last candidate if it is not among them
confidence  of a DSpark head: cross entropy of its confidence to the shared mass
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jspec.models.layer import Params
from jspec.spec.model_spec import ModelSpec
from jspec.training.dense import attention_backend, causal_attend, forward, lm_logits
from jspec.training.heads.draft_head import DraftHead, Guess, TargetFeatures
from jspec.training.loop import Loss, Metrics

# ids i32[B, T], weights f32[B, T]; hidden and aux, if stored; roots i32[B, A] of blocks, if any
Batch = dict[str, jax.Array]
FeaturesOf = Callable[[Params, Batch], TargetFeatures]
Unrolled = Callable[[Params, Params, Batch], tuple[TargetFeatures, jax.Array, list[Guess]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """Weights of the loss's terms, and of depth i as a whole: max(decay**i, least)."""

    cross: float = 1.0
    overlap: float = 2.0
    feature: float = 1.0
    selector: float = 1.0
    confidence: float = 1.0
    decay: float = 0.8
    least: float = 0.0

    def of_depth(self, depth: int) -> float:
        return max(self.decay**depth, self.least)


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
        guesses = head.guesses(
            whole,
            batch["ids"],
            features,
            num_depths=num_depths,
            dtype=dtype,
            roots=batch.get("roots"),
        )
        return features, logits, guesses

    return run


def draft_loss(run: Unrolled, weights: LossWeights) -> Loss:
    """Return the loss summed over depths, weighted by `weights` and the batch's own.

    The batch's weight [b, p] is for the target's prediction at position p, which is token p + 1.
    Metrics by depth: the shared mass `overlap` (at most 1) over the whole vocabulary, and
    `accuracy`, the agreement with the target's argmax (one outside the draft vocabulary is a miss).
    """

    def loss(params: Params, frozen: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, Metrics]:
        del key
        features, target_logits, guesses = run(params, frozen, batch)
        draft_ids = frozen["draft_ids"]
        best = jnp.argmax(target_logits, axis=-1)
        in_draft = jnp.zeros((target_logits.shape[-1],), bool).at[draft_ids].set(True)
        probs = jax.nn.softmax(target_logits, axis=-1)
        probs = jnp.take(probs, draft_ids, axis=-1, mode="clip")
        total, by_depth = jnp.zeros(()), []
        for i, guess in enumerate(guesses):
            at = _Places.of(guess, depth=i)
            depth_loss, metrics = _of_depth(
                guess,
                weights,
                counts=at.take(batch["weights"], beyond=0.0),
                probs=at.take(probs),
                best=at.take(best),
                in_draft=in_draft,
                draft_ids=draft_ids,
                feature=at.take(features.hidden),
            )
            total = total + weights.of_depth(i) * depth_loss
            by_depth.append(metrics)
        return total, jax.tree.map(lambda *values: jnp.stack(values), *by_depth)

    return loss


@dataclass(frozen=True, slots=True)
class _Places:
    depth: int
    roots: jax.Array | None

    @classmethod
    def of(cls, guess: Guess, *, depth: int) -> _Places:
        return cls(depth, guess.roots)

    def take(self, x: jax.Array, *, beyond: float | None = None) -> jax.Array:
        """Return the entries of x [B, T, ...]. beyond: their value after the row's end."""
        if self.roots is None:
            return x[:, 1 + self.depth :]
        places = self.roots + self.depth
        shape = (*places.shape, *(1,) * (x.ndim - 2))
        found = jnp.take_along_axis(x, places.reshape(shape), axis=1, mode="clip")
        return found if beyond is None else jnp.where(places < x.shape[1], found, beyond)


def _of_depth(
    guess: Guess,
    weights: LossWeights,
    *,
    counts: Float[Array, "B R"],
    probs: Float[Array, "B R U"],
    best: Int[Array, "B R"],
    in_draft: Bool[Array, "V"],
    draft_ids: Int[Array, "U"],
    feature: Float[Array, "B R E"],
) -> tuple[jax.Array, Metrics]:
    """Return (loss, metrics) of a depth. best: the target's argmax; probs: of the draft ids."""
    log_q = jax.nn.log_softmax(guess.logits, axis=-1)
    teacher = probs / jnp.maximum(jnp.sum(probs, axis=-1, keepdims=True), 1e-20)
    cross = -jnp.sum(teacher * log_q, axis=-1)
    shared = jnp.sum(jnp.minimum(probs, jnp.exp(log_q)), axis=-1)
    guessed = jnp.take(draft_ids, _first_choice(guess), mode="clip")
    metrics = {
        "accuracy": _mean((guessed == best).astype(jnp.float32), counts),
        "overlap": _mean(shared, counts),
    }
    is_in_draft = jnp.take(in_draft, best, mode="clip").astype(jnp.float32)
    loss = weights.cross * _mean(is_in_draft * cross, counts)
    loss = loss + weights.overlap * (1.0 - metrics["overlap"])
    if guess.feature is not None:
        metrics["feature"] = _mean(_feature_distance(guess.feature, feature), counts)
        loss = loss + weights.feature * metrics["feature"]
    if guess.reranked is not None:
        metrics["selector"] = _mean(_selector_loss(guess, guess.reranked, best), counts)
        loss = loss + weights.selector * metrics["selector"]
    if guess.confidence is not None:
        wanted = jax.lax.stop_gradient(shared)
        missed = optax.sigmoid_binary_cross_entropy(guess.confidence, wanted)
        metrics["confidence"] = _mean(missed, counts)
        loss = loss + weights.confidence * metrics["confidence"]
    return loss, metrics


def _candidates(guess: Guess) -> Int[Array, "B R C"]:
    return jax.lax.top_k(jax.lax.stop_gradient(guess.logits), guess.num_candidates)[1]


def _first_choice(guess: Guess) -> Int[Array, "B R"]:
    if guess.reranked is None:
        return jnp.argmax(guess.logits, axis=-1)
    found = _candidates(guess)
    first = jnp.argmax(jnp.take_along_axis(guess.reranked, found, axis=-1), axis=-1)
    return jnp.take_along_axis(found, first[..., None], axis=-1)[..., 0]


def _selector_loss(
    guess: Guess, reranked: Float[Array, "B R V"], best: Int[Array, "B R"]
) -> Float[Array, "B R"]:
    """Return the loss of reranking. `best` are also columns: the whole vocabulary is drafted."""
    found = _candidates(guess)
    is_best = found == best[..., None]
    is_among = jnp.any(is_best, axis=-1)
    found = found.at[..., -1].set(jnp.where(is_among, found[..., -1], best))
    place = jnp.where(is_among, jnp.argmax(is_best, axis=-1), found.shape[-1] - 1)
    log_q = jax.nn.log_softmax(jnp.take_along_axis(reranked, found, axis=-1), axis=-1)
    return -jnp.take_along_axis(log_q, place[..., None], axis=-1)[..., 0]


def _mean(values: Float[Array, "B R"], weights: Float[Array, "B R"]) -> jax.Array:
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def _feature_distance(
    found: Float[Array, "B R E"], wanted: Float[Array, "B R E"]
) -> Float[Array, "B R"]:
    wide = (x.astype(jnp.float32) for x in (found, wanted))
    return jnp.mean(optax.huber_loss(*wide, delta=1.0), axis=-1)
