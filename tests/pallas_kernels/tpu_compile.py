"""Compile the TPU's kernels with the real TPU compiler, all in one separate process.

    python -m tests.pallas_kernels.tpu_compile TOPOLOGY [few | PATTERN ...]

Prints one JSON line per shape: of FEW, of those that a pattern matches, or of all. This shows that
Mosaic accepts the shapes and that XLA copies no large array around a kernel, not that they run.
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

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.attention.tpu import attend_rows, is_copy_free
from jspec.pallas_kernels.bonus_token.tpu import gather_emitted
from jspec.pallas_kernels.compaction.tpu import compact_paths
from jspec.pallas_kernels.ops_tpu import TpuOps
from jspec.pallas_kernels.prefill.tpu import attend_packed
from jspec.pallas_kernels.shapes import GPT_OSS_20B, QWEN3_5_9B, QWEN3_30B_A3B, ModelShape
from jspec.spec.axes import TENSOR
from jspec.spec.cache_entry import CacheLayout
from jspec.spec.layers.delta_net import DeltaNetSpec
from jspec.spec.layers.feed_forward import MoESpec
from tests.engine.pool_copies import pool_copies

i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16
array = jax.ShapeDtypeStruct


@dataclass(frozen=True, kw_only=True)
class Program:
    """One call at a shape of one shard.

    If its name has `copied`, XLA stores `large` in another layout than the kernel reads: correct,
    but copied.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    large: tuple[int, ...] | None = None  # a shape that is not to be copied
    donated: tuple[int, ...] = ()
    kernels: int = 1
    most_temp: float = math.inf  # bytes


