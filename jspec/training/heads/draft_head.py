"""What a head is to the trainer: how it starts, what it guesses at every depth, how it is stored.

One class a kind of head implements it: EAGLE-1, EAGLE-3, layers for multi-token prediction. The
loss, the batches, the loop and the export know this alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jspec.device.pytree import pytree
from jspec.models.decoder import Params
from jspec.spec.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec
from jspec.spec.rope import RopeConfig


@pytree
class TargetFeatures:
    """What the target made of B rows of T tokens."""

    hidden: jax.Array  # [B, T, E], after the final norm
    aux: jax.Array  # [B, T, A], the residual at the input of the head's aux layers, side by side


@pytree
class Guess:
    """One depth. Row t's logits guess token t + 2 + depth; rows 0..T-2-depth."""

    logits: jax.Array  # f32[B, T - 1 - depth, U]
    feature: jax.Array | None = None  # [B, T - 1 - depth, E], of a head that guesses features, too


class DraftHead(Protocol):
    """A head over a target. aux_layer_ids: the captures that it reads beside the last hidden."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...

    def init(self, target_params: Params, draft_ids: np.ndarray, *, seed: int) -> Params:
        """Trainable float32 parameters; what is the target's is not among them."""

    def whole(self, params: Params, target_params: Params, draft_ids: Any) -> Params:
        """The parameters as they are served: the trained ones, and the target's that it shares."""

    def guesses(
        self,
        params: Params,
        token_ids: Int[Array, "B T"],
        features: TargetFeatures,
        *,
        num_depths: int,
        dtype: DTypeLike,
    ) -> list[Guess]:
        """Of each depth; params: `whole`."""

    def save(
        self, folder: Path, params: Params, *, draft_ids: np.ndarray, dtype: Any, target: ModelSpec
    ) -> None:
        """config.json and model.safetensors in the public layout. params: `whole`, or those of
        them that the layout stores."""


def plain_layer(target: ModelSpec, *, intermediate_size: int) -> LayerSpec:
    """A layer with its target's heads and nothing else of it; RoPE theta 10000, as published heads
    have."""
    given = target.layers[-1].attention
    attention = AttentionSpec(
        num_heads=given.num_heads,
        num_kv_heads=given.num_kv_heads,
        head_dim=given.head_dim,
        rope=RopeConfig(theta=10000.0),
    )
    return LayerSpec(
        attention=attention, ffn=DenseSpec(inner=intermediate_size), eps=target.rms_norm_eps
    )


def one_layer_model(target: ModelSpec, layer: LayerSpec) -> ModelSpec:
    """A Llama of that layer, as wide as the target and with its vocabulary."""
    return replace(target, layers=(layer,), tie_word_embeddings=False, family="llama")


def inner_size(target: ModelSpec) -> int:
    """The inner width of the target's own MLPs, or four times its width where it has none."""
    inner = (x.ffn.inner for x in target.layers if isinstance(x.ffn, DenseSpec))
    return next(inner, 4 * target.hidden_size)
