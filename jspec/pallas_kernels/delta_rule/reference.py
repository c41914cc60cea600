"""The gated delta rule (Gated DeltaNet, arXiv:2412.06464) over chunks of prompts and over trees.

A head has a state S [Dk, Dv]. A token with key k, value v, log decay g and step size b gives

    S' = e^g S + k u^T,  u = b (v - e^g S^T k),  output S'^T q

so the outputs of all tokens of a tree follow from the state before it and their ancestors' inputs.
With G_n the sum of g along the path to node n, and D_nj = e^(G_n - G_j) for j an ancestor of n or n
itself (else 0), the rows of U solve a unit lower triangular system, parents coming first:

    (I + b * (D - I) * K K^T) U = b * (V - e^G * K S),  outputs e^G * Q S + (D * Q K^T) U

A chain is such a tree, and so is a block of a prompt. With T the inverse of the system, a block's U
is T (b * V) - T (b * e^G * K) S. Neither product with T depends on the state, so the blocks of a
prompt are solved side by side, and only two products of a block wait for the block before it.

Nothing is written twice: a step keeps k, u and G of its tokens, and the state after the tokens that
were accepted is

    e^(G_last) S + sum over the path of e^(G_last - G_j) k_j u_j^T

which the next step of the row computes (`folded`) in the pass that reads the state. Keys, queries
and values come from a causal convolution over the path; its inputs are kept and folded likewise.

A cache has, by slot: state f32[Hv, Dk, Dv] and conv [W - 1, C] after the folded tokens; pending
f32[N, ..], for each of the last step's tokens k, u, G and the convolution's input side by side; and
path i32[M], the accepted ones of these, then -1. Heads h * Hv / Hk .. of the values share key head
h. Since `pending` is one array, its only write depends on all that is read, and XLA copies no pool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.device.pytree import pytree, static
from jspec.device.state import put_rows, take_rows
from jspec.pallas_kernels.attention.api import AttentionMetadata, index_queries, mask_bits

BLOCK_TOKENS = 64  # of a prompt, one system
BLOCKS_AT_ONCE = 16  # solved side by side; they bound the memory of a long prompt
# States, sums of logarithms and the system are float32: the platforms' defaults for products of
# float32 (bfloat16 on a TPU, TF32 on a GPU) would round them.
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
NORM_EPS = 1e-6  # of the l2 norm of queries and keys

Cache = dict[str, jax.Array]
CARRIED = ("state", "conv")  # what a snapshot has


@pytree
class Tokens:
    """Inputs of the rule, in float32: [*b, Hk, Dk] and [*b, Hv(, Dv)]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array  # g, at most 0
    beta: jax.Array  # b


def run_rows(
    inputs: Float[Array, "T C"],
    decay: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
    conv: Float[Array, "W C"],
    cache: Cache,
    rows: AttentionMetadata,
    *,
    nodes: int,
) -> tuple[Float[Array, "T Hv Dv"], Cache]:
    """Run `nodes` tokens of every row, a chain or the tree of rows.tail_mask; accept none yet.
    inputs: of the convolution, the channels of all queries, keys, then values. rows: with slots."""
    slots = _given(rows.slots)
    own = take_rows(cache, slots)
    state, tail = folded(own, is_fresh=rows.prefix_lens == 0)
    tokens, sees, new = tokens_of_rows(inputs, decay, beta, conv, tail, rows, like=state)
    out, updates, total = _solve(state, tokens, sees)
    flat = flat_pending(tokens, updates, total, new)
    pending = own["pending"].at[:, :nodes].set(flat, mode="promise_in_bounds")
    after = {"state": state, "conv": tail, "pending": pending}
    return out.reshape(-1, *out.shape[2:]), _stored(cache, slots, after)


