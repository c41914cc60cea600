"""Drafting with S layers of their own, one a level: multi-layer EAGLE, multi-token prediction.

Layer s guesses the token s + 2 after its feature's: its row i holds the pair (feature i, token
i + s + 1). So it lags by s: of a row with L committed tokens it knows the rows below L - s. Its
rows L - s .. L - 1 hold drafts; propose writes them anew each time, and the next advance writes
over them what came true. Each layer is given its own pool and no other.

    worked example, L = 7, root t7, S = 3, K = 1; a verification accepts a b with bonus y
    kept      layer 0: rows 0..6, (h6, t7) last; layer 1: 0..5, (h5, t7); layer 2: 0..4, (h4, t7)
    level 1   a, from layer 0's row 6, which the last advance ran; no forward
    level 2   b, from layer 1's row 6 (h6, a); it sees its rows 0..5 and itself
    level 3   c, from layer 2's row 6 (h6, b), after row 5 (h5, a); both see 0..4
    advance   t7 a b at 7 8 9 with y after them. Every layer is given a b y:
              layer 0  rows 7 8 9  (h7, a) (h8, b) (h9, y)
              layer 1  rows 6 7 8  (h6, a) (h7, b) (h8, y)
              layer 2  rows 5 6 7  (h5, a) (h6, b) (h7, y)

So the features of the last S - 1 rows travel by slot: h6 and h5, then h9 and h8. In a chain layer s
reads what layer s - 1 made of the same row instead, and one output of each layer travels.

With K > 1 every beam has rows of its own for its whole path: s * K rows in layer s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.config import drafting
from jspec.config.drafting import Drafting
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree, Features
from jspec.device.pytree import pytree
from jspec.device.state import SamplingRows
from jspec.errors import ConfigError
from jspec.models.heads.mtp import MtpHead
from jspec.models.params import ParamTable
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup, KVEntry
from jspec.speculative.beams import BeamLayout, BeamRows, LevelOne, first_level, grow_tree
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import Emitted, Needs, RowsInStep, following_ids, next_positions
from jspec.speculative.drafters.lag import delayed, lag_behind, path_rows
from jspec.speculative.target import KVPool, Params


@pytree
class MultiLayerState:
    """What one advance leaves for the next propose; indexed by slot, or by row once gathered.

    hidden[., s - 1] is what layer s reads at row L - s: the target's feature, or in a chain what
    layer s - 1 handed on. num_rows: how many of them there are, fewer where a row has just begun.
    """

    hidden: jax.Array  # [., S - 1, E]
    num_rows: jax.Array  # i32[.], tokens since the row's start, at most S - 1
    level1_ids: jax.Array  # i32[., K], target ids
    level1_scores: jax.Array  # f32[., K], path scores, <= 0


@pytree
class Path:
    """What a beam carries: the tokens on its path, and in a chain what the last layer made of each.

    tokens: i32[B, K, n]. outputs: [B, K, n * E]; of width 0 where nothing is handed on.
    """

    tokens: jax.Array
    outputs: jax.Array


@dataclass(frozen=True, slots=True)
class MultiLayerDrafter:
    """The first S layers of `head`. draft_noise: as in EagleDrafter."""

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
    def drafting(self) -> Drafting:
        return drafting.MULTI_LAYER

    @property
    def table(self) -> ParamTable:
        return self.head.table

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """One a layer."""
        layers = self.head.config.model.layers[: self.spec.num_steps]
        return tuple(
            CacheGroup(f"draft {s}", 1, KVEntry(a.num_kv_heads, a.head_dim, a.value_dim), a.window)
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
        sampling: SamplingRows,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
        """Best K ids after each row of a layer and the log-probability of each, best first.

        positions: token position of the candidates (their noise).
        """
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
        self, params: Params, caches: KVPool, state: MultiLayerState, rows: RowsInStep
    ) -> tuple[KVPool, DraftTree]:
        """Layer s over the paths of length s, for level s + 1; then the tree."""
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
        rows: RowsInStep,
    ) -> tuple[KVPool, Path, Int[Array, "B K K"], Float[Array, "B K K"]]:
        """One forward of layer s over every beam's path of s tokens, at the layer's own rows."""
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
        """What layer s reads at rows L - s .. L - 1 of every beam."""
        batch, _, size = state.hidden.shape
        if not self.head.config.chained:
            features = state.hidden[:, :layer][:, ::-1]
            return jnp.broadcast_to(features[:, None], (batch, topk, layer, size))
        first = jnp.broadcast_to(state.hidden[:, None, layer - 1, None], (batch, topk, 1, size))
        return jnp.concatenate((first, carried.outputs.reshape(batch, topk, -1, size)), axis=2)

    def advance(
        self, params: Params, caches: KVPool, state: MultiLayerState, emitted: Emitted
    ) -> tuple[KVPool, MultiLayerState]:
        """Runs every layer over the ids after the emitted tokens, each at the rows it lags at.

        A row's first rows in layer s would stand before its start: they are left out.
        """
        start = emitted.rows.prefix_lens
        known = jnp.minimum(state.num_rows, start)  # a row of padding has none
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
        """What layer 0's last row of each row guesses after `next_ids`."""
        position = indexing.chosen_position(next_positions(emitted), 0)
        ids, terms = self.candidates(
            params, 0, final[:, None], positions=position[:, None], sampling=emitted.sampling
        )
        return first_level(ids, terms, carried=())
