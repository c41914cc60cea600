"""Multi-layer EAGLE (multi-token prediction): S draft layers, one per level, each with its pool.

Layer s predicts the token s + 2 positions after its feature: its slot i holds the pair (feature i,
token i + s + 1). So it lags by s: of L committed tokens, its slots below L - s are committed. Slots
L - s .. L - 1 hold drafts, which every propose rewrites and the next advance replaces.

    worked example, L = 7, root t7, S = 3, K = 1; a verification accepts a b with bonus y
    before    layer 0: slots 0..6, (h6, t7) last; layer 1: 0..5, (h5, t7); layer 2: 0..4, (h4, t7)
    level 1   a, from layer 0's slot 6, which the last advance ran; no forward
    level 2   b, from layer 1's slot 6 (h6, a); it sees slots 0..5 and itself
    level 3   c, from layer 2's slot 6 (h6, b), after slot 5 (h5, a); both see 0..4
    advance   t7 a b at 7 8 9, before y. Every layer receives a b y:
              layer 0  slots 7 8 9  (h7, a) (h8, b) (h9, y)
              layer 1  slots 6 7 8  (h6, a) (h7, b) (h8, y)
              layer 2  slots 5 6 7  (h5, a) (h6, b) (h7, y)

So the state has the features of the last S - 1 positions: h6 and h5, then h9 and h8. In a chained
head, layer s reads layer s - 1's output at the same slot, and the state has one output of each
layer. With K > 1 every beam has its own slots for its whole path: s * K in layer s.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.device.pytree import pytree
from jspec.errors import ConfigError
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.beams import BeamRows
from jspec.speculative.drafter import Emitted, StepBatch, next_positions
from jspec.speculative.drafters.lag import delayed, lag_behind, path_rows
from jspec.speculative.drafters.ranked import EagleDrafter
from jspec.speculative.target import KVPool, Params


@pytree
class Lagging:
    """The inputs of the lagging layers, by slot, or by row once gathered."""

    # hidden[., s - 1] is layer s's input at slot L - s: the target's feature, or if chained layer
    # s - 1's output. The first num_rows are valid.
    hidden: jax.Array  # [., S - 1, E]
    num_rows: jax.Array  # i32[.], tokens since the row's start, at most S - 1


@pytree
class Path:
    tokens: jax.Array  # i32[B, K, n], on the beam's path
    outputs: jax.Array  # [B, K, n * E], the last layer's at each token; width 0 if not chained


@dataclass(frozen=True, slots=True)
class MultiLayerDrafter(EagleDrafter):
    """Drafting with the first S layers of `model`, whose spec is `per_level`."""

    def __post_init__(self) -> None:
        if self.draft_shape.num_steps > self.model.spec.num_layers:
            raise ConfigError(
                f"speculative_num_steps is {self.draft_shape.num_steps}; expected at most "
                f"{self.model.spec.num_layers}, the layers that the draft has: one a step"
            )

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        layers = self.model.spec.layer.layers[: self.draft_shape.num_steps]
        return tuple(
            CacheGroup(f"draft {s}", 1, a.cache_entry, a.window)
            for s, a in enumerate(layer.attention for layer in layers)
        )

    def init_own(self, num_slots: int, *, dtype: DTypeLike) -> Lagging:
        size = self.model.spec.layer.hidden_size
        return Lagging(
            hidden=jnp.zeros((num_slots, self.draft_shape.num_steps - 1, size), dtype),
            num_rows=jnp.zeros((num_slots,), jnp.int32),
        )

    def carried_by_root(self, own: Lagging, *, topk: int) -> Path:
        nothing = jnp.zeros((own.hidden.shape[0], topk, 0), jnp.int32)
        return Path(tokens=nothing, outputs=nothing.astype(own.hidden.dtype))

    def expand(
        self,
        caches: KVPool,
        ids: Int[Array, "B K"],
        carried: Path,
        beams: BeamRows,
        *,
        params: Params,
        own: Lagging,
        rows: StepBatch,
    ) -> tuple[KVPool, Path, Int[Array, "B K K"], Float[Array, "B K K"]]:
        (batch, topk), layer = ids.shape, beams.depth
        tokens = jnp.concatenate((carried.tokens, ids[:, :, None]), axis=2)
        places = path_rows(rows, own.num_rows, layer=layer, topk=topk)
        hidden = self._hidden_of_path(own, carried, layer=layer, topk=topk)
        out, caches = self.model.forward(
            params,
            places.laid_out(tokens[..., None]).reshape(-1),
            places.laid_out(hidden).reshape(batch * layer * topk, -1),
            caches,
            places.rows,
            queries_per_row=layer * topk,
            level=layer,
        )
        by_path = places.by_path(out.reshape(batch, layer * topk, -1))
        found, terms = self.candidates(
            params,
            by_path[:, :, -1],
            positions=beams.positions,
            sampling=rows.sampling,
            level=layer,
        )
        outputs = carried.outputs
        if self.model.spec.chained:
            outputs = by_path.reshape(batch, topk, -1).astype(own.hidden.dtype)
        return caches, Path(tokens=tokens, outputs=outputs), found, terms

    def _hidden_of_path(
        self, own: Lagging, carried: Path, *, layer: int, topk: int
    ) -> Float[Array, "B K n E"]:
        batch, _, size = own.hidden.shape
        if not self.model.spec.chained:
            features = own.hidden[:, :layer][:, ::-1]
            return jnp.broadcast_to(features[:, None], (batch, topk, layer, size))
        first = jnp.broadcast_to(own.hidden[:, None, layer - 1, None], (batch, topk, 1, size))
        return jnp.concatenate((first, carried.outputs.reshape(batch, topk, -1, size)), axis=2)

    def follow(
        self, params: Params, caches: KVPool, own: Lagging, emitted: Emitted
    ) -> tuple[Float[Array, "R E"], Lagging, KVPool]:
        """Run every layer, at its lag, over the ids after the emitted tokens."""
        start, is_chained = emitted.rows.prefix_lens, self.model.spec.chained
        known = jnp.minimum(own.num_rows, start)  # 0 for padding
        known = jnp.where(emitted.is_first, 0, known)
        pairs, hidden = self.inputs(params, emitted)
        place = lag_behind(emitted, lag=0, num_known=known)
        outs, kept = [], []
        for layer in range(self.draft_shape.num_steps):
            if layer:
                before, place = place, lag_behind(emitted, lag=layer, num_known=known)
                hidden = delayed(hidden, own.hidden[:, layer - 1], before=before, own=place)
            out, caches = self.model.forward(
                params,
                jnp.take(pairs.token_ids, place.source, mode="clip"),
                hidden,
                caches,
                place.rows,
                queries_per_row=emitted.queries_per_row,
                kept=None if is_chained else emitted.last,
                level=layer,
            )
            outs.append(out)
            if is_chained:
                hidden = out
            kept.append(jnp.take(hidden, place.last, axis=0, mode="clip"))
        most = self.draft_shape.num_steps - 1
        final = jnp.take(outs[0], emitted.last, axis=0, mode="clip") if is_chained else outs[0]
        return (
            final,
            Lagging(
                hidden=jnp.stack(kept, axis=1)[:, :most],
                num_rows=jnp.minimum(known + next_positions(emitted) - start, most),
            ),
            caches,
        )
