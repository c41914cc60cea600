"""The parts of one decode step as separate loops, each with its least time.

A part runs with the step's own functions, shapes and weights inside one compiled loop; its carry
depends on the part's output, so that the compiler can hoist or skip nothing. The floors count bytes
and operations, independent of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import COPY_BYTES_PER_SECOND, FLOPS_PER_SECOND, READ_BYTES_PER_SECOND
from jspec.device.batch import DraftTree, Features, Verified
from jspec.device.state import EngineState, take_rows
from jspec.layers.embedding import embed
from jspec.layers.norm import Residual, norm_of_sum
from jspec.layers.rope import angles_of
from jspec.models.decoder import trunk
from jspec.models.layer import LayerSettings, run_layer
from jspec.pallas_kernels.attention.api import AttentionCall, AttentionMetadata
from jspec.pallas_kernels.attention.reference import new_slots
from jspec.pallas_kernels.kv_write.api import Rotation
from jspec.pallas_kernels.kv_write.gpu import rotate_and_write
from jspec.pallas_kernels.kv_write.reference import rotate_and_split
from jspec.pallas_kernels.ops_gpu import GpuOps
from jspec.spec import indexing
from jspec.spec.layers.attention import AttentionSpec
from jspec.speculative.drafter import StepBatch, emitted_by
from jspec.speculative.step import StepProgram
from jspec.speculative.tree import ancestors, pack_bits
from jspec.speculative.verify import choose_at_nodes, settle

PRODUCTS, ATTENTION, KV_WRITES = "target products", "target attention", "KV writes"
PROPOSE, ADVANCE = "draft propose", "draft extend"  # the names that recorded tables have
ACCEPT, SAMPLING = "accept and compaction", "sampling"
ATTENTION_AND_WRITES = "target attention with KV writes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One decode step at rest: B rows of L committed tokens, a tree of N nodes each."""

    program: StepProgram
    params: dict[str, Any]
    rows: StepBatch
    tree: DraftTree

    @property
    def batch(self) -> int:
        return self.tree.tokens.shape[0]

    @property
    def num_queries(self) -> int:
        """T = B * N."""
        return self.tree.tokens.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """body(carry, rows, tree, arrays) -> carry: one run of the part.

    The loop only reads rows, tree and `arrays`. All of them are arguments: a closure's arrays would
    be constants of the program, which the compiler could fold.
    """

    name: str
    body: Callable[[Any, StepBatch, DraftTree, Any], Any]
    carry: Any
    arrays: Any


def rows_of(state: EngineState, slots: jax.Array) -> StepBatch:
    """Return propose's view of the rows in `slots`."""
    rows = state.rows
    return StepBatch(
        root_ids=take_rows(rows.root_ids, slots),
        seq_lens=take_rows(rows.seq_lens, slots),
        page_table=take_rows(rows.page_table, slots),
        window_tables=take_rows(rows.window_tables, slots),
        sampling=take_rows(rows.sampling, slots),
    )


def nudge(x: jax.Array, by: jax.Array) -> jax.Array:
    """Return x, but dependent on `by` in a way that no compiler can fold."""
    return x + (by.reshape(-1)[0].astype(jnp.float32) * 1e-30).astype(x.dtype)


def parts(step: Step, state: EngineState) -> Iterator[Part]:
    """Yield every part of the step, in order; each makes its arrays only when it is used."""
    yield products_part(step)
    yield attention_part(step, state, writes=False)
    if has_one_kernel_for_writes(step):
        yield writes_part(step, state)
    else:
        yield attention_part(step, state, writes=True)
    if step.program.draft_shape.num_steps:
        yield propose_part(step, state)
        yield advance_part(step, state)
        yield accept_part(step, state)
    yield sampling_part(step)


def has_one_kernel_for_writes(step: Step) -> bool:
    """Return True if RoPE and KV writes are one kernel, which is then the part KV_WRITES."""
    return isinstance(step.program.ops, GpuOps)


