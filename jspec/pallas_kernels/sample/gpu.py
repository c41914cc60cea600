"""Fused sampling on GPUs: temperature, noise and argmax in one read of the logits (Pallas-Triton).

One program per row and chunk of the vocabulary writes its best (value, id) by logit(v) + T *
g(seed, position, v), with the noise of device/noise.py; XLA reduces these, and the lowest id wins
ties. At T > 0 a cheap rough score, never below the exact one, comes first. The token with the
highest is scored exactly, and wins if no other rough score reaches its exact score; otherwise all
tokens are scored exactly. NaN counts as -infinity.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt32

from jspec.device import noise
from jspec.pallas_kernels.sample.reference import without_nan
from jspec.pallas_kernels.sample.tuning import SampleTuning, choose_tuning

_NO_ID = 2**31 - 1
_NO_KEY = -(2**31)  # below the key of every float
_NAN_KEY = 2**31 - 1  # above every float, as in argmax


def sample(
    logits: Float[Array, "T V"],
    temperature: Float[Array, "B"],
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "T"],
    threshold: Float[Array, "T"] | None = None,
    *,
    first_id: jax.Array | int = 0,
    tuning: SampleTuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T"], Int[Array, "T"]]:
    """Compute reference.sample (a zero may lose its sign). logits: f32 or bf16. tuning: static."""
    num_rows, width = logits.shape
    tuning = tuning or choose_tuning(num_rows)
    chunk = min(tuning.chunk, pl.next_power_of_2(width))
    num_chunks = pl.cdiv(width, chunk)
    rows = [temperature, seed, positions, jnp.asarray(first_id, jnp.int32).reshape(1)]
    if threshold is not None:
        rows.append(threshold)

    def sample_gpu(*refs: Any) -> None:  # the name that profiles show
        _body(*refs, chunk=chunk, filtered=threshold is not None, interpret=interpret)

    keys, ids = pl.pallas_call(
        sample_gpu,
        grid=(num_rows, num_chunks),
        out_shape=[jax.ShapeDtypeStruct((num_rows, num_chunks), jnp.int32)] * 2,
        compiler_params=plt.CompilerParams(num_warps=tuning.num_warps, num_stages=1),
        interpret=interpret,
        name="sample_gpu",
    )(logits, *rows)
    key, best = lax.reduce(
        (keys, ids), (jnp.int32(_NO_KEY), jnp.int32(_NO_ID)), _first_best, dimensions=(1,)
    )
    return _from_key(key), best


def _body(
    logits: Any,
    temperature: Any,
    seed: Any,
    positions: Any,
    first_id: Any,
    *refs: Any,
    chunk: int,
    filtered: bool,
    interpret: bool,
) -> None:
    """Find the best of one row's chunk. Columns past the row lose to everything."""
    least, keys, ids = refs if filtered else (None, *refs)
    row, index = pl.program_id(0), pl.program_id(1)
    batch_row = row // (logits.shape[0] // temperature.shape[0])
    columns = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
    inside = columns < logits.shape[1]
    read = plt.load(logits.at[row, columns], mask=inside, other=0).astype(jnp.float32)
    read = without_nan(read)
    t = temperature[batch_row]
    token_ids = columns + first_id[0]

    def best(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        if least is not None:
            value = jnp.where(read >= least[row], value, -jnp.inf)
        key = jnp.where(inside, _to_key(value), jnp.int32(_NO_KEY))
        return jnp.max(key), _lowest(token_ids, key == jnp.max(key))

    def best_perturbed() -> tuple[jax.Array, jax.Array]:
        key = noise.key_of_words(seed[batch_row, 0], seed[batch_row, 1], positions[row])
        bits = noise.noise_bits(key, token_ids)
        kept = inside if least is None else inside & (read >= least[row])
        rough = jnp.where(kept, read + t * _rough_gumbel(bits, interpret=interpret), -jnp.inf)
        leader = _lowest(token_ids, rough == jnp.max(rough))
        column = jnp.clip(leader - first_id[0], 0, logits.shape[1] - 1)
        value = without_nan(logits[row, column].astype(jnp.float32))
        value = value + t * noise.gumbel_from_bits(noise.noise_bits(key, leader))
        rivals = inside & ~(rough < _least_rough(value, t))
        found = leader != _NO_ID  # no score equals the best if that is NaN
        return lax.cond(
            found & (jnp.sum(rivals.astype(jnp.int32)) == 1),
            lambda: (_to_key(value), leader),
            lambda: best(read + t * noise.gumbel_from_bits(bits)),
        )

    keys[row, index], ids[row, index] = lax.cond(t != 0, best_perturbed, lambda: best(read))


def _lowest(token_ids: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.min(jnp.where(where, token_ids, jnp.int32(_NO_ID)))


def _rough_gumbel(bits: jax.Array, *, interpret: bool) -> jax.Array:
    """Bound noise.gumbel_from_bits from above (to 2e-5), closely where it is large: g = -log(E),
    and E = u + u^2/2 + u^3/3 + ... is more than its first terms."""
    u = bits.astype(jnp.float32) * jnp.float32(2.0**-32) + jnp.float32(2.0**-33)
    tail = u * (jnp.float32(1 / 3) + u * jnp.float32(0.25))
    terms = u + u * u * (jnp.float32(0.5) + tail)
    if interpret:
        log2 = jnp.log2(terms)
    else:
        out = [jax.ShapeDtypeStruct(terms.shape, jnp.float32)]
        asm = "lg2.approx.ftz.f32 $0, $1;"
        (log2,) = plt.elementwise_inline_asm(
            asm, args=[terms], constraints="=f,f", pack=1, result_shape_dtypes=out
        )
    return log2 * jnp.float32(-math.log(2.0))


def _least_rough(value: jax.Array, t: jax.Array) -> jax.Array:
    """Return the least rough score of a token that reaches `value`, or NaN: float32 is too
    coarse."""
    slack = t * jnp.float32(1e-4) + jnp.abs(value) * jnp.float32(2.0**-20)
    return jnp.where(t > jnp.float32(1e-30), value - slack, jnp.nan)


def _first_best(
    x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    x_wins = (x[0] > y[0]) | ((x[0] == y[0]) & (x[1] < y[1]))
    return jnp.where(x_wins, x[0], y[0]), jnp.where(x_wins, x[1], y[1])


def _to_key(x: jax.Array) -> jax.Array:
    """Map floats to i32 in the same order; the two zeros are equal, NaN is above infinity.

    In:  -inf         -1.0         -0.0  0.0  1.0         NaN
    Out: -0x7F800000  -0x3F800000  0     0    0x3F800000  0x7FFFFFFF
    """
    return jnp.where(x != x, jnp.int32(_NAN_KEY), _folded(lax.bitcast_convert_type(x, jnp.int32)))


def _from_key(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(_folded(key), jnp.float32)


def _folded(bits: jax.Array) -> jax.Array:
    """Convert sign and magnitude to two's complement, or back."""
    return jnp.where(bits < 0, jnp.int32(_NO_KEY) - bits, bits)
