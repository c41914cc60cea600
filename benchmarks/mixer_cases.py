"""The cases of benchmarks.ops of layers that cache something else than K and V."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.op_cases import BATCHES, BYTES, PAGE, Arrays, Case, Sizes, crossed, normal
from benchmarks.op_cases import rows_of as packed_rows
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.pallas_kernels.shapes import ModelShape
from jspec.spec.cache_entry import CacheLayout
from jspec.spec.layers.attention import LatentAttentionSpec
from jspec.spec.layers.delta_net import DeltaNetSpec

PATH, FANOUT = 4, 4  # the most accepted tokens, and the children of a tree's node
STATE_BYTES = 4


def rows_with_tree(batch: int, nodes: int, prefix: int) -> tuple[AttentionMetadata, int]:
    """Return rows with slots whose nodes are a chain, or from 16 on a tree; and pages of a pool."""
    rows, num_pages, _ = packed_rows(batch, nodes, prefix, packed=False, tree=False)
    slots = 1 + jnp.arange(batch, dtype=jnp.int32)
    if nodes < 16:
        return replace(rows, slots=slots), num_pages
    sees = np.eye(nodes, dtype=bool)
    depth = np.zeros(nodes, np.int32)
    for node in range(1, nodes):
        parent = (node - 1) // FANOUT
        sees[node] |= sees[parent]
        depth[node] = depth[parent] + 1
    words = (sees * (1 << np.arange(nodes))).sum(axis=-1)
    positions = jnp.asarray(np.tile(prefix + depth, (batch, 1)), jnp.int32)
    rows = replace(
        rows,
        slots=slots,
        q_positions=positions.reshape(-1),
        tail_mask=jnp.asarray(np.tile(words, batch).reshape(-1, 1), jnp.uint32),
        tail_positions=positions,
    )
    return rows, num_pages


def delta_net(shape: ModelShape) -> DeltaNetSpec:
    if not isinstance(shape.mixer, DeltaNetSpec):
        raise ValueError("the model has no delta nets")
    return shape.mixer


def delta_inputs(spec: DeltaNetSpec, seed: int, tokens: int) -> tuple[jax.Array, ...]:
    """Return (inputs of the convolution, decay, beta, conv) of random tokens."""
    inputs = normal(seed + 10, tokens, spec.conv_dim)
    conv = normal(seed + 11, spec.conv_size, spec.conv_dim, scale=0.5)
    steps = normal(seed + 12, 2, tokens, spec.num_heads, dtype=jnp.float32)
    return inputs, -0.1 * jnp.exp(steps[0]), jax.nn.sigmoid(steps[1]), conv


def delta_rule(shape: ModelShape, *, batch: int, nodes: int) -> Case:
    """A step of a delta net's rule, after three accepted tokens (of a plain step, one)."""
    spec = delta_net(shape)
    rows, _ = rows_with_tree(batch, nodes, 1168)
    tokens, heads = batch * nodes, spec.num_heads
    layout = CacheLayout(
        page_size=PAGE, dtype="bfloat16", num_nodes=nodes, num_path=PATH if nodes > 1 else 1
    )
    arrays = spec.cache_entry.arrays(batch + 1, layout)

    def make(seed: int) -> tuple[Arrays, Arrays]:
        cache: dict[str, jax.Array] = {}
        for i, (name, array) in enumerate(arrays.items()):
            if name == "path":
                kept = [0] if nodes == 1 else [0, 1, 2, -1] if nodes < 16 else [0, 1, 5, -1]
                cache[name] = jnp.tile(jnp.asarray(kept, jnp.int32), (batch + 1, 1))
            else:
                how: Any = {"scale": 0.1, "dtype": jnp.dtype(array.dtype)}
                cache[name] = normal(seed + i, *array.shape, **how)
        first = spec.num_key_heads * spec.key_dim + heads * spec.value_dim
        fading = -0.1 * jnp.arange(1, nodes + 1, dtype=jnp.float32)[:, None]
        pending = cache["pending"].at[:, :, first : first + heads].set(fading)
        return (*delta_inputs(spec, seed, tokens), rows), {**cache, "pending": pending}

    def run(ops: Ops, arguments: Arrays, cache: Arrays) -> tuple[Arrays, Arrays]:
        inputs, decay, beta, conv, rows = arguments
        return ops.delta_rule(inputs, decay, beta, conv, cache, rows, queries_per_row=nodes)

    states = batch * heads * spec.key_dim * spec.value_dim * STATE_BYTES
    values = tokens * heads * spec.value_dim * STATE_BYTES
    return Case(
        make=make,
        run=run,
        num_bytes=2 * states + 2 * values + tokens * spec.conv_dim * BYTES,
        decode_tokens=tokens,
        worst=1e-3,
    )


