"""`delta_inputs`: what the last step left pending, and this step's convolution and norms, in a
program per row and head of queries, keys or values."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.delta_rule.gpu_tree import Sizes, rows_of, totals, tree_of
from jspec.pallas_kernels.delta_rule.reference import NORM_EPS, Cache
from jspec.pallas_kernels.delta_rule.tuning import Tuning


def run_inputs(
    inputs: jax.Array,
    decay: jax.Array,
    conv: jax.Array,
    cache: Cache,
    rows: AttentionMetadata,
    sizes: Sizes,
    tuning: Tuning,
) -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """Return (inputs of `delta_states`, the convolutions' tails, pending without the updates)."""
    batch, nodes = rows.prefix_lens.shape[0], sizes.nodes
    shapes = {
        "q": (batch, sizes.num_keys, nodes, sizes.key_dim),
        "k": (batch, sizes.num_keys, nodes, sizes.key_dim),
        "v": (batch, sizes.num_values, nodes, sizes.value_dim),
        "old_k": (batch, sizes.num_keys, sizes.path, sizes.key_dim),  # of the accepted tokens
        "fade": (batch, sizes.num_values, sizes.path),  # factors of their updates
        "carried": (batch, sizes.num_values, 1),  # factor of the state
    }
    operands = (*rows_of(rows, cache), inputs, decay, conv, cache["conv"], cache["pending"])
    last = len(operands)
    *small, tail, pending = pl.pallas_call(
        functools.partial(_inputs_program, sizes=sizes),
        grid=(batch, 2 * sizes.num_keys + sizes.num_values),
        out_shape=[
            *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[-2:]),
        ],
        input_output_aliases={last - 2: len(shapes), last - 1: len(shapes) + 1},
        compiler_params=plt.CompilerParams(num_warps=tuning.input_warps, num_stages=1),
        interpret=sizes.interpret,
        name="delta_inputs",
    )(*operands)
    return dict(zip(shapes, small, strict=True)), tail, pending


