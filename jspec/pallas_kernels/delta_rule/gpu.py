"""A decode or tree step of the gated delta rule on an NVIDIA GPU (Pallas-Triton).

`delta_inputs`, with a program for each row and head, reads what the last step left pending and this
step's inputs, and runs the convolution and norms. `delta_states`, with a program for each row,
value head and strip of V, folds the accepted tokens into its part of the state and computes all
outputs and updates from it (reference.py has the formulas). Few nodes are substituted one after the
other; for many, `delta_pairs` first solves the triangular system of each value head.

No program of a launch reads what another one writes to `pending`, and a barrier separates a
program's own reads and writes. Rows of slot 0 are padding.
"""

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
from jaxtyping import Array, Float

from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.delta_rule.reference import NORM_EPS, Cache
from jspec.pallas_kernels.delta_rule.tuning import FEW_NODES, Tuning, choose_tuning

LEAST_NODES = 16  # M of the smallest tensor core tile
MOST_NODES = 64
CHANNELS = 32  # channels of keys in one step of a product
NEVER = -1e30  # the logarithm of a decay to nothing, without infinities


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a layer and a step. nodes: N, padded: a power of two with N."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    window: int  # W, inputs of the convolution
    nodes: int
    padded: int
    path: int  # M
    is_chain: bool
    interpret: bool

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
    def wide_key(self) -> int:
        return pl.next_power_of_2(self.key_dim)

    @property
    def wide_value(self) -> int:
        return pl.next_power_of_2(self.value_dim)

    @property
    def wide_path(self) -> int:
        return pl.next_power_of_2(self.path)

    def barrier(self) -> None:
        """Order a program's loads before its stores; the interpreter runs whole arrays."""
        if not self.interpret:
            plt.debug_barrier()

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return exact_product(a, b, interpret=self.interpret)


def exact_product(a: jax.Array, b: jax.Array, *, interpret: bool) -> jax.Array:
    """Return a @ b to float32's precision: on a chip three products of TF32."""
    exact: Any = lax.Precision.HIGHEST
    if not interpret:
        exact = lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return jnp.dot(a, b, precision=exact, preferred_element_type=jnp.float32)


def serves(*, queries_per_row: int | None) -> bool:
    return queries_per_row is not None and queries_per_row <= MOST_NODES


