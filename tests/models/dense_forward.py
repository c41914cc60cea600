"""A target over a whole text at once, by dense attention: no cache, no pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jspec.layers.attention import Attend, causal_attention
from jspec.layers.embedding import embed
from jspec.layers.linear import logits_of
from jspec.layers.norm import norm
from jspec.models.decoder import trunk
from jspec.models.layer import LayerSettings, Params, run_layer
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import AttentionSpec
from jspec.spec.model_spec import ModelSpec


def of_all_keys(_: AttentionSpec) -> Attend:
    return causal_attention


def dense_hidden(
    spec: ModelSpec,
    params: Params,
    token_ids: jax.Array,
    *,
    aux_layer_ids: tuple[int, ...] = (),
    attend_of: Callable[[AttentionSpec], Attend] = of_all_keys,
) -> tuple[jax.Array, jax.Array]:
    """Return (normed hidden [B, T, E], aux_hidden [B, T, A]) of token_ids [B, T]; for use in a
    jit."""
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    layers = [
        partial(
            run_layer,
            params["layers"][i],
            positions=positions,
            attend=attend_of(layer.attention),
            spec=layer,
            settings=LayerSettings(Ops()),
        )
        for i, layer in enumerate(spec.layers)
    ]
    stream, aux = trunk(layers, embed(params["embed"], token_ids), aux_layer_ids=aux_layer_ids)
    return norm(params["norm"], stream.sum(), eps=spec.rms_norm_eps), aux


def dense_forward(
    spec: ModelSpec,
    params: Params,
    token_ids: Any,
    *,
    aux_layer_ids: tuple[int, ...],
    attend_of: Callable[[AttentionSpec], Attend] = of_all_keys,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (logits[T, V], normed hidden[T, E], aux_hidden[T, A]) of token_ids[T], in float32."""
    run = jax.jit(partial(dense_hidden, spec, aux_layer_ids=aux_layer_ids, attend_of=attend_of))
    with jax.default_matmul_precision("highest"):
        hidden, aux = run(params, jnp.asarray(token_ids)[None])
        logits = logits_of(hidden, jnp.asarray(params["lm_head"]["kernel"]))
    return logits[0], hidden[0], aux[0]
