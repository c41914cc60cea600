"""`delta_states`: the state after the accepted tokens, and all outputs and updates from it, in a
program per row, value head and strip of V."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.delta_rule.gpu_tree import CHANNELS, NEVER, Sizes, rows_of
from jspec.pallas_kernels.delta_rule.reference import Cache
from jspec.pallas_kernels.delta_rule.tuning import Tuning


def run_states(
    small: dict[str, jax.Array],
    cache: Cache,
    pending: jax.Array,
    rows: AttentionMetadata,
    sizes: Sizes,
    tuning: Tuning,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, state = rows.prefix_lens.shape[0], cache["state"]
    strip = min(tuning.strip, sizes.wide_value)
    out = (batch * sizes.nodes, sizes.num_values, sizes.value_dim)
    operands = (*rows_of(rows, cache), *small.values(), state, pending)
    last = len(operands)
    found: tuple[jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_states_program, names=tuple(small), sizes=sizes, strip=strip),
        grid=(batch, sizes.num_values, sizes.wide_value // strip),
        out_shape=(
            jax.ShapeDtypeStruct(out, jnp.float32),
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[-2:]),
        ),
        input_output_aliases={last - 2: 1, last - 1: 2},
        compiler_params=plt.CompilerParams(num_warps=tuning.state_warps, num_stages=1),
        interpret=sizes.interpret,
        name="delta_states",
    )(*operands)
    return found


@dataclass(frozen=True, slots=True)
class _Strip:
    row: jax.Array
    head: jax.Array  # of keys and queries
    value: jax.Array
    column: jax.Array
    is_column: jax.Array
    channel: jax.Array
    is_channel: jax.Array
    slot: jax.Array
    states: Any
    given: dict[str, Any]
    out: Any
    pending: Any
    first_update: jax.Array

    @property
    def tile(self) -> jax.Array:
        return self.is_channel[:, None] & self.is_column[None]

    @property
    def place(self) -> Any:
        return self.states.at[self.slot, self.value, self.channel[:, None], self.column[None]]

    def vectors(self, name: str, node: Any) -> jax.Array:
        place = self.given[name].at[self.row, self.head, node, self.channel]
        return plt.load(place, mask=self.is_channel, other=0.0)

    def values(self, node: Any) -> jax.Array:
        place = self.given["v"].at[self.row, self.value, node, self.column]
        return plt.load(place, mask=self.is_column, other=0.0)

    def store(self, token: Any, node: Any, found: jax.Array, update: jax.Array) -> None:
        plt.store(self.out.at[token, self.value, self.column], found, mask=self.is_column)
        place = self.pending.at[self.slot, node, self.first_update + self.column]
        plt.store(place, update, mask=self.is_column)


def _states_program(*refs: Any, names: tuple[str, ...], sizes: Sizes, strip: int) -> None:
    slots, prefixes, _, paths, *others = refs
    mask_ref = None if sizes.is_chain else others.pop(0)
    given = dict(zip(names, others, strict=False))
    out, states, pending = others[len(names) + 2 :]
    row, value, part = (pl.program_id(axis) for axis in range(3))
    slot, prefix = plt.load(slots.at[row]), plt.load(prefixes.at[row])
    column = part * strip + jnp.arange(strip, dtype=jnp.int32)
    channel = jnp.arange(sizes.wide_key, dtype=jnp.int32)
    own = _Strip(
        row=row,
        head=value // sizes.repeats,
        value=value,
        column=column,
        is_column=column < sizes.value_dim,
        channel=channel,
        is_channel=channel < sizes.key_dim,
        slot=slot,
        states=states,
        given=given,
        out=out,
        pending=pending,
        first_update=sizes.in_keys + value * sizes.value_dim,
    )
    held = _folded(own, paths, is_fresh=prefix == 0, sizes=sizes)
    sizes.barrier()
    plt.store(own.place, held, mask=own.tile)
    if sizes.are_few:
        _run_few(own, held, _ancestors(row, mask_ref, sizes), sizes.nodes)
    else:
        sizes.barrier()
        _run_many(own, sizes)


def _ancestors(row: jax.Array, mask: Any, sizes: Sizes) -> Callable[[int, int], Any]:
    if mask is None:
        return lambda *_: True
    words = [plt.load(mask.at[row * sizes.nodes + i, row * 0]) for i in range(sizes.nodes)]
    return lambda i, j: ((words[i] >> j) & 1) > 0


def _folded(own: _Strip, paths: Any, *, is_fresh: jax.Array, sizes: Sizes) -> jax.Array:
    """Return the state [Dk, strip] after the last step's accepted tokens."""
    held = plt.load(own.place, mask=own.tile & jnp.logical_not(is_fresh), other=0.0)
    held = held * plt.load(own.given["carried"].at[own.row, own.value, own.row * 0])
    in_updates = own.first_update + own.column
    for step in range(sizes.path):
        nth = own.row * 0 + step  # jax 0.10 cannot interpret a load at a constant index
        accepted = plt.load(paths.at[own.slot, nth])
        is_kept = (accepted >= 0) & jnp.logical_not(is_fresh)
        update_at = own.pending.at[own.slot, jnp.maximum(accepted, 0), in_updates]
        update = plt.load(update_at, mask=own.is_column & is_kept, other=0.0)
        fade = plt.load(own.given["fade"].at[own.row, own.value, nth])
        held = held + own.vectors("old_k", nth)[:, None] * (update * fade)[None]
    return held