def tokens_of_rows(
    inputs: Float[Array, "T C"],
    decay: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
    conv: Float[Array, "W C"],
    tail: Float[Array, "B W1 C"],
    rows: AttentionMetadata,
    *,
    like: Float[Array, "_ Hv Dk Dv"],
) -> tuple[Tokens, Bool[Array, "B N N"], Float[Array, "B N C"]]:
    """Return (tokens, ancestors, inputs by row) of rows of equal length. like: states, by shape."""
    batch = rows.prefix_lens.shape[0]
    new = inputs.reshape(batch, -1, inputs.shape[1])
    nodes = new.shape[1]
    sees = _ancestors(rows, batch, nodes)
    depth = rows.q_positions.reshape(batch, nodes) - rows.prefix_lens[:, None]
    window = _tree_window(tail, new, sees, depth)
    tokens = _tokens(
        _convolved(window, conv),
        decay.reshape(batch, nodes, -1),
        beta.reshape(batch, nodes, -1),
        like=like,
    )
    return tokens, sees, new


def flat_pending(
    tokens: Tokens,
    updates: Float[Array, "B N Hv Dv"],
    total: Float[Array, "B N Hv"],
    new: Float[Array, "B N C"],
) -> Float[Array, "B N P"]:
    """Return what each token leaves pending, side by side."""
    parts = (tokens.k, updates, total, new)
    flat = [x.reshape(*new.shape[:2], -1).astype(jnp.float32) for x in parts]
    return jnp.concatenate(flat, axis=-1)


RunBlocks = Callable[[jax.Array, "Tokens", jax.Array], tuple[jax.Array, jax.Array]]


def run_chunks(
    inputs: Float[Array, "T C"],
    decay: Float[Array, "T Hv"],
    beta: Float[Array, "T Hv"],
    conv: Float[Array, "W C"],
    cache: Cache,
    rows: AttentionMetadata,
    *,
    run: RunBlocks | None = None,
) -> tuple[Float[Array, "T Hv Dv"], Cache]:
    """Run packed chunks of prompts, whose tokens are all accepted; padding tokens give zeros. run:
    `run_blocks`, or a kernel of the same results."""
    slots, size = _given(rows.slots), inputs.shape[0]
    own = take_rows(cache, slots)
    states, tail = folded(own, is_fresh=rows.prefix_lens == 0)
    index = index_queries(rows.cu_q_lens, size, queries_per_row=None)
    inputs = jnp.where(index.valid[:, None], inputs, 0)
    window = _chunk_window(tail, inputs, index.row_idx, index.within)
    tokens = _tokens(_convolved(window, conv), decay, beta, like=states)
    out, states = (run or run_blocks)(states, tokens, rows.cu_q_lens)
    starts, ends = rows.cu_q_lens[:-1], rows.cu_q_lens[1:]
    count = jnp.minimum(ends - starts, tail.shape[1])
    at = jnp.arange(tail.shape[1]) - tail.shape[1] + (ends - starts)[:, None]
    of_chunk = inputs.at[jnp.maximum(starts[:, None] + at, 0)].get(mode="clip")
    after = {
        "state": states,
        "conv": jnp.where((at >= 0)[:, :, None], of_chunk, _shifted(tail, count)),
        "path": jnp.full_like(own["path"], -1),
    }
    return out, _stored(cache, slots, after)


