"""Joint top-k, top-p and min-p: one threshold per node, found by bisection.

All three filter the same distribution, softmax(logits / T), without renormalisation in between. A
token of logit x is kept iff

    #{v : x_v > x} < top_k   and   P{v : x_v > x} < top_p   and   p(x) >= min_p * p(max)

Each condition can only become true as x grows, so all logits >= a threshold are kept, ties
included. The search divides the range of the logits' ordered float32 bit patterns: a pass over the
logits measures count and mass above several pivots and selects one of the parts between them. The
number of parts affects speed alone (decision 6), and that of passes is static.

The threshold is a logit, not logit / T, whose rounding may differ where a compiler computes it
twice. It must be compared with the very array that was searched (`choose._stored`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.device import noise
from jspec.device.state import SamplingBatch
from jspec.layers.linear import Shard
from jspec.pallas_kernels.sample.reference import without_nan

_LOWEST = -3.4e38  # excludes -inf


@dataclass(frozen=True)
class Passes:
    """Parameters of a pass over the logits. They affect speed, and rounding of the sums."""

    parts: int  # intervals per pass, a power of two
    columns: int  # longest piece that is summed at once; piece sums are added


_WHOLE_ROW = 2**31
# On accelerators a pass costs one read of the logits, so few passes are best. On GPUs each piece
# ends in a reduction across threads for every sum, so pieces are long, but numerous enough for
# all multiprocessors. On TPUs splitting a row copies it.
ON_GPU = Passes(parts=8, columns=8192)
ON_TPU = Passes(parts=8, columns=_WHOLE_ROW)
# On CPUs the logits fit in caches and comparisons dominate, so few pivots are best. XLA there
# vectorizes sums for one pivot only; for several it adds sequentially, which is slow, and ten times
# less exact at V = 128,256.
ON_CPU = Passes(parts=2, columns=_WHOLE_ROW)


def _ordered(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _from_ordered(key: jax.Array) -> jax.Array:
    bits = jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def threshold(
    logits: Float[Array, "B N V"],
    rows: SamplingBatch,
    *,
    shard: Shard,
    passes: Passes | None = None,
) -> Float[Array, "B N"]:
    """Return the smallest logit that is kept at each node; -inf for a row without filters. logits:
    one vocabulary shard; NaN counts as -inf. passes: None: chosen by the platform."""
    top = _max_over(jnp.max(without_nan(logits), axis=-1), shard)
    divisor = divisors(rows.temperature)
    args = logits, top, 1.0 / divisor, rows.top_k, rows.top_p
    if passes is None:
        found = jax.lax.platform_dependent(
            *args,
            cpu=partial(_lowest_kept, shard=shard, passes=ON_CPU),
            tpu=partial(_lowest_kept, shard=shard, passes=ON_TPU),
            default=partial(_lowest_kept, shard=shard, passes=ON_GPU),
        )
    else:
        found = _lowest_kept(*args, shard=shard, passes=passes)
    min_p = rows.min_p[:, None]
    # Rounding must not raise the threshold above the largest logit, which every filter keeps.
    below_top = jnp.minimum(divisor[:, None] * jnp.log(jnp.maximum(min_p, 1e-38)), 0.0)
    found = jnp.where(min_p > 0, jnp.maximum(found, top + below_top), found)
    keeps_all = (rows.top_k >= logits.shape[-1] * shard.size) & (rows.top_p >= 1)
    return jnp.where(keeps_all[:, None] & (min_p <= 0), -jnp.inf, found)


def divisors(temperature: Float[Array, "*b"]) -> Float[Array, "*b"]:
    return jnp.where(temperature > 0, jnp.maximum(temperature, noise.COLDEST), 1.0)


def _lowest_kept(
    logits: jax.Array,
    top: jax.Array,
    inverse: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    shard: Shard,
    passes: Passes,
) -> jax.Array:
    """Return f32[B, N], the smallest logit that top-k and top-p keep. inverse: f32[B], 1 / T."""
    bits = passes.parts.bit_length() - 1
    limit_k, limit_p = top_k[:, None], top_p[:, None]
    weights = _weights(without_nan(logits), top[..., None], inverse[:, None, None])
    total = _sum_over(jnp.sum(weights, axis=-1), shard)

    def divide(
        _: jax.Array | int, bounds: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # high is kept; low - 1 is not, or unknown
        pivots = _pivots(low, high, bits=bits)
        above = [_from_ordered(pivot) for pivot in pivots]
        counts, masses = _above(logits, top, inverse, above, columns=passes.columns)
        count, mass = _sum_over(jnp.stack(counts), shard), _sum_over(jnp.stack(masses), shard)
        kept = (count < limit_k) & ((mass < limit_p * total) | (limit_p >= 1.0))
        pivot = jnp.stack(pivots)
        higher = jnp.max(jnp.where(kept, low, pivot + 1), axis=0)
        return higher, jnp.min(jnp.where(kept, pivot, high), axis=0)

    highest = _ordered(top)
    lowest = jnp.minimum(_ordered(jnp.float32(_LOWEST)), highest)
    _, found = jax.lax.fori_loop(0, -(-32 // bits), divide, (lowest, highest))
    return _from_ordered(found)


def _pivots(low: jax.Array, high: jax.Array, *, bits: int) -> list[jax.Array]:
    """Return low + floor(i * (high - low) / 2**bits) for i = 1 .. 2**bits - 1, without overflow.

    In:  low 10, high 21, bits 2   Out: 12 15 18, for the parts 10..12, 13..15, 16..18, 19..21
    Each part is at most 2**-bits of the whole, so ceil(32 / bits) passes leave one key.
    """
    length = high.astype(jnp.uint32) - low.astype(jnp.uint32)
    whole, rest = length >> bits, length & jnp.uint32(2**bits - 1)
    steps = [whole * jnp.uint32(i) + ((rest * jnp.uint32(i)) >> bits) for i in range(1, 2**bits)]
    return [low + step.astype(jnp.int32) for step in steps]


def _above(
    logits: jax.Array,
    top: jax.Array,
    inverse: jax.Array,
    pivots: list[jax.Array],
    *,
    columns: int,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return (count, mass relative to the maximum's) of the logits above each pivot, without NaN.

    The comparison is written twice: XLA on a GPU would store a [B, N, V] array that two operands
    share.
    """
    pieces = _in_pieces(logits, columns)
    axes = tuple(range(2, pieces.ndim))
    top, pivots = jnp.expand_dims(top, axes), [jnp.expand_dims(pivot, axes) for pivot in pivots]
    weight = _weights(pieces, top, jnp.expand_dims(inverse, (1, *axes)))
    is_above = [(pivot < pieces).astype(jnp.int32) for pivot in pivots]
    weights = [jnp.where(pieces > pivot, weight, 0.0) for pivot in pivots]
    zeros = [jnp.int32(0)] * len(pivots) + [jnp.float32(0)] * len(pivots)
    sums = [*is_above, *weights]
    for axis in reversed(axes):
        sums = jax.lax.reduce(sums, zeros, _add_each, (axis,))
    return sums[: len(pivots)], sums[len(pivots) :]


