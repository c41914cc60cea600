"""The top-1 draft candidate and its softmax normalizer in one read of the logits (Triton)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt32

from jspec.device import noise
from jspec.pallas_kernels.sample.reference import finite
from jspec.pallas_kernels.sample.tuning import SampleTuning, choose_tuning

_NO_COLUMN = 2**31 - 1


def rank_one(
    logits: Float[Array, "T U"],
    temperature: Float[Array, "B"],
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "T"],
    token_ids: Int[Array, "U"],
    *,
    lowest: float,
    tuning: SampleTuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T"], Int[Array, "T"], Float[Array, "T"]]:
    """Compute `reference.rank_one`, summing in another order. Static: lowest, tuning."""
    num_rows, width = logits.shape
    tuning = tuning or choose_tuning(num_rows)
    chunk = min(tuning.chunk, pl.next_power_of_2(width))
    num_chunks = pl.cdiv(width, chunk)
    per_row = num_rows // temperature.shape[0]

    def rank_gpu(*refs: Any) -> None:  # the name that profiles show
        _body(*refs, chunk=chunk, per_row=per_row, lowest=lowest)

    shape = (num_rows, num_chunks)
    tops, columns, masses = pl.pallas_call(
        rank_gpu,
        grid=shape,
        out_shape=[jax.ShapeDtypeStruct(shape, t) for t in (jnp.float32, jnp.int32, jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=tuning.num_warps, num_stages=1),
        interpret=interpret,
        name="rank_gpu",
    )(logits, temperature, seed, positions, token_ids)
    top = jnp.max(tops, axis=1)
    is_best = tops == top[:, None]
    column = jnp.min(jnp.where(is_best, columns, _NO_COLUMN), axis=1)
    return top, column, jnp.sum(masses * jnp.exp(tops - top[:, None]), axis=1)


def _body(
    logits: Any,
    temperature: Any,
    seed: Any,
    positions: Any,
    token_ids: Any,
    tops: Any,
    columns: Any,
    masses: Any,
    *,
    chunk: int,
    per_row: int,
    lowest: float,
) -> None:
    row, index = pl.program_id(0), pl.program_id(1)
    batch_row = row // per_row
    column = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
    inside = column < logits.shape[1]
    read = plt.load(logits.at[row, column], mask=inside, other=0.0).astype(jnp.float32)
    t = temperature[batch_row]

    def noisy() -> jax.Array:
        key = noise.key_of_words(seed[batch_row, 0], seed[batch_row, 1], positions[row])
        ids = plt.load(token_ids.at[column], mask=inside, other=0)
        return read + t * noise.gumbel_from_bits(noise.noise_bits(key, ids))

    scores = finite(lax.cond(t != 0, noisy, lambda: read), lowest=lowest)
    scores = jnp.where(inside, scores, -jnp.inf)
    top = jnp.max(scores)
    tops[row, index] = top
    columns[row, index] = jnp.min(jnp.where(scores == top, column, _NO_COLUMN))
    masses[row, index] = jnp.sum(jnp.exp(scores - top))
