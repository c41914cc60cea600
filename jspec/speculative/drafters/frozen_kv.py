"""FROZEN_KV_MTP: a draft model that attends to the target's caches and has none itself (Gemma 4).

`advance` keeps the target's last hidden at each row's last token. `propose` runs the model over the
root and that hidden, then over each level's beams and the model's own output for the token before.
Every query is at the root's position, so a beam is a row with one query.

    worked example, L = 7, root t7, S = 2, K = 2
    propose   t7 with the hidden of t6 at RoPE 7 over slots 0..6 guesses a1 b1, the tokens at 8;
              a1 and b1 with its output, at RoPE 7 over slots 0..6, guess those at 9
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.config.drafting import Algorithm
from jspec.config.limits import SpeculativeConfig
from jspec.errors import ConfigError
from jspec.files.json_files import read_fields
from jspec.layers.linear import Shard
from jspec.models.files.stored.param_reads import Place
from jspec.models.heads.assistant import (
    Assistant,
    check_assistant,
    load_assistant,
    load_assistant_config,
)
from jspec.models.params import ParamTable
from jspec.models.registry import ASSISTANTS
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec import indexing
from jspec.spec.cache_entry import FP8
from jspec.spec.cache_groups import CacheGroup
from jspec.speculative.beams import grow_block
from jspec.speculative.candidates import Ranking, rank_candidates
from jspec.speculative.drafter import Emitted, LevelDrafter, Needs, StepBatch
from jspec.speculative.drafters.source import DraftRequest, DraftSource
from jspec.speculative.target import KVPool, Params
from jspec.speculative.tree import Level


@dataclass(frozen=True, slots=True)
class FrozenKVDrafter(LevelDrafter):
    """A drafter with an assistant. Its state is the target's last hidden per row, [., E]."""

    model: Assistant
    draft_shape: SpeculativeConfig
    draft_noise: bool = True

    cache_groups: ClassVar[tuple[CacheGroup, ...]] = ()
    needs: ClassVar[Needs] = Needs(hidden=True, caches=True)

    @property
    def algorithm(self) -> Algorithm:
        return self.draft_shape.algorithm

    @property
    def table(self) -> ParamTable:
        return self.model.table

    def init_state(self, num_slots: int, *, context_length: int, dtype: DTypeLike) -> jax.Array:
        del context_length
        return jnp.zeros((num_slots, self.model.spec.target_size), dtype)

    def of_shape(self, draft_shape: SpeculativeConfig) -> FrozenKVDrafter:
        return replace(self, draft_shape=draft_shape)

    def levels(
        self, params: Params, caches: KVPool, state: jax.Array, rows: StepBatch
    ) -> tuple[KVPool, tuple[Level, ...]]:
        levels = grow_block(
            rows.root_ids,
            partial(self._rank, params, rows),
            draft_shape=self.draft_shape,
            carried=state[:, None],
        )
        return caches, levels

    def _rank(
        self,
        params: Params,
        rows: StepBatch,
        depth: int,
        parents: Int[Array, "B P"],
        carried: Float[Array, "B P E"],
    ) -> tuple[Float[Array, "B P E"], Int[Array, "B P K"], Float[Array, "B P K"]]:
        batch, num = parents.shape
        out, hidden = self.model.forward(
            params,
            parents.reshape(-1),
            carried.reshape(batch * num, -1),
            rows.target_kv,
            _one_query_each(rows, num),
        )
        position = indexing.chosen_position(rows.seq_lens, depth)[:, None]
        ids, terms = rank_candidates(
            self.model.logits(params, out.reshape(batch, num, -1)),
            self.model.token_ids(),
            rows.sampling,
            positions=jnp.broadcast_to(position, parents.shape),
            ranking=Ranking(self.draft_shape.topk, self.draft_noise),
            shard=self.model.shard,
            ops=self.model.ops,
        )
        return hidden.reshape(batch, num, -1), ids, terms

    def advance(
        self, params: Params, caches: KVPool, state: jax.Array, emitted: Emitted
    ) -> tuple[KVPool, jax.Array]:
        del params
        last = jnp.take(emitted.features.hidden, emitted.last, axis=0, mode="clip")
        return caches, last.astype(state.dtype)


def _one_query_each(rows: StepBatch, num: int) -> AttentionMetadata:
    """Return `num` rows of one query for each row; each sees the slots before L.

    In:  L = [7], num 2
    Out: prefix_lens [6 6], cu_q_lens [0 1 2], q_positions [7 7]
    """

    def each(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, num, axis=0)

    lens = each(rows.seq_lens)
    return AttentionMetadata(
        page_table=each(rows.page_table),
        window_tables={window: each(table) for window, table in rows.window_tables.items()},
        prefix_lens=jnp.maximum(lens - 1, 0),
        cu_q_lens=jnp.arange(lens.shape[0] + 1, dtype=jnp.int32),
        q_positions=indexing.target_position(lens, 0),
    )


def is_assistant(path: Path) -> bool:
    names = read_fields(path / "config.json").get("architectures")
    return isinstance(names, list) and bool(set(ASSISTANTS).intersection(map(str, names)))


def assistant_source(request: DraftRequest) -> DraftSource:
    """Plan an assistant. Raises ConfigError or CheckpointError if it does not fit its target."""
    args, path = request.args, request.checkpoint
    if args.speculative_draft_rope_theta is not None:
        raise ConfigError(
            f"speculative_draft_rope_theta is {args.speculative_draft_rope_theta}, but the layers "
            "of an assistant have their own; expected it unset"
        )
    if args.speculative_token_map is not None:
        raise ConfigError(
            f"speculative_token_map is {args.speculative_token_map!r}, but an assistant has "
            "an lm_head of its own; expected it unset"
        )
    if request.kv_dtype == FP8:
        raise ConfigError(
            "the KV cache is in FP8, whose scales an assistant does not read; expected another "
            "kv_cache_dtype, or another draft"
        )
    spec = load_assistant_config(path, target=request.target)
    if args.speculative.topk > spec.layer.vocab_size:
        raise ConfigError(
            f"speculative_eagle_topk is {args.speculative.topk}; expected at most "
            f"{spec.layer.vocab_size}, the vocabulary"
        )
    if args.load_format != "dummy":
        check_assistant(path, spec)  # before the slower read of the target
    speculation = replace(args.speculative, algorithm=Algorithm.FROZEN_KV_MTP)

    def make(ops: Ops, shard: Shard) -> FrozenKVDrafter:
        model = Assistant(spec, ops, shard, request.formats)
        return FrozenKVDrafter(model, speculation, args.speculative_draft_noise)

    def read(target_params: Params, dtype: DTypeLike, place: Place) -> Params:
        how: dict[str, Any] = {"shards": request.shards, "formats": request.formats}
        return load_assistant(
            path, spec, target_params=target_params, dtype=np.dtype(dtype), place=place, **how
        )

    return DraftSource(
        make=make,
        read=read,
        specs=(spec.layer,),
        shares=("embed",),
        algorithm=Algorithm.FROZEN_KV_MTP,
    )
