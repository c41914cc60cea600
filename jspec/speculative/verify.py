"""Verification: one target forward over the tree, then acceptance. Simulated acceptance, a static
option for speed measurements, replaces the accepted path after all the work of a real step."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.config.limits import SpeculativeConfig
from jspec.device import noise
from jspec.device.batch import DraftTree, Features, Verified
from jspec.device.state import Seen
from jspec.layers.expert_use import ExpertCounter
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.sampling.accept import accept_tree
from jspec.sampling.choose import choose
from jspec.sampling.grammar import restrict
from jspec.sampling.penalties import path_tokens, penalize
from jspec.spec import indexing
from jspec.spec.cache_entry import KV, CacheEntry, Latent, Unit
from jspec.spec.cache_groups import CacheGroup, groups_of_layers
from jspec.speculative.drafter import Needs, StepBatch
from jspec.speculative.target import KVPool, Params, Target
from jspec.speculative.tree import ancestors, pack_bits

ANY_KV = KV(num_heads=1, qk_dim=1, v_dim=1)


def score(
    target: Target,
    params: Params,
    kv: KVPool,
    tree: DraftTree,
    rows: StepBatch,
    *,
    needs: Needs,
    draft_shape: SpeculativeConfig,
    counter: ExpertCounter | None = None,
) -> tuple[KVPool, Float[Array, "B N V"], Features]:
    """Return (pool with a scratch slot per node, f32 logits of all nodes, features [B, N, .])."""
    batch, nodes = tree.tokens.shape
    positions = indexing.target_position(rows.seq_lens[:, None], tree.depths)
    is_chain = draft_shape.is_chain
    mask = None if is_chain else pack_bits(ancestors(tree, num_levels=draft_shape.depth))
    attention_rows = AttentionMetadata(
        page_table=rows.page_table,
        window_tables=rows.window_tables,
        prefix_lens=rows.seq_lens,
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * nodes,
        q_positions=positions.reshape(-1),
        tail_mask=None if mask is None else mask.reshape(batch * nodes, -1),
        tail_positions=None if is_chain else positions,
        shared=rows.shared,
        slots=rows.slots,
    )
    hidden, aux, kv = target.forward(
        params,
        tree.tokens.reshape(-1),
        kv,
        attention_rows,
        queries_per_row=nodes,
        lora_slots=rows.lora_slots,
        counter=counter,
    )
    logits = target.logits(params, hidden).reshape(batch, nodes, -1)
    by_node = jax.tree.map(
        lambda x: x.reshape(batch, nodes, -1), features_of(hidden, aux, needs=needs)
    )
    return kv, logits, by_node


def features_of(hidden: Float[Array, "_ E"], aux: Float[Array, "T A"], *, needs: Needs) -> Features:
    nothing = jnp.zeros((aux.shape[0], 0), hidden.dtype)
    return Features(hidden=hidden if needs.hidden else nothing, aux_hidden=aux)


def choose_at_nodes(
    target: Target,
    logits: Float[Array, "B N V"],
    tree: DraftTree,
    rows: StepBatch,
    *,
    draft_shape: SpeculativeConfig,
    prompt_lens: Int[Array, "B"],
    filtered: bool,
    seen: Seen | None,
    allowed: UInt32[Array, "B N W"] | None = None,
) -> Int[Array, "B N"]:
    """Return the target's token at every node.

    filtered: apply top-k, top-p and min-p. seen: None: no penalties, bias or minimum length.
    allowed: bit mask of a grammar's tokens after each node.
    """
    raw = logits
    positions = indexing.chosen_position(rows.seq_lens[:, None], tree.depths)
    token_ids = target.token_ids()
    if seen is not None:
        logits = penalize(
            logits,
            rows.sampling,
            token_ids=token_ids,
            seen=seen,
            tokens_on_path=path_tokens(tree, num_levels=draft_shape.depth),
            num_output=positions - prompt_lens[:, None],
        )
    if allowed is not None:
        logits = restrict(logits, raw, allowed, token_ids=token_ids, shard=target.shard)
    return choose(
        logits,
        rows.sampling,
        positions=positions,
        token_ids=token_ids,
        filtered=filtered,
        shard=target.shard,
        ops=target.ops,
    )


def settle(
    tree: DraftTree,
    target_ids: Int[Array, "B N"],
    features: Features,
    kv: KVPool,
    rows: StepBatch,
    *,
    draft_shape: SpeculativeConfig,
    ops: Ops,
    groups: tuple[CacheGroup, ...] = (),
) -> tuple[KVPool, Verified]:
    """Walk the tree and commit the accepted path. features: [B, N, .], by node. groups: the cache
    groups of `kv`; if empty, all of it is KV in the full page space."""
    drafts = rows.sampling.speculative > 0
    node_path, num_accepted = accept_tree(
        tree, target_ids, num_levels=draft_shape.depth, may_accept=drafts
    )
    if draft_shape.simulate_acceptance is not None:
        forced = simulated_drafts(rows, mean_emitted=draft_shape.simulate_acceptance)
        forced = jnp.where(drafts, forced, 0)
        node_path = forced_path(tree, node_path, num_accepted, forced)
        num_accepted = forced
    if kv and not groups:
        groups = (CacheGroup("all", len(kv), ANY_KV),)
    kv = commit_path(
        kv, rows, node_path, num_accepted, ops=ops, groups=groups, is_chain=draft_shape.is_chain
    )
    gather = partial(ops.gather_emitted, target_ids, node_path=node_path, num_accepted=num_accepted)
    emitted_ids, bonus_ids, aux_hidden = gather(hidden=features.aux_hidden)
    hidden = jnp.zeros((*node_path.shape, 0), features.hidden.dtype)
    if features.hidden.shape[-1]:
        _, _, hidden = gather(hidden=features.hidden)
    return kv, Verified(
        emitted_ids=emitted_ids,
        bonus_ids=bonus_ids,
        num_accepted=num_accepted,
        node_path=node_path,
        features=Features(hidden=hidden, aux_hidden=aux_hidden),
    )


def commit_path(
    kv: KVPool,
    rows: StepBatch,
    node_path: Int[Array, "B M"],
    num_accepted: Int[Array, "B"],
    *,
    ops: Ops,
    groups: tuple[CacheGroup, ...],
    is_chain: bool,
) -> KVPool:
    """Commit the accepted path in every layer's cache: its records move to the slots after L, where
    a chain's already are. Recurrent layers store the path, which the next step folds."""
    caches = list(kv)
    kinds: dict[tuple[int | None, type[CacheEntry]], list[int]] = {}
    for i, group in enumerate(groups_of_layers(groups)):
        if group.entry.unit is Unit.SLOT:
            caches[i] = ops.commit_state(kv[i], rows.slots, node_path, num_accepted)
        elif not is_chain:
            space = group.window if group.window in rows.window_tables else None
            kinds.setdefault((space, type(group.entry)), []).append(i)
    for (space, entry), own in kinds.items():
        table = rows.page_table if space is None else rows.window_tables[space]
        commit = ops.commit_latent if entry is Latent else ops.commit
        of_kind, by_layer = jax.tree.flatten([kv[i] for i in own])
        moved = commit(tuple(of_kind), table, rows.seq_lens, node_path, num_accepted)
        for i, cache in zip(own, jax.tree.unflatten(by_layer, moved), strict=True):
            caches[i] = cache
    return tuple(caches)


def simulated_drafts(rows: StepBatch, *, mean_emitted: float) -> Int[Array, "B"]:
    """Return the number of drafts to accept per row, so that rows emit `mean_emitted` on average:
    the fraction is the probability of one more, by a hash of the row's seed and L."""
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
    """Cut or extend the real path to `forced` drafts; entries after them are 0.

    An extension follows each node's first child. After a node without children comes the next node
    by index; the last node repeats. The result depends on the real walk, so no compiler drops that.

    In:  parents [-1 0 0 1], node_path [0 2 0], num_accepted 1, forced 2   (b1 has no child)
    Out: [0 2 3]
    """
    last = tree.parents.shape[1] - 1
    current = node_path[:, 0]
    path = [current]
    for i in range(1, node_path.shape[1]):
        children = tree.parents == current[:, None]
        first = jnp.argmax(children, axis=1).astype(jnp.int32)
        following = jnp.minimum(current + 1, last)
        onward = jnp.where(jnp.any(children, axis=1), first, following)
        current = jnp.where(i <= num_accepted, node_path[:, i], onward)
        path.append(jnp.where(i <= forced, current, 0))
    return jnp.stack(path, axis=1)
