"""The trainer's interface of a draft head: initialisation, predictions at every depth, storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.device.pytree import pytree, static
from jspec.models.layer import Params
from jspec.spec.layers.attention import AttentionSpec, LatentAttentionSpec
from jspec.spec.layers.feed_forward import DenseSpec
from jspec.spec.model_spec import LayerSpec, ModelSpec
from jspec.spec.rope import RopeConfig


@pytree
class TargetFeatures:
    hidden: jax.Array  # [B, T, E], after the final norm
    aux: jax.Array  # [B, T, A], concatenated residuals at the inputs of the head's aux layers


@pytree
class Guess:
    """The predictions of one depth: logits[:, i] predict the token at roots[:, i] + 1 + depth.
    roots: of blocks; T in entries without a block. None: R = T - 1 - depth, roots 1 to R."""

    logits: jax.Array  # f32[B, R, U]
    feature: jax.Array | None = None  # [B, R, E], if the head predicts features
    roots: jax.Array | None = None  # i32[B, R]
    reranked: jax.Array | None = None  # f32[B, R, U], the logits with a selector's terms
    confidence: jax.Array | None = None  # f32[B, R], logits of the probability of acceptance
    num_candidates: int = static(default=0)  # of `reranked`, those with the best logits count


class DraftHead(Protocol):
    """A head over a target. aux_layer_ids: captures that it reads besides the last hidden."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...

    def init(self, target_params: Params, draft_ids: np.ndarray, *, seed: int) -> Params:
        """Return trainable float32 parameters, without those shared with the target."""

    def whole(self, params: Params, target_params: Params, draft_ids: Any) -> Params:
        """Return the served parameters: the trained ones, and those shared with the target."""

    def guesses(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        features: TargetFeatures,
        *,
        num_depths: int,
        dtype: DTypeLike,
        roots: Int[Array, "B A"] | None = None,
    ) -> list[Guess]:
        """Return the predictions of each depth. params: from `whole`. roots: of blocks."""

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        """Write config.json and model.safetensors in the public layout. params: from `whole`."""


def plain_layer(target: ModelSpec, *, intermediate_size: int) -> LayerSpec:
    """Return a layer with its target's attention heads and RoPE theta 10000, as published."""
    given = target.layers[-1].softmax_attention
    is_latent = isinstance(given, LatentAttentionSpec)
    attention = AttentionSpec(
        num_heads=given.num_heads,
        num_kv_heads=given.num_kv_heads,
        head_dim=given.value_dim if is_latent else given.head_dim,
        rope=RopeConfig(theta=10000.0),
    )
    return LayerSpec(
        attention=attention, ffn=DenseSpec(inner=intermediate_size), eps=target.rms_norm_eps
    )


def layers_over(target: ModelSpec, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    return replace(target, layers=layers, tie_word_embeddings=False, family="llama")


def inner_size(target: ModelSpec) -> int:
    """Return the inner size of the target's first MLP; without one, four times its hidden size."""
    inner = (x.ffn.inner for x in target.layers if isinstance(x.ffn, DenseSpec))
    return next(inner, 4 * target.hidden_size)
