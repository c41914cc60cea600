"""A decode or tree step of the gated delta rule on an NVIDIA GPU (Pallas-Triton).

`delta_inputs`, a program for each row and head of queries, keys or values, reads what the last step
left pending and this step's inputs, and runs the convolution and norms. With several nodes,
`delta_pairs` solves the triangular system of each value head. `delta_states`, a program for each
row, value head and strip of V, reads its part of the state once, folds the accepted tokens into it,
writes it once, and computes all outputs and updates from it (reference.py has the formulas).

What a program writes to `pending` no other program of its launch reads, and a barrier is between
its own reads and writes: `delta_inputs` copies the accepted keys and decays for `delta_states`.
Rows of slot 0 are padding.
"""

from __future__ import annotations

import functools
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
from jspec.pallas_kernels.delta_rule.tuning import Tuning, choose_tuning

LEAST_NODES = 16  # M of the smallest tensor core tile; a single node needs no product
MOST_NODES = 64
PAIR_WARPS = 4
CHANNELS = 32  # of keys, in a step of a product over them
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
        """Return a @ b to float32's precision: on a chip three products of TF32."""
        exact: Any = lax.Precision.HIGHEST
        if not self.interpret:
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
        padded=1 if nodes == 1 else max(pl.next_power_of_2(nodes), LEAST_NODES),
        path=cache["path"].shape[1],
        is_chain=rows.tail_mask is None,
        interpret=interpret,
    )
    tuning = tuning or choose_tuning(rows=rows.prefix_lens.shape[0], nodes=nodes)
    small, tail, pending = _inputs(inputs, decay, conv, cache, rows, sizes, tuning)
    small |= {"decay": decay, "beta": beta}
    if nodes > 1:
        small |= _pairs(small, rows, cache, sizes)
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
    """Return what both launches read of the rows; a chain has no mask."""
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
    """Return (what `delta_states` reads, the convolutions' tails, pending but for the updates)."""
    batch, nodes = rows.prefix_lens.shape[0], sizes.nodes
    shapes = {
        "q": (batch, sizes.num_keys, nodes, sizes.key_dim),
        "k": (batch, sizes.num_keys, nodes, sizes.key_dim),
        "v": (batch, sizes.num_values, nodes, sizes.value_dim),
        "old_k": (batch, sizes.num_keys, sizes.path, sizes.key_dim),  # of the accepted tokens
        "fade": (batch, sizes.num_values, sizes.path),  # what their updates are multiplied by
        "carried": (batch, sizes.num_values, 1),  # what the state is multiplied by
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

    # Each head has its own stores: masks, as what a branch needs would be kept in registers.
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
    """Return G of each node."""
    return jnp.sum(jnp.where(tree.sees, decay[None], 0.0), axis=1)


def _pairs(
    small: dict[str, jax.Array], rows: AttentionMetadata, cache: Cache, sizes: _Sizes
) -> dict[str, jax.Array]:
    """Return each value head's system, solved, and its products of queries and keys."""
    batch = rows.prefix_lens.shape[0]
    shape = jax.ShapeDtypeStruct((batch, sizes.num_values, sizes.nodes, sizes.nodes), jnp.float32)
    given = [small[name] for name in ("q", "k", "decay", "beta")]
    solve, near = pl.pallas_call(
        functools.partial(_run_pairs, sizes=sizes),
        grid=(batch, sizes.num_keys),
        out_shape=(shape, shape),
        compiler_params=plt.CompilerParams(num_warps=PAIR_WARPS, num_stages=1),
        interpret=sizes.interpret,
        name="delta_pairs",
    )(*_rows_of(rows, cache), *given)
    return {"solve": solve, "near": near}


def _run_pairs(*refs: Any, sizes: _Sizes) -> None:
    _, prefixes, positions, _, *others = refs
    mask_ref = None if sizes.is_chain else others.pop(0)
    queries, keys, decay, beta, solve_out, near_out = others
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


def _states(
    small: dict[str, jax.Array],
    cache: Cache,
    pending: jax.Array,
    rows: AttentionMetadata,
    sizes: _Sizes,
    tuning: Tuning,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (outputs [T, Hv, Dv], states, pending)."""
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


def _run_states(*refs: Any, names: tuple[str, ...], sizes: _Sizes, strip: int) -> None:
    slots, prefixes, positions, paths, *others = refs
    mask_ref = None if sizes.is_chain else others.pop(0)
    given = dict(zip(names, others, strict=False))
    out, states, pending = others[len(names) + 2 :]
    row, value, part = (pl.program_id(axis) for axis in range(3))
    head = value // sizes.repeats
    slot, prefix = plt.load(slots.at[row]), plt.load(prefixes.at[row])
    is_fresh = prefix == 0
    column = part * strip + jnp.arange(strip, dtype=jnp.int32)
    is_column = column < sizes.value_dim
    channel = jnp.arange(sizes.wide_key, dtype=jnp.int32)
    is_channel = channel < sizes.key_dim
    tile = is_channel[:, None] & is_column[None]
    place = states.at[slot, value, channel[:, None], column[None]]
    held = plt.load(place, mask=tile & jnp.logical_not(is_fresh), other=0.0)
    held = held * plt.load(given["carried"].at[row, value, row * 0])
    in_updates = sizes.in_keys + value * sizes.value_dim
    for step in range(sizes.path):
        nth = row * 0 + step  # jax 0.10 cannot interpret a load at a constant index
        accepted = plt.load(paths.at[slot, nth])
        is_kept = (accepted >= 0) & jnp.logical_not(is_fresh)
        update_at = pending.at[slot, jnp.maximum(accepted, 0), in_updates + column]
        update = plt.load(update_at, mask=is_column & is_kept, other=0.0)
        update = update * plt.load(given["fade"].at[row, value, nth])
        key = plt.load(given["old_k"].at[row, head, nth, channel], mask=is_channel, other=0.0)
        held = held + key[:, None] * update[None]
    sizes.barrier()
    plt.store(place, held, mask=tile)

    tree = _tree(row, prefix, positions, mask_ref, sizes)
    node, is_node = tree.node, tree.is_node
    is_value = is_node[:, None] & is_column[None]
    v_at = given["v"].at[row, value, node[:, None], column[None]]
    v = plt.load(v_at, mask=is_value, other=0.0)
    grown = jnp.exp(_total(tree, plt.load(given["decay"].at[tree.at, value])))[:, None]
    if sizes.padded == 1:
        at = (row, head, row * 0, channel)
        q, k = (plt.load(given[name].at[at], mask=is_channel, other=0.0) for name in ("q", "k"))
        of_key, of_query = (jnp.sum(x[:, None] * held, axis=0)[None] for x in (k, q))
        update = plt.load(given["beta"].at[tree.at, value])[:, None] * (v - grown * of_key)
        found = grown * of_query + jnp.sum(q * k) * update
    else:
        sizes.barrier()
        some = min(CHANNELS, sizes.wide_key)

        def add(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Add the products with a few channels, read again: all would fill the registers."""
            channel = step * some + jnp.arange(some, dtype=jnp.int32)
            is_channel = channel < sizes.key_dim
            again = states.at[slot, value, channel[:, None], column[None]]
            x = plt.load(again, mask=is_channel[:, None] & is_column[None], other=0.0)
            at, mask = (row, head, node[:, None], channel[None]), is_node[:, None] & is_channel
            q, k = (plt.load(given[name].at[at], mask=mask, other=0.0) for name in ("q", "k"))
            return carry[0] + sizes.product(k, x), carry[1] + sizes.product(q, x)

        nothing = jnp.zeros((sizes.padded, strip), jnp.float32)
        of_key, of_query = lax.fori_loop(0, sizes.wide_key // some, add, (nothing, nothing))
        at = (row, value, node[:, None], node[None])
        mask = is_node[:, None] & is_node[None]
        solve, near = (
            plt.load(given[name].at[at], mask=mask, other=0.0) for name in ("solve", "near")
        )
        update = sizes.product(solve, v - grown * of_key)
        found = grown * of_query + sizes.product(near, update)
    token = row * sizes.nodes + node
    plt.store(out.at[token[:, None], value, column[None]], found, mask=is_value)
    plt.store(pending.at[slot, node[:, None], in_updates + column[None]], update, mask=is_value)


def _likeness(
    queries: Any, keys: Any, row: jax.Array, head: jax.Array, tree: _Tree, sizes: _Sizes
) -> tuple[jax.Array, jax.Array]:
    """Return (K K^T, Q K^T), by a few channels at a time: whole operands would fill registers."""
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
