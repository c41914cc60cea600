"""Paged attention: the contract, and the choice of the program that fulfils it.

    q[T, H, D], k_new, v_new [T, G, D] (or None: nothing is written), kv_pages[NP, S, 2G, D]
    page_table[B, P], prefix_lens[B]: KV rows before this call's first new row, always
    cu_q_lens[B + 1]: row b has cu_q_lens[b+1] - cu_q_lens[b] queries

Queries lie packed, row after row, unless `queries_per_row` R is given: then row b's queries are
q[b * R], ..., and those behind its length are padding, whose K and V go to the dummy page.

Which keys query j of row b sees:
  - tail_mask None: the first prefix_lens[b] + j + 1 (prefill, chunk, extend, chain);
  - tail_mask u32[T, ceil(W / 32)]: all keys before the tail, and of the tail, which is the last W
    slots through this call's last new row, those w whose bit w is set (W from tail_positions).
  - window w: only keys with q_position - key_position < w; a tail key's position is
    tail_positions[b, w], any other key's position is its slot.

`sinks` f32[H] adds exp(sink) to each head's softmax denominator; soft_cap c maps scores s to
c * tanh(s / c). K and V may be narrower than the pool's D. Result: (out[T, H, D], kv_pages').
"""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from jspec.core.errors import ConfigError
from jspec.pallas_kernels import (
    paged_attention_gpu,
    paged_attention_tpu,
    paged_prefill_gpu,
    paged_prefill_tpu,
    reference,
    streaming,
)
from jspec.pallas_kernels.rows import AttentionRows

# What runs the contract: the definition; XLA, on anything; the Mosaic kernels, on a TPU or a Hopper
# GPU, or in an interpreter on anything (for tests: it is thousands of times slower).
Backend = Literal["reference", "xla", "tpu", "tpu_interpret", "gpu", "gpu_interpret"]
LANES = 128  # of a TPU


def paged_attention(
    q: Float[Array, "T H Dq"],
    k_new: Float[Array, "T G Dk"] | None,
    v_new: Float[Array, "T G Dv"] | None,
    kv_pages: Float[Array, "NP S G2 D"],
    page_table: Int[Array, "B P"],
    prefix_lens: Int[Array, "B"],
    cu_q_lens: Int[Array, "B1"],
    tail_mask: UInt32[Array, "T words"] | None,
    q_positions: Int[Array, "T"],
    tail_positions: Int[Array, "B W"] | None,
    *,
    scale: float,
    queries_per_row: int | None = None,
    window: int | None = None,
    sinks: Float[Array, "H"] | None = None,
    soft_cap: float | None = None,
    backend: Backend = "xla",
) -> tuple[Float[Array, "T H D"], Float[Array, "NP S G2 D"]]:
    """Writes k_new and v_new, then attends; see the module's docstring for the contract.

    Raises ValueError at trace time for shapes that contradict each other.
    """
    rows = AttentionRows(
        page_table=page_table,
        prefix_lens=prefix_lens,
        cu_q_lens=cu_q_lens,
        q_positions=q_positions,
        tail_mask=tail_mask,
        tail_positions=tail_positions,
    )
    _check(q, kv_pages, rows, queries_per_row=queries_per_row)
    many = queries_per_row is not None and (
        queries_per_row > paged_attention_tpu.MAX_QUERIES_PER_ROW
    )
    settings: dict[str, Any] = {
        "scale": scale,
        "window": window,
        "sinks": sinks,
        "soft_cap": soft_cap,
    }
    if is_tpu_kernel(backend) and not many:
        return _attend_tpu(
            q,
            k_new,
            v_new,
            kv_pages,
            rows,
            queries_per_row=queries_per_row,
            interpret=backend == "tpu_interpret",
            **settings,
        )
    if k_new is not None and v_new is not None:
        kv_pages = reference.write_new(
            k_new, v_new, kv_pages, rows, queries_per_row=queries_per_row
        )
    if is_gpu_kernel(backend) and not many:
        settings |= {"interpret": backend == "gpu_interpret"}
        if queries_per_row is None:
            return paged_prefill_gpu.attend_packed(q, kv_pages, rows, **settings), kv_pages
        out = paged_attention_gpu.attend_rows(
            q, kv_pages, rows, queries_per_row=queries_per_row, **settings
        )
        return out, kv_pages
    kind = reference.attend if backend == "reference" else streaming.attend
    return kind(q, kv_pages, rows, queries_per_row=queries_per_row, **settings), kv_pages


