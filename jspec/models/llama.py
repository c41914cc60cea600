"""Llama-like decoder (Llama 2 and 3, and every architecture with the same layer).

`trunk` runs the stack with one `attend` per layer and says nothing about caches: training,
prefill, verification and plain decoding are the same function with different attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core.config import TransformerConfig
from jspec.layers.attention import Attend, Attention
from jspec.layers.embedding import Embedding
from jspec.layers.linear import Linear, Shard
from jspec.layers.mlp import GatedMLP, GatedProduct
from jspec.layers.norm import AddAndNorm, Residual, RMSNorm

Params = dict[str, Any]


class LlamaLayer(nnx.Module):
    """x + Attn(norm(x)), then x + MLP(norm(x)); that last sum is left to whoever comes next."""

    def __init__(
        self, config: TransformerConfig, *, shard: Shard, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.attention = Attention(config, in_size=size, shard=shard, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(size, config.intermediate_size, shard=shard, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        stream: Residual,
        positions: Int[Array, "*b"],
        attend: Attend,
        add_and_norm: AddAndNorm | None = None,
        gated_product: GatedProduct | None = None,
    ) -> Residual:
        x, normed = self.input_norm.of_sum(stream, add_and_norm)
        stream = Residual(x=x, delta=self.attention(normed, positions, attend))
        x, normed = self.post_norm.of_sum(stream, add_and_norm)
        return Residual(x=x, delta=self.mlp(normed, gated_product))


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
    layers: Sequence[Callable[[Residual], Residual]],
    x: Float[Array, "*b E"],
    *,
    aux_layer_ids: tuple[int, ...],
) -> tuple[Residual, Float[Array, "*b A"]]:
    """Runs the stack; also returns the residual stream, summed, at the INPUT of each aux layer.

    What is captured is passed on as one summand: the layer works on the very same numbers.
    An aux id equal to the number of layers is the residual after the last one. The captures are
    concatenated, low to high: [*b, len(aux_layer_ids) * E].
    """
    stream, captured = Residual(x=x), []
    for i, layer in enumerate(layers):
        if i in aux_layer_ids:
            stream = Residual(x=stream.sum())
            captured.append(stream.x)
        stream = layer(stream)
    if len(layers) in aux_layer_ids:
        stream = Residual(x=stream.sum())
        captured.append(stream.x)
    aux = jnp.concatenate(captured, axis=-1) if captured else x[..., :0]
    return stream, aux