def delta_prefill(shape: ModelShape, *, batch: int, queries: int) -> Case:
    """The next `queries` tokens of each row's prompt through a delta net's rule, packed."""
    spec, tokens = delta_net(shape), batch * queries
    rows, _, _ = packed_rows(batch, queries, 1168, packed=True, tree=False)
    rows = replace(rows, slots=1 + jnp.arange(batch, dtype=jnp.int32))
    layout = CacheLayout(page_size=PAGE, dtype="bfloat16", num_nodes=1, num_path=1)
    arrays = spec.cache_entry.arrays(batch + 1, layout)

    def make(seed: int) -> tuple[Arrays, Arrays]:
        cache = {
            name: jnp.full(array.shape, -1, jnp.int32)  # nothing is pending
            if name == "path"
            else normal(seed + i, *array.shape, scale=0.1, dtype=jnp.dtype(array.dtype))
            for i, (name, array) in enumerate(arrays.items())
        }
        return (*delta_inputs(spec, seed, tokens), rows), cache

    def run(ops: Ops, arguments: Arrays, cache: Arrays) -> tuple[Arrays, Arrays]:
        inputs, decay, beta, conv, rows = arguments
        return ops.delta_rule(inputs, decay, beta, conv, cache, rows, queries_per_row=None)

    state = spec.num_heads * spec.key_dim * spec.value_dim
    values = tokens * spec.num_heads * spec.value_dim
    return Case(
        make=make,
        run=run,
        num_bytes=STATE_BYTES * (2 * batch * state + values) + tokens * spec.conv_dim * BYTES,
        flops=3 * 2 * tokens * state,  # S^T k, k u^T and S^T q of each token
        worst=1e-3,
    )


def latent(shape: ModelShape, *, batch: int, queries: int, context: int) -> Case:
    """Latent attention of `queries` tokens per row, the last of `context`, with their write."""
    spec = shape.mixer
    if not isinstance(spec, LatentAttentionSpec):
        raise ValueError("the model has no latent attention")
    rows, num_pages = rows_with_tree(batch, queries, context - queries)
    heads, rank, width = spec.num_heads, spec.kv_rank, spec.kv_rank + spec.rope_dim
    call = AttentionCall(queries_per_row=queries, scale=spec.softmax_scale)

    def make(seed: int) -> tuple[Arrays, Arrays]:
        q = normal(seed, batch * queries, heads, width)
        records = normal(seed + 1, batch * queries, width)
        return (q, records, rows), normal(seed + 2, num_pages, PAGE, width)

    def run(ops: Ops, arguments: Arrays, pool: Arrays) -> tuple[Arrays, Arrays]:
        q, records, rows = arguments
        out, pool = ops.attend_latent(q, records, pool, rows, call, rank=rank)
        return out[..., :rank], pool

    seen = batch * (queries * (context - queries) + queries * (queries + 1) / 2)
    return Case(
        make=make,
        run=run,
        num_bytes=BYTES * batch * (context * width + queries * heads * (width + rank)),
        flops=2 * seen * heads * (width + rank),
        decode_tokens=batch * queries,
    )


OPS: Mapping[str, tuple[Callable[..., Case], tuple[Sizes, ...]]] = {
    "delta_rule": (delta_rule, crossed(batch=BATCHES, nodes=(1, 4, 16))),
    "delta_prefill": (
        delta_prefill,
        tuple({"batch": b, "queries": q} for b, q in ((1, 512), (1, 2048), (4, 512), (1, 8192))),
    ),
    "latent": (latent, crossed(batch=BATCHES, queries=(1, 4, 16), context=(1168, 8192))),
}