def run_rows(
    inputs: Float[Array, "T C"],
    decay: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
    conv: Float[Array, "W C"],
    cache: Cache,
    rows: AttentionMetadata,
    *,
    nodes: int,
    tuning: Tuning | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Hv Dv"], Cache]:
    """Compute `reference.run_rows`, the caches in place if they are donated."""
    if rows.slots is None:
        raise ValueError("slots is None; expected the slot of each row, for a recurrent layer")
    state, window = cache["state"], conv.shape[0]
    _, num_values, key_dim, value_dim = state.shape
    sizes = _Sizes(
        num_keys=(inputs.shape[1] - num_values * value_dim) // (2 * key_dim),
        num_values=num_values,
        key_dim=key_dim,
        value_dim=value_dim,
        window=window,
        nodes=nodes,
        padded=pl.next_power_of_2(nodes if nodes <= FEW_NODES else max(nodes, LEAST_NODES)),
        path=cache["path"].shape[1],
        is_chain=rows.tail_mask is None,
        interpret=interpret,
    )
    tuning = tuning or choose_tuning(rows=rows.prefix_lens.shape[0], nodes=nodes)
    small, tail, pending = _inputs(inputs, decay, conv, cache, rows, sizes, tuning)
    small |= {"decay": decay, "beta": beta}
    if not sizes.are_few:
        small |= _pairs(small, rows, cache, sizes, tuning)
    out, state, pending = _states(small, cache, pending, rows, sizes, tuning)
    return out, {**cache, "state": state, "conv": tail, "pending": pending}


@dataclass(frozen=True, slots=True)
class _Tree:
    """The nodes of a row as a program sees them. sees: [i, j] if j is i or one of its ancestors."""

    node: jax.Array
    is_node: jax.Array
    at: jax.Array  # of each node among all tokens
    depth: jax.Array
    sees: jax.Array


def _tree(row: jax.Array, prefix: jax.Array, positions: Any, mask: Any, sizes: _Sizes) -> _Tree:
    node = jnp.arange(sizes.padded, dtype=jnp.int32)
    at = row * sizes.nodes + jnp.minimum(node, sizes.nodes - 1)
    is_node = node < sizes.nodes
    sees = node[None] <= node[:, None]
    if mask is not None:
        word = plt.load(mask.at[at[:, None], node[None] // 32])
        sees = ((word >> (node[None] % 32)) & 1) > 0
    sees = sees & is_node[None] & is_node[:, None]
    depth = plt.load(positions.at[at]) - prefix
    return _Tree(node=node, is_node=is_node, at=at, depth=depth, sees=sees)


def _rows_of(rows: AttentionMetadata, cache: Cache) -> tuple[jax.Array, ...]:
    mask: tuple[jax.Array, ...] = ()
    if rows.tail_mask is not None:
        mask = (lax.bitcast_convert_type(rows.tail_mask, jnp.int32),)
    assert rows.slots is not None
    return (rows.slots, rows.prefix_lens, rows.q_positions, cache["path"], *mask)


def _inputs(
    inputs: jax.Array,
    decay: jax.Array,
    conv: jax.Array,
    cache: Cache,
    rows: AttentionMetadata,
    sizes: _Sizes,
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
    operands = (*_rows_of(rows, cache), inputs, decay, conv, cache["conv"], cache["pending"])
    last = len(operands)
    *small, tail, pending = pl.pallas_call(
        functools.partial(_run_inputs, sizes=sizes),
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


def _run_inputs(*refs: Any, sizes: _Sizes) -> None:
    slots, prefixes, positions, paths, *refs_after = refs
    mask_ref = None if sizes.is_chain else refs_after.pop(0)
    inputs, decay, conv, _, _, *outs = refs_after
    q_out, k_out, v_out, old_out, fade_out, carried_out, tails, pending = outs
    row, which = pl.program_id(0), pl.program_id(1)
    num_keys, nodes, most = sizes.num_keys, sizes.nodes, sizes.window - 1
    slot, prefix = plt.load(slots.at[row]), plt.load(prefixes.at[row])
    is_fresh = prefix == 0
    tree = _tree(row, prefix, positions, mask_ref, sizes)
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
    total = _total(tree, plt.load(decay.at[tree.at, value]))

    sizes.barrier()
    plt.store(pending.at[slot, node, column], normed, mask=is_own & is_key)
    place = pending.at[slot, tree.node, sizes.first_decay + value]
    plt.store(place, total, mask=tree.is_node & is_value)
    plt.store(tails.at[slot, entry, channel], tail, mask=(entry < most) & is_lane)
    place = pending.at[slot, node, sizes.first_input + channel]
    plt.store(place, own.astype(jnp.float32), mask=is_own)


def _total(tree: _Tree, decay: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(tree.sees, decay[None], 0.0), axis=1)


def _pairs(
    small: dict[str, jax.Array],
    rows: AttentionMetadata,
    cache: Cache,
    sizes: _Sizes,
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
        functools.partial(_run_pairs, sizes=sizes),
        grid=(batch, sizes.num_keys),
        out_shape=(shape, shape, grown),
        compiler_params=plt.CompilerParams(num_warps=tuning.pair_warps, num_stages=1),
        interpret=sizes.interpret,
        name="delta_pairs",
    )(*_rows_of(rows, cache), *given)
    return {"solve": solve, "near": near, "grown": grown}


def _run_pairs(*refs: Any, sizes: _Sizes) -> None:
    _, prefixes, positions, _, *others = refs
    mask_ref = None if sizes.is_chain else others.pop(0)
    queries, keys, decay, beta, solve_out, near_out, grown_out = others
    row, head = pl.program_id(0), pl.program_id(1)
    tree = _tree(row, plt.load(prefixes.at[row]), positions, mask_ref, sizes)
    node = tree.node
    alike, near = _likeness(queries, keys, row, head, tree, sizes)
    is_below = tree.sees & (node[None] != node[:, None])
    whole = jnp.where(node[None] == node[:, None], 1.0, 0.0)
    deepest = jnp.clip(jnp.max(jnp.where(tree.is_node, tree.depth, 0)), 0, sizes.nodes - 1)
    square = tree.is_node[:, None] & tree.is_node[None]
    for nth in range(sizes.repeats):
        value = head * sizes.repeats + nth
        total = _total(tree, plt.load(decay.at[tree.at, value]))
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


def _states(
    small: dict[str, jax.Array],
    cache: Cache,
    pending: jax.Array,
    rows: AttentionMetadata,
    sizes: _Sizes,
    tuning: Tuning,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, state = rows.prefix_lens.shape[0], cache["state"]
    strip = min(tuning.strip, sizes.wide_value)
    out = (batch * sizes.nodes, sizes.num_values, sizes.value_dim)
    operands = (*_rows_of(rows, cache), *small.values(), state, pending)
    last = len(operands)
    found: tuple[jax.Array, jax.Array, jax.Array] = pl.pallas_call(
        functools.partial(_run_states, names=tuple(small), sizes=sizes, strip=strip),
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


def _run_states(*refs: Any, names: tuple[str, ...], sizes: _Sizes, strip: int) -> None:
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


def _ancestors(row: jax.Array, mask: Any, sizes: _Sizes) -> Callable[[int, int], Any]:
    if mask is None:
        return lambda *_: True
    words = [plt.load(mask.at[row * sizes.nodes + i, row * 0]) for i in range(sizes.nodes)]
    return lambda i, j: ((words[i] >> j) & 1) > 0


def _folded(own: _Strip, paths: Any, *, is_fresh: jax.Array, sizes: _Sizes) -> jax.Array:
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


def _run_many(own: _Strip, sizes: _Sizes) -> None:
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


def _likeness(
    queries: Any, keys: Any, row: jax.Array, head: jax.Array, tree: _Tree, sizes: _Sizes
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
