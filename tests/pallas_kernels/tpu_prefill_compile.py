"""Compiles the packed prefill kernel with the real TPU compiler; run in a process of its own.

    python -m tests.pallas_kernels.tpu_prefill_compile TOPOLOGY [EVERY]

Prints one JSON line a shape (where EVERY is 4, every fourth). There is no TPU here: this shows that
Mosaic accepts the kernel and that XLA does not copy the pool around it, not that it runs.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# The compiler needs no chip: it may run beside another load, whoever owns the lock file in /tmp.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.prefill.tpu import attend_packed
from tests.engine.pool_copies import pool_copies

NUM_PAGES, BATCH, CONTEXT = 4096, 8, 8192


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Query and kv heads of one shard, head_dim, packed tokens."""

    heads: int = 8
    kv_heads: int = 2
    width: int = 128
    q_width: int = 128
    tokens: int = 1024
    page_size: int = 64
    dtype: Any = jnp.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    writes: bool = True

    @property
    def pool(self) -> tuple[int, int, int, int]:
        return (NUM_PAGES, self.page_size, 2 * self.kv_heads, self.width)


LLAMA_8B_TP4 = [Shape(tokens=t, page_size=s) for t in (256, 1024, 2048) for s in (16, 64, 128)]
SHAPES = [
    *LLAMA_8B_TP4,
    Shape(kv_heads=1, tokens=2048, page_size=16),  # 70B, tensor parallel 8
    Shape(kv_heads=1, tokens=256, page_size=128),
    Shape(heads=32, kv_heads=8, page_size=32),  # 8B on one chip
    Shape(heads=32, kv_heads=8, q_width=64, tokens=512),  # head_dim 64 in a pool of 128
    Shape(heads=8, kv_heads=8, tokens=16, page_size=16),
    Shape(heads=28, kv_heads=4, tokens=512),
    Shape(kv_heads=2, dtype=jnp.float32, tokens=256, page_size=16),
    Shape(window=512, soft_cap=30.0, sinks=True),
    Shape(writes=False, page_size=16),
    Shape(width=256, q_width=256, tokens=256),
]


def compile_shape(shape: Shape, sharding: jax.sharding.Sharding) -> dict[str, Any]:
    def array(dims: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def program(q: Any, k: Any, v: Any, pool: Any, rows: AttentionMetadata, sinks: Any) -> Any:
        return attend_packed(
            q,
            k if shape.writes else None,
            v if shape.writes else None,
            pool,
            rows,
            scale=shape.q_width**-0.5,
            window=shape.window,
            sinks=sinks if shape.sinks else None,
            soft_cap=shape.soft_cap,
        )

    rows = AttentionMetadata(
        page_table=array((BATCH, CONTEXT // shape.page_size)),
        prefix_lens=array((BATCH,)),
        cu_q_lens=array((BATCH + 1,)),
        q_positions=array((shape.tokens,)),
    )
    new = array((shape.tokens, shape.kv_heads, shape.q_width), shape.dtype)
    started = time.monotonic()
    compiled = (
        jax.jit(program, donate_argnums=3)
        .lower(
            array((shape.tokens, shape.heads, shape.q_width), shape.dtype),
            new,
            new,
            array(shape.pool, shape.dtype),
            rows,
            array((shape.heads,), jnp.float32),
        )
        .compile()
    )
    text = compiled.as_text()
    return {
        "program": str(shape),
        "seconds": round(time.monotonic() - started, 1),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "pool_copies": pool_copies(text, shape.pool),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "pool_bytes": math.prod(shape.pool) * jnp.dtype(shape.dtype).itemsize,
    }


def main(topology: str, every: str = "1") -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    for shape in SHAPES[:: int(every)]:
        result = compile_shape(shape, jax.sharding.SingleDeviceSharding(device))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
