"""The EAGLE-3 draft head (Li et al., 2025, arXiv:2503.01840).

row i of the draft holds the pair (token i + 1, feature of position i)
e = embed(token), h = fc([low; mid; high]) for a target feature, else the parent's own output
u = [input_norm(e); hidden_norm(h)]             width 2E, embedding first
h1 = res + attention(u)                         res = h (norm_before_residual: hidden_norm(h))
h2 = h1 + mlp(post_norm(h1))                    h2, before the final norm, is fed back
logits = lm_head(norm(h2))                      over the draft vocabulary U
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core.config import Eagle3Config
from jspec.layers.attention import Attend, Attention
from jspec.layers.embedding import Embedding
from jspec.layers.linear import Linear, Shard
from jspec.layers.mlp import GatedMLP, GatedProduct
from jspec.layers.norm import AddAndNorm, Residual, RMSNorm


class Eagle3Layer(nnx.Module):
    """The head's one layer: attention over [embedding; hidden], as wide as 2E at its input."""

    def __init__(
        self, config: Eagle3Config, *, shard: Shard, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        layer = config.layer
        size, eps = layer.hidden_size, layer.rms_norm_eps
        self.input_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.attention = Attention(layer, in_size=2 * size, shard=shard, dtype=dtype, rngs=rngs)
        self.post_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(size, layer.intermediate_size, shard=shard, dtype=dtype, rngs=rngs)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        embedded: Float[Array, "*b E"],
        hidden: Float[Array, "*b E"],
        positions: Int[Array, "*b"],
        attend: Attend,
        add_and_norm: AddAndNorm | None = None,
        gated_product: GatedProduct | None = None,
    ) -> Float[Array, "*b E"]:
        normed = self.hidden_norm(hidden)
        wide = jnp.concatenate((self.input_norm(embedded), normed), axis=-1)
        residual = normed if self.norm_before_residual else hidden
        stream = Residual(x=residual, delta=self.attention(wide, positions, attend))
        x, normed = self.post_norm.of_sum(stream, add_and_norm)
        return x + self.mlp(normed, gated_product)


class DraftVocabulary(nnx.Variable[Any]):
    """i32[U] target ids; not a parameter, so no optimizer ever moves it."""


class Eagle3(nnx.Module):
    """fc over the aux features, one layer, own norm and lm_head [E, U], d2t as target ids.

    draft_ids[u] is the TARGET id of draft id u (checkpoints store the offset, d2t[u] = id - u).
    """

    def __init__(
        self,
        config: Eagle3Config,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        shard: Shard | None = None,
    ) -> None:
        shard = shard or Shard()
        layer = config.layer
        size = layer.hidden_size
        in_size = len(config.aux_layer_ids) * config.target_hidden_size
        self.embed = Embedding(layer.vocab_size, size, dtype=dtype, rngs=rngs)
        self.fc = Linear(in_size, size, dtype=dtype, rngs=rngs)
        self.layer = Eagle3Layer(config, shard=shard, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(size, eps=layer.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(size, config.draft_vocab_size, dtype=dtype, rngs=rngs)
        self.draft_ids = DraftVocabulary(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))

    def features(self, aux_hidden: Float[Array, "*b A"]) -> Float[Array, "*b E"]:
        """Fuses the target's aux features; applied once, never to the head's own output."""
        return self.fc(aux_hidden)