def choose_backend(
    platform: str, requested: str = "auto", *, gpu_problem: str | None = None
) -> Backend:
    """What runs attention on jax devices of `platform`: "cpu", "gpu" or "tpu".

    requested: "auto"; "xla", on anything; "pallas", the platform's own kernels. gpu_problem: why
    the Hopper kernels do not serve (dispatch.gpu_problem); XLA does then, unless they were asked
    for by name. Raises ConfigError.
    """
    if requested == "pallas" and platform not in ("gpu", "tpu"):
        raise ConfigError(
            f"attention_backend is 'pallas', on {platform} devices; expected 'auto' or 'xla' there"
        )
    if requested == "xla" or platform not in ("gpu", "tpu"):
        return "xla"
    if platform == "tpu":
        return "tpu"
    if gpu_problem is None:
        return "gpu"
    if requested == "pallas":
        raise ConfigError(f"attention_backend is 'pallas', with {gpu_problem}")
    return "xla"


def is_tpu_kernel(backend: Backend) -> bool:
    return backend in ("tpu", "tpu_interpret")


def is_gpu_kernel(backend: Backend) -> bool:
    return backend in ("gpu", "gpu_interpret")


def pool_width(head_dim: int, backend: Backend) -> int:
    """D of the pool. The TPU kernels read whole vectors, and a TPU pads the last axis to them.

    In:  64, "tpu"     Out: 128
    """
    return -(-head_dim // LANES) * LANES if is_tpu_kernel(backend) else head_dim


def _attend_tpu(
    q: jax.Array,
    k_new: jax.Array | None,
    v_new: jax.Array | None,
    kv_pages: jax.Array,
    rows: AttentionRows,
    *,
    queries_per_row: int | None,
    interpret: bool,
    **settings: Any,
) -> tuple[jax.Array, jax.Array]:
    if queries_per_row is None:
        return paged_prefill_tpu.attend_packed(
            q,
            k_new,
            v_new,
            kv_pages,
            rows,
            interpret=pltpu.InterpretParams() if interpret else False,
            **settings,
        )
    return paged_attention_tpu.attend_rows(
        q,
        k_new,
        v_new,
        kv_pages,
        rows,
        queries_per_row=queries_per_row,
        interpret=interpret,
        **settings,
    )


def _check(
    q: jax.Array, kv_pages: jax.Array, rows: AttentionRows, *, queries_per_row: int | None
) -> None:
    batch = rows.page_table.shape[0]
    if q.shape[1] % (kv_pages.shape[2] // 2):
        raise ValueError(
            f"{q.shape[1]} query heads over {kv_pages.shape[2] // 2} kv heads; expected a multiple"
        )
    if q.shape[2] > kv_pages.shape[3]:
        raise ValueError(f"q is {q.shape[2]} wide, the pool {kv_pages.shape[3]}; expected at most")
    if queries_per_row is not None and q.shape[0] != batch * queries_per_row:
        raise ValueError(f"{q.shape[0]} queries; expected {batch} rows of {queries_per_row}")
    if (rows.tail_mask is None) != (rows.tail_positions is None):
        raise ValueError("tail_mask and tail_positions come together or not at all")
    if rows.tail_mask is not None and rows.tail_positions is not None:
        words = -(-rows.tail_positions.shape[1] // 32)
        if rows.tail_mask.shape != (q.shape[0], words):
            raise ValueError(f"tail_mask is {rows.tail_mask.shape}; expected {(q.shape[0], words)}")
