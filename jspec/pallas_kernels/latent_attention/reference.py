"""Attention over latent vectors (MLA, DeepSeek-V2, arXiv:2405.04434), in its absorbed form.

A token's record is its normed latent c (of the rank), then the rotated part of K that all heads
share. With the up-projections absorbed, a head's query is (W_uk q_nope, q_rope), its scores are the
products with the records, and its output is the weighted sum of latents, to which the layer applies
W_uv: attention of one kv head whose V is the first part of K. Queries, page tables and masks are
those of attention/api.py.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.attention.reference import new_slots
from jspec.pallas_kernels.kv_write.api import KVScales
from jspec.pallas_kernels.kv_write.reference import stored, write_rows


def write_new(
    records: Float[Array, "T D"],
    pages: Float[Array, "NP S Dp"],
    rows: AttentionMetadata,
    call: AttentionCall,
    scales: KVScales | None = None,
) -> Float[Array, "NP S Dp"]:
    """Write the record of new token j of each row at slot prefix_len + j, like K and V."""
    page, offset = new_slots(
        rows,
        records.shape[0],
        page_size=pages.shape[1],
        queries_per_row=call.queries_per_row,
    )
    if scales is not None:
        records = records.astype(jnp.float32) / scales.k
    wide = jnp.pad(records, ((0, 0), (0, pages.shape[2] - records.shape[1])))
    return write_rows(pages, page, offset, stored(wide, pages.dtype))
