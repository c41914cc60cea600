"""Grouped-query attention as a layer: what `attend` is given, and what becomes of its answer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.core.config import TransformerConfig
from jspec.layers.attention import (
    Attention,
    Rotation,
    causal_attention,
    kv_heads_per_shard,
    rotate_and_split,
)
from jspec.layers.linear import Shard
from jspec.layers.rope import apply_rope

CONFIG = TransformerConfig(
    vocab_size=8,
    hidden_size=12,
    intermediate_size=16,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    attention_bias=True,
)


def test_projections_and_rope_reach_attend() -> None:
    layer = Attention(CONFIG, in_size=12, shard=Shard(), dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert layer.qkv.bias is not None
    layer.qkv.bias[...] = jnp.arange(48.0) / 48
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(5, 12)), jnp.float32)
    positions = jnp.asarray([3, 4, 0, 9, 9], jnp.int32)
    answer = jnp.asarray(rng.normal(size=(5, 4, 6)), jnp.float32)
    given: list[jax.Array] = []

    def attend(heads: jax.Array, rotation: Rotation) -> jax.Array:
        given.extend((heads, *rotate_and_split(heads, rotation)))
        return answer

    out = layer(x, positions, attend)
    heads = (x @ layer.qkv.kernel[...] + layer.qkv.bias[...]).reshape(5, 8, 6)
    q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    np.testing.assert_allclose(given[0], heads, atol=1e-5)
    np.testing.assert_allclose(given[1], apply_rope(q, positions, rope=CONFIG.rope), atol=1e-5)
    np.testing.assert_allclose(given[2], apply_rope(k, positions, rope=CONFIG.rope), atol=1e-5)
    np.testing.assert_allclose(given[3], v, atol=1e-5)
    np.testing.assert_allclose(out, answer.reshape(5, 24) @ layer.out.kernel[...], atol=1e-5)


@pytest.mark.parametrize(("heads", "shards", "each"), [(8, 1, 8), (8, 4, 2), (2, 2, 1), (2, 8, 1)])
def test_kv_heads_are_replicated_beyond_their_number(heads: int, shards: int, each: int) -> None:
    assert kv_heads_per_shard(heads, Shard(shards)) == each


def test_causal_attention_is_the_definition() -> None:
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 7, 4, 6))
    k, v = (rng.normal(size=(2, 7, 2, 6)) for _ in range(2))
    heads = jnp.asarray(np.concatenate((q, k, v), axis=2), jnp.float32)
    still = Rotation(cos=jnp.ones((2, 7, 3)), sin=jnp.zeros((2, 7, 3)), num_heads=4)
    out = np.asarray(causal_attention(heads, still))
    for h in range(4):
        scores = np.einsum("btd,bsd->bts", q[:, :, h], k[:, :, h // 2]) / np.sqrt(6)
        weights = np.exp(scores) * np.tri(7)
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("bts,bsd->btd", weights, v[:, :, h // 2])
        np.testing.assert_allclose(out[:, :, h], expected, rtol=1e-4, atol=1e-5)
