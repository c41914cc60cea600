"""Experts that stay packed in memory: the kernels against the unpacked ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.device.weights import dense
from jspec.pallas_kernels.bundles import OPS
from jspec.pallas_kernels.experts.reference import run_experts
from jspec.pallas_kernels.experts.tuning import sizes_of
from jspec.spec.layers.feed_forward import Gate, MoESpec, Routing
from jspec.spec.weight_format import MXFP4
from tests.device.test_weights import stored
from tests.pallas_kernels.chips import needs_gpu


def packed_experts(X: int, size: int, inner: int, *, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def bias(width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((X, width)), jnp.bfloat16)

    shapes = {"gate_up": (X, size, 2 * inner), "down": (X, inner, size)}
    products = {name: stored(MXFP4(), shape)[1] for name, shape in shapes.items()}
    return products | {"gate_up_bias": bias(2 * inner), "down_bias": bias(size)}


def routed(tokens: int, X: int, top_k: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens)
    ids = np.argsort(rng.random((tokens, X)), axis=1)[:, :top_k]
    x = jnp.asarray(rng.standard_normal((tokens, size)), jnp.bfloat16)
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random(ids.shape), jnp.float32)


def assert_close(found: jax.Array, expected: jax.Array) -> None:
    """Compare bf16 within a few roundings."""
    got, wanted = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())


def check_kernels(X: int, size: int, inner: int, *, tokens: int, interpret: bool) -> None:
    """Compare the kernels for any number of tokens, and those for few, with XLA over bf16
    weights."""
    params = packed_experts(X, size, inner, seed=tokens)
    assert sizes_of(params) == (X, size, inner, True)
    x, ids, weights = routed(tokens, X, 2, size)
    wide = params | {name: dense(params[name], jnp.bfloat16) for name in ("gate_up", "down")}
    expected = run_experts(x, ids, weights, wide, gate=Gate.CLAMPED)
    same = run_experts(x, ids, weights, params, gate=Gate.CLAMPED)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(expected))
    ops = OPS["gpu_interpret" if interpret else "gpu"]
    assert_close(ops.experts(x, ids, weights, params, gate=Gate.CLAMPED), expected)
    router = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(size, X)), x.dtype)}
    spec = MoESpec(
        num_experts=X,
        top_k=2,
        inner=inner,
        routing=Routing.TOP_THEN_SOFTMAX,
        gate=Gate.CLAMPED,
        bias=True,
    )
    scale = jnp.ones(size, x.dtype)
    both = [
        ops.moe_of_sum(x, x, scale, {"router": router, "experts": e}, eps=1e-5, spec=spec)
        for e in (params, wide)
    ]
    assert both[0] is not None
    assert both[1] is not None
    assert_close(both[0][1].sum(), both[1][1].sum())


@pytest.mark.mosaic_gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "tokens"), [(96, 1), (64, 5), pytest.param(96, 100, marks=pytest.mark.exhaustive)]
)
def test_packed_experts_are_as_good_as_unpacked_ones(inner: int, tokens: int) -> None:
    """E is a step and a quarter, I less than a group; of 100 tokens an expert has 67."""
    check_kernels(3, 320, inner, tokens=tokens, interpret=True)


@pytest.mark.mosaic_gpu
@pytest.mark.slow
def test_experts_of_another_shard_are_not_read() -> None:
    """One token has two experts, of which this shard has one."""
    params = packed_experts(3, 320, 96, seed=1)
    x, _, weights = routed(1, 3, 2, 320)
    ids = jnp.asarray([[3, 1]], jnp.int32)
    how: dict[str, Any] = {"gate": Gate.CLAMPED, "shards": 2}
    expected = run_experts(x, ids, weights, params, **how)
    assert_close(OPS["gpu_interpret"].experts(x, ids, weights, params, **how), expected)


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 700])
def test_packed_experts_on_a_gpu(tokens: int) -> None:
    """gpt-oss's widths, with the assembly that converts the codes to bfloat16."""
    check_kernels(6, 2880, 2880, tokens=tokens, interpret=False)
