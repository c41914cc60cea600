"""The contract of paged attention, which every implementation of `Ops.attend` fulfils.

    q[T, H, D], k_new, v_new [T, G, D] (None: nothing is written), kv_pages[NP, S, 2G, D]
    rows.page_table[B, P], rows.prefix_lens[B]: tokens of the row before this call's first new one,
    also when k_new is None
    rows.cu_q_lens[B + 1]: row b has cu_q_lens[b+1] - cu_q_lens[b] queries

Queries are packed row after row. With `queries_per_row` R, row b's queries instead start at q[b *
R]; those beyond its length are padding, whose K and V go to the dummy page.

Query j of row b sees these keys:
  - tail_mask None: the first prefix_lens[b] + j + 1 (prefill, chunk, advance, chain);
  - tail_mask u32[T, ceil(W / 32)]: all keys before the tail, and tail slot w if bit w is set. The
    tail is the row's last W slots, up to this call's last new token (W from tail_positions). With
    `queries_per_row` such a row has R queries or none.
  - window w: only keys with q_position - key_position < w; a tail key's position is
    tail_positions[b, w], any other key's position is its slot.

`sinks` f32[H] adds exp(sink) to each head's softmax denominator; soft_cap c maps scores s to c *
tanh(s / c). K and V may be narrower than the pool's D. Result: (out[T, H, D], kv_pages').

Writes replace non-finite values of k_new and v_new (kv_write), so every written slot is finite;
unwritten slots may hold anything. XLA and the kernels rely on both: they replace unwritten slots,
and give slots that only some queries see a weight of 0 for the others. The reference does not rely
on it: no slot reaches a query that does not see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jspec.pallas_kernels.attention.rows import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The static arguments of a call. queries_per_row: None for packed prefill chunks."""

    queries_per_row: int | None
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that every implementation takes."""
        return {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}


def check_call(
    q: jax.Array, kv_pages: jax.Array, rows: AttentionMetadata, call: AttentionCall
) -> None:
    """Raise ValueError at trace time for shapes that contradict each other."""
    batch = rows.page_table.shape[0]
    if q.shape[1] % (kv_pages.shape[2] // 2):
        raise ValueError(
            f"{q.shape[1]} query heads over {kv_pages.shape[2] // 2} kv heads; expected a multiple"
        )
    if q.shape[2] > kv_pages.shape[3]:
        raise ValueError(f"q is {q.shape[2]} wide, the pool {kv_pages.shape[3]}; expected at most")
    if call.queries_per_row is not None and q.shape[0] != batch * call.queries_per_row:
        raise ValueError(f"{q.shape[0]} queries; expected {batch} rows of {call.queries_per_row}")
    if (rows.tail_mask is None) != (rows.tail_positions is None):
        raise ValueError("tail_mask and tail_positions come together or not at all")
    if rows.tail_mask is not None and rows.tail_positions is not None:
        words = -(-rows.tail_positions.shape[1] // 32)
        if rows.tail_mask.shape != (q.shape[0], words):
            raise ValueError(f"tail_mask is {rows.tail_mask.shape}; expected {(q.shape[0], words)}")