def metadata(batch: int, pages: int, queries: int, *, tail: int | None = None) -> AttentionMetadata:
    has_tail = tail is not None
    return AttentionMetadata(
        page_table=array((batch, pages), i32),
        prefix_lens=array((batch,), i32),
        cu_q_lens=array((batch + 1,), i32),
        q_positions=array((queries,), i32),
        tail_mask=array((queries, -(-tail // 32)), jnp.uint32) if has_tail else None,
        tail_positions=array((batch, tail), i32) if has_tail else None,
    )


def rows(
    queries: int, *, heads: int = 8, kv_heads: int = 2, batch: int = 64, page_size: int = 64,
    pages_per_row: int = 128, widths: tuple[int, int] = (128, 128), dtype: Any = bf16,
    tail: int | None = None, writes: bool = True, sinks: bool = False, **options: Any,
) -> Program:  # fmt: skip
    """Row-wise attention of R queries. widths: head_dim and the pool's D."""
    call = partial(attend_rows, scale=0.088, queries_per_row=queries, **options)

    def two_layers(q: Any, k: Any, v: Any, pool: Any, rows: Any, sinks: Any) -> Any:
        out, pool = call(q, k, v, pool, rows, sinks=sinks)
        # On one pool: an update that is not in place would copy it in between.
        return call(out[..., : q.shape[-1]], k, v, pool, rows, sinks=sinks)

    total, pool = batch * queries, (4096, page_size, 2 * kv_heads, widths[1])
    new = array((total, kv_heads, widths[0]), dtype) if writes else None
    q, of_heads = array((total, heads, widths[0]), dtype), array((heads,), f32) if sinks else None
    where = metadata(batch, pages_per_row, total, tail=tail)
    args = (q, new, new, array(pool, dtype), where, of_heads)
    return Program(function=two_layers, args=args, large=pool, donated=(3,), kernels=2)


def packed(
    tokens: int, *, heads: int = 8, kv_heads: int = 2, width: int = 128, q_width: int = 128,
    page_size: int = 64, dtype: Any = bf16, writes: bool = True, sinks: bool = False,
    window: int | None = None,
) -> Program:  # fmt: skip
    """Prefill of eight rows of up to 8,192 tokens. q_width: head_dim; width: the pool's."""
    options: dict[str, Any] = {"window": window}
    call = partial(attend_packed, scale=q_width**-0.5, **options)

    def program(q: Any, k: Any, v: Any, pool: Any, rows: AttentionMetadata, sinks: Any) -> Any:
        return call(q, k, v, pool, rows, sinks=sinks)

    pool = (4096, page_size, 2 * kv_heads, width)
    new = array((tokens, kv_heads, q_width), dtype) if writes else None
    of_heads = array((heads,), f32) if sinks else None
    where = metadata(8, 8192 // page_size, tokens)
    args = (array((tokens, heads, q_width), dtype), new, new, array(pool, dtype), where, of_heads)
    pool_bytes = math.prod(pool) * jnp.dtype(dtype).itemsize
    return Program(function=program, args=args, large=pool, donated=(3,), most_temp=pool_bytes)


def compaction(
    layers: int, heads: int, *, width: int = 128, page_size: int = 16, batch: int = 64,
    num_path: int = 4,
) -> Program:  # fmt: skip
    pool, lens = (4099, page_size, heads, width), array((batch,), i32)
    kv = tuple(array(pool, bf16) for _ in range(layers))
    args = (kv, array((batch, 520), i32), lens, array((batch, num_path), i32), lens)
    return Program(function=compact_paths, args=args, large=pool, donated=(0,))


def gathering(
    nodes: int, width: int, *, batch: int = 64, num_path: int = 4, dtype: Any = bf16
) -> Program:
    def step(flat: jax.Array, ids: jax.Array, path: jax.Array, accepted: jax.Array) -> Any:
        # As a step has them: the flat rows of a forward.
        return gather_emitted(ids, flat.reshape(batch, nodes, width), path, accepted)

    ids, path = array((batch, nodes), i32), array((batch, num_path), i32)
    args = (array((batch * nodes, width), dtype), ids, path, array((batch,), i32))
    return Program(function=step, args=args, large=(batch, nodes, width))


def experts(shape: ModelShape, tokens: int, *, kernels: int = 2) -> Program:
    spec = shape.ffn
    assert isinstance(spec, MoESpec)
    weights = {
        name: array(of_weight, bf16)
        for name, of_weight in shape.moe_params["experts"].items()
        if name != "down_bias"
    }
    chosen = [array((tokens, spec.top_k), dtype) for dtype in (i32, f32)]
    weight_bytes = sum(x.size * 2 for x in weights.values())
    return Program(
        function=partial(TpuOps().experts, gate=spec.gate),
        args=(array((tokens, shape.hidden_size), bf16), *chosen, weights),
        kernels=kernels,
        most_temp=weight_bytes / 20 if kernels else math.inf,
    )


def delta(nodes: int, *, batch: int = 64, tail: int | None = None, shards: int = 1) -> Program:
    """A step of Qwen3.5-9B's delta nets."""
    spec = QWEN3_5_9B.mixer
    assert isinstance(spec, DeltaNetSpec)
    heads, keys = spec.num_heads // shards, spec.num_key_heads // shards
    spec = replace(spec, num_heads=heads, num_key_heads=keys)
    layout = CacheLayout(page_size=64, dtype="bfloat16", num_nodes=nodes, num_path=min(nodes, 4))
    arrays = spec.cache_entry.arrays(batch + 1, layout)
    cache = {name: array(x.shape, x.dtype) for name, x in arrays.items()}
    tokens = batch * nodes

    def step(cache: Any, inputs: Any, decay: Any, beta: Any, conv: Any, rows: Any) -> Any:
        given = (inputs, decay, beta, conv, cache, rows)
        return TpuOps().delta_rule(*given, queries_per_row=nodes)

    where = replace(metadata(batch, 64, tokens, tail=tail), slots=array((batch,), i32))
    steps = array((tokens, heads), f32)
    inputs, conv = (
        array((tokens, spec.conv_dim), bf16),
        array((spec.conv_size, spec.conv_dim), bf16),
    )
    args = (cache, inputs, steps, steps, conv, where)
    return Program(function=step, args=args, large=arrays["state"].shape, donated=(0,))


# 8B at tensor parallel 4 is H = 8, G = 2; 70B at 8 is H = 8, G = 1; D = 128.
PROGRAMS = {
    **{
        f"rows, 8b tp4 R {queries} page {page_size}": rows(queries, page_size=page_size)
        for queries in (1, 4, 16)
        for page_size in (16, 32, 64, 128)
    },
    "rows, 8b tp4 tree of 16": rows(16, tail=16),
    "rows, 8b tp4 tree of 64": rows(64, tail=64),
    "rows, 8b tp4 tree of 33, page 16": rows(33, tail=33, page_size=16),
    "rows, 8b tp4 draft level": rows(4, tail=12, page_size=16),
    "rows, 8b tp4 long table": rows(4, page_size=16, pages_per_row=8192, batch=256),
    "rows, 8b tp4 window, sinks": rows(16, tail=16, sinks=True, window=128),
    "rows, 8b tp4 one row": rows(16, tail=16, batch=1),
    "rows, 8b tp4 nothing written": rows(4, writes=False),
    **{
        f"rows, 8b tp8 R {queries}": rows(
            queries, heads=4, kv_heads=1, tail=tail, page_size=128, pages_per_row=64
        )
        for queries, tail in ((1, None), (4, None), (16, 16))
    },
    "rows, 8b tp1 R 1": rows(1, heads=32, kv_heads=8),
    "rows, 8b tp1 tree of 16": rows(16, heads=32, kv_heads=8, tail=16),
    "rows, 70b tp8 R 1": rows(1, kv_heads=1),
    "rows, 70b tp8 tree of 16": rows(16, kv_heads=1, tail=16),
    "rows, 70b tp1 tree of 64": rows(64, heads=64, kv_heads=8, tail=64, batch=8),
    "rows, every head its own, R 4": rows(4, heads=16, kv_heads=16),
    "rows, head_dim 64 in a pool of 128": rows(4, widths=(64, 128)),
    "rows, float32, R 4": rows(4, dtype=f32),
    "rows, float32, tree of 16, 70b tp8": rows(16, kv_heads=1, dtype=f32, tail=16),
    "rows, copied: pool of 64 lanes": rows(4, widths=(64, 64)),
    "rows, copied: three kv heads": rows(4, heads=9, kv_heads=3),
    **{
        f"prefill, 8b tp4 T {tokens} page {page_size}": packed(tokens, page_size=page_size)
        for tokens in (256, 1024, 2048)
        for page_size in (16, 64, 128)
    },
    "prefill, 70b tp8 T 2048": packed(2048, kv_heads=1, page_size=16),
    "prefill, 70b tp8 T 256": packed(256, kv_heads=1, page_size=128),
    "prefill, 8b tp1": packed(1024, heads=32, kv_heads=8, page_size=32),
    "prefill, head_dim 64 in a pool of 128, window, sinks": packed(
        512, heads=32, kv_heads=8, q_width=64, window=128, sinks=True
    ),
    "prefill, every head its own": packed(16, heads=8, kv_heads=8, page_size=16),
    "prefill, group 7": packed(512, heads=28, kv_heads=4),
    "prefill, float32": packed(256, dtype=f32, page_size=16),
    "prefill, window, sinks": packed(1024, window=512, sinks=True),
    "prefill, nothing written": packed(1024, writes=False, page_size=16),
    "prefill, 256 wide": packed(256, width=256, q_width=256),
    "compaction, 8b tp4": compaction(32, 4),
    "compaction, 8b tp4, pages of 64, 8 levels": compaction(32, 4, page_size=64, num_path=9),
    "compaction, 8b tp4, one row": compaction(32, 4, batch=1),
    "compaction, 8b tp1, 256 rows": compaction(32, 16, batch=256),
    "compaction, 70b tp8": compaction(80, 2),
    "compaction, 8b tp8, pages of 128, 4 levels": compaction(32, 2, page_size=128, num_path=5),
    "compaction, copied: 64 lanes": compaction(2, 4, width=64),
    "gathering, 8b, tree of 16": gathering(16, 3 * 4096),
    "gathering, 8b, tree of 64": gathering(64, 3 * 4096, num_path=9),
    "gathering, copied: an odd tree": gathering(15, 3 * 4096, batch=1),
    "gathering, 70b, tree of 16": gathering(16, 3 * 8192),
    "gathering, 8b, float32": gathering(16, 3 * 4096, dtype=f32, batch=8),
    **{f"experts, qwen3-30b-a3b, {n} tokens": experts(QWEN3_30B_A3B, n) for n in (1, 64, 256)},
    **{f"experts, gpt-oss-20b, {n} tokens": experts(GPT_OSS_20B, n) for n in (1, 256)},
    "experts, qwen3-30b-a3b tp4, 8 tokens": experts(QWEN3_30B_A3B.shard(4), 8),
    "experts, gpt-oss-20b tp4, 8 tokens": experts(GPT_OSS_20B.shard(4), 8),
    "delta, qwen3.5-9b, R 1": delta(1),
    "delta, qwen3.5-9b, one row, R 1": delta(1, batch=1),
    "delta, qwen3.5-9b, R 4": delta(4),
    "delta, qwen3.5-9b, tree of 16": delta(16, tail=16),
    "delta, qwen3.5-9b tp4, tree of 16": delta(16, tail=16, shards=4),
    "experts, by XLA, 2048 tokens": experts(QWEN3_30B_A3B, 2048, kernels=0),
}
# What CI's whole steps (test_step_compile) do not compile: the largest shapes, what moves or
# gathers a tree's nodes, copies, and delta nets.
FEW = (
    "rows, 8b tp4 long table",
    "rows, 70b tp1 tree of 64",
    "rows, copied: pool of 64 lanes",
    "prefill, head_dim 64 in a pool of 128, window, sinks",
    "compaction, 70b tp8",
    "compaction, copied: 64 lanes",
    "gathering, 8b, tree of 64",
    "gathering, copied: an odd tree",
    "delta, qwen3.5-9b, R 1",
)


def compile_one(name: str, mesh: Mesh) -> dict[str, Any]:
    program, started = PROGRAMS[name], time.monotonic()
    whole = PartitionSpec()
    step = jax.shard_map(  # kernels ask the mesh which chip they are for
        program.function,
        mesh=mesh,
        in_specs=(whole,) * len(program.args),
        out_specs=whole,
        check_vma=False,
    )
    placed = NamedSharding(mesh, whole)
    jitted = jax.jit(
        step, donate_argnums=program.donated, in_shardings=placed, out_shardings=placed
    )
    compiled = jitted.lower(*program.args).compile()
    text, large = compiled.as_text(), program.large
    if name.startswith("rows"):
        assert large is not None
        assert is_copy_free(large) != ("copied" in name), name
    return {
        "name": name,
        "seconds": round(time.monotonic() - started, 1),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "expected_kernels": program.kernels,
        "copies": [] if large is None else pool_copies(text, large),
        "fits": compiled.memory_analysis().temp_size_in_bytes < program.most_temp,
    }


def main(topology: str, patterns: list[str]) -> None:
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    mesh = Mesh([device], (TENSOR,))
    wanted = FEW if patterns == ["few"] else patterns or ["*"]
    for name in PROGRAMS:
        if any(fnmatch(name, pattern) for pattern in wanted):
            print(json.dumps(compile_one(name, mesh)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
