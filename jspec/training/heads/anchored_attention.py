"""Attention of heads that draft blocks at roots within a row (DFlash, arXiv:2602.06036; P-EAGLE).

The block of root r is at positions r, r + 1, ... Its tokens see the text before r and each other,
but no other block, so any number of blocks in a row share the keys and values of its text.

    T = 6, roots 2 and 4, blocks of 3 tokens
    root 2: text 0 1 | its block at 2 3 4
    root 4: text 0 1 2 3 | its block at 4 5 6
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.spec.layers.attention import AttentionSpec
from jspec.training.dense import attend_dense


class AnchoredAttention:
    """An `attend` of a layer. is_causal: tokens see no later token of their block."""

    def __init__(
        self,
        keys: Float[Array, "B T G D"],
        values: Float[Array, "B T G D"],
        roots: Int[Array, "B A"],
        *,
        spec: AttentionSpec,
        is_causal: bool,
    ) -> None:
        self._text = keys, values
        self._roots, self._spec, self._is_causal = roots, spec, is_causal

    def __call__(
        self, heads: Float[Array, "N heads D"], rotation: Rotation, sinks: jax.Array | None
    ) -> Float[Array, "N H D"]:
        del sinks  # heads trained here have none
        q, k, v = rotate_and_split(heads, rotation)
        batch, num_roots = self._roots.shape
        k, v = (x.reshape(batch, num_roots, -1, *x.shape[1:]) for x in (k, v))
        grouped = q.reshape(*k.shape[:4], -1, q.shape[-1])
        run = partial(_attend, scale=self._spec.softmax_scale, is_causal=self._is_causal)
        # the scores of all blocks over the text are recomputed in the backward pass
        return jax.checkpoint(run)(grouped, *self._text, k, v, self._roots).reshape(q.shape)


def _attend(
    queries: Float[Array, "B A R G Q D"],
    keys: Float[Array, "B T G D"],
    values: Float[Array, "B T G D"],
    own_keys: Float[Array, "B A R G D"],
    own_values: Float[Array, "B A R G D"],
    roots: Int[Array, "B A"],
    *,
    scale: float,
    is_causal: bool,
) -> Float[Array, "B A R G Q D"]:
    size, length = queries.shape[2], keys.shape[1]
    text = jnp.einsum("barghd,btgd->baghrt", queries, keys, preferred_element_type=jnp.float32)
    is_before = jnp.arange(length) < roots[:, :, None]
    text = jnp.where(is_before[:, :, None, None, None], text, -jnp.inf)
    own = jnp.einsum("barghd,bacgd->baghrc", queries, own_keys, preferred_element_type=jnp.float32)
    if is_causal:
        own = jnp.where(jnp.tril(jnp.ones((size, size), bool)), own, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate((text, own), axis=-1) * scale, axis=-1)
    weights = weights.astype(values.dtype)
    mixed = jnp.einsum("baghrt,btgd->barghd", weights[..., :length], values)
    return mixed + jnp.einsum("baghrc,bacgd->barghd", weights[..., length:], own_values)


class RecordedText:
    """A causal `attend` of a layer over a text, which keeps the keys and values for blocks."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.keys: Any = None
        self.values: Any = None

    def __call__(
        self, heads: Float[Array, "B T heads D"], rotation: Rotation, sinks: jax.Array | None
    ) -> Float[Array, "B T H D"]:
        del sinks
        q, self.keys, self.values = rotate_and_split(heads, rotation)
        return attend_dense(q, self.keys, self.values, backend="xla", spec=self.spec)


def block_positions(roots: Int[Array, "B A"], *, size: int) -> Int[Array, "N"]:
    return (roots[..., None] + jnp.arange(size, dtype=roots.dtype)).reshape(-1)
