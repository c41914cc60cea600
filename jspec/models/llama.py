"""Llama-like decoder (Llama 2 and 3, and every architecture with the same layer).

`trunk` runs the stack with one `attend` per layer and says nothing about caches: training,
prefill, verification and plain decoding are the same function with different attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core.config import TransformerConfig
from jspec.layers.attention import Attend, Attention
from jspec.layers.embedding import Embedding
from jspec.layers.linear import Linear, Shard
from jspec.layers.mlp import GatedMLP
from jspec.layers.norm import RMSNorm

Params = dict[str, Any]


class LlamaLayer(nnx.Module):
    """x + Attn(norm(x)), then x + MLP(norm(x))."""

    def __init__(
        self, config: TransformerConfig, *, shard: Shard, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.attention = Attention(config, in_size=size, shard=shard, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(size, config.intermediate_size, shard=shard, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*b E"], positions: Int[Array, "*b"], attend: Attend
    ) -> Float[Array, "*b E"]:
        x = x + self.attention(self.input_norm(x), positions, attend)
        return x + self.mlp(self.post_norm(x))


class Llama(nnx.Module):
    """embed, layers, final norm, lm_head [E, V] (sharded by vocabulary)."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        shard: Shard | None = None,
    ) -> None:
        shard = shard or Shard()
        size = config.hidden_size
        self.embed = Embedding(config.vocab_size, size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                LlamaLayer(config, shard=shard, dtype=dtype, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(size, config.vocab_size, dtype=dtype, rngs=rngs)


def split(module: nnx.Module) -> tuple[nnx.GraphDef[Any], Params]:
    """(static definition, plain dict of arrays): all that the hot path ever holds."""
    definition, state = nnx.split(module)
    return definition, nnx.to_pure_dict(state)


def bind(definition: nnx.GraphDef[Any], params: Params) -> Any:
    """The module again, for use while tracing."""
    return nnx.merge(definition, params)


def trunk(
    layers: Sequence[Callable[[jax.Array], jax.Array]],
    x: Float[Array, "*b E"],
    *,
    aux_layer_ids: tuple[int, ...],
) -> tuple[Float[Array, "*b E"], Float[Array, "*b A"]]:
    """Runs the stack; also returns the residual stream at the INPUT of each aux layer.

    An aux id equal to the number of layers is the residual after the last one. The captures are
    concatenated, low to high: [*b, len(aux_layer_ids) * E].
    """
    captured = []
    for i, layer in enumerate(layers):
        if i in aux_layer_ids:
            captured.append(x)
        x = layer(x)
    if len(layers) in aux_layer_ids:
        captured.append(x)
    aux = jnp.concatenate(captured, axis=-1) if captured else x[..., :0]
    return x, aux
