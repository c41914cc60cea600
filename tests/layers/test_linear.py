"""Linear, norm, MLP and embedding against numpy, alone and over two fake devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jspec.layers.embedding import Embedding
from jspec.layers.linear import Linear, Shard, logits_of
from jspec.layers.mlp import GatedMLP
from jspec.layers.norm import RMSNorm

REPLICATED = PartitionSpec()


def mesh_of_two() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))


def test_linear_multiplies_and_adds() -> None:
    rng = np.random.default_rng(0)
    layer = Linear(6, 4, dtype=jnp.float32, rngs=nnx.Rngs(0), bias=True)
    assert layer.bias is not None
    layer.bias[...] = jnp.arange(4.0)
    x = rng.normal(size=(2, 3, 6)).astype(np.float32)
    expected = x @ np.asarray(layer.kernel[...]) + np.arange(4)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_sums_once_and_adds_its_bias_once(bias: bool) -> None:
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(8, 5)).astype(np.float32)
    offset = np.arange(5, dtype=np.float32)
    x = rng.normal(size=(3, 8)).astype(np.float32)
    shard = Shard(2, "tensor")
    layer = Linear(4, 5, dtype=jnp.float32, rngs=nnx.Rngs(0), bias=bias, reduce=shard)
    definition, _ = nnx.split(layer)

    def half(x: jax.Array, kernel: jax.Array) -> jax.Array:
        values = {"kernel": kernel, **({"bias": jnp.asarray(offset)} if bias else {})}
        own = nnx.merge(definition, nnx.State({k: nnx.Param(v) for k, v in values.items()}))
        return own(x)[None]

    both = jax.jit(
        jax.shard_map(
            half,
            mesh=mesh_of_two(),
            in_specs=(PartitionSpec(None, "tensor"), PartitionSpec("tensor", None)),
            out_specs=PartitionSpec("tensor"),
            check_vma=False,
        )
    )(jnp.asarray(x), jnp.asarray(kernel))
    np.testing.assert_array_equal(both[0], both[1])
    np.testing.assert_allclose(both[0], x @ kernel + bias * offset, rtol=1e-5, atol=1e-5)


def test_logits_leave_in_float32() -> None:
    hidden, kernel = jnp.full((1, 3), 1 / 3, jnp.bfloat16), jnp.full((3, 2), 1 / 3, jnp.bfloat16)
    logits = logits_of(hidden, kernel)
    assert logits.dtype == jnp.float32
    third = float(hidden[0, 0])
    np.testing.assert_allclose(logits, 3 * third * third, rtol=1e-6)  # not rounded to bf16


def test_norm_is_computed_in_float32() -> None:
    layer = RMSNorm(4, eps=1e-5, dtype=jnp.float32)
    layer.scale[...] = jnp.asarray([1.0, 2.0, 0.5, 1.0])
    x = np.array([[3.0, -1.0, 0.0, 2.0], [1e-4, 0, 0, 0]], np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected * [1, 2, 0.5, 1], rtol=1e-5)
    # 1 + 2**-8 is no bf16 number: a mean square taken in bf16 would be off by that much.
    coarse = jnp.asarray([[1.0, 1.0078125, 1.0, 1.0078125]], jnp.bfloat16)
    exact = np.asarray(coarse, np.float64) / np.sqrt((np.asarray(coarse, np.float64) ** 2).mean())
    result = layer(coarse)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(result.astype(jnp.float32), exact * [1, 2, 0.5, 1], rtol=2**-8)


def test_mlp_is_silu_gated() -> None:
    rng = np.random.default_rng(2)
    mlp = GatedMLP(4, 6, shard=Shard(), dtype=jnp.float32, rngs=nnx.Rngs(3))
    x = rng.normal(size=(5, 4))
    both = x @ np.asarray(mlp.gate_up.kernel[...], np.float64)
    gate, up = both[:, :6], both[:, 6:]
    expected = (gate / (1 + np.exp(-gate)) * up) @ np.asarray(mlp.down.kernel[...], np.float64)
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), expected, rtol=1e-4, atol=1e-5)


def test_embedding_reads_rows() -> None:
    layer = Embedding(7, 3, dtype=jnp.float32, rngs=nnx.Rngs(0))
    table = np.asarray(layer.table[...])
    ids = jnp.asarray([[0, 6], [3, 3]], jnp.int32)
    np.testing.assert_array_equal(layer(ids), table[np.asarray(ids)])
