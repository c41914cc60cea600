"""A layer's attention on a Hopper GPU in two kernels: kv_write/gpu.py writes K and V and stores q
as gpu.py, gpu_fp8.py or prefill/gpu.py reads it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.pallas_kernels.attention import gpu as paged_attention_gpu
from jspec.pallas_kernels.attention import gpu_fp8, gpu_shared
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.gpu_plan import pack_queries
from jspec.pallas_kernels.attention.reference import new_slots
from jspec.pallas_kernels.fp8_product.api import Scaled
from jspec.pallas_kernels.hopper import wide_dtype
from jspec.pallas_kernels.kv_write import gpu as rotate_write_gpu
from jspec.pallas_kernels.kv_write.api import KVScales, Rotation
from jspec.pallas_kernels.prefill import gpu as paged_prefill_gpu
from jspec.spec.cache_entry import FP8


def serves(
    heads: jax.Array,
    kv_pages: jax.Array,
    *,
    queries_per_row: int | None,
    scales: KVScales | None = None,
) -> bool:
    """Return whether the kernels support heads[T, H + 2G, D] and this pool."""
    reads = kv_pages.dtype == (heads.dtype if scales is None else FP8)
    fits = rotate_write_gpu.serves(heads.shape[-1], kv_pages.shape[-1])
    few = (queries_per_row or 1) <= paged_attention_gpu.MAX_QUERIES
    return fits and few and reads


def rotate_write_and_attend(
    heads: Float[Array, "T heads D"],
    rotation: Rotation,
    kv_pages: Float[Array, "NP S G2 D"],
    rows: AttentionMetadata,
    *,
    queries_per_row: int | None,
    scale: float,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    scales: KVScales | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H D"] | Scaled, Float[Array, "NP S G2 D"]]:
    """Fulfil api.py for heads (q, then k, then v) before norms and RoPE."""
    tokens = heads.shape[0]
    page, offset = new_slots(
        rows, tokens, page_size=kv_pages.shape[1], queries_per_row=queries_per_row
    )
    q, kv_pages = rotate_write_gpu.rotate_and_write(
        heads,
        rotation.cos,
        rotation.sin,
        kv_pages,
        page,
        offset,
        num_heads=rotation.num_heads,
        norms=rotation.norms,
        scales=scales,
        queries_per_row=queries_per_row,
        interpret=interpret,
    )
    if queries_per_row is None:
        out = paged_prefill_gpu.attend_packed(
            q,
            kv_pages,
            rows,
            scale=scale,
            window=window,
            sinks=sinks,
            interpret=interpret,
        )
        return _scaled(out, scales, heads.dtype), kv_pages
    group = rotation.num_heads // (kv_pages.shape[2] // 2)
    packs = gpu_shared.serves(queries_per_row=queries_per_row, group=group)
    if rows.shared is not None and window is None and packs:
        out = gpu_shared.attend_shared(
            q,
            kv_pages,
            rows,
            num_heads=rotation.num_heads,
            queries_per_row=queries_per_row,
            scale=scale,
            sinks=sinks,
            interpret=interpret,
        )
        return _scaled(out, scales, heads.dtype), kv_pages
    out = attend_rows(
        q,
        kv_pages,
        rows,
        scale=scale,
        window=window,
        sinks=sinks,
        queries_per_row=queries_per_row,
        packed_heads=rotation.num_heads,
        interpret=interpret,
    )
    return _scaled(out, scales, heads.dtype), kv_pages


def attend_rows(
    q: jax.Array,
    kv_pages: jax.Array,
    rows: AttentionMetadata,
    *,
    queries_per_row: int,
    packed_heads: int | None = None,
    **how: Any,
) -> jax.Array:
    """Run gpu.attend_rows, or gpu_fp8.py's kernel where it computes the same in less time."""
    num_kv, width = kv_pages.shape[2] // 2, kv_pages.shape[3]
    num_heads = packed_heads or q.shape[1]
    if not gpu_fp8.serves(kv_pages, queries_per_row=queries_per_row, group=num_heads // num_kv):
        how |= {"queries_per_row": queries_per_row, "packed_heads": packed_heads}
        return paged_attention_gpu.attend_rows(q, kv_pages, rows, **how)
    if packed_heads is None:
        sizes = (rows.page_table.shape[0], num_kv, queries_per_row)
        q = pack_queries(q.astype(wide_dtype(kv_pages.dtype)), *sizes, width=width)
    how |= {"queries_per_row": queries_per_row, "packed_heads": num_heads}
    return gpu_fp8.attend_rows(q, kv_pages, rows, **how)


def _scaled(out: jax.Array, scales: KVScales | None, dtype: DTypeLike) -> jax.Array | Scaled:
    """Leave the multiplication by V's scale to the product that reads the result."""
    return out if scales is None else Scaled(of=out, factor=scales.v, dtype=jnp.dtype(dtype))
