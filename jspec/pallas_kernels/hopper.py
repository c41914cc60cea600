"""Shared parts of the Mosaic GPU kernels: chip limits, argument checks, interpreter options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jspec.pallas_kernels.gated_mlp.tuning import SHARED_BYTES
from jspec.spec.cache_entry import FP8

LOG2E = math.log2(math.e)
SWIZZLE = 128  # bytes: a row of 64 bf16 in a swizzled tile, without bank conflicts
MEMBER = "member"  # the axis of a cluster's blocks
NOTHING = -1e30  # maximum (or height) over no keys; finite, so differences are not NaN


def has_mosaic_gpu() -> bool:
    """Return whether this jax can compile and interpret the kernels (0.11 or later)."""
    return hasattr(plgpu, "InterpretGPUParams")


def require_mosaic_gpu() -> None:
    if not has_mosaic_gpu():
        raise NotImplementedError(f"the GPU kernel needs jax 0.11 or later, not {jax.__version__}")


def interpret_options(interpreted: bool) -> dict[str, Any]:
    """Return arguments of plgpu.kernel: the interpreter with race detection, or none."""
    if not interpreted:
        return {}
    params: Any = getattr(plgpu, "InterpretGPUParams")  # noqa: B009  # absent in jax 0.10
    return {"interpret": params(detect_races=True)}


def swizzled(dtype: DTypeLike, width: int = SWIZZLE) -> tuple[Any, ...]:
    """Return the transforms of memory for TMA and wgmma. width: columns of the narrowest slice."""
    row_bytes = min(SWIZZLE, width * jnp.dtype(dtype).itemsize)
    columns = row_bytes // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(row_bytes))


def ring_barriers(stages: int, *, copies: int, consumers: int, cluster: int) -> dict[str, Any]:
    """Return the barriers of a ring that a producer fills with `copies` copies per stage."""
    empty: Any = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    if cluster > 1:  # a multicast writes to all members, so all must have released the stage
        empty = plgpu.ClusterBarrier(
            collective_axes=(MEMBER,), num_arrivals=consumers, num_barriers=stages
        )
    return {"full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages), "empty": empty}


def each(start: Any, stop: Any, body: Callable[[Any], None]) -> None:
    lax.fori_loop(start, stop, lambda i, _: body(i), None)


@dataclass(frozen=True, slots=True)
class Sweep:
    """The tiles of a product that each block of a persistent kernel computes, in order.

    grid: cluster tiles (tiles without clusters), down the rows and across the columns
    group: rows of tiles swept together, column by column, so that weights are read once per group
    cluster: tiles of a cluster, down and across
    """

    grid: tuple[int, int]
    num_blocks: int
    group: int
    cluster: tuple[int, int]

    def turns(self, block: jax.Array) -> jax.Array:
        """Return the number of tiles of a block: every num_blocks-th."""
        return (self.grid[0] * self.grid[1] - block + self.num_blocks - 1) // self.num_blocks

    def place(self, block: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (row tile, column tile) of a turn of this block.

        In:  3 rows, 2 columns, groups of 2      Out: tiles 0 2 | 1 3, then 4 | 5
        """
        rows, columns = self.grid
        down, across = self.cluster
        group = max(1, min(rows, self.group // down))
        tile = block + turn * self.num_blocks
        first = tile // (group * columns) * group
        height: Any = jnp.minimum(group, rows - first) if rows % group else group
        inner = tile - first * columns
        row, column = first + lax.rem(inner, height), lax.div(inner, height)
        if self.cluster != (1, 1):
            member = lax.axis_index(MEMBER)
            row, column = row * down, column * across
            row, column = (row + member, column) if down > 1 else (row, column + member)
        return row, column


def fill_ring(
    sweep: Sweep,
    *,
    k_tiles: int,
    num_stages: int,
    empty: Any,
    copy_weights: Callable[[Any, jax.Array, jax.Array], None],
    copy_tokens: Callable[[Any, jax.Array, jax.Array], None],
    starts_early: bool,
    releases_early: bool,
) -> None:
    """Keep a ring of stages full over all tiles of this block's sweep.

    copy_weights, copy_tokens: start the copies into a stage, given (stage, column tile, K tile) and
        (stage, row tile, K tile)
    starts_early: load the first weights before the preceding kernel has ended
    releases_early: let the next kernel start when the last tile has started
    """
    block = lax.axis_index("block")
    turns = sweep.turns(block)
    total = turns * k_tiles
    first = jnp.minimum(total, num_stages)

    def stage_of(step: jax.Array) -> jax.Array:
        return lax.rem(step, num_stages)

    def first_weights(step: jax.Array) -> None:
        (_, column), k = sweep.place(block, step // k_tiles), step % k_tiles
        copy_weights(stage_of(step), column, k)

    def first_tokens(step: jax.Array) -> None:
        (row, _), k = sweep.place(block, step // k_tiles), step % k_tiles
        copy_tokens(stage_of(step), row, k)

    def tile(turn: jax.Array) -> None:
        row, column = sweep.place(block, turn)
        if releases_early:

            @pl.when(turn == turns - 1)
            def _() -> None:
                plgpu.griddepcontrol_launch_dependents()

        def refill(k: jax.Array) -> None:
            step = turn * k_tiles + k
            _await_release(empty, stage_of(step))
            copy_weights(stage_of(step), column, k)
            copy_tokens(stage_of(step), row, k)

        each(jnp.clip(first - turn * k_tiles, 0, k_tiles), k_tiles, refill)

    each(0, first, first_weights)
    if starts_early:
        plgpu.griddepcontrol_wait()
    each(0, first, first_tokens)
    each(0, turns, tile)
    each(total - first, total, lambda step: _await_release(empty, stage_of(step)))


def _await_release(empty: Any, stage: jax.Array) -> None:
    plgpu.barrier_wait(empty.at[stage])


def check_attention(
    q: tuple[int, int, int],  # T, H, Dq
    kv_pages: jax.Array,
    *,
    block_tokens: int,
    shared_bytes: int,
    scale: float,
    reads_fp8: bool = False,
) -> None:
    """Raise ValueError for unsupported arguments. shared_bytes: per program."""
    require_mosaic_gpu()
    _, page_size, two_g, width = kv_pages.shape
    if not (kv_pages.dtype in (jnp.bfloat16, jnp.float16) or (reads_fp8 and kv_pages.dtype == FP8)):
        raise ValueError(f"the pool is {kv_pages.dtype}; expected bfloat16 or float16")
    if width not in (64, 128):
        raise ValueError(f"head_dim is {width}; expected 64 or 128")
    if page_size % 8 or (block_tokens % page_size and page_size % block_tokens):
        raise ValueError(f"page_size is {page_size}; expected 8, 16, 32, 64 or a multiple of 128")
    if scale <= 0:
        raise ValueError(f"scale is {scale}; expected more than 0")
    if q[1] % (two_g // 2) or q[2] > width:
        raise ValueError(f"q is {q}, the pool {kv_pages.shape}; heads or widths do not fit")
    if shared_bytes > SHARED_BYTES:
        raise ValueError(
            f"the tuning needs {shared_bytes} bytes of shared memory; {SHARED_BYTES} exist"
        )


def fold_scores(scores: Any, factor: float, top: Any, total: Any) -> tuple[Any, Any, Any, Any]:
    """Add a block of scores to an online softmax. Return (new maxima, of log2-scaled scores; the
    fade of earlier sums; the block's weights; new sums)."""
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * factor)
    fade = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    return new_top, fade, weights, total * fade + jnp.sum(weights, axis=1)


def add_values(mixed: Any, weights: Any, values: Any, *, staged: Any) -> Any:
    """Return mixed + weights V with a running accumulator. staged: shared memory for the weights in
    interpret mode, which has no such accumulator."""
    if staged is not None:
        staged[...] = weights
        plgpu.commit_smem()

        def apart(acc: Any) -> Any:
            plgpu.wgmma(acc, staged, values)
            return acc[...]

        return mixed + pl.run_scoped(apart, plgpu.WGMMAAccumulatorRef(mixed.shape, jnp.float32))

    def running(acc: Any) -> None:
        plgpu.wgmma(acc, weights, values)

    return pl.run_state(running)(plgpu.WGMMAAccumulatorRef.init(mixed))


def silu_gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return silu(gate) * up, computed in float32 and rounded to gate's dtype."""
    wide = gate.astype(jnp.float32)
    # 1 / y is rsqrt(y) squared: one instruction instead of ten. If exp2 overflows, it is 0.
    root = lax.rsqrt(1.0 + jnp.exp2(wide * -LOG2E))
    return (wide * root * root * up.astype(jnp.float32)).astype(gate.dtype)


def wide_dtype(pool_dtype: DTypeLike) -> Any:
    """Return the dtype in which products read a pool: f16 for FP8, as it has every e4m3 value."""
    return jnp.dtype(jnp.float16 if pool_dtype == FP8 else pool_dtype)


def widened(source: Any, dtype: DTypeLike, *, written: Any = None) -> Any:
    """Load K or V of a block in FP8 as f16, with 0 from `written` on, as 0 times NaN is NaN."""
    load: Any = plgpu.load
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    found = load(source, layout=layout).astype(dtype)
    if written is None:
        return found
    token = plgpu.broadcasted_iota(jnp.int32, found.shape, 0, layout=layout)
    return jnp.where(token < written, found, jnp.zeros_like(found))


def zero_unwritten(values: Any, written: Any) -> None:
    """Zero the V of a block's slots from `written` on, as 0 times NaN is NaN."""
    v = plgpu.layout_cast(values[...], plgpu.Layout.WGMMA)
    token = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
    values[...] = jnp.where(token < written, v, jnp.zeros_like(v))
    plgpu.commit_smem()
