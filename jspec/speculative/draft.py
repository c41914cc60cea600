"""Drafting with a feature-level head (EAGLE-3): propose a tree, and extend over what was emitted.

Level 1 needs no forward: its candidates come from the last extend. Levels 2..S cost one draft
forward each, over the K beams of the level before. A beam attends to the committed rows and to its
true ancestors among the scratch rows, also after beams were re-ranked.

Candidates are ranked, and paths scored, by log_softmax(c * (draft logits + T * g(s, p, v))) with
the very noise that verification will use at that position (shared noise): what the draft thinks
the target will choose, given the same dice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.core import shapes
from jspec.core.batch import DraftTree
from jspec.core.config import Eagle3Config, SpeculativeConfig
from jspec.core.pytree import pytree
from jspec.core.state import SamplingRows
from jspec.layers.linear import Shard
from jspec.models.llama import Params
from jspec.models.paged import AttentionSettings, KVPool
from jspec.pallas_kernels.paged_attention import Backend
from jspec.pallas_kernels.rows import AttentionRows
from jspec.sampling.choose import perturb
from jspec.speculative.tree import Level, beam_scores, build_tree, pack_bits, root_only


@pytree
class RowsInStep:
    """The rows of a decode step, gathered from the state: everything propose may look at."""

    root_ids: jax.Array  # i32[B]
    seq_lens: jax.Array  # i32[B], L
    page_table: jax.Array  # i32[B, P]
    sampling: SamplingRows


@pytree
class EagleState:
    """What one extend leaves for the next propose; indexed by slot, or by row once gathered."""

    hidden: jax.Array  # [., E], the head's own output at the last row
    level1_ids: jax.Array  # i32[., K], target ids
    level1_scores: jax.Array  # f32[., K], path scores, <= 0


class FeatureHead(Protocol):
    """A draft model that reads (token, feature) pairs: `models.paged.PagedEagle3`, or a fake."""

    @property
    def config(self) -> Eagle3Config: ...

    @property
    def shard(self) -> Shard: ...

    def features(self, params: Params, aux_hidden: jax.Array) -> jax.Array: ...

    def forward(
        self,
        params: Params,
        token_ids: jax.Array,
        hidden: jax.Array,
        kv: KVPool,
        rows: AttentionRows,
        settings: AttentionSettings,
    ) -> tuple[jax.Array, KVPool]: ...

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array: ...


class Drafter(Protocol):
    """A way of drafting. All methods are pure and traced inside the step.

    lookahead: draft KV at position i depends on tokens up to i + lookahead (prefix-cache keys).
    """

    @property
    def lookahead(self) -> int: ...

    def init_state(self, num_slots: int, *, dtype: DTypeLike) -> Any: ...

    def propose(
        self, params: Params, kv: KVPool, draft: Any, rows: RowsInStep
    ) -> tuple[KVPool, DraftTree]: ...

    def extend(
        self,
        params: Params,
        kv: KVPool,
        *,
        token_ids: Int[Array, "T"],
        features: Float[Array, "T A"],
        rows: AttentionRows,
        queries_per_row: int | None,
        last: Int[Array, "B"],
        next_position: Int[Array, "B"],
        sampling: SamplingRows,
    ) -> tuple[KVPool, Any]: ...


@dataclass(frozen=True, slots=True)
class NoDrafter:
    """Plain decoding: a tree of one node."""

    lookahead: int = 0

    def init_state(self, num_slots: int, *, dtype: DTypeLike) -> tuple[()]:
        del num_slots, dtype
        return ()

    def propose(
        self, params: Params, kv: KVPool, draft: tuple[()], rows: RowsInStep
    ) -> tuple[KVPool, DraftTree]:
        del params, draft
        return kv, root_only(rows.root_ids)

    def extend(self, params: Params, kv: KVPool, **_: Any) -> tuple[KVPool, tuple[()]]:
        del params
        return kv, ()


@dataclass(frozen=True, slots=True)
class EagleDrafter:
    """EAGLE-3. `score_scale` is the c of the path score; `draft_noise` False drafts plain top-k.

    Plain top-k drafting exists to measure what shared noise gains; the emitted text is the same.
    """

    head: FeatureHead
    spec: SpeculativeConfig
    backend: Backend = "xla"
    score_scale: float = 1.0
    draft_noise: bool = True
    lookahead: int = 1

    def init_state(self, num_slots: int, *, dtype: DTypeLike) -> EagleState:
        size = self.head.config.layer.hidden_size
        return EagleState(
            hidden=jnp.zeros((num_slots, size), dtype),
            level1_ids=jnp.zeros((num_slots, self.spec.topk), jnp.int32),
            level1_scores=jnp.zeros((num_slots, self.spec.topk), jnp.float32),
        )

    def candidates(
        self,
        params: Params,
        hidden: Float[Array, "B R E"],
        *,
        positions: Int[Array, "B R"],
        sampling: SamplingRows,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
        """Best K target ids after each row and the log-probability of each, best first.

        positions: token position of the candidates (their noise).
        """
        logits = self.head.logits(params, hidden)
        ids = params["draft_ids"]
        if self.draft_noise:
            logits = perturb(logits, sampling, positions=positions, token_ids=ids)
        return top_candidates(
            self.score_scale * logits, ids, topk=self.spec.topk, shard=self.head.shard
        )

    def propose(
        self, params: Params, kv: KVPool, draft: EagleState, rows: RowsInStep
    ) -> tuple[KVPool, DraftTree]:
        """S - 1 draft forwards, then the tree. Returns the pool with the scratch rows written."""
        spec, batch = self.spec, rows.root_ids.shape[0]
        level = Level(
            ids=draft.level1_ids,
            scores=draft.level1_scores,
            parents=jnp.full_like(draft.level1_ids, -1),
        )
        levels, first_of_level = [level], 0
        beams = _Beams(
            ids=draft.level1_ids,
            scores=draft.level1_scores,
            hidden=jnp.broadcast_to(
                draft.hidden[:, None], (batch, spec.topk, draft.hidden.shape[1])
            ),
            ancestors=jnp.zeros((batch, spec.topk, 0), bool),
            pool_idx=jnp.broadcast_to(
                jnp.arange(spec.topk, dtype=jnp.int32), draft.level1_ids.shape
            ),
        )
        for depth in range(1, spec.num_steps):
            kv, hidden, beams = self._forward_beams(params, kv, beams, rows, depth=depth)
            position = shapes.chosen_position(rows.seq_lens, depth)[:, None]
            ids, terms = self.candidates(
                params,
                hidden,
                positions=jnp.broadcast_to(position, beams.ids.shape),
                sampling=rows.sampling,
            )
            first_of_level += levels[-1].ids.shape[1]
            level = Level(
                ids=ids.reshape(batch, -1),
                scores=beam_scores(beams.scores, terms).reshape(batch, -1),
                parents=jnp.repeat(beams.pool_idx, spec.topk, axis=1),
            )
            levels.append(level)
            if depth < spec.num_steps - 1:
                beams = _best_beams(beams, level, hidden, topk=spec.topk, first=first_of_level)
        tree = build_tree(rows.root_ids, tuple(levels), num_draft_tokens=spec.num_draft_tokens)
        return kv, tree

    def _forward_beams(
        self, params: Params, kv: KVPool, beams: _Beams, rows: RowsInStep, *, depth: int
    ) -> tuple[KVPool, jax.Array, _Beams]:
        """One draft forward over the K beams at `depth`: scratch rows (depth - 1) * K, ...

        Returns the pool, the rows' hidden [B, K, E], and the beams with their own row among
        their ancestors.
        """
        batch, topk = beams.ids.shape
        own = jnp.broadcast_to(jnp.eye(topk, dtype=bool), (batch, topk, topk))
        ancestors = jnp.concatenate((beams.ancestors, own), axis=2)  # [B, K, depth * K]
        position = shapes.draft_position(rows.seq_lens, depth)
        tail_depth = 1 + jnp.arange(depth * topk, dtype=jnp.int32) // topk
        is_chain = topk == 1
        attention_rows = AttentionRows(
            page_table=rows.page_table,
            prefix_lens=shapes.scratch_slot(rows.seq_lens, (depth - 1) * topk),
            cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32) * topk,
            q_positions=jnp.repeat(position, topk),
            tail_mask=None if is_chain else pack_bits(ancestors).reshape(batch * topk, -1),
            tail_positions=(
                None
                if is_chain
                else shapes.draft_position(rows.seq_lens[:, None], tail_depth[None])
            ),
        )
        hidden, kv = self.head.forward(
            params,
            beams.ids.reshape(-1),
            beams.hidden.reshape(batch * topk, -1),
            kv,
            attention_rows,
            AttentionSettings(self.backend, queries_per_row=topk),
        )
        grown = _Beams(
            ids=beams.ids,
            scores=beams.scores,
            hidden=beams.hidden,
            ancestors=ancestors,
            pool_idx=beams.pool_idx,
        )
        return kv, hidden.reshape(batch, topk, -1), grown

    def extend(
        self,
        params: Params,
        kv: KVPool,
        *,
        token_ids: Int[Array, "T"],
        features: Float[Array, "T A"],
        rows: AttentionRows,
        queries_per_row: int | None,
        last: Int[Array, "B"],
        next_position: Int[Array, "B"],
        sampling: SamplingRows,
    ) -> tuple[KVPool, EagleState]:
        """Runs the head over (token i + 1, target feature i) pairs, with the target's features.

        last: index in T of each row's last pair; next_position: token position of what it
        predicts, the level-1 candidates.
        """
        fused = self.head.features(params, features)
        settings = AttentionSettings(self.backend, queries_per_row=queries_per_row)
        hidden, kv = self.head.forward(params, token_ids, fused, kv, rows, settings)
        final = jnp.take(hidden, last, axis=0, mode="clip")
        ids, scores = self.candidates(
            params, final[:, None], positions=next_position[:, None], sampling=sampling
        )
        return kv, EagleState(hidden=final, level1_ids=ids[:, 0], level1_scores=scores[:, 0])


@pytree
class _Beams:
    """The K nodes that the next draft forward expands."""

    ids: jax.Array  # i32[B, K]
    scores: jax.Array  # f32[B, K]
    hidden: jax.Array  # [B, K, E], the parent's output
    ancestors: jax.Array  # bool[B, K, scratch rows so far]
    pool_idx: jax.Array  # i32[B, K], place in the candidate pool


def _best_beams(beams: _Beams, level: Level, hidden: jax.Array, *, topk: int, first: int) -> _Beams:
    """The K best candidates of `level`, each with its own parent's hidden and ancestors."""
    scores, idx = jax.lax.top_k(level.scores, topk)
    parent = idx // topk
    return _Beams(
        ids=jnp.take_along_axis(level.ids, idx, axis=1, mode="clip"),
        scores=scores,
        hidden=jnp.take_along_axis(hidden, parent[:, :, None], axis=1, mode="clip"),
        ancestors=jnp.take_along_axis(beams.ancestors, parent[:, :, None], axis=1, mode="clip"),
        pool_idx=first + idx,
    )