def run_blocks(
    states: Float[Array, "R Hv Dk Dv"], tokens: Tokens, cu_q_lens: Int[Array, "R1"]
) -> tuple[Float[Array, "T Hv Dv"], Float[Array, "R Hv Dk Dv"]]:
    """Return (outputs, states after the rows) of packed rows. No block has tokens of two rows; what
    `tokens` has after the last row is not read."""
    size = tokens.v.shape[0]
    block = min(BLOCK_TOKENS, size)
    places = BlockPlaces.of(cu_q_lens, block)
    most = most_blocks(size, rows=states.shape[0], block=block)
    group = -(-most // -(-most // BLOCKS_AT_ONCE))  # so that the last group is nearly full, too

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        nth, states, out = carry
        row, first, last = places.at(nth + jnp.arange(group, dtype=jnp.int32))
        at = first[:, None] + jnp.arange(block, dtype=jnp.int32)
        valid = at < last[:, None]
        blocks = _blocks(jax.tree.map(lambda x: _masked(x, at, valid), tokens))

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            states, out = carry
            state = jax.lax.dynamic_index_in_dim(states, row[i], keepdims=False)
            found, state = blocks.nth(i).run(state)
            found = jnp.where(valid[i][:, None, None], found, 0)
            states = jax.lax.dynamic_update_index_in_dim(states, state, row[i], 0)
            # A row's last block writes zeros after the row; the next row's blocks replace them.
            out = jax.lax.dynamic_update_slice_in_dim(out, found, jnp.minimum(first[i], size), 0)
            return states, out

        states, out = jax.lax.fori_loop(0, group, step, (states, out))
        return nth + group, states, out

    out = jnp.zeros((size + block, *tokens.v.shape[1:]), jnp.float32)
    begin = jnp.zeros((), places.ends.dtype)
    _, states, out = jax.lax.while_loop(
        lambda carry: carry[0] < places.ends[-1], body, (begin, states, out)
    )
    return out[:size], states


def record_path(
    cache: Cache,
    slots: Int[Array, "B"] | None,
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
) -> Cache:
    """Store which of the last step's tokens were accepted, the root included; nothing moves."""
    step = jnp.arange(node_path.shape[1], dtype=jnp.int32)
    path = jnp.where(step <= num_accepted[:, None], node_path, -1)
    most = cache["path"].shape[1]
    path = jnp.pad(path, ((0, 0), (0, most - path.shape[1])), constant_values=-1)
    stored = cache["path"].at[_given(slots)].set(path, mode="promise_in_bounds")
    return {**cache, "path": stored}


@pytree
class Accepted:
    """Values that accepted tokens of gathered rows leave; after them, and of fresh rows, zeros."""

    keys: jax.Array  # [B, M, Hk, Dk]
    updates: jax.Array  # [B, M, Hv, Dv]
    decays: jax.Array  # [B, M, Hv]
    total: jax.Array  # [B, Hv], the last G
    tail: jax.Array  # [B, W - 1, C], of the convolution after them


def accepted(own: Cache, *, is_fresh: Bool[Array, "B"]) -> Accepted:
    """Read path, pending and conv of gathered rows; of their states only the shape matters."""
    path, fresh = own["path"], is_fresh[:, None, None]
    valid = path >= 0
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)

    at = jnp.maximum(path, 0)[:, :, None]
    pending = jnp.take_along_axis(own["pending"], at, axis=1, mode="clip")
    pending = jnp.where(valid[:, :, None], pending, 0)
    keys, updates, decays, inputs = _split_pending(pending, own)
    at_last = jnp.maximum(count - 1, 0)[:, None, None]
    total = jnp.take_along_axis(decays, at_last, axis=1, mode="clip")[:, 0]
    tail = jnp.concatenate((own["conv"], inputs.astype(own["conv"].dtype)), axis=1)
    at = count[:, None, None] + jnp.arange(own["conv"].shape[1])[:, None]
    tail = jnp.take_along_axis(tail, at, axis=1, mode="clip")
    return Accepted(
        keys=keys,
        updates=jnp.where(fresh[..., None], 0, updates),
        decays=decays,
        total=total,
        tail=jnp.where(fresh, 0, tail),
    )


def folded(
    own: Cache, *, is_fresh: Bool[Array, "B"]
) -> tuple[Float[Array, "B Hv Dk Dv"], Float[Array, "B W1 C"]]:
    """Return state and conv of gathered rows after their accepted tokens; zeros for fresh rows."""
    fresh = is_fresh[:, None, None, None]
    last = accepted(own, is_fresh=is_fresh)
    carried = jnp.where(fresh, 0, own["state"])
    state = jax.vmap(_after)(carried, last.keys, last.updates, last.decays, last.total)
    return jnp.where(fresh, 0, state), last.tail


def save_snapshots(
    snapshots: Cache, cache: Cache, *, slots: Int[Array, "B"], entries: Int[Array, "B"]
) -> Cache:
    """Copy the state of row slots[b], with what is pending, to entry entries[b]. Entry 0 is a
    dummy, as slot 0 is."""
    found = folded(take_rows(cache, slots), is_fresh=slots == 0)
    return put_rows(snapshots, entries, dict(zip(CARRIED, found, strict=True)))


def load_snapshots(
    cache: Cache, snapshots: Cache, *, slots: Int[Array, "B"], entries: Int[Array, "B"]
) -> Cache:
    """Let row slots[b] go on after the tokens of entry entries[b]."""
    path = jnp.full((slots.shape[0], cache["path"].shape[1]), -1, jnp.int32)
    after: dict[str, jax.Array] = {**take_rows(snapshots, entries), "path": path}
    return {**cache, **put_rows({name: cache[name] for name in after}, slots, after)}


