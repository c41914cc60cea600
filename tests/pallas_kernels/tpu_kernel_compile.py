"""Compiles the row-wise attention kernel with the real TPU compiler; run in a process of its own.

    python -m tests.pallas_kernels.tpu_kernel_compile TOPOLOGY [NAME ...]

Prints one JSON line a shape: its name, seconds, lines that copy the pool, and how often it calls
the kernel. There is no TPU here: this shows that shapes compile, not that they run.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# The compiler needs no chip: it may run beside another load, whoever owns the lock file in /tmp.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.tpu import attend_rows, is_copy_free
from tests.engine.pool_copies import pool_copies


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call, on one shard."""

    queries: int  # R
    heads: int = 8  # H
    kv_heads: int = 2  # G
    batch: int = 64
    page_size: int = 64
    num_pages: int = 4096
    pages_per_row: int = 64
    widths: tuple[int, int] = (128, 128)  # head_dim and the pool's D
    dtype: Any = jnp.bfloat16
    tail: int | None = None  # W
    writes: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # window, soft_cap
    sinks: bool = False


# 8B at tensor parallel 4 is H = 8, G = 2; 70B at 8 is H = 8, G = 1; D = 128.
SHAPES = {
    **{
        f"8b tp4 R {queries} page {page_size}": Shape(queries=queries, page_size=page_size)
        for queries in (1, 4, 16)
        for page_size in (16, 32, 64, 128)
    },
    "8b tp4 tree of 16": Shape(queries=16, tail=16),
    "8b tp4 tree of 64": Shape(queries=64, tail=64),
    "8b tp4 tree of 33, page 16": Shape(queries=33, tail=33, page_size=16),
    "8b tp4 draft level": Shape(queries=4, tail=12, page_size=16),
    "8b tp4 long table": Shape(queries=4, page_size=16, pages_per_row=8192, batch=256),
    "8b tp4 window, sinks, soft cap": Shape(
        queries=16, tail=16, sinks=True, options={"window": 128, "soft_cap": 30.0}
    ),
    "8b tp4 one row": Shape(queries=16, tail=16, batch=1),
    "8b tp4 nothing written": Shape(queries=4, writes=False),
    "8b tp1 R 1": Shape(queries=1, heads=32, kv_heads=8),
    "8b tp1 tree of 16": Shape(queries=16, heads=32, kv_heads=8, tail=16),
    "70b tp8 R 1": Shape(queries=1, kv_heads=1),
    "70b tp8 tree of 16": Shape(queries=16, kv_heads=1, tail=16),
    "70b tp1 tree of 64": Shape(queries=64, heads=64, kv_heads=8, tail=64, batch=8),
    "every head its own, R 4": Shape(queries=4, heads=16, kv_heads=16),
    "head_dim 64 in a pool of 128": Shape(queries=4, widths=(64, 128)),
    "float32, R 4": Shape(queries=4, dtype=jnp.float32),
    "float32, tree of 16, 70b tp8": Shape(queries=16, kv_heads=1, dtype=jnp.float32, tail=16),
    # Pools that XLA lays out otherwise: right, but copied.
    "copied: pool of 64 lanes": Shape(queries=4, widths=(64, 64)),
    "copied: three kv heads": Shape(queries=4, heads=9, kv_heads=3),
}


def arguments(shape: Shape) -> tuple[Any, ...]:
    """Shapes of (q, k_new, v_new, kv_pages, rows, sinks)."""
    num_queries, (head_dim, width) = shape.batch * shape.queries, shape.widths
    abstract, i32 = jax.ShapeDtypeStruct, jnp.int32
    new = abstract((num_queries, shape.kv_heads, head_dim), shape.dtype) if shape.writes else None
    pool = (shape.num_pages, shape.page_size, 2 * shape.kv_heads, width)
    mask = positions = None
    if shape.tail is not None:
        mask = abstract((num_queries, -(-shape.tail // 32)), jnp.uint32)
        positions = abstract((shape.batch, shape.tail), i32)
    rows = AttentionMetadata(
        page_table=abstract((shape.batch, shape.pages_per_row), i32),
        prefix_lens=abstract((shape.batch,), i32),
        cu_q_lens=abstract((shape.batch + 1,), i32),
        q_positions=abstract((num_queries,), i32),
        tail_mask=mask,
        tail_positions=positions,
    )
    q = abstract((num_queries, shape.heads, head_dim), shape.dtype)
    sinks = abstract((shape.heads,), jnp.float32) if shape.sinks else None
    return q, new, new, abstract(pool, shape.dtype), rows, sinks


def main(topology: str, names: list[str]) -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    for name in names or SHAPES:
        shape = SHAPES[name]

        def step(q: Any, k: Any, v: Any, pool: Any, rows: Any, sinks: Any, *, call: Any) -> Any:
            out, pool = call(q, k, v, pool, rows, sinks=sinks)
            # Two layers on one pool: an update that is not in place would copy it in between.
            return call(out[..., : q.shape[-1]], k, v, pool, rows, sinks=sinks)

        call = partial(attend_rows, scale=0.088, queries_per_row=shape.queries, **shape.options)
        started = time.monotonic()
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments(shape)
        )
        compiled = jax.jit(partial(step, call=call), donate_argnums=3).lower(*args).compile()
        text, pool_shape = compiled.as_text(), args[3].shape
        result = {
            "name": name,
            "seconds": round(time.monotonic() - started, 1),
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "pool_copies": pool_copies(text, pool_shape),
            "is_copy_free": is_copy_free(pool_shape),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
