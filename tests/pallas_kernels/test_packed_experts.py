"""Experts that stay packed in memory: their order, and the kernels against the unpacked ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.files.mxfp4 import E2M1
from jspec.pallas_kernels.choose import OPS
from jspec.pallas_kernels.experts.packed import (
    CODES,
    SCALES,
    pack,
    padded_scales,
    sizes_of,
    unpack,
    unpacked,
)
from jspec.pallas_kernels.experts.reference import run_experts
from jspec.spec.model_spec import Gate, MoESpec, Routing
from tests.pallas_kernels.chips import needs_gpu


def drawn(rng: np.random.Generator, width: int, length: int) -> tuple[Any, Any, Any]:
    """(numbers [N, K], their nibbles, their scales)."""
    nibbles = rng.integers(0, 16, (width, length)).astype(np.uint8)
    scales = rng.integers(117, 123, (width, -(-length // 32))).astype(np.uint8)
    signs = np.where(nibbles & 8, -1.0, 1.0)
    power = np.repeat(scales, 32, axis=1)[:, :length].astype(int) - 127
    return np.array(E2M1)[nibbles & 7] * signs * 2.0**power, nibbles, scales


@pytest.mark.slow_cases("3-4", "5-5")
@pytest.mark.parametrize(("width", "blocks"), [(1, 1), (3, 4), (5, 5), (2, 9)])
def test_what_is_packed_is_unpacked(width: int, blocks: int) -> None:
    values, nibbles, scales = drawn(np.random.default_rng(blocks), width, 32 * blocks)
    codes, held = packed(nibbles, scales)
    found = unpack(
        jnp.asarray(codes[None]), jnp.asarray(held[None]), length=32 * blocks, dtype=np.float32
    )
    np.testing.assert_array_equal(found[0], values.T)


def test_every_nibble_of_every_place_is_its_number() -> None:
    """Inputs 0 to 15 of each of a group's four blocks."""
    nibbles = np.tile(np.arange(16, dtype=np.uint8), 8)[None]
    codes, scales = packed(nibbles, np.full((1, 4), 127, np.uint8))
    found = unpack(
        jnp.asarray(codes[None]), jnp.asarray(scales[None]), length=128, dtype=np.float32
    )[0, :, 0]
    expected = np.tile([*E2M1, *(-x for x in E2M1)], 8)
    np.testing.assert_array_equal(np.asarray(found), expected)


def packed(nibbles: Any, scales: Any) -> tuple[Any, Any]:
    """Codes [32 G, N] and scales [4 G, N], as they are held."""
    return pack(nibbles).T, padded_scales(scales).T


def packed_experts(X: int, size: int, inner: int, *, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def stack(width: int, length: int) -> dict[str, jax.Array]:
        each = [packed(*drawn(rng, width, length)[1:]) for _ in range(X)]
        codes, scales = (jnp.asarray(np.stack(parts)) for parts in zip(*each, strict=True))
        return {CODES: codes, SCALES: scales}

    def bias(width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((X, width)), jnp.bfloat16)

    products = {"gate_up": stack(2 * inner, size), "down": stack(size, inner)}
    return products | {"gate_up_bias": bias(2 * inner), "down_bias": bias(size)}


def routed(tokens: int, X: int, top_k: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(tokens)
    ids = np.argsort(rng.random((tokens, X)), axis=1)[:, :top_k]
    x = jnp.asarray(rng.standard_normal((tokens, size)), jnp.bfloat16)
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random(ids.shape), jnp.float32)


def assert_close(found: jax.Array, expected: jax.Array) -> None:
    """bf16 within a few roundings."""
    got, wanted = (np.asarray(x, np.float32) for x in (found, expected))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2**-6 * np.abs(wanted).max())


def check_kernels(X: int, size: int, inner: int, *, tokens: int, interpret: bool) -> None:
    """The kernels for any number of tokens, and those for few, against XLA's over bf16 weights."""
    params = packed_experts(X, size, inner, seed=tokens)
    assert sizes_of(params) == (X, size, inner)
    x, ids, weights = routed(tokens, X, 2, size)
    wide = unpacked(params, dtype=jnp.bfloat16)
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


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 5, 60, 100])  # of the last an expert has 67
def test_packed_experts_are_as_good_as_unpacked_ones(tokens: int) -> None:
    """E of a group and a quarter, I of three quarters of one."""
    check_kernels(3, 160, 96, tokens=tokens, interpret=True)


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 700])
def test_packed_experts_on_a_gpu(tokens: int) -> None:
    """At gpt-oss's widths, by the assembly that makes bfloat16 of the codes."""
    check_kernels(6, 2880, 2880, tokens=tokens, interpret=False)
