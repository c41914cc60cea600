"""Fused sampling on Hopper GPUs: temperature, noise and argmax in one pass over the logits.

Of each row it computes max_v and argmax_v of logit(v) + T * g(seed, position, v), the lowest id
winning ties, with the noise of core/noise.py made in registers. A grid of rows x chunks; each
block walks its chunk in windows of a fixed width and keeps the best value and id of every lane.
Rows at temperature 0 skip the noise: T * g is then an exact zero.

It knows nothing of filters (a row may bring a threshold), penalties or sharding: it
returns (value, id), so that shards of a vocabulary can be compared. Seen so far: bit-equal to
`reference` in the GPU interpreter; compiled for sm_90a without a GPU, to the same libdevice
arithmetic as XLA's own code for `reference`. Not yet run on a chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from jspec.core import noise
from jspec.pallas_kernels.matmul_gpu import require_mosaic_gpu

LANES = 128  # threads of a warpgroup
COLDEST = 1e-6  # sampling/choose.py's floor when it divides by the temperature
_NO_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SampleTuning:
    """window: logits that a block reads at a time, a multiple of 128. num_blocks: how many blocks
    the rows together should make, about; a row is cut into that many chunks divided by rows."""

    window: int = 1024
    num_blocks: int = 132 * 8


def reference(
    logits: Float[Array, "T V"],
    temperature: Float[Array, "T"],
    seed: UInt32[Array, "T 2"],
    positions: Int[Array, "T"],
    threshold: Float[Array, "T"] | None = None,
    *,
    first_id: int = 0,
) -> tuple[Float[Array, "T"], Int[Array, "T"]]:
    """(value, id) of each row; ids count from `first_id`, the first of this vocabulary shard.

    threshold: keeps v only if logit / T (logit where T is 0) reaches it: filters.threshold.
    """
    logits = logits.astype(jnp.float32)
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.int32) + first_id
    t = temperature[:, None]
    perturbed = logits + t * noise.gumbel(seed, positions, token_ids)
    if threshold is not None:
        scaled = logits / jnp.where(t > 0, jnp.maximum(t, COLDEST), 1.0)
        perturbed = jnp.where(scaled >= threshold[:, None], perturbed, -jnp.inf)
    best = jnp.argmax(perturbed, axis=1).astype(jnp.int32)
    return jnp.max(perturbed, axis=1), best + first_id


def sample(
    logits: Float[Array, "T V"],
    temperature: Float[Array, "T"],
    seed: UInt32[Array, "T 2"],
    positions: Int[Array, "T"],
    threshold: Float[Array, "T"] | None = None,
    *,
    first_id: int = 0,
    tuning: SampleTuning | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "T"], Int[Array, "T"]]:
    """As `reference`. logits: f32 or bf16, none NaN. Static: first_id, tuning.

    Raises ValueError where a row is shorter than a window or would be read off its alignment.
    """
    require_mosaic_gpu()
    num_rows, width = logits.shape
    plan = _plan(num_rows, width, tuning or SampleTuning(), interpreted=interpret is not None)
    rows = [logits, temperature, seed, positions]

    def sample_gpu(*refs: Any) -> None:  # the name that profiles show
        _body(*refs, plan=plan, first_id=first_id, filtered=threshold is not None)

    values, ids = plgpu.kernel(
        sample_gpu,
        out_type=[
            jax.ShapeDtypeStruct((num_rows, plan.num_chunks), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, plan.num_chunks), jnp.int32),
        ],
        grid=(num_rows, plan.num_chunks),
        grid_names=("row", "chunk"),
        interpret=interpret,
    )(*rows, *([] if threshold is None else [threshold]))
    best = jnp.argmax(values, axis=1, keepdims=True)  # chunks ascend: the first holds lower ids
    chosen = jnp.take_along_axis(ids, best, axis=1, mode="clip")
    return jnp.max(values, axis=1), chosen[:, 0]


@dataclass(frozen=True, slots=True)
class _Plan:
    width: int
    window: int
    num_windows: int
    num_chunks: int
    interpreted: bool


def _plan(num_rows: int, width: int, tuning: SampleTuning, *, interpreted: bool) -> _Plan:
    window = tuning.window
    if width < window or window % LANES or width % 8:
        expected = f"at least {window} and a multiple of 8, and window a multiple of {LANES}"
        raise ValueError(f"row of {width} logits, window {window}: expected {expected}")
    num_windows = pl.cdiv(width, window)
    num_chunks = min(num_windows, pl.cdiv(tuning.num_blocks, num_rows))
    return _Plan(width, window, num_windows, num_chunks, interpreted)


def _body(
    logits: Any,
    temperature: Any,
    seed: Any,
    positions: Any,
    *refs: Any,
    plan: _Plan,
    first_id: int,
    filtered: bool,
) -> None:
    threshold, values, ids = refs if filtered else (None, *refs)
    row, chunk = lax.axis_index("row"), lax.axis_index("chunk")
    t = temperature[row]
    least = threshold[row] if threshold is not None else None

    def scan(noisy: bool) -> tuple[jax.Array, jax.Array]:
        key = _key(seed, positions, row) if noisy else None

        def window(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _window(logits.at[row], index, t, key, least, plan=plan, first_id=first_id)

        return _best(window, chunk, plan)

    value, token_id = lax.cond(t > 0, lambda: scan(True), lambda: scan(False))
    values[row, chunk] = value
    ids[row, chunk] = token_id


def _key(seed: Any, positions: Any, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """noise.position_key of one row, from scalars."""
    high, low = seed[row, 0], seed[row, 1]
    h0 = noise.mix32(low ^ jnp.uint32(0x9E3779B9))
    h1 = noise.mix32(high ^ h0)
    k0 = noise.mix32(h0 ^ noise.mix32(positions[row].astype(jnp.uint32) + h1))
    return k0, noise.mix32(k0 + h1)


def _best(window: Any, chunk: jax.Array, plan: _Plan) -> tuple[jax.Array, jax.Array]:
    """(value, id) over a chunk's windows. Lanes keep their first maximum; then the lowest id."""
    first = chunk * plan.num_windows // plan.num_chunks
    stop = (chunk + 1) * plan.num_windows // plan.num_chunks

    def better(index: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, token_ids = window(index)
        wins = value > best[0]
        return jnp.where(wins, value, best[0]), jnp.where(wins, token_ids, best[1])

    value, token_ids = lax.fori_loop(first + 1, stop, better, window(first))
    top = jnp.max(value)
    return top, jnp.min(jnp.where(value == top, token_ids, jnp.int32(_NO_ID)))


def _window(
    logits: Any,
    index: jax.Array,
    t: jax.Array,
    key: tuple[jax.Array, jax.Array] | None,
    least: jax.Array | None,
    *,
    plan: _Plan,
    first_id: int,
) -> tuple[jax.Array, jax.Array]:
    """Perturbed logits and ids of one window.

    The last window ends where the row does and repeats what the one before it has seen: a
    maximum does not mind. 2,600 logits in windows of 1,024: they start at 0, 1,024 and 1,576.
    """
    start = jnp.minimum(index * plan.window, plan.width - plan.window)
    read = logits.at[pl.ds(start, plan.window)][...].astype(jnp.float32)
    columns = start + plgpu.broadcasted_iota(
        jnp.int32, (plan.window,), 0, layout=_strided(plan.window)
    )
    token_ids = columns + jnp.int32(first_id)
    value = read
    if key is not None:
        value = read + _scaled_gumbel(noise.noise_bits(key, token_ids), t, plan)
    if least is not None:
        divisor = jnp.where(t > 0, jnp.maximum(t, jnp.float32(COLDEST)), jnp.float32(1.0))
        value = jnp.where(read / divisor >= least, value, -jnp.inf)
    return value, token_ids


def _scaled_gumbel(bits: jax.Array, t: jax.Array, plan: _Plan) -> jax.Array:
    """t * noise.gumbel_from_bits(bits), bit for bit what XLA computes on the same chip."""
    u = (bits.astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2.0**-32)
    u = jnp.minimum(u, jnp.float32(1.0 - 2.0**-24))
    if plan.interpreted:
        return t * -jnp.log(-jnp.log1p(-u))
    return _emit_scaled_gumbel(u, jnp.broadcast_to(t, u.shape))


def _emit_scaled_gumbel(u: jax.Array, t: jax.Array) -> jax.Array:
    """t * -log(-log1p(-u)), emitted below Pallas for two reasons.

    Pallas has no log1p on this backend, while the compiler has (libdevice's, as XLA). And t * g
    must be rounded before the logit is added, as in XLA's code: a plain product would be
    contracted with that addition. fma(t, g, +0) cannot be, nor folded, as -0 is not +0.
    """
    layout = _strided(u.shape[0])

    def emit(_: Any, u: Any, t: Any) -> Any:
        from jax.experimental.mosaic import gpu as mosaic
        from jaxlib.mlir.dialects import math as math_dialect

        g = -(-(-u)._pointwise(math_dialect.log1p)).log()
        zero, factor = (
            mosaic.FragmentedArray.splat(scalar, u.shape, u.layout)
            for scalar in (mosaic.c(0.0, u.mlir_dtype), t.registers.item())
        )
        return factor._pointwise(math_dialect.fma, g, zero)

    inline = plgpu.inline_mgpu(
        arg_types=(layout, plgpu.Layout.WG_SPLAT(u.shape)),
        return_type=plgpu.ShapeDtypeStruct(u.shape, jnp.float32, layout=layout),
    )
    return inline(emit)(u, t)


def _strided(width: int) -> Any:
    """One vector register of consecutive elements a thread, threads side by side."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=min(2, width // LANES))