def _given(slots: jax.Array | None) -> jax.Array:
    if slots is None:
        raise ValueError("slots is None; expected the slot of each row, for a recurrent layer")
    return slots


def _stored(cache: Cache, slots: jax.Array, after: Cache) -> Cache:
    return {**cache, **put_rows({name: cache[name] for name in after}, slots, after)}


def _split_pending(
    pending: Float[Array, "B M P"], own: Cache
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return keys [B, M, Hk, Dk], updates [B, M, Hv, Dv], decays [B, M, Hv], inputs [B, M, C]."""
    _, num_values, key_dim, value_dim = own["state"].shape
    in_values, channels = num_values * value_dim, own["conv"].shape[-1]
    in_keys = (channels - in_values) // 2
    parts = (in_keys, in_keys + in_values, in_keys + in_values + num_values)
    keys, updates, decays, inputs = jnp.split(pending, parts, axis=-1)
    keys = keys.reshape(*keys.shape[:-1], -1, key_dim)
    updates = updates.reshape(*updates.shape[:-1], num_values, value_dim)
    return keys, updates, decays, inputs


def _masked(x: jax.Array, at: jax.Array, valid: jax.Array) -> jax.Array:
    found = x.at[at].get(mode="clip")
    return jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 1)), found, 0)


def _shifted(tail: jax.Array, count: jax.Array) -> jax.Array:
    """Return each row's tail without its first `count` entries, in front."""
    at = count[:, None, None] + jnp.arange(tail.shape[1])[:, None]
    return jnp.take_along_axis(tail, at, axis=1, mode="clip")


def _ancestors(rows: AttentionMetadata, batch: int, nodes: int) -> Bool[Array, "B N N"]:
    """Return a mask: [b, i, j] is True if node j is node i or one of its ancestors."""
    if rows.tail_mask is None:
        return jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (batch, nodes, nodes))
    words = rows.tail_mask.reshape(batch, nodes, -1)
    every = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (batch, nodes, nodes))
    return mask_bits(words, every)


def _tree_window(
    tail: Float[Array, "B W1 C"],
    new: Float[Array, "B N C"],
    sees: Bool[Array, "B N N"],
    depth: Int[Array, "B N"],
) -> Float[Array, "B N W C"]:
    """Return the last W inputs of each node's path, its own last."""
    size, nodes = tail.shape[1] + 1, new.shape[1]
    back = jnp.arange(size - 1, -1, -1, dtype=jnp.int32)
    wanted = depth[:, :, None] - back  # depth of each input; negative ones are before the tree
    is_at = sees[:, :, None, :] & (depth[:, None, None, :] == wanted[..., None])
    node = jnp.argmax(is_at, axis=-1).astype(jnp.int32)
    at = size - 1 + jnp.where(wanted >= 0, node, wanted)
    both = jnp.concatenate((tail, new.astype(tail.dtype)), axis=1)
    flat = at.reshape(at.shape[0], nodes * size, 1)
    found = jnp.take_along_axis(both, flat, axis=1, mode="clip")
    return found.reshape(*at.shape, both.shape[-1])


def _chunk_window(
    tail: Float[Array, "R W1 C"],
    inputs: Float[Array, "T C"],
    row_idx: Int[Array, "T"],
    within: Int[Array, "T"],
) -> Float[Array, "T W C"]:
    """Return the last W inputs of each packed token's row, its own last."""
    size, num_tokens = tail.shape[1] + 1, inputs.shape[0]
    back = jnp.arange(size - 1, -1, -1, dtype=jnp.int32)
    wanted = within[:, None] - back
    at = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] - back
    of_chunk = inputs.astype(tail.dtype).at[jnp.maximum(at, 0)].get(mode="clip")
    before = jnp.maximum(size - 1 + jnp.minimum(wanted, -1), 0)
    of_tail = tail.at[row_idx[:, None], before].get(mode="clip")
    return jnp.where((wanted >= 0)[..., None], of_chunk, of_tail)


