"""Verification: one target forward over the tree, then what it settles.

score   runs the target over all N nodes of every row at once
settle  chooses the target's token at each node, walks the tree, compacts the accepted path

Simulated acceptance, a static option for measurements of speed alone, cuts or lengthens that walk
behind everything a real step computes; no request can ask for it.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core import noise, shapes
from jspec.core.batch import DraftTree, Verified
from jspec.core.config import SpeculativeConfig
from jspec.core.state import SamplingRows
from jspec.models.llama import Params
from jspec.models.paged import AttentionSettings, KVPool, PagedLlama
from jspec.pallas_kernels.dispatch import compact_paths, gather_emitted
from jspec.pallas_kernels.paged_attention import Backend
from jspec.pallas_kernels.rows import AttentionRows
from jspec.sampling.accept import accept_tree
from jspec.sampling.choose import choose
from jspec.sampling.penalties import path_tokens, penalize
from jspec.speculative.draft import RowsInStep
from jspec.speculative.tree import ancestors, pack_bits


def score(
    target: PagedLlama,
    params: Params,
    kv: KVPool,
    tree: DraftTree,
    rows: RowsInStep,
    *,
    spec: SpeculativeConfig,
    backend: Backend,
) -> tuple[KVPool, Float[Array, "B N V"], Float[Array, "B N A"]]:
    """(pool with N scratch rows a row, f32 logits of every node, aux features of every node)."""
    batch, nodes = tree.tokens.shape
    positions = shapes.target_position(rows.seq_lens[:, None], tree.depths)
    is_chain = spec.topk == 1
    mask = None if is_chain else pack_bits(ancestors(tree, num_levels=spec.num_steps))
    attention_rows = AttentionRows(
        page_table=rows.page_table,
        prefix_lens=rows.seq_lens,
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * nodes,
        q_positions=positions.reshape(-1),
        tail_mask=None if mask is None else mask.reshape(batch * nodes, -1),
        tail_positions=None if is_chain else positions,
    )
    hidden, aux, kv = target.forward(
        params,
        tree.tokens.reshape(-1),
        kv,
        attention_rows,
        AttentionSettings(backend, queries_per_row=nodes),
    )
    logits = target.logits(params, hidden).reshape(batch, nodes, -1)
    return kv, logits, aux.reshape(batch, nodes, -1)


def choose_at_nodes(
    target: PagedLlama,
    logits: Float[Array, "B N V"],
    tree: DraftTree,
    rows: RowsInStep,
    *,
    spec: SpeculativeConfig,
    prompt_lens: Int[Array, "B"],
    output_counts: Int[Array, "B V"] | None,
    backend: Backend = "xla",
) -> Int[Array, "B N"]:
    """The target's token at every node; `output_counts` None is the plain program (no filters)."""
    positions = shapes.chosen_position(rows.seq_lens[:, None], tree.depths)
    token_ids = target.token_ids()
    if output_counts is not None:
        logits = penalize(
            logits,
            rows.sampling,
            token_ids=token_ids,
            output_counts=output_counts,
            tokens_on_path=path_tokens(tree, num_levels=spec.num_steps),
            num_output=positions - prompt_lens[:, None],
        )
    return choose(
        logits,
        rows.sampling,
        positions=positions,
        token_ids=token_ids,
        filtered=output_counts is not None,
        shard=target.shard,
        backend=backend,
    )


def settle(
    tree: DraftTree,
    target_ids: Int[Array, "B N"],
    hidden: Float[Array, "B N A"],
    kv: KVPool,
    rows: RowsInStep,
    *,
    spec: SpeculativeConfig,
    backend: Backend = "xla",
) -> tuple[KVPool, Verified]:
    """Walks the tree and moves the accepted path's KV to the front (a chain is there already)."""
    node_path, num_accepted = accept_tree(tree, target_ids, num_levels=spec.num_steps)
    if spec.simulate_acceptance is not None:
        forced = simulated_drafts(rows, mean_emitted=spec.simulate_acceptance)
        node_path = forced_path(tree, node_path, num_accepted, forced)
        num_accepted = forced
    if spec.topk > 1:
        kv = compact_paths(
            kv, rows.page_table, rows.seq_lens, node_path, num_accepted, backend=backend
        )
    emitted_ids, bonus_ids, on_path = gather_emitted(
        target_ids, hidden, node_path, num_accepted, backend=backend
    )
    return kv, Verified(
        emitted_ids=emitted_ids,
        bonus_ids=bonus_ids,
        num_accepted=num_accepted,
        node_path=node_path,
        hidden=on_path,
    )


def simulated_drafts(rows: RowsInStep, *, mean_emitted: float) -> Int[Array, "B"]:
    """Drafts to accept in each row, one less than the tokens emitted: `mean_emitted` on average.

    A fraction is rounded up with that probability, by a hash of the row's seed and its L.
    """
    whole = math.floor(mean_emitted)
    odds = math.floor((mean_emitted - whole) * 2**32)
    bits, _ = noise.position_key(rows.sampling.seed, rows.seq_lens)
    return (whole - 1) + (bits < jnp.uint32(odds)).astype(jnp.int32)


def forced_path(
    tree: DraftTree,
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    forced: Int[Array, "B"],
) -> Int[Array, "B M"]:
    """The real walk, cut or lengthened to `forced` drafts; 0 behind them.

    Where the real walk ends, the path goes on with each node's first child. A node without one
    (the tree may be shallower than S) is followed by the next node, or the last one by itself. The
    result depends on the real walk, so no compiler can leave that out.

    In:  parents [-1 0 0 1], node_path [0 2 0], num_accepted 1, forced 2   (b1 has no child)
    Out: [0 2 3]
    """
    last_node = tree.parents.shape[1] - 1
    current = node_path[:, 0]
    path = [current]
    for i in range(1, node_path.shape[1]):
        children = tree.parents == current[:, None]
        first = jnp.argmax(children, axis=1).astype(jnp.int32)
        following = jnp.minimum(current + 1, last_node)
        onward = jnp.where(jnp.any(children, axis=1), first, following)
        current = jnp.where(i <= num_accepted, node_path[:, i], onward)
        path.append(jnp.where(i <= forced, current, 0))
    return jnp.stack(path, axis=1)


def target_logits_at(
    target: PagedLlama, params: Params, hidden: Float[Array, "T E"], last: Int[Array, "B"]
) -> Float[Array, "B 1 V"]:
    """f32 logits of one row per sequence: what a prefill samples from."""
    final = jnp.take(hidden, last, axis=0, mode="clip")
    return target.logits(params, final)[:, None]


def no_tree(rows: SamplingRows) -> Int[Array, "B 1 0"]:
    """The (empty) path in front of a prefill's only node."""
    return jnp.zeros((rows.temperature.shape[0], 1, 0), jnp.int32)
