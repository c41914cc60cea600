"""Linear, norm, MLP and embedding against numpy, alone and over two fake devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jspec.device.peers import Peers
from jspec.device.weights import Weight
from jspec.layers import linear as linear_module
from jspec.layers.embedding import embed
from jspec.layers.linear import Shard, all_columns, linear, logits_of
from jspec.layers.mlp import gated_mlp
from jspec.layers.norm import Residual, norm, norm_of_sum
from jspec.pallas_kernels.ops import Ops

REPLICATED = PartitionSpec()


def mesh_of_two() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",))


def test_linear_multiplies_and_adds() -> None:
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(6, 4)).astype(np.float32)
    params = {"kernel": jnp.asarray(kernel), "bias": jnp.arange(4.0)}
    x = rng.normal(size=(2, 3, 6)).astype(np.float32)
    expected = x @ kernel + np.arange(4)
    np.testing.assert_allclose(
        linear(params, jnp.asarray(x), ops=Ops()), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("columns", [6, 3])
@pytest.mark.parametrize("rows", [4, 600])
def test_columns_gathered_between_peers_are_those_of_a_collective(
    columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 rows of 6 are more words than the draft's area of a narrow buffer has."""
    sent: list[int] = []

    def gather(words: jax.Array, peers: Peers) -> jax.Array:
        assert words.size <= peers.most_words
        sent.append(words.size)
        return jax.lax.all_gather(words, "tensor")

    monkeypatch.setattr(linear_module, "gather_over_peers", gather)
    peers = Peers(table=jnp.zeros(7, jnp.int32), width=4)
    x = jax.random.normal(jax.random.key(0), (rows, 2 * columns), jnp.bfloat16)
    whole = jax.shard_map(
        lambda x: all_columns(Shard(2, "tensor", peers=peers), x)[None],
        mesh=mesh_of_two(),
        in_specs=PartitionSpec(None, "tensor"),
        out_specs=PartitionSpec("tensor"),
        check_vma=False,
    )(x)
    assert (np.asarray(whole) == np.asarray(x)[None]).all()
    assert sent == ([rows * columns // 2] if (rows, columns) == (4, 6) else [])


class HalvedOps(Ops):
    def sums_halves(self, kernel: Weight, shards: int) -> bool:
        return isinstance(kernel, jax.Array) and shards > 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ops", [Ops(), HalvedOps()], ids=lambda ops: type(ops).__name__)
def test_row_parallel_sums_once_and_adds_its_bias_once(bias: bool, ops: Ops) -> None:
    rng = np.random.default_rng(1)
    kernel = rng.normal(size=(8, 6)).astype(np.float32)
    offset = np.arange(6, dtype=np.float32)
    x = rng.normal(size=(3, 8)).astype(np.float32)
    shard = Shard(2, "tensor")

    def half(x: jax.Array, kernel: jax.Array) -> jax.Array:
        params = {"kernel": kernel, **({"bias": jnp.asarray(offset)} if bias else {})}
        return linear(params, x, ops=ops, reduce=shard)[None]

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
    params = {"scale": jnp.asarray([1.0, 2.0, 0.5, 1.0])}
    x = np.array([[3.0, -1.0, 0.0, 2.0], [1e-4, 0, 0, 0]], np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    result = norm(params, jnp.asarray(x), eps=1e-5)
    np.testing.assert_allclose(result, expected * [1, 2, 0.5, 1], rtol=1e-5)
    # 1 + 2**-8 is no bf16 number: a mean square taken in bf16 would be off by that much.
    coarse = jnp.asarray([[1.0, 1.0078125, 1.0, 1.0078125]], jnp.bfloat16)
    exact = np.asarray(coarse, np.float64) / np.sqrt((np.asarray(coarse, np.float64) ** 2).mean())
    result = norm(params, coarse, eps=1e-5)
    assert result.dtype == jnp.bfloat16
    np.testing.assert_allclose(result.astype(jnp.float32), exact * [1, 2, 0.5, 1], rtol=2**-8)


@pytest.mark.parametrize("bias", [False, True])
def test_mlp_is_silu_gated(bias: bool) -> None:
    rng = np.random.default_rng(2)
    x, gate_up, down = (rng.normal(size=size) for size in ((5, 4), (4, 12), (6, 4)))
    biases = {"gate_up": rng.normal(size=12), "down": rng.normal(size=4)}
    params = {name: {"kernel": value} for name, value in (("gate_up", gate_up), ("down", down))}
    if bias:
        params = {name: {**params[name], "bias": biases[name]} for name in params}
    both = x @ gate_up + bias * biases["gate_up"]
    gate, up = both[:, :6], both[:, 6:]
    expected = (gate / (1 + np.exp(-gate)) * up) @ down + bias * biases["down"]
    params, x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))
    mine = gated_mlp(params, x, shard=Shard(), ops=Ops())
    np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def test_embedding_reads_rows() -> None:
    table = np.random.default_rng(3).normal(size=(7, 3)).astype(np.float32)
    ids = jnp.asarray([[0, 6], [3, 3]], jnp.int32)
    np.testing.assert_array_equal(embed({"table": jnp.asarray(table)}, ids), table[np.asarray(ids)])


def test_a_norm_closes_the_sum_that_a_layer_left_open() -> None:
    rng = np.random.default_rng(4)
    x, delta = (jnp.asarray(rng.normal(size=(3, 4)), jnp.float32) for _ in range(2))
    params = {"scale": jnp.asarray([1.0, 2.0, 0.5, 1.0])}
    for stream, total in ((Residual(x=x, delta=delta), x + delta), (Residual(x=x), x)):
        summed, normed = norm_of_sum(params, stream, eps=1e-5, ops=Ops())
        np.testing.assert_array_equal(summed, total)
        np.testing.assert_allclose(normed, norm(params, total, eps=1e-5), rtol=1e-6)