def _convolved(window: Float[Array, "*b W C"], conv: Float[Array, "W C"]) -> Float[Array, "*b C"]:
    wide = window.astype(jnp.float32) * conv.astype(jnp.float32)
    return jax.nn.silu(jnp.sum(wide, axis=-2))


def _tokens(
    mixed: Float[Array, "*b C"],
    decay: Float[Array, "*b Hv"],
    beta: Float[Array, "*b Hv"],
    *,
    like: Float[Array, "B Hv Dk Dv"],
) -> Tokens:
    """Split the convolution's output; queries and keys are l2-normed, queries scaled."""
    _, num_values, key_dim, value_dim = like.shape
    in_values = num_values * value_dim
    in_keys = (mixed.shape[-1] - in_values) // 2
    q, k, v = jnp.split(mixed, (in_keys, 2 * in_keys), axis=-1)
    q, k = (x.reshape(*x.shape[:-1], -1, key_dim) for x in (q, k))
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + NORM_EPS) for x in (q, k))
    return Tokens(
        q=q * key_dim**-0.5,
        k=k,
        v=v.reshape(*v.shape[:-1], num_values, value_dim),
        decay=decay.astype(jnp.float32),
        beta=beta.astype(jnp.float32),
    )


@pytree
class System:
    """The linear system of a block or a tree, by head: what does not depend on the state."""

    keys: jax.Array  # [*b, N, Hv, Dk], of each value head
    queries: jax.Array
    total: jax.Array  # G: [*b, N, Hv]
    matrix: jax.Array  # I + b * (D - I) * K K^T: [*b, Hv, N, N]
    near: jax.Array  # D * Q K^T: [*b, Hv, N, N]


def system_of(tokens: Tokens, sees: Bool[Array, "*b N N"]) -> System:
    repeats = tokens.v.shape[-2] // tokens.k.shape[-2]
    q, k = (jnp.repeat(x, repeats, axis=-2) for x in (tokens.q, tokens.k))
    total = _einsum("...ij,...jh->...ih", sees.astype(jnp.float32), tokens.decay)
    gap = total[..., :, None, :] - total[..., None, :, :]
    fade = jnp.exp(jnp.where(sees[..., None], gap, -jnp.inf))  # D: [*b, N, N, Hv]
    fade = jnp.moveaxis(fade, -1, -3)
    alike, near = (jnp.repeat(_pairs(x, tokens.k), repeats, -3) for x in (tokens.k, tokens.q))
    matrix = jnp.moveaxis(tokens.beta, -1, -2)[..., None] * fade * alike
    matrix = jnp.where(jnp.eye(sees.shape[-1], dtype=bool), 1.0, matrix)
    return System(keys=k, queries=q, total=total, matrix=matrix, near=fade * near)


def _solve(
    state: Float[Array, "*b Hv Dk Dv"], tokens: Tokens, sees: Bool[Array, "*b N N"]
) -> tuple[Float[Array, "*b N Hv Dv"], Float[Array, "*b N Hv Dv"], Float[Array, "*b N Hv"]]:
    """Return (outputs, U, G) of the module's docstring."""
    system = system_of(tokens, sees)
    grown = jnp.exp(system.total)[..., None]
    given = tokens.v - grown * _einsum("...nhk,...hkv->...nhv", system.keys, state)
    updates = jax.scipy.linalg.solve_triangular(
        system.matrix,
        jnp.moveaxis(tokens.beta[..., None] * given, -2, -3),
        lower=True,
        unit_diagonal=True,
    )
    out = grown * _einsum("...nhk,...hkv->...nhv", system.queries, state) + jnp.moveaxis(
        _einsum("...hij,...hjv->...hiv", system.near, updates), -3, -2
    )
    return out, jnp.moveaxis(updates, -3, -2), system.total


def most_blocks(tokens: int, *, rows: int, block: int) -> int:
    """Return the most blocks that `tokens` of `rows` can have."""
    return (tokens + rows * (block - 1)) // block


