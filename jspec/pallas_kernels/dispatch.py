"""Which program compacts an accepted path and gathers what is emitted, by backend; and its limits.

paged_attention.py chooses among the attentions; the references stand in kv_update.py and
bonus_token.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.pallas_kernels import (
    bonus_token,
    bonus_token_tpu,
    hopper,
    kv_update,
    kv_update_gpu,
    kv_update_tpu,
)
from jspec.pallas_kernels.paged_attention import Backend, is_gpu_kernel, is_tpu_kernel


def gpu_problem(
    *, compute_capability: str, dtype: DTypeLike, page_size: int, head_dims: tuple[int, ...]
) -> str | None:
    """What the Hopper kernels do not serve, and what they expect; None if they serve all of it."""
    odd = [width for width in head_dims if width not in (64, 128)]
    expected = {
        f"the GPU's compute capability {compute_capability}": (compute_capability == "9.0", "9.0"),
        f"jax {jax.__version__}": (hopper.has_mosaic_gpu(), "0.11 or later"),
        f"dtype {jnp.dtype(dtype).name}": (
            dtype in (jnp.bfloat16, jnp.float16),
            "bfloat16 or float16",
        ),
        f"page_size {page_size}": (
            page_size in (8, 16, 32, 64) or page_size % 128 == 0,
            "8, 16, 32, 64 or a multiple of 128",
        ),
        f"head_dim {odd[0] if odd else head_dims[0]}": (not odd, "64 or 128"),
    }
    found = (f"{name}; expected {wanted}" for name, (fits, wanted) in expected.items() if not fits)
    return next(found, None)


def compact_paths(
    kv: tuple[jax.Array, ...],
    page_table: Int[Array, "B P"],
    seq_lens: Int[Array, "B"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    backend: Backend,
) -> tuple[jax.Array, ...]:
    """`kv_update.compact_path` of every layer's pool, in place when the pools are donated."""
    if is_tpu_kernel(backend):
        return kv_update_tpu.compact_paths(
            kv,
            page_table,
            seq_lens,
            node_path,
            num_accepted,
            interpret=backend == "tpu_interpret",
        )
    if is_gpu_kernel(backend):
        return kv_update_gpu.compact_paths(
            kv,
            page_table,
            seq_lens,
            node_path,
            num_accepted,
            interpret=backend == "gpu_interpret",
        )
    return tuple(
        kv_update.compact_path(pages, page_table, seq_lens, node_path, num_accepted) for pages in kv
    )


def gather_emitted(
    target_ids: Int[Array, "B N"],
    hidden: Float[Array, "B N A"],
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    backend: Backend,
) -> tuple[Int[Array, "B M"], Int[Array, "B"], Float[Array, "B M A"]]:
    """(emitted ids, bonus token, hidden rows along the path), 0 behind each path."""
    if is_tpu_kernel(backend) and hidden.shape[2]:
        return bonus_token_tpu.gather_emitted(
            target_ids, hidden, node_path, num_accepted, interpret=backend == "tpu_interpret"
        )
    return bonus_token.gather_emitted(target_ids, hidden, node_path, num_accepted)