def _weights(logits: jax.Array, top: jax.Array, inverse: jax.Array) -> jax.Array:
    return jnp.exp((logits - top) * inverse)


def _in_pieces(x: jax.Array, columns: int) -> jax.Array:
    """Reshape [B, N, V] to [B, N, pieces, <= columns], unless V fits or does not divide.

    In:  V 128,256, columns 8,192   Out: [B, N, 16, 8016]
    """
    *outer, num_ids = x.shape
    fewest = -(-num_ids // columns)
    pieces = next((n for n in range(fewest, 8 * fewest) if num_ids % n == 0), 1)
    return x if pieces == 1 else x.reshape(*outer, pieces, num_ids // pieces)


def _add_each(x: list[jax.Array], y: list[jax.Array]) -> list[jax.Array]:
    return [a + b for a, b in zip(x, y, strict=True)]


def _sum_over(x: jax.Array, shard: Shard) -> jax.Array:
    """Sum over shards in a fixed order, so that every device gets the same bits."""
    if shard.axis is None:
        return x
    return jnp.sum(jax.lax.all_gather(x, shard.axis), axis=0)


def _max_over(x: jax.Array, shard: Shard) -> jax.Array:
    return x if shard.axis is None else jnp.max(jax.lax.all_gather(x, shard.axis), axis=0)
