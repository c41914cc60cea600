"""Paged attention on a TPU for rows of equal length: the inputs and memory of tpu_kernel.py.

XLA must store the pool in index order (`is_copy_free`), as it does for 128 lanes and 2, 4 or a
multiple of 8 K and V heads per shard. head_dim 64 therefore needs a pool of width 128.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.tpu_kernel import (
    LANES,
    NUM_BUFFERS,
    RowsPlan,
    attend_kernel,
)
from jspec.pallas_kernels.kv_write.reference import pool_rows

MAX_QUERIES_PER_ROW = 64
MAX_POSITION = 1 << 30
SMEM_BYTES = 512 * 1024  # half of the 1 MiB, since the compiler needs some of it


def is_copy_free(pool_shape: tuple[int, ...]) -> bool:
    """Return whether XLA stores a pool [NP, S, 2G, D] in index order and need not copy it."""
    two_g, width = pool_shape[2:]
    return width % LANES == 0 and (two_g in {2, 4} or two_g % 8 == 0)


def attend_rows(
    q: jax.Array,
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    scale: float,
    queries_per_row: int,
    window: int | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write k_new and v_new [T, G, *], then attend: return (out[T, H, D], kv_pages'). T = B * R.

    Donate kv_pages. Queries after a row's length return finite values. Raises ValueError.
    """
    plan = _make_plan(
        q,
        kv_pages,
        rows,
        queries=queries_per_row,
        writes=k_new is not None and v_new is not None,
        scale=scale,
        window=window,
        interpret=interpret,
    )
    inputs: dict[str, Any] = _describe_rows(plan, rows)
    inputs["q"] = _pack(plan, q)
    inputs["table"] = _pad_to(rows.page_table, 1, LANES)[:, None]
    inputs["pages"] = kv_pages
    if sinks is not None:
        sink = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(plan.two_g // 2, 1, plan.group),
            (plan.two_g // 2, plan.queries, plan.group),
        ).reshape(plan.two_g // 2, -1, 1)
        inputs["sinks"] = _pad_to(sink, 1, 8)
    if k_new is not None and v_new is not None:
        new = pool_rows(k_new, v_new, width=plan.width, dtype=kv_pages.dtype)
        new = new.reshape(plan.batch, plan.queries, plan.two_g, plan.width)
        inputs["new"] = inputs["new_source"] = new
    out, *written = _call(plan, inputs)
    return _unpack(plan, out).astype(q.dtype), written[0] if written else kv_pages


def _make_plan(
    q: jax.Array, kv_pages: jax.Array, rows: AttentionMetadata, *, queries: int, **settings: Any
) -> RowsPlan:
    batch, pages_per_row = rows.page_table.shape
    _, page_size, two_g, width = kv_pages.shape
    if not 1 <= queries <= MAX_QUERIES_PER_ROW:
        raise ValueError(f"queries_per_row is {queries}; expected 1 to {MAX_QUERIES_PER_ROW}")
    if kv_pages.dtype not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"the pool is {kv_pages.dtype}; expected bfloat16 or float32")
    if page_size & (page_size - 1):
        raise ValueError(f"page_size is {page_size}; expected a power of two")
    tail = 0 if rows.tail_positions is None else rows.tail_positions.shape[1]
    # Tables of two rows, three scalars per row, and a window's tail positions in whole vectors.
    positions = -(-tail // LANES) * LANES if settings["window"] is not None else 0
    smem = 4 * (2 * pages_per_row + batch * (3 + positions))
    if smem > SMEM_BYTES:
        raise ValueError(
            f"{batch} rows of {pages_per_row} pages, {tail} tail slots need {smem} bytes of scalar "
            f"memory; expected at most {SMEM_BYTES}: use larger pages or fewer rows"
        )
    return RowsPlan(
        batch=batch,
        queries=queries,
        group=q.shape[1] // (two_g // 2),
        page_size=page_size,
        two_g=two_g,
        width=width,
        pages_per_row=pages_per_row,
        tail=tail,
        dtype=jnp.dtype(kv_pages.dtype),
        **settings,
    )


def _pad_to(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, pads)


def _pack(plan: RowsPlan, q: jax.Array) -> jax.Array:
    dtype = plan.dtype if q.dtype == plan.dtype else jnp.float32
    q = jnp.pad(q.astype(dtype), ((0, 0), (0, 0), (0, plan.width - q.shape[2])))
    q = q.reshape(plan.batch, plan.queries, plan.two_g // 2, plan.group, plan.width)
    q = q.transpose(0, 2, 1, 3, 4).reshape(plan.batch, plan.two_g // 2, -1, plan.width)
    return _pad_to(q, 2, 8)


def _unpack(plan: RowsPlan, out: jax.Array) -> jax.Array:
    out = out[:, :, : plan.queries * plan.group]
    shape = (plan.batch, plan.two_g // 2, plan.queries, plan.group, plan.width)
    out = out.reshape(shape).transpose(0, 2, 1, 3, 4)
    return out.reshape(plan.batch * plan.queries, -1, plan.width)


def _describe_rows(plan: RowsPlan, rows: AttentionMetadata) -> dict[str, jax.Array]:
    """Return the rows' scalars and, if a mask needs them, mask words and position of each query.

    In:  prefix_lens = [9, 0], lengths = [3, 0], q_positions = 9 10 11 | 0 0 0, window 4
    Out: limits = [12, 0], firsts = [6, 0]
    """
    lens = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
    most = plan.pages_per_row * plan.page_size
    limits = jnp.where(lens > 0, jnp.minimum(rows.prefix_lens + lens, most), 0)
    firsts = jnp.zeros_like(limits)
    columns = []
    if rows.tail_mask is not None:
        columns.append(lax.bitcast_convert_type(rows.tail_mask, jnp.int32))
    if plan.window is not None:
        positions = rows.q_positions.reshape(plan.batch, plan.queries)
        real = jnp.arange(plan.queries) < lens[:, None]
        least = jnp.min(jnp.where(real, positions, MAX_POSITION), axis=1)
        firsts = least - plan.window + 1
        if plan.tail:  # a tail key's position does not determine its slot
            firsts = jnp.minimum(firsts, rows.prefix_lens + plan.queries - plan.tail)
        firsts = jnp.clip(firsts, 0, jnp.maximum(limits - 1, 0))
        columns.append(rows.q_positions[:, None])
    described = {"prefix_lens": rows.prefix_lens, "limits": limits, "firsts": firsts}
    if plan.window is not None and rows.tail_positions is not None:
        described["tail_positions"] = rows.tail_positions
    if columns:
        info = jnp.concatenate(columns, axis=1).reshape(plan.batch, plan.queries, -1)
        described["query_info"] = _pad_to(info, 1, 8)
    return described


def _call(plan: RowsPlan, inputs: dict[str, jax.Array]) -> list[jax.Array]:
    step_rows, heads = plan.rows_per_step, plan.two_g // 2
    num_steps = plan.batch // plan.num_splits // step_rows

    def rows_of(x: jax.Array) -> pl.BlockSpec:
        rest = (0,) * (x.ndim - 1)
        return pl.BlockSpec((step_rows, *x.shape[1:]), lambda s, n, *_: (s * num_steps + n, *rest))

    hbm = pl.BlockSpec(memory_space=pl.ANY)
    specs = {
        "q": rows_of(inputs["q"]),
        "table": hbm,
        "pages": hbm,
        "query_info": rows_of(inputs["query_info"]) if plan.has_query_info else hbm,
        "sinks": pl.BlockSpec((heads, plan.packed, 1), lambda *_: (0, 0, 0)),
        "new": rows_of(inputs["new"]) if plan.writes else hbm,
        "new_source": hbm,
    }
    scalars = [n for n in ("prefix_lens", "limits", "firsts", "tail_positions") if n in inputs]
    names = [name for name in specs if name in inputs]
    outs: dict[str, Any] = {"out": jax.ShapeDtypeStruct(inputs["q"].shape, inputs["q"].dtype)}
    out_specs = [specs["q"]]
    aliases = {}
    if plan.writes:
        pool = inputs["pages"]
        # Placed in HBM explicitly, or XLA would copy a small pool to VMEM and back.
        outs["pages_out"] = pltpu.HBM(pool.shape, pool.dtype)
        out_specs.append(hbm)
        aliases[len(scalars) + names.index("pages")] = 1
    scratch = _scratch(plan, inputs)
    order = [*scalars, *names, *outs, *scratch]
    call = pl.pallas_call(
        functools.partial(attend_kernel, plan, order),
        out_shape=list(outs.values()),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(plan.num_splits, num_steps),
            in_specs=[specs[name] for name in names],
            out_specs=out_specs,
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=plan.vmem_bytes,
            # Checks would be half the instructions of a page's copy; the interpreter has its own.
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams() if plan.interpret else False,
        name=f"paged_attention_rows_{plan.queries}",
    )
    return list(call(*(inputs[name] for name in (*scalars, *names))))


def _scratch(plan: RowsPlan, inputs: dict[str, jax.Array]) -> dict[str, Any]:
    heads = plan.two_g // 2
    block = (plan.block_keys, plan.two_g, plan.width)
    table_width = -(-plan.pages_per_row // LANES) * LANES
    partial = (heads, plan.packed, LANES)
    scratch = {
        "buffers": pltpu.VMEM((NUM_BUFFERS, *block), plan.dtype),
        "table_ring": pltpu.SMEM((2, 1, table_width), jnp.int32),
        "state": pltpu.SMEM((4,), jnp.int32),
        "top": pltpu.VMEM(partial, jnp.float32),
        "total": pltpu.VMEM(partial, jnp.float32),
        "mixed": pltpu.VMEM((heads, plan.packed, plan.width), jnp.float32),
        "page_sems": pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
        "table_sem": pltpu.SemaphoreType.DMA,
        "write_sem": pltpu.SemaphoreType.DMA,
    }
    if plan.has_query_info:
        info = (plan.packed, inputs["query_info"].shape[2])
        scratch["packed_info"] = pltpu.VMEM(info, jnp.int32)
    return scratch