def products_part(step: Step) -> Part:
    """The target without attention: products, norms, activations, lm_head.

    It has RoPE unless that is one kernel with the KV writes.
    """
    target, ops = step.program.target, step.program.ops
    spec = target.spec
    is_rotated_elsewhere = has_one_kernel_for_writes(step)
    settings = LayerSettings(ops, target.shard, step.program.draft_shape.num_draft_tokens)

    def attend(heads: jax.Array, turn: Rotation, _: jax.Array | None) -> jax.Array:
        if is_rotated_elsewhere:
            first_v = (heads.shape[1] + turn.num_heads) // 2
            q, k, v = jnp.split(heads, (turn.num_heads, first_v), 1)
        else:
            q, k, v = rotate_and_split(heads, turn)
        return q + jnp.repeat(k + v, q.shape[-2] // k.shape[-2], axis=-2)

    def body(carry: Any, rows: StepBatch, tree: DraftTree, params: Any) -> Any:
        logits, _ = carry
        positions = indexing.target_position(rows.seq_lens[:, None], tree.depths).reshape(-1)

        def layer(i: int, stream: Residual) -> Residual:
            return run_layer(
                params["layers"][i],
                stream,
                positions,
                attend,
                spec=spec.layers[i],
                settings=settings,
            )

        x = nudge(embed(params["embed"], tree.tokens.reshape(-1)), logits)
        stack = [partial(layer, i) for i in range(spec.num_layers)]
        stream, aux = trunk(stack, x, aux_layer_ids=target.aux_layer_ids)
        _, hidden = norm_of_sum(params["norm"], stream, eps=spec.rms_norm_eps, ops=ops)
        return target.logits(params, hidden), aux

    params = step.params["target"]
    width = len(target.aux_layer_ids) * spec.hidden_size
    carry = (
        jnp.zeros((step.num_queries, params["lm_head"]["kernel"].shape[1]), jnp.float32),
        jnp.zeros((step.num_queries, width), params["embed"]["table"].dtype),
    )
    return Part(name=PRODUCTS, body=body, carry=carry, arrays=params)


def attention_part(step: Step, state: EngineState, *, writes: bool) -> Part:
    """Attention of all layers over their own pools, with or without writing the N new tokens."""
    program, spec = step.program, step.program.target.spec
    heads = spec.one_layer.attention
    settings = AttentionCall(queries_per_row=step.tree.tokens.shape[1], scale=heads.softmax_scale)

    def call(
        q: jax.Array, pages: jax.Array, where: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        new = q[:, : heads.num_kv_heads] if writes else None
        return program.ops.attend(q, new, new, pages, where, settings)

    def body(carry: Any, rows: StepBatch, tree: DraftTree, read: Any) -> Any:
        q, kv = carry
        pools, where = list(kv or read), verified_rows(program, rows, tree)
        for i in range(spec.num_layers):
            q, pools[i] = call(q, pools[i], where)
        return q, tuple(pools) if writes else ()

    dtype = state.kv[0].dtype
    q = jnp.ones((step.num_queries, heads.num_heads, heads.head_dim), dtype)
    name = ATTENTION_AND_WRITES if writes else ATTENTION
    carry = (q, fresh(state.kv) if writes else ())
    return Part(name=name, body=body, carry=carry, arrays=() if writes else state.kv)


def writes_part(step: Step, state: EngineState) -> Part:
    """RoPE and the write of the N new tokens' K and V in all layers, one kernel each."""
    spec, ops = step.program.target.spec.one_layer.attention, step.program.ops
    nodes = step.tree.tokens.shape[1]
    shape = (step.num_queries, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    heads = jnp.ones(shape, state.kv[0].dtype)

    def body(kv: Any, rows: StepBatch, tree: DraftTree, heads: Any) -> Any:
        where = verified_rows(step.program, rows, tree)
        cos, sin = angles_of(where.q_positions, head_dim=spec.head_dim, rope=spec.rope)
        page, offset = new_slots(
            where, heads.shape[0], page_size=kv[0].shape[1], queries_per_row=nodes
        )
        return tuple(
            rotate_and_write(
                heads,
                cos,
                sin,
                pages,
                page,
                offset,
                num_heads=spec.num_heads,
                queries_per_row=nodes,
                interpret=isinstance(ops, GpuOps) and ops.interpret,
            )[1]
            for pages in kv
        )

    return Part(name=KV_WRITES, body=body, carry=fresh(state.kv), arrays=heads)


def verified_rows(program: StepProgram, rows: StepBatch, tree: DraftTree) -> AttentionMetadata:
    """Return the metadata that verify.score passes to every layer."""
    batch, nodes = tree.tokens.shape
    positions = indexing.target_position(rows.seq_lens[:, None], tree.depths)
    is_chain = program.draft_shape.topk == 1
    mask = (
        None if is_chain else pack_bits(ancestors(tree, num_levels=program.draft_shape.num_steps))
    )
    return AttentionMetadata(
        page_table=rows.page_table,
        prefix_lens=rows.seq_lens,
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * nodes,
        q_positions=positions.reshape(-1),
        tail_mask=None if mask is None else mask.reshape(batch * nodes, -1),
        tail_positions=None if is_chain else positions,
    )


def propose_part(step: Step, state: EngineState) -> Part:
    """S - 1 draft forwards and the growth of the tree."""
    topk = step.program.draft_shape.topk
    draft = take_rows(state.draft, jnp.arange(1, step.batch + 1))

    def body(carry: Any, rows: StepBatch, _: DraftTree, arrays: Any) -> Any:
        (kv, tree), (params, draft) = carry, arrays
        # The last tree's first candidates: other ids each time, as good as any.
        first = tree.tokens[:, 1 : 1 + topk]
        if hasattr(draft, "level1_ids"):
            draft = replace(draft, level1_ids=first)
        else:  # a lookup's: the row's length, for which no id of a tree is small enough to matter
            rows = replace(rows, seq_lens=rows.seq_lens + jnp.minimum(first[:, 0], 0))
        return step.program.drafter.propose(params, kv, draft, rows)

    carry = (fresh(state.draft_kv), fresh(step.tree))
    return Part(name=PROPOSE, body=body, carry=carry, arrays=(step.params["draft"], draft))


def advance_part(step: Step, state: EngineState) -> Part:
    """The drafter over the emitted tokens, always M per row, with the target's features."""
    draft_shape, batch = step.program.draft_shape, step.batch
    most = draft_shape.max_emitted
    emitted = min(most, round(draft_shape.simulate_acceptance or most))
    target: Any = step.program.target
    width = len(target.aux_layer_ids) * target.spec.hidden_size
    draft = take_rows(state.draft, jnp.arange(1, batch + 1))
    hidden_width = target.spec.hidden_size if step.program.drafter.needs.hidden else 0
    dtype = state.kv[0].dtype
    given = Features(
        hidden=jnp.ones((batch, most, hidden_width), dtype),
        aux_hidden=jnp.ones((batch, most, width), dtype),
    )

    def body(carry: Any, rows: StepBatch, _: DraftTree, arrays: Any) -> Any:
        (kv, before), (params, given) = carry, arrays
        ids = before.history if hasattr(before, "history") else before.level1_ids
        verified = Verified(
            emitted_ids=jnp.broadcast_to(ids[:, :1], (batch, most)),
            bonus_ids=ids[:, 0],
            num_accepted=jnp.full((batch,), emitted - 1, jnp.int32),
            node_path=jnp.zeros((batch, most), jnp.int32),
            features=jax.tree.map(lambda x: nudge(x, ids) if x.size else x, given),
        )
        tokens = emitted_by(verified, rows, is_chain=draft_shape.topk == 1)
        return step.program.drafter.advance(params, kv, before, tokens)

    carry = (fresh(state.draft_kv), draft)
    return Part(name=ADVANCE, body=body, carry=carry, arrays=(step.params["draft"], given))


def accept_part(step: Step, state: EngineState) -> Part:
    """The walk down the tree, compaction of all pools, the gather of ids and features."""
    draft_shape, nodes = step.program.draft_shape, step.tree.tokens.shape[1]
    target: Any = step.program.target
    width = len(target.aux_layer_ids) * target.spec.hidden_size
    aux_hidden = jnp.ones((step.batch, nodes, width), state.kv[0].dtype)

    def body(carry: Any, rows: StepBatch, tree: DraftTree, features: Any) -> Any:
        kv, before = carry
        target_ids = jnp.where(before.emitted_ids[:, :1] < -1, 0, tree.tokens)
        ops = step.program.ops
        return settle(tree, target_ids, features, kv, rows, draft_shape=draft_shape, ops=ops)

    most = draft_shape.max_emitted
    verified = Verified(
        emitted_ids=jnp.zeros((step.batch, most), jnp.int32),
        bonus_ids=jnp.zeros((step.batch,), jnp.int32),
        num_accepted=jnp.zeros((step.batch,), jnp.int32),
        node_path=jnp.zeros((step.batch, most), jnp.int32),
        features=Features(
            hidden=jnp.zeros((step.batch, most, 0), aux_hidden.dtype),
            aux_hidden=jnp.zeros((step.batch, most, width), aux_hidden.dtype),
        ),
    )
    features = Features(hidden=aux_hidden[:, :, :0], aux_hidden=aux_hidden)
    return Part(name=ACCEPT, body=body, carry=(fresh(state.kv), verified), arrays=features)


def sampling_part(step: Step) -> Part:
    """The target's token at every node, from float32 logits in memory."""
    vocab = step.params["target"]["lm_head"]["kernel"].shape[1]
    logits = jax.random.normal(jax.random.key(0), (*step.tree.tokens.shape, vocab), jnp.float32)

    def body(ids: jax.Array, rows: StepBatch, tree: DraftTree, logits: jax.Array) -> jax.Array:
        # Not the logits: before a kernel, XLA would write them once more.
        rows = replace(rows, seq_lens=rows.seq_lens + jnp.minimum(ids[0, 0], 0))
        return choose_at_nodes(
            step.program.target,
            logits,
            tree,
            rows,
            draft_shape=step.program.draft_shape,
            prompt_lens=rows.seq_lens,
            filtered=False,
            seen=None,
        )

    return Part(name=SAMPLING, body=body, carry=fresh(step.tree.tokens), arrays=logits)


def fresh(tree: Any) -> Any:
    """Return copies, to be donated as a loop's carry."""
    return jax.tree.map(jnp.copy, tree)


# Floors.


def floors_ms(step: Step, *, committed: int) -> dict[str, float]:
    """Return the least milliseconds of each part on one H200, for rows of `committed` tokens."""
    draft_shape, heads = step.program.draft_shape, step.program.target.spec.one_layer.attention
    target = step.params["target"]
    kv_row = _row_bytes(heads, target)
    layers, rows = step.program.target.spec.num_layers, step.num_queries
    seen = committed + step.tree.tokens.shape[1]
    attention_flops = 4 * rows * seen * heads.num_heads * heads.head_dim * layers
    found = {
        PRODUCTS: _products_ms(target, rows),
        ATTENTION: 1e3
        * max(
            step.batch * seen * kv_row * layers / READ_BYTES_PER_SECOND,
            attention_flops / FLOPS_PER_SECOND,
        ),
        KV_WRITES: 1e3 * rows * kv_row * layers / READ_BYTES_PER_SECOND,
        SAMPLING: 1e3 * rows * target["lm_head"]["kernel"].shape[1] * 4 / READ_BYTES_PER_SECOND,
    }
    if draft_shape.num_steps:
        draft = step.params["draft"]
        inner = {name: draft[name] for name in ("layers", "lm_head")}
        read = step.batch * committed * kv_row / READ_BYTES_PER_SECOND
        forward = _products_ms(inner, step.batch * draft_shape.topk) + 1e3 * read
        most = step.batch * draft_shape.max_emitted
        body = {name: draft[name] for name in ("fc", "layers")}
        found[PROPOSE] = (draft_shape.num_steps - 1) * forward
        found[ADVANCE] = (
            _products_ms(body, most)
            + _products_ms({"lm_head": draft["lm_head"]}, step.batch)
            + 1e3 * read
        )
        moved = (
            step.batch * draft_shape.num_steps * kv_row * layers * 2 if draft_shape.topk > 1 else 0
        )
        found[ACCEPT] = 1e3 * moved / COPY_BYTES_PER_SECOND
    return found


def _row_bytes(heads: AttentionSpec, target: Any) -> int:
    """Return the bytes of one token's K and V in one layer."""
    itemsize = target["embed"]["table"].dtype.itemsize
    return 2 * heads.num_kv_heads * heads.head_dim * itemsize


def _products_ms(params: Any, rows: int) -> float:
    """Return the milliseconds of reading or multiplying every matrix, whichever takes longer."""
    matrices = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if jax.tree_util.keystr(path).endswith("['kernel']")
    ]
    return 1e3 * sum(
        max(m.nbytes / READ_BYTES_PER_SECOND, 2 * rows * m.size / FLOPS_PER_SECOND)
        for m in matrices
    )