def top_candidates(
    scaled: Float[Array, "B R U"], ids: Int[Array, "U"], *, topk: int, shard: Shard
) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
    """(target ids, log_softmax) of the K largest; every device decides from the same pairs.

    Ties prefer the lower draft id: shards hold ascending ids and top_k is stable.
    """
    values, idx = _largest(scaled, min(topk, scaled.shape[-1]))  # a shard may hold fewer than K
    found = jnp.take(ids, idx, mode="clip")
    top = jnp.max(scaled, axis=-1)
    mass = jnp.sum(jnp.exp(scaled - top[..., None]), axis=-1)
    if shard.axis is not None:
        values, found = (
            jax.lax.all_gather(x, shard.axis, axis=2, tiled=True) for x in (values, found)
        )
        tops, masses = jax.lax.all_gather(top, shard.axis), jax.lax.all_gather(mass, shard.axis)
        top = jnp.max(tops, axis=0)
        mass = jnp.sum(masses * jnp.exp(tops - top), axis=0)
        values, best = _largest(values, topk)
        found = jnp.take_along_axis(found, best, axis=2, mode="clip")
    log_total = top + jnp.log(mass)
    return found, values - log_total[..., None]


def _largest(x: jax.Array, topk: int) -> tuple[jax.Array, jax.Array]:
    """lax.top_k over the last axis; neither a chain nor a TPU needs a sort."""
    if topk == 1:
        best = jnp.argmax(x, axis=-1, keepdims=True)
        return jnp.max(x, axis=-1, keepdims=True), best
    return jax.lax.platform_dependent(
        x, tpu=partial(largest_in_rounds, topk=topk), default=partial(_top_k, topk=topk)
    )


