"""The best draft candidates and the softmax's normalizer in one read of the logits (Triton)."""

from __future__ import annotations

from functools import partial
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

MOST = 16  # candidates of a row; each takes two reductions over a chunk
_NO_COLUMN = 2**31 - 1


def rank(
    logits: Float[Array, "T U"],
    temperature: Float[Array, "B"],
    seed: UInt32[Array, "B 2"],
    positions: Int[Array, "T"],
    token_ids: Int[Array, "U"],
    *,
    topk: int,
    lowest: float,
    tuning: SampleTuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"], Float[Array, "T"]]:
    """Compute `reference.rank`, summing in another order. Static: topk, lowest, tuning."""
    num_rows, width = logits.shape
    topk = min(topk, width)
    tuning = tuning or choose_tuning(num_rows)
    chunk = min(tuning.chunk, pl.next_power_of_2(width))
    num_chunks = pl.cdiv(width, chunk)

    def rank_gpu(*refs: Any) -> None:  # the name that profiles show
        per_row = num_rows // temperature.shape[0]
        _of_chunk(*refs, chunk=chunk, per_row=per_row, topk=topk, lowest=lowest)

    best = (num_rows, num_chunks, topk)
    tops, columns, masses = pl.pallas_call(
        rank_gpu,
        grid=(num_rows, num_chunks),
        out_shape=(
            jax.ShapeDtypeStruct(best, jnp.float32),
            jax.ShapeDtypeStruct(best, jnp.int32),
            jax.ShapeDtypeStruct(best[:2], jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=tuning.num_warps, num_stages=1),
        interpret=interpret,
        name="rank_gpu",
    )(logits, temperature, seed, positions, token_ids)
    values, found, mass = pl.pallas_call(
        partial(_of_row, topk=topk),
        grid=(num_rows,),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, topk), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, topk), jnp.int32),
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rank_merge_gpu",
    )(tops.reshape(num_rows, -1), columns.reshape(num_rows, -1), masses)
    return values, found, mass


def _of_chunk(
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
    topk: int,
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
    top, values, found = _best(scores, column, topk=topk)
    place = jnp.arange(values.shape[0], dtype=jnp.int32)
    plt.store(tops.at[row, index, place], values, mask=place < topk)
    plt.store(columns.at[row, index, place], found, mask=place < topk)
    masses[row, index] = jnp.sum(jnp.exp(scores - top))


def _of_row(
    tops: Any,
    columns: Any,
    masses: Any,
    values_out: Any,
    columns_out: Any,
    mass_out: Any,
    *,
    topk: int,
) -> None:
    """Choose among the best of a row's chunks, and add up the chunks' masses."""
    row, num_found = pl.program_id(0), tops.shape[1]
    at = jnp.arange(pl.next_power_of_2(num_found), dtype=jnp.int32)
    inside = at < num_found
    scores = plt.load(tops.at[row, at], mask=inside, other=-jnp.inf)
    column = plt.load(columns.at[row, at], mask=inside, other=_NO_COLUMN)
    top, values, found = _best(scores, column, topk=topk)
    place = jnp.arange(values.shape[0], dtype=jnp.int32)
    plt.store(values_out.at[row, place], values, mask=place < topk)
    plt.store(columns_out.at[row, place], found, mask=place < topk)
    chunk = jnp.arange(pl.next_power_of_2(masses.shape[1]), dtype=jnp.int32)
    exists = chunk < masses.shape[1]
    own_top = plt.load(tops.at[row, chunk * topk], mask=exists, other=-jnp.inf)
    own = plt.load(masses.at[row, chunk], mask=exists, other=0.0)
    mass_out[row] = jnp.sum(own * jnp.exp(own_top - top))


def _best(
    scores: jax.Array, column: jax.Array, *, topk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (the largest score; the K largest and their columns, padded to a power of two)."""
    place = jnp.arange(pl.next_power_of_2(topk), dtype=jnp.int32)
    values = jnp.full(place.shape, -jnp.inf, jnp.float32)
    found = jnp.full(place.shape, _NO_COLUMN, jnp.int32)
    top = jnp.max(scores)
    best = top
    for round_ in range(topk):
        first = jnp.min(jnp.where(scores == best, column, _NO_COLUMN))
        values = jnp.where(place == round_, best, values)
        found = jnp.where(place == round_, first, found)
        if round_ + 1 < topk:
            scores = jnp.where(column == first, -jnp.inf, scores)
            best = jnp.max(scores)
    return top, values, found
