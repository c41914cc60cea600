"""STANDALONE: drafting with a small language model (Leviathan et al., 2022, arXiv:2211.17192).

The draft is of any served family with the target's vocabulary and has its own caches. A slot holds
a token at its own position, so nothing of the target is read and nothing is shifted. Acceptance
follows from shared noise, not from that paper's rule.

`advance` runs over the emitted tokens and the new root, whose logits give level 1. The root's slot
is scratch: it is at L', and the next advance writes the same values there again.

    worked example, L = 7, root t7, S = 3, K = 2; a verification accepts a1 a2 with bonus y
    propose   reads slots 0..7 (the last advance wrote 7, the root's); beams a1 b1 in slots 8 9 at
              RoPE 8; two of their children in slots 10 11 at RoPE 9
    advance   slots 7 8 9 10 hold t7 a1 a2 y, at RoPE 7 8 9 10; M + 1 = 5 at most. L' = 10, and y's
              logits, with the noise of position 11, are the next level 1

With K = 1 the drafts are in their final slots, so `propose` has written all that `advance` would
write except the last draft's and the new root's KV: advance runs over two tokens per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.device.pytree import pytree
from jspec.device.state import SamplingBatch
from jspec.errors import ConfigError
from jspec.layers.linear import Shard
from jspec.models.decoder import Decoder
from jspec.models.files.checkpoint import check_target, load_model_spec, load_target
from jspec.models.files.stored import Place
from jspec.models.params import ParamTable
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.model_spec import cache_groups
from jspec.speculative.beams import BeamLayout, BeamRows, LevelOne, first_level, grow_tree
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import (
    Emitted,
    Needs,
    StepBatch,
    last_two,
    next_positions,
    with_next_ids,
)
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import KVPool, Params
from jspec.text.tokenizer.tokenizer import check_same_vocabulary


@pytree
class StandaloneState:
    """State from an advance to the next propose, by slot, or by row once gathered."""

    level1_ids: jax.Array  # i32[., K], target ids
    level1_scores: jax.Array  # f32[., K], path scores, <= 0


@dataclass(frozen=True, slots=True)
class StandaloneDrafter:
    """A language model that drafts. draft_noise: as in `candidates.Ranking`."""

    model: Decoder
    spec: SpeculativeConfig
    draft_noise: bool = True

    @property
    def algorithm(self) -> Algorithm:
        return self.spec.algorithm

    @property
    def table(self) -> ParamTable:
        return self.model.table

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(self.model.spec, name="draft")

    @property
    def needs(self) -> Needs:
        return Needs()

    def init_state(
        self, num_slots: int, *, context_length: int, dtype: DTypeLike
    ) -> StandaloneState:
        del context_length, dtype
        return StandaloneState(
            level1_ids=jnp.zeros((num_slots, self.spec.topk), jnp.int32),
            level1_scores=jnp.zeros((num_slots, self.spec.topk), jnp.float32),
        )

    def candidates(
        self,
        params: Params,
        hidden: Float[Array, "B R E"],
        *,
        positions: Int[Array, "B R"],
        sampling: SamplingBatch,
    ) -> tuple[Int[Array, "B R K"], Float[Array, "B R K"]]:
        return rank_candidates(
            self.model.logits(params, hidden),
            self.model.token_ids(),
            sampling,
            positions=positions,
            ranking=Ranking(self.spec.topk, self.draft_noise),
            shard=self.model.shard,
            ops=self.model.ops,
        )

    def of_shape(self, spec: SpeculativeConfig) -> StandaloneDrafter:
        return replace(self, spec=spec)

    def propose(
        self, params: Params, caches: KVPool, state: StandaloneState, rows: StepBatch
    ) -> tuple[KVPool, DraftTree]:
        return grow_tree(
            LevelOne(ids=state.level1_ids, scores=state.level1_scores, carried=()),
            caches,
            rows,
            partial(self.expand, params=params, sampling=rows.sampling),
            spec=self.spec,
            layout=BeamLayout.TOKENS,
        )

    def expand(
        self,
        caches: KVPool,
        ids: Int[Array, "B K"],
        carried: tuple[()],
        beams: BeamRows,
        *,
        params: Params,
        sampling: SamplingBatch,
    ) -> tuple[KVPool, tuple[()], Int[Array, "B K K"], Float[Array, "B K K"]]:
        """Run one draft forward over the beams' tokens; children inherit only KV."""
        batch, topk = ids.shape
        hidden, _, caches = self.model.forward(
            params, ids.reshape(-1), caches, beams.rows, queries_per_row=topk
        )
        found, terms = self.candidates(
            params,
            hidden.reshape(batch, topk, -1),
            positions=beams.positions,
            sampling=sampling,
        )
        return caches, carried, found, terms

    def advance(
        self, params: Params, caches: KVPool, state: StandaloneState, emitted: Emitted
    ) -> tuple[KVPool, StandaloneState]:
        """Run the draft over the emitted tokens and the one after them; for a chain, the last two.

        After a chunk that is not final, the token after it is the next prompt token: the next chunk
        writes its KV again, and its prediction is unused.
        """
        del state  # of the previous root
        tokens = last_two(emitted) if emitted.is_chain else with_next_ids(emitted)
        final, _, caches = self.model.forward(
            params,
            tokens.token_ids,
            caches,
            tokens.rows,
            queries_per_row=tokens.queries_per_row,
            kept=tokens.last,
        )
        position = indexing.chosen_position(next_positions(emitted), 0)
        ids, terms = self.candidates(
            params, final[:, None], positions=position[:, None], sampling=emitted.sampling
        )
        first = first_level(ids, terms, carried=())
        return caches, StandaloneState(level1_ids=first.ids, level1_scores=first.scores)


def standalone_source(request: DraftRequest) -> DraftSource:
    """Plan a draft language model; raises ConfigError or CheckpointError if it does not fit."""
    args, path = request.args, request.checkpoint
    spec = load_model_spec(path)
    if spec.vocab_size != request.target.vocab_size:
        raise ConfigError(
            f"{path / 'config.json'}: vocab_size is {spec.vocab_size}; expected "
            f"{request.target.vocab_size}, the target's"
        )
    if spec.is_recurrent:
        raise ConfigError(
            f"{path}: the draft has recurrent layers; expected one whose layers cache their tokens,"
            " since each level of a draft must be taken back"
        )
    check_same_vocabulary(request.tokenizer, path)
    if args.speculative.topk > spec.vocab_size:
        raise ConfigError(
            f"speculative_eagle_topk is {args.speculative.topk}; expected at most "
            f"{spec.vocab_size}, the vocabulary"
        )
    if args.speculative_draft_rope_theta is not None:
        raise ConfigError(
            f"speculative_draft_rope_theta is {args.speculative_draft_rope_theta}, but "
            f"speculative_algorithm is STANDALONE, whose draft has its own; expected it unset"
        )
    if args.load_format != "dummy":
        check_target(path, spec)  # before the slower read of the target

    def make(ops: Ops, shard: Shard) -> StandaloneDrafter:
        model = Decoder(spec, ops, shard)
        return StandaloneDrafter(model, args.speculative, draft_noise=args.speculative_draft_noise)

    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        del target_params  # it has its own embedding
        return load_target(
            path,
            spec,
            dtype=np.dtype(dtype),
            shards=request.shards,
            place=place,
        )

    return DraftSource(make=make, read=read, specs=(spec,))