def _top_k(x: jax.Array, *, topk: int) -> tuple[jax.Array, jax.Array]:
    values, idx = jax.lax.top_k(x, topk)
    return values, idx


def largest_in_rounds(
    x: Float[Array, "*b U"], *, topk: int
) -> tuple[Float[Array, "*b K"], Int[Array, "*b K"]]:
    """lax.top_k of finite numbers, ties included: each round takes the first largest of the rest.

    For TPUs, whose compiler makes a sort of all columns of lax.top_k: for 4 of [64, 4, 8000] on v5e
    12 times the steps in its schedule, and more time to compile. Neither was run on a chip.

    In:  x = [3 5 5 1], topk 2   Out: [5 5], [1 2]: round 2 leaves what is less than 5, or equal
         and behind column 1
    """
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)

    def take(last: tuple[jax.Array, jax.Array], _: None) -> Any:
        value, idx = last
        left = (x < value) | ((x == value) & (column > idx))
        rest = jnp.where(left, x, -jnp.inf)
        first = jnp.argmax(rest, axis=-1, keepdims=True).astype(jnp.int32)
        taken = jnp.max(rest, axis=-1, keepdims=True), first
        return taken, taken

    one = (*x.shape[:-1], 1)
    above_all = jnp.full(one, jnp.inf, x.dtype), jnp.full(one, -1, jnp.int32)
    _, (values, idx) = jax.lax.scan(take, above_all, length=topk)
    return jnp.moveaxis(values[..., 0], 0, -1), jnp.moveaxis(idx[..., 0], 0, -1)
