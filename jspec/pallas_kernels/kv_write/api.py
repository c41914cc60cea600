"""The steps between projected heads and attention: q and k norms (Qwen3), RoPE, and storing."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Scales of the RMSNorm of each q and k head, applied before RoPE."""

    q: jax.Array  # [D]
    k: jax.Array  # [D]
    eps: float = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The norms and RoPE to apply to heads[*b, H + 2G, D]: q, then k, then v."""

    cos: jax.Array  # f32[*b, half]; half of the rotated dimensions
    sin: jax.Array  # f32[*b, half]
    num_heads: int = field(metadata={"static": True})  # H
    norms: HeadNorms | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """Divisors of a layer's K and V when they are stored in FP8. Instead of the stored values,
    queries are multiplied by k_scale and outputs by v_scale."""

    k: jax.Array  # f32[1]
    v: jax.Array  # f32[1]
