"""`delta_pairs`: the triangular system of each row and value head, solved, for many nodes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.delta_rule.gpu_tree import (
    CHANNELS,
    NEVER,
    Sizes,
    Tree,
    rows_of,
    totals,
    tree_of,
)
from jspec.pallas_kernels.delta_rule.reference import Cache
from jspec.pallas_kernels.delta_rule.tuning import Tuning


def run_pairs(
    small: dict[str, jax.Array],
    rows: AttentionMetadata,
    cache: Cache,
    sizes: Sizes,
    tuning: Tuning,
) -> dict[str, jax.Array]:
    """Return each value head's system, solved, and its products of queries and keys."""
    batch = rows.prefix_lens.shape[0]
    of_head = (batch, sizes.num_values, sizes.nodes)
    grown, shape = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (of_head, (*of_head, sizes.nodes))
    )
    given = [small[name] for name in ("q", "k", "decay", "beta")]
    solve, near, grown = pl.pallas_call(
        functools.partial(_pairs_program, sizes=sizes),
        grid=(batch, sizes.num_keys),
        out_shape=(shape, shape, grown),
        compiler_params=plt.CompilerParams(num_warps=tuning.pair_warps, num_stages=1),
        interpret=sizes.interpret,
        name="delta_pairs",
    )(*rows_of(rows, cache), *given)
    return {"solve": solve, "near": near, "grown": grown}


def _pairs_program(*refs: Any, sizes: Sizes) -> None:
    _, prefixes, positions, _, *others = refs
    mask_ref = None if sizes.is_chain else others.pop(0)
    queries, keys, decay, beta, solve_out, near_out, grown_out = others
    row, head = pl.program_id(0), pl.program_id(1)
    tree = tree_of(row, plt.load(prefixes.at[row]), positions, mask_ref, sizes)
    node = tree.node
    alike, near = _likeness(queries, keys, row, head, tree, sizes)
    is_below = tree.sees & (node[None] != node[:, None])
    whole = jnp.where(node[None] == node[:, None], 1.0, 0.0)
    deepest = jnp.clip(jnp.max(jnp.where(tree.is_node, tree.depth, 0)), 0, sizes.nodes - 1)
    square = tree.is_node[:, None] & tree.is_node[None]
    for nth in range(sizes.repeats):
        value = head * sizes.repeats + nth
        total = totals(tree, plt.load(decay.at[tree.at, value]))
        size = plt.load(beta.at[tree.at, value])
        fade = jnp.exp(jnp.where(tree.sees, total[:, None] - total[None], NEVER))
        system = jnp.where(is_below, size[:, None] * fade * alike, 0.0)

        # Each round makes the nodes of one more level exact, as substitution does.
        def deeper(_: Any, x: jax.Array, system: jax.Array = system) -> jax.Array:
            return whole - sizes.product(system, x)

        solved = jnp.where(square, lax.fori_loop(0, deepest, deeper, whole) * size[None], 0.0)
        matrix = (row, value, node[:, None], node[None])
        plt.store(solve_out.at[matrix], solved, mask=square)
        plt.store(near_out.at[matrix], fade * near, mask=square)
        plt.store(grown_out.at[row, value, node], jnp.exp(total), mask=tree.is_node)


def _likeness(
    queries: Any, keys: Any, row: jax.Array, head: jax.Array, tree: Tree, sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """Return (K K^T, Q K^T), a few channels at a time: whole operands would fill the registers."""
    some = min(CHANNELS, sizes.wide_key)

    def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        channel = step * some + jnp.arange(some, dtype=jnp.int32)
        is_channel = channel < sizes.key_dim
        mask = tree.is_node[:, None] & is_channel[None]
        place = (row, head, tree.node[:, None], channel[None])
        q, k = (plt.load(ref.at[place], mask=mask, other=0.0) for ref in (queries, keys))
        mask = tree.is_node[None] & is_channel[:, None]
        place = (row, head, tree.node[None], channel[:, None])
        turned = plt.load(keys.at[place], mask=mask, other=0.0)
        alike, near = carry
        return alike + sizes.product(k, turned), near + sizes.product(q, turned)

    nothing = jnp.zeros((sizes.padded, sizes.padded), jnp.float32)
    return lax.fori_loop(0, sizes.wide_key // some, add, (nothing, nothing))
