"""Sizes of a step, and a row's tree of nodes as a program sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.delta_rule.reference import Cache
from jspec.pallas_kernels.delta_rule.tuning import FEW_NODES

CHANNELS = 32  # channels of keys in one step of a product
NEVER = -1e30  # the logarithm of a decay to nothing, without infinities


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The dimensions of a head's state, and what a program does alike on a chip and interpreted."""

    key_dim: int
    value_dim: int
    interpret: bool

    @property
    def wide_key(self) -> int:
        return pl.next_power_of_2(self.key_dim)

    @property
    def wide_value(self) -> int:
        return pl.next_power_of_2(self.value_dim)

    def barrier(self) -> None:
        """Order loads and stores of a program's threads; the interpreter runs whole arrays."""
        if not self.interpret:
            plt.debug_barrier()

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return exact_product(a, b, interpret=self.interpret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes(Dims):
    """Sizes of a layer and a step. nodes: N, padded: a power of two with N."""

    num_keys: int
    num_values: int
    window: int  # W, inputs of the convolution
    nodes: int
    padded: int
    path: int  # M
    is_chain: bool

    @property
    def are_few(self) -> bool:
        return self.nodes <= FEW_NODES

    @property
    def repeats(self) -> int:
        return self.num_values // self.num_keys

    @property
    def in_keys(self) -> int:
        return self.num_keys * self.key_dim

    @property
    def in_values(self) -> int:
        return self.num_values * self.value_dim

    @property
    def first_decay(self) -> int:
        """The first column of G in `pending`; keys and updates are before it, inputs after."""
        return self.in_keys + self.in_values

    @property
    def first_input(self) -> int:
        return self.first_decay + self.num_values

    @property
    def wide(self) -> int:
        return pl.next_power_of_2(max(self.key_dim, self.value_dim))

    @property
    def wide_path(self) -> int:
        return pl.next_power_of_2(self.path)


def exact_product(a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    """Return a @ b to float32's precision: on a chip three products of TF32."""
    exact: Any = lax.Precision.HIGHEST
    if not interpret:
        exact = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return jnp.dot(a, b, precision=exact, preferred_element_type=jnp.float32)


@dataclass(frozen=True, slots=True)
class Tree:
    """The nodes of a row as a program sees them. sees: [i, j] if j is i or one of its ancestors."""

    node: jax.Array
    is_node: jax.Array
    at: jax.Array  # of each node among all tokens
    depth: jax.Array
    sees: jax.Array


def tree_of(row: jax.Array, prefix: jax.Array, positions: Any, mask: Any, sizes: Sizes) -> Tree:
    node = jnp.arange(sizes.padded, dtype=jnp.int32)
    at = row * sizes.nodes + jnp.minimum(node, sizes.nodes - 1)
    is_node = node < sizes.nodes
    sees = node[None] <= node[:, None]
    if mask is not None:
        word = plt.load(mask.at[at[:, None], node[None] // 32])
        sees = ((word >> (node[None] % 32)) & 1) > 0
    sees = sees & is_node[None] & is_node[:, None]
    depth = plt.load(positions.at[at]) - prefix
    return Tree(node=node, is_node=is_node, at=at, depth=depth, sees=sees)


def rows_of(rows: AttentionMetadata, cache: Cache) -> tuple[jax.Array, ...]:
    mask: tuple[jax.Array, ...] = ()
    if rows.tail_mask is not None:
        mask = (lax.bitcast_convert_type(rows.tail_mask, jnp.int32),)
    assert rows.slots is not None
    return (rows.slots, rows.prefix_lens, rows.q_positions, cache["path"], *mask)


def totals(tree: Tree, decay: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(tree.sees, decay[None], 0.0), axis=1)