@pytree
class BlockPlaces:
    """Places of the blocks of packed rows: those of row 0, then those of row 1, and so on."""

    cu_q_lens: jax.Array  # i32[R + 1]
    ends: jax.Array  # i32[R], how many blocks each row and those before it have
    block: int = static()

    @classmethod
    def of(cls, cu_q_lens: Int[Array, "R1"], block: int) -> BlockPlaces:
        blocks = -(-(cu_q_lens[1:] - cu_q_lens[:-1]) // block)
        return cls(cu_q_lens=cu_q_lens, ends=jnp.cumsum(blocks), block=block)

    def at(self, nth: Int[Array, "N"]) -> tuple[Int[Array, "N"], Int[Array, "N"], Int[Array, "N"]]:
        """Return (row, first token, end of the row) of blocks; after the last, first >= end."""
        row = jnp.sum(nth[:, None] >= self.ends, axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, self.ends.shape[0] - 1)
        first, last = self.cu_q_lens[row], self.cu_q_lens[row + 1]
        before = self.ends[row] + (first - last) // self.block  # blocks of the rows before it
        return row, first + (nth - before) * self.block, last


@pytree
class _Blocks:
    """Blocks of prompts, solved, by head: G of them, or one without the first axis."""

    left: jax.Array  # multiplied by the state, T (b * e^G * K), e^G * Q: [G, Hv, 2N, Dk]
    given: jax.Array  # T (b * V): [G, Hv, N, Dv]
    right: jax.Array  # multiplied by U, D * Q K^T, (e^(G_last - G) * K)^T: [G, Hv, N + Dk, N]
    carried: jax.Array  # e^G_last: [G, Hv]

    def nth(self, i: jax.Array) -> _Blocks:
        def of(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

        return jax.tree.map(of, self)

    def run(
        self, state: Float[Array, "Hv Dk Dv"]
    ) -> tuple[Float[Array, "N Hv Dv"], Float[Array, "Hv Dk Dv"]]:
        """Return (outputs, the state after the block)."""
        size = self.given.shape[-2]
        of_state = _einsum("hik,hkv->hiv", self.left, state)
        updates = self.given - of_state[:, :size]
        added = _einsum("hij,hjv->hiv", self.right, updates)
        out = of_state[:, size:] + added[:, :size]
        return jnp.swapaxes(out, 0, 1), self.carried[:, None, None] * state + added[:, size:]


def _blocks(tokens: Tokens) -> _Blocks:
    """Solve blocks of tokens [G, N, ..]; those after a block's last have zeros."""
    system = system_of(tokens, jnp.tril(jnp.ones((tokens.v.shape[1],) * 2, bool)))
    grown, last = jnp.exp(system.total)[..., None], system.total[:, -1]
    given = tokens.beta[..., None] * jnp.concatenate((tokens.v, grown * system.keys), axis=-1)
    solved = jax.scipy.linalg.solve_triangular(
        system.matrix, jnp.swapaxes(given, 1, 2), lower=True, unit_diagonal=True
    )
    values, keys = jnp.split(solved, (tokens.v.shape[-1],), axis=-1)
    queries = jnp.swapaxes(grown * system.queries, 1, 2)
    fading = jnp.exp(last[:, None] - system.total)[..., None] * system.keys
    return _Blocks(
        left=jnp.concatenate((keys, queries), axis=-2),
        given=values,
        right=jnp.concatenate((system.near, jnp.transpose(fading, (0, 2, 3, 1))), axis=-2),
        carried=jnp.exp(last),
    )


def _pairs(a: Float[Array, "*b N H K"], b: Float[Array, "*b N H K"]) -> Float[Array, "*b H N N"]:
    """Return the products of each a_i and b_j. XLA's GPU compiler fails on those of one token."""
    if a.shape[-3] == 1:
        return jnp.sum(a * b, axis=-1)[..., 0, :, None, None]
    return _einsum("...ihk,...jhk->...hij", a, b)


def _after(
    state: Float[Array, "Hv Dk Dv"],
    keys: Float[Array, "M Hk Dk"],
    updates: Float[Array, "M Hv Dv"],
    decays: Float[Array, "M Hv"],
    total: Float[Array, "Hv"],
) -> Float[Array, "Hv Dk Dv"]:
    """Return the state after a path, of which `total` is the last G."""
    k = jnp.repeat(keys, updates.shape[1] // keys.shape[1], axis=1)
    faded = updates * jnp.exp(total - decays)[..., None]
    return jnp.exp(total)[:, None, None] * state + _einsum("mhk,mhv->hkv", k, faded)
