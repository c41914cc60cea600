"""Multi-layer EAGLE (multi-token prediction): S draft layers, one per level.

Layer s predicts the token s + 2 after its feature's: its slot i holds the pair (feature i, token
i + s + 1). So it lags by s: with L committed tokens its slots below L - s are committed. Slots
L - s .. L - 1 hold drafts, which every propose rewrites and the next advance replaces by the
accepted tokens. Each layer has its own pool.

    worked example, L = 7, root t7, S = 3, K = 1; a verification accepts a b with bonus y
    before    layer 0: slots 0..6, (h6, t7) last; layer 1: 0..5, (h5, t7); layer 2: 0..4, (h4, t7)
    level 1   a, from layer 0's slot 6, which the last advance ran; no forward
    level 2   b, from layer 1's slot 6 (h6, a); it sees slots 0..5 and itself
    level 3   c, from layer 2's slot 6 (h6, b), after slot 5 (h5, a); both see 0..4
    advance   t7 a b at 7 8 9, before y. Every layer receives a b y:
              layer 0  slots 7 8 9  (h7, a) (h8, b) (h9, y)
              layer 1  slots 6 7 8  (h6, a) (h7, b) (h8, y)
              layer 2  slots 5 6 7  (h5, a) (h6, b) (h7, y)

So the state carries the features of the last S - 1 positions: h6 and h5, then h9 and h8. In a
chained head, layer s instead reads layer s - 1's output at the same slot, and the state carries one
output of each layer.

With K > 1 every beam has its own slots for its whole path: s * K in layer s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree, Features
from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch
from jspec.errors import ConfigError
from jspec.models.heads.mtp import MtpHead
from jspec.models.params import ParamTable
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.beams import BeamLayout, BeamRows, LevelOne, first_level, grow_tree
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import Emitted, Needs, StepBatch, following_ids, next_positions
from jspec.speculative.drafters.lag import delayed, lag_behind, path_rows
from jspec.speculative.target import KVPool, Params


@pytree
class MultiLayerState:
    """State from an advance to the next propose, by slot, or by row once gathered."""

    # hidden[., s - 1] is layer s's input at slot L - s: the target's feature, or if chained layer
    # s - 1's output. The first num_rows are valid.
    hidden: jax.Array  # [., S - 1, E]
    num_rows: jax.Array  # i32[.], tokens since the row's start, at most S - 1
    level1_ids: jax.Array  # i32[., K], target ids
    level1_scores: jax.Array  # f32[., K], path scores, <= 0


@pytree
class Path:
    """The arrays that beams carry."""

    tokens: jax.Array  # i32[B, K, n], on the beam's path
    outputs: jax.Array  # [B, K, n * E], the last layer's at each token; width 0 if not chained


@dataclass(frozen=True, slots=True)
class MultiLayerDrafter:
    """Drafting with the first S layers of `head`. draft_noise: as in `candidates.Ranking`."""

    head: MtpHead
    spec: SpeculativeConfig
    draft_noise: bool = True

    def __post_init__(self) -> None:
        if self.spec.num_steps > self.head.config.num_layers:
            raise ConfigError(
                f"speculative_num_steps is {self.spec.num_steps}; expected at most "
                f"{self.head.config.num_layers}, the layers that the draft has: one a step"
            )

    @property
    def algorithm(self) -> Algorithm:
        return self.spec.algorithm

    @property
    def table(self) -> ParamTable:
        return self.head.table

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        layers = self.head.config.model.layers[: self.spec.num_steps]
        return tuple(
            CacheGroup(f"draft {s}", 1, a.cache_entry, a.window)
            for s, a in enumerate(layer.attention for layer in layers)
        )

    @property
    def needs(self) -> Needs:
        ids = self.head.config.aux_layer_ids
        return Needs(hidden=not ids, aux_layer_ids=ids)

    def init_state(
        self, num_slots: int, *, context_length: int, dtype: DTypeLike
    ) -> MultiLayerState:
        del context_length
        size, topk = self.head.config.model.hidden_size, self.spec.topk
        return MultiLayerState(
            hidden=jnp.zeros((num_slots, self.spec.num_steps - 1, size), dtype),
            num_rows=jnp.zeros((num_slots,), jnp.int32),
            level1_ids=jnp.zeros((num_slots, topk), jnp.int32),
            level1_scores=jnp.zeros((num_slots, topk), jnp.float32),
        )

    def candidates(
        self,
        params: Params,
        layer: int,
        out: Float[Array, "B R E"],
        *,
        positions: Int[Array, "B R"],
        sampling: SamplingBatch,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
        return rank_candidates(
            self.head.logits(params, layer, out),
            self.head.token_ids(),
            sampling,
            positions=positions,
            ranking=Ranking(self.spec.topk, self.draft_noise),
            shard=self.head.shard,
            ops=self.head.ops,
        )

    def of_shape(self, spec: SpeculativeConfig) -> MultiLayerDrafter:
        return replace(self, spec=spec)

    def propose(
        self, params: Params, caches: KVPool, state: MultiLayerState, rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        """Run layer s over the paths of length s to get level s + 1, then build the tree."""
        batch, topk = state.level1_ids.shape
        nothing = jnp.zeros((batch, topk, 0), jnp.int32)
        return grow_tree(
            LevelOne(
                ids=state.level1_ids,
                scores=state.level1_scores,
                carried=Path(tokens=nothing, outputs=nothing.astype(state.hidden.dtype)),
            ),
            caches,
            rows,
            partial(self.expand, params=params, state=state, rows=rows),
            spec=self.spec,
            layout=BeamLayout.PAIRS,
        )

    def expand(
        self,
        caches: KVPool,
        ids: Int[Array, "B K"],
        carried: Path,
        beams: BeamRows,
        *,
        params: Params,
        state: MultiLayerState,
        rows: StepBatch,
    ) -> tuple[KVPool, Path, Int[Array, "B K K"], Float[Array, "B K K"]]:
        """Run layer s over every beam's path of s tokens, at the layer's own slots."""
        batch, topk = ids.shape
        tokens = jnp.concatenate((carried.tokens, ids[:, :, None]), axis=2)
        layer = tokens.shape[2]
        places = path_rows(rows, state.num_rows, layer=layer, topk=topk)
        hidden = self._hidden_of_path(state, carried, layer=layer, topk=topk)
        out, pages = self.head.forward(
            params,
            layer,
            places.laid_out(tokens[..., None]).reshape(-1),
            places.laid_out(hidden).reshape(batch * layer * topk, -1),
            caches[layer],
            places.rows,
            queries_per_row=layer * topk,
        )
        by_path = places.by_path(out.reshape(batch, layer * topk, -1))
        final = by_path[:, :, -1]
        found, terms = self.candidates(
            params, layer, final, positions=beams.positions, sampling=rows.sampling
        )
        outputs = carried.outputs
        if self.head.config.chained:
            outputs = self.head.handed_on(params, layer, by_path).reshape(batch, topk, -1)
            outputs = outputs.astype(state.hidden.dtype)
        caches = (*caches[:layer], pages, *caches[layer + 1 :])
        return caches, Path(tokens=tokens, outputs=outputs), found, terms

    def _hidden_of_path(
        self, state: MultiLayerState, carried: Path, *, layer: int, topk: int
    ) -> Float[Array, "B K n E"]:
        """Return layer s's inputs at slots L - s .. L - 1 of every beam."""
        batch, _, size = state.hidden.shape
        if not self.head.config.chained:
            features = state.hidden[:, :layer][:, ::-1]
            return jnp.broadcast_to(features[:, None], (batch, topk, layer, size))
        first = jnp.broadcast_to(state.hidden[:, None, layer - 1, None], (batch, topk, 1, size))
        return jnp.concatenate((first, carried.outputs.reshape(batch, topk, -1, size)), axis=2)

    def advance(
        self, params: Params, caches: KVPool, state: MultiLayerState, emitted: Emitted
    ) -> tuple[KVPool, MultiLayerState]:
        """Run every layer over the ids after the emitted tokens, each at its lag."""
        start = emitted.rows.prefix_lens
        known = jnp.minimum(state.num_rows, start)  # 0 for padding
        known = jnp.where(emitted.is_first, 0, known)
        ids, hidden = following_ids(emitted), self._features(emitted.features)
        own = lag_behind(emitted, lag=0, num_known=known)
        pools, outs, kept = list(caches), [], []
        for layer in range(self.spec.num_steps):
            if layer:
                before, own = own, lag_behind(emitted, lag=layer, num_known=known)
                hidden = delayed(hidden, state.hidden[:, layer - 1], before=before, own=own)
            out, pools[layer] = self.head.forward(
                params,
                layer,
                jnp.take(ids, own.source, mode="clip"),
                hidden,
                pools[layer],
                own.rows,
                queries_per_row=emitted.queries_per_row,
                kept=None if self.head.config.chained else emitted.last,
            )
            outs.append(out)
            if self.head.config.chained:
                hidden = self.head.handed_on(params, layer, out)
            kept.append(jnp.take(hidden, own.last, axis=0, mode="clip"))
        most = self.spec.num_steps - 1
        final = outs[0]
        if self.head.config.chained:
            final = jnp.take(final, emitted.last, axis=0, mode="clip")
        first = self._level1(params, final, emitted)
        return tuple(pools), MultiLayerState(
            hidden=jnp.stack(kept, axis=1)[:, :most],
            num_rows=jnp.minimum(known + next_positions(emitted) - start, most),
            level1_ids=first.ids,
            level1_scores=first.scores,
        )

    def _features(self, features: Features) -> jax.Array:
        return features.hidden if self.head.config.reads_normed else features.aux_hidden

    def _level1(self, params: Params, final: Float[Array, "R E"], emitted: Emitted) -> LevelOne:
        position = indexing.chosen_position(next_positions(emitted), 0)
        ids, terms = self.candidates(
            params, 0, final[:, None], positions=position[:, None], sampling=emitted.sampling
        )
        return first_level(ids, terms, carried=())