def _inputs_program(*refs: Any, sizes: Sizes) -> None:
    slots, prefixes, positions, paths, *refs_after = refs
    mask_ref = None if sizes.is_chain else refs_after.pop(0)
    inputs, decay, conv, _, _, *outs = refs_after
    q_out, k_out, v_out, old_out, fade_out, carried_out, tails, pending = outs
    row, which = pl.program_id(0), pl.program_id(1)
    num_keys, nodes, most = sizes.num_keys, sizes.nodes, sizes.window - 1
    slot, prefix = plt.load(slots.at[row]), plt.load(prefixes.at[row])
    is_fresh = prefix == 0
    tree = tree_of(row, prefix, positions, mask_ref, sizes)
    node = tree.node[:, None]

    # The head's channels, which are those of all queries, then keys, then values.
    is_query, is_value = which < num_keys, which >= 2 * num_keys
    is_key = jnp.logical_not(is_query | is_value)
    value = jnp.maximum(which - 2 * num_keys, 0)
    head = jnp.where(is_query, which, jnp.where(is_key, which - num_keys, value))
    first = jnp.where(is_value, 2 * sizes.in_keys + value * sizes.value_dim, which * sizes.key_dim)
    lane = jnp.arange(sizes.wide, dtype=jnp.int32)[None]
    width = sizes.key_dim + is_value.astype(jnp.int32) * (sizes.value_dim - sizes.key_dim)
    is_lane = lane < width
    channel = first + lane
    is_own = tree.is_node[:, None] & is_lane

    step = jnp.arange(sizes.wide_path, dtype=jnp.int32)
    path = plt.load(paths.at[slot, step], mask=step < sizes.path, other=-1)
    is_kept = (path >= 0) & jnp.logical_not(is_fresh)
    count = jnp.sum(is_kept.astype(jnp.int32))
    path = jnp.maximum(path, 0)

    def from_tail(at: jax.Array, mask: jax.Array) -> jax.Array:
        """Return the inputs before the tree: entries `at` of the tail after accepted tokens."""
        at = at + count
        is_old = at < most
        mask = mask & jnp.logical_not(is_fresh)
        place = tails.at[slot, jnp.minimum(at, most - 1), channel]
        old = plt.load(place, mask=mask & is_old, other=0.0)
        accepted = plt.load(paths.at[slot, jnp.clip(at - most, 0, sizes.path - 1)])
        place = pending.at[slot, jnp.maximum(accepted, 0), sizes.first_input + channel]
        new = plt.load(place, mask=mask & jnp.logical_not(is_old), other=0.0)
        return jnp.where(is_old, old, new.astype(old.dtype))

    own = plt.load(inputs.at[tree.at[:, None], channel], mask=is_own, other=0.0)
    mixed: Any = 0.0
    for back in range(sizes.window):
        found = own.astype(tails.dtype)
        if back:
            wanted = tree.depth - back
            is_at = tree.sees & (tree.depth[None] == wanted[:, None])
            ancestor = row * nodes + jnp.max(jnp.where(is_at, tree.node[None], 0), axis=1)
            in_tree = (wanted >= 0)[:, None]
            place = inputs.at[ancestor[:, None], channel]
            found = plt.load(place, mask=is_own & in_tree, other=0.0).astype(tails.dtype)
            at = jnp.clip(most + wanted, 0, most - 1)[:, None]
            before = from_tail(at, is_own & jnp.logical_not(in_tree))
            found = jnp.where(in_tree, found, before)
        weight = plt.load(conv.at[most - back, channel], mask=is_lane, other=0.0)
        mixed = mixed + found.astype(jnp.float32) * weight.astype(jnp.float32)
    mixed = mixed / (1 + jnp.exp(-mixed))
    normed = mixed * lax.rsqrt(jnp.sum(mixed * mixed, axis=1) + NORM_EPS)[:, None]
    entry = jnp.arange(pl.next_power_of_2(most), dtype=jnp.int32)[:, None]
    tail = from_tail(entry, (entry < most) & is_lane)

    # Each head has its own stores, masked: a branch would keep its operands in registers.
    plt.store(q_out.at[row, head, node, lane], normed * sizes.key_dim**-0.5, mask=is_own & is_query)
    plt.store(k_out.at[row, head, node, lane], normed, mask=is_own & is_key)
    plt.store(v_out.at[row, head, node, lane], mixed, mask=is_own & is_value)

    column = head * sizes.key_dim + lane
    old_key = plt.load(
        pending.at[slot, path[:, None], column], mask=is_kept[:, None] & is_lane & is_key, other=0.0
    )
    mask = (step < sizes.path)[:, None] & is_lane & is_key
    plt.store(old_out.at[row, head, step[:, None], lane], old_key, mask=mask)

    place = pending.at[slot, path, sizes.first_decay + value]
    old = plt.load(place, mask=is_kept & is_value, other=0.0)
    end = jnp.sum(jnp.where(step == count - 1, old, 0.0))
    kept = jnp.where(is_kept, jnp.exp(end - old), 0.0)
    plt.store(fade_out.at[row, value, step], kept, mask=(step < sizes.path) & is_value)
    carried = jnp.where(is_fresh, 0.0, jnp.exp(end))
    is_first = (step == 0) & is_value
    plt.store(carried_out.at[row, value, step], carried + 0 * kept, mask=is_first)
    total = totals(tree, plt.load(decay.at[tree.at, value]))

    sizes.barrier()
    plt.store(pending.at[slot, node, column], normed, mask=is_own & is_key)
    place = pending.at[slot, tree.node, sizes.first_decay + value]
    plt.store(place, total, mask=tree.is_node & is_value)
    plt.store(tails.at[slot, entry, channel], tail, mask=(entry < most) & is_lane)
    place = pending.at[slot, node, sizes.first_input + channel]
    plt.store(place, own.astype(jnp.float32), mask=is_own)
