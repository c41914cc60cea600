"""Grouped-query attention as a layer: the arguments of `attend`, and the use of its result."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.layers.attention import attention, causal_attention, project
from jspec.layers.linear import Shard
from jspec.layers.rope import angles_of
from jspec.models.layer_params import attention_params
from jspec.models.placement import init_params
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.reference import rotate, rotate_and_split
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.attention import AttentionSpec, HeadGate

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("has_more", [False, True])
def test_projections_and_rope_reach_attend(qk_norm: bool, has_more: bool) -> None:
    """has_more: with sinks, which `attend` gets, gated heads, and a bias on the output."""
    gate = HeadGate.OF_HEADS if has_more else None
    spec = dataclasses.replace(SPEC, qk_norm=qk_norm, sinks=has_more, out_bias=has_more, gate=gate)
    table = attention_params(spec, in_size=12, out_size=12)
    params = init_params(table, seed=0)["attention"]
    rng = np.random.default_rng(0)
    params["qkv"]["bias"] = jnp.arange(48.0) / 48
    out_bias = np.zeros(12, np.float32)
    if has_more:
        params["sinks"] = jnp.arange(4.0)
        out_bias = rng.normal(size=12).astype(np.float32)
        params["out"]["bias"] = jnp.asarray(out_bias)
    scales = dict.fromkeys(("q_norm", "k_norm"))
    if qk_norm:
        scales = {name: rng.uniform(0.5, 1.5, 6) for name in scales}
        params |= {name: {"scale": jnp.asarray(scales[name], jnp.float32)} for name in scales}
    x = jnp.asarray(rng.normal(size=(5, 12)), jnp.float32)
    positions = jnp.asarray([3, 4, 0, 9, 9], jnp.int32)
    answer = jnp.asarray(rng.normal(size=(5, 4, 6)), jnp.float32)
    given: list[jax.Array] = []
    sinks_given: list[jax.Array | None] = []

    def attend(heads: jax.Array, rotation: Rotation, sinks: jax.Array | None) -> jax.Array:
        given.extend((heads, *rotate_and_split(heads, rotation)))
        sinks_given.append(sinks)
        return answer

    out = attention(params, x, positions, attend, spec=spec, eps=1e-2, shard=Shard(), ops=Ops())
    heads = np.asarray(x @ params["qkv"]["kernel"] + params["qkv"]["bias"]).reshape(5, 8, 6)
    q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
    np.testing.assert_allclose(given[0], heads, atol=1e-5)  # their norms are still to come
    if qk_norm:
        q, k = (normed(x, scales[name], eps=1e-2) for x, name in ((q, "q_norm"), (k, "k_norm")))
    angles = angles_of(positions, head_dim=6, rope=spec.rope)
    np.testing.assert_allclose(given[1], rotate(jnp.asarray(q), *angles), atol=1e-5)
    np.testing.assert_allclose(given[2], rotate(jnp.asarray(k), *angles), atol=1e-5)
    np.testing.assert_allclose(given[3], v, atol=1e-5)
    assert sinks_given == [params.get("sinks")]
    shares = np.ones((5, 4))
    if has_more:
        shares = 1 / (1 + np.exp(-np.asarray(x @ params["gate"]["kernel"])))
    mixed = answer * shares[..., None]
    expected = mixed.reshape(5, 24) @ params["out"]["kernel"] + out_bias
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_norms_that_span_heads_span_shards(num_shards: int) -> None:
    """Two of four shards have the same kv head, whose squares their sum counts twice."""
    own: dict[str, Any] = {"qkv_bias": False, "qk_norm": True, "norms_span_heads": True}
    spec = dataclasses.replace(SPEC, **own)
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(5, 12)), rng.normal(size=(12, 8, 6))
    scales = rng.uniform(0.5, 1.5, (4, 6)), rng.uniform(0.5, 1.5, (2, 6))
    of_q = np.split(np.arange(4), num_shards)
    of_kv = [
        np.arange(2)[i * 2 // num_shards :][: max(2 // num_shards, 1)] for i in range(num_shards)
    ]
    order = [[*q, *(4 + kv), *(6 + kv)] for q, kv in zip(of_q, of_kv, strict=True)]
    params = {
        "qkv": {"kernel": np.stack([kernel[:, heads].reshape(12, -1) for heads in order])},
        "q_norm": {"scale": np.stack([scales[0][heads].ravel() for heads in of_q])},
        "k_norm": {"scale": np.stack([scales[1][heads].ravel() for heads in of_kv])},
    }

    def heads_of(shard: Any) -> jax.Array:
        heads, rotation = project(
            shard,
            jnp.asarray(x, jnp.float32),
            jnp.arange(5),
            spec=spec,
            eps=1e-2,
            shard=Shard(num_shards, "shards"),
            ops=Ops(),
        )
        assert rotation.norms is None
        return heads

    params = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), params)
    found = jax.vmap(heads_of, axis_name="shards")(params)
    heads = np.einsum("te,ehd->thd", x, kernel)
    q, k = (
        normed(part.reshape(5, -1), scale.ravel(), eps=1e-2).reshape(part.shape)
        for part, scale in zip((heads[:, :4], heads[:, 4:6]), scales, strict=True)
    )
    expected = np.concatenate((q, k, heads[:, 6:]), axis=1)
    for mine, own_heads in zip(found, order, strict=True):
        np.testing.assert_allclose(mine, expected[:, own_heads], atol=1e-5)


def normed(x: Any, scale: Any, *, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


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


def test_causal_attention_refuses_sinks() -> None:
    still = Rotation(cos=jnp.ones((1, 2, 1)), sin=jnp.zeros((1, 2, 1)), num_heads=2)
    with pytest.raises(ValueError, match="no sinks; expected None"):
        causal_attention(jnp.zeros((1, 2, 4, 2)), still, jnp.zeros(2))
