"""Layers that mix tokens, by their definitions: one row at once, in float64, without a cache."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jspec.layers.rope import inverse_frequencies
from jspec.spec.layers.attention import IndexerSpec, LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec

EPS = 1e-6  # of the layer's norms and of l2 norms
F64 = npt.NDArray[np.float64]


def latent_reference(spec: LatentAttentionSpec, params: Any, x: F64) -> F64:
    """Return outputs [T, E] of x [T, E]; every head's K and V follow from the latent."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    size, H, rank = len(x), spec.num_heads, spec.kv_rank
    given = x
    if "q_a" in w:
        given = normed(x @ w["q_a"]["kernel"]) * w["q_a_norm"]["scale"]
    q = (given @ w["q"]["kernel"]).reshape(size, H, spec.head_dim)
    latent, shared = np.split(x @ w["kv_a"]["kernel"], (rank,), axis=-1)
    latent = normed(latent) * w["kv_a_norm"]["scale"]
    inv = np.asarray(inverse_frequencies(spec.rope_dim, spec.rope), np.float64)
    angle = np.arange(size)[:, None] * inv
    q = np.concatenate((q[..., : spec.nope_dim], turned(q[..., spec.nope_dim :], angle)), -1)
    plain = (latent @ w["k_up"]["kernel"]).reshape(size, H, -1)
    of_all = np.repeat(turned(shared[:, None], angle), H, axis=1)
    k = np.concatenate((plain, of_all), -1)
    v = (latent @ w["v_up"]["kernel"]).reshape(size, H, -1)
    scores = np.einsum("qhd,khd->hqk", q, k) * spec.softmax_scale
    seen = np.tril(np.ones((size, size), bool))
    if spec.indexer is not None:
        seen &= selected(spec.indexer, w["indexer"], x, given, angle)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khv->qhv", weights, v).reshape(size, -1)
    out: F64 = mixed @ w["out"]["kernel"]
    return out


def selected(spec: IndexerSpec, w: Any, x: F64, given: F64, angle: F64) -> npt.NDArray[np.bool_]:
    """Return bool[T, T]: whether a query's indexer selects a token. given: the low-rank queries."""
    rope = 2 * angle.shape[-1]

    def rotated(heads: F64) -> F64:
        leading = heads[..., :rope]
        if spec.interleaved:
            leading = np.concatenate((leading[..., 0::2], leading[..., 1::2]), -1)
        return np.concatenate((turned(leading, angle), heads[..., rope:]), -1)

    q = rotated((given @ w["q"]["kernel"]).reshape(len(x), spec.num_heads, -1))
    k = x @ w["k"]["kernel"]
    k = normed(k - k.mean(-1, keepdims=True)) * w["k_norm"]["scale"] + w["k_norm"]["bias"]
    heights = np.maximum(np.einsum("qhd,kd->qhk", q, rotated(k[:, None])[:, 0]), 0)
    scores = np.einsum("qhk,qh->qk", heights, x @ w["weights"]["kernel"])
    found = np.zeros(scores.shape, bool)
    for t, own in enumerate(scores):
        found[t, np.argsort(-own[: t + 1], kind="stable")[: spec.top_k]] = True
    return found


def delta_reference(spec: DeltaNetSpec, params: Any, x: F64) -> F64:
    """Return outputs [T, E] of x [T, E], token by token."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    Hk, Hv, Dk, Dv = spec.num_key_heads, spec.num_heads, spec.key_dim, spec.value_dim
    state = np.zeros((Hv, Dk, Dv))
    inputs = np.concatenate((np.zeros((spec.conv_size - 1, spec.conv_dim)), x @ w["qkv"]["kernel"]))
    out = []
    for t, token in enumerate(x):
        window = inputs[t : t + spec.conv_size]
        q, k, v = np.split(silu((window * w["conv"]["kernel"]).sum(0)), (Hk * Dk, 2 * Hk * Dk))
        q, k = (np.repeat(unit(a.reshape(Hk, Dk)), Hv // Hk, axis=0) for a in (q, k))
        step, rate = np.split(token @ w["steps"]["kernel"], 2)
        decay = -np.exp(w["decay"]["log"]) * np.log1p(np.exp(rate + w["decay"]["bias"]))
        state = state * np.exp(decay)[:, None, None]
        error = v.reshape(Hv, Dv) - np.einsum("hkv,hk->hv", state, k)
        error /= 1 + np.exp(-step)[:, None]
        state = state + k[:, :, None] * error[:, None, :]
        heads = normed(np.einsum("hkv,hk->hv", state, q * Dk**-0.5)) * w["norm"]["scale"]
        gated = heads * silu(token @ w["gate"]["kernel"]).reshape(Hv, Dv)
        out.append(gated.reshape(-1) @ w["out"]["kernel"])
    return np.stack(out)


def normed(x: F64) -> F64:
    found: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return found


def unit(x: F64) -> F64:
    found: F64 = x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS)
    return found


def silu(x: F64) -> F64:
    found: F64 = x / (1 + np.exp(-x))
    return found


def turned(x: F64, angle: F64) -> F64:
    """Rotate x [T, heads, D] by half-split angles [T, D / 2]."""
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