def _run_few(own: _Strip, held: jax.Array, sees: Callable[[int, int], Any], nodes: int) -> None:
    """Run nodes one after the other, parents first, with the state in registers."""
    totals: list[jax.Array] = []
    keys: list[jax.Array] = []
    updates: list[jax.Array] = []
    for node in range(nodes):
        nth = own.row * 0 + node  # jax 0.10 cannot interpret a load at a constant index
        token = own.row * nodes + node
        before = range(node)
        decays = [plt.load(own.given["decay"].at[token - node + j, own.value]) for j in before]
        total = plt.load(own.given["decay"].at[token, own.value])
        for j in before:
            total = total + jnp.where(sees(node, j), decays[j], 0.0)
        query, key = (own.vectors(name, nth) for name in ("q", "k"))
        fades = [jnp.exp(jnp.where(sees(node, j), total - totals[j], NEVER)) for j in before]
        update = own.values(nth) - jnp.exp(total) * jnp.sum(key[:, None] * held, axis=0)
        found = jnp.exp(total) * jnp.sum(query[:, None] * held, axis=0)
        for j in before:
            update = update - fades[j] * jnp.sum(key * keys[j]) * updates[j]
            found = found + fades[j] * jnp.sum(query * keys[j]) * updates[j]
        update = plt.load(own.given["beta"].at[token, own.value]) * update
        own.store(token, nth, found + jnp.sum(query * key) * update, update)
        totals, keys, updates = [*totals, total], [*keys, key], [*updates, update]


def _run_many(own: _Strip, sizes: Sizes) -> None:
    node = jnp.arange(sizes.padded, dtype=jnp.int32)
    is_node = node < sizes.nodes
    some = min(CHANNELS, sizes.wide_key)

    def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Add the products with a few channels, read again: all would fill the registers."""
        channel = step * some + jnp.arange(some, dtype=jnp.int32)
        is_channel = channel < sizes.key_dim
        again = own.states.at[own.slot, own.value, channel[:, None], own.column[None]]
        x = plt.load(again, mask=is_channel[:, None] & own.is_column[None], other=0.0)
        at = (own.row, own.head, node[:, None], channel[None])
        mask = is_node[:, None] & is_channel
        q, k = (plt.load(own.given[name].at[at], mask=mask, other=0.0) for name in ("q", "k"))
        return carry[0] + sizes.product(k, x), carry[1] + sizes.product(q, x)

    nothing = jnp.zeros((sizes.padded, own.column.shape[0]), jnp.float32)
    of_key, of_query = lax.fori_loop(0, sizes.wide_key // some, add, (nothing, nothing))
    at = (own.row, own.value, node[:, None], node[None])
    mask = is_node[:, None] & is_node[None]
    solve, near = (
        plt.load(own.given[name].at[at], mask=mask, other=0.0) for name in ("solve", "near")
    )
    grown = plt.load(own.given["grown"].at[own.row, own.value, node], mask=is_node, other=0.0)
    is_value = is_node[:, None] & own.is_column[None]
    v_at = own.given["v"].at[own.row, own.value, node[:, None], own.column[None]]
    v = plt.load(v_at, mask=is_value, other=0.0)
    update = sizes.product(solve, v - grown[:, None] * of_key)
    found = grown[:, None] * of_query + sizes.product(near, update)
    token = own.row * sizes.nodes + node
    plt.store(own.out.at[token[:, None], own.value, own.column[None]], found, mask=is_value)
    place = own.pending.at[own.slot, node[:, None], own.first_update + own.column[None]]
    plt.store(place, update, mask=is_value)
