"""A drafter's inputs and declarations: the arithmetic of `Emitted`, and the data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.drafting import ALGORITHMS
from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.device.batch import DraftTree, Features, Verified
from jspec.device.state import empty_sampling
from jspec.errors import ConfigError
from jspec.models.decoder import Decoder
from jspec.models.heads.assistant import Assistant
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.feature_head import FeatureHead
from jspec.pallas_kernels.attention.api import AttentionMetadata
from jspec.pallas_kernels.ops import Ops
from jspec.spec.cache_entry import KV
from jspec.spec.cache_groups import CacheGroup
from jspec.spec.head_spec import eagle1_spec, mtp_spec
from jspec.speculative.drafter import (
    Drafter,
    Emitted,
    Needs,
    NoDrafter,
    StepBatch,
    emitted_by,
    following_ids,
    last_two,
    next_positions,
    with_next_ids,
)
from jspec.speculative.drafters.block import BlockDrafter
from jspec.speculative.drafters.frozen_kv import FrozenKVDrafter
from jspec.speculative.drafters.multi_layer import MultiLayerDrafter
from jspec.speculative.drafters.ngram import NgramDrafter
from jspec.speculative.drafters.ranked import EagleDrafter, StandaloneDrafter
from jspec.speculative.drafters.registry import DRAFTERS
from jspec.speculative.step import StepProgram
from jspec.speculative.verify import settle
from tests.speculative import own_assistants, own_blocks
from tests.speculative.engines import DRAFT, TARGET, spec_of
from tests.speculative.test_worked_example import A1, A2, B1, SEQ_LENS, SPEC, T7, L, X, Y, Z, tree
from tests.support.caches import empty_pools
from tests.support.tiny_models import tiny_target_config

TABLE = jnp.asarray([[3, 1, 2]], jnp.int32)


def both(array: Any) -> Any:
    """Return two equal rows."""
    return jnp.concatenate((array, array))


def worked_example() -> Emitted:
    """Row 0 accepts a1 a2 with bonus y, row 1 accepts b1 with bonus z; node n's features are n."""
    rows = StepBatch(
        root_ids=jnp.asarray([T7, T7], jnp.int32),
        seq_lens=both(SEQ_LENS),
        page_table=both(TABLE),
        sampling=empty_sampling(2, vocab_size=100),
    )
    trees: DraftTree = jax.tree.map(both, tree())
    target_ids = jnp.asarray([[A1, A2, X, Y], [B1, X, Z, Y]], jnp.int32)
    by_node = jnp.broadcast_to(jnp.arange(4.0)[:, None], (2, 4, 1))
    features = Features(hidden=by_node + 10, aux_hidden=by_node)
    kv = (jnp.zeros((4, 4, 2, 1)),)
    _, verified = settle(trees, target_ids, features, kv, rows, draft_shape=SPEC, ops=Ops())
    return emitted_by(verified, rows)


def test_the_worked_example_as_a_drafter_is_told_of_it() -> None:
    emitted = worked_example()
    assert emitted.queries_per_row == SPEC.max_emitted == 3
    assert emitted.rows.cu_q_lens.tolist() == [0, 3, 5]
    assert emitted.token_ids.tolist()[:5] == [T7, A1, A2, T7, B1]
    assert emitted.next_ids.tolist() == [Y, Z]
    assert emitted.last.tolist() == [2, 4]
    assert following_ids(emitted).tolist()[:5] == [A1, A2, Y, B1, Z]
    assert emitted.rows.prefix_lens.tolist() == [L, L]
    assert emitted.rows.q_positions.tolist() == [7, 8, 9] * 2
    assert next_positions(emitted).tolist() == [10, 9]  # positions of the next roots
    assert emitted.is_first.tolist() == [False, False]


def test_a_drafter_that_asks_for_both_features_gets_those_of_the_nodes_on_the_path() -> None:
    features = worked_example().features
    assert features.aux_hidden[:5, 0].tolist() == [0, 1, 3, 0, 2]
    assert features.hidden[:5, 0].tolist() == [10, 11, 13, 10, 12]


def chunks(token_ids: list[int], cu_q_lens: list[int], next_ids: list[int]) -> Emitted:
    """Pack chunks of prompts; padding tokens follow cu_q_lens in token_ids."""
    num_rows = len(next_ids)
    return Emitted(
        token_ids=jnp.asarray(token_ids, jnp.int32),
        features=Features(hidden=jnp.zeros((0, 0)), aux_hidden=jnp.zeros((0, 0))),
        next_ids=jnp.asarray(next_ids, jnp.int32),
        rows=AttentionMetadata(
            page_table=jnp.zeros((num_rows, 1), jnp.int32),
            prefix_lens=jnp.arange(num_rows, dtype=jnp.int32) * 10,
            cu_q_lens=jnp.asarray(cu_q_lens, jnp.int32),
            q_positions=jnp.zeros((len(token_ids),), jnp.int32),
        ),
        last=jnp.maximum(jnp.asarray(cu_q_lens[1:], jnp.int32) - 1, 0),
        is_first=jnp.zeros((num_rows,), bool),
        sampling=empty_sampling(num_rows, vocab_size=100),
        queries_per_row=None,
    )


def test_every_chunk_ends_with_the_id_after_it() -> None:
    emitted = chunks([3, 4, 5, 8, 9, 0, 0], [0, 3, 5, 5], [6, 7, 0])
    assert following_ids(emitted).tolist()[:5] == [4, 5, 6, 9, 7]
    assert next_positions(emitted).tolist() == [3, 12, 20]
    one = chunks([3, 8, 0], [0, 1, 2], [6, 7])
    assert following_ids(one).tolist()[:2] == [6, 7]


def test_rows_of_tokens_end_with_the_next_root() -> None:
    """The worked example and the chunks of `with_next_ids`, and a row of padding."""
    tokens = with_next_ids(worked_example())
    assert tokens.queries_per_row == 4
    assert tokens.token_ids.tolist()[:7] == [T7, A1, A2, Y, T7, B1, Z]
    assert tokens.rows.q_positions.tolist() == [7, 8, 9, 10] * 2
    assert tokens.rows.cu_q_lens.tolist() == [0, 4, 7]
    assert tokens.last.tolist() == [3, 6]
    packed = with_next_ids(chunks([3, 4, 5, 8, 9, 0, 0], [0, 3, 5, 5], [6, 7, 0]))
    assert packed.queries_per_row is None
    assert packed.token_ids.tolist()[:8] == [3, 4, 5, 6, 8, 9, 7, 0]
    assert packed.rows.q_positions.tolist()[:8] == [0, 1, 2, 3, 10, 11, 12, 20]
    assert packed.rows.cu_q_lens.tolist() == [0, 4, 7, 8]
    assert packed.last.tolist() == [3, 6, 7]


def test_of_a_chain_the_last_two_tokens_are_left_to_do() -> None:
    """The worked example of `last_two`: one row accepts a1 a2 with bonus y, one none with z."""
    rows = StepBatch(
        root_ids=jnp.asarray([T7, T7], jnp.int32),
        seq_lens=both(SEQ_LENS),
        page_table=both(TABLE),
        sampling=empty_sampling(2, vocab_size=100),
    )
    verified = Verified(
        emitted_ids=jnp.asarray([[A1, A2, Y], [Z, 0, 0]], jnp.int32),
        bonus_ids=jnp.asarray([Y, Z], jnp.int32),
        num_accepted=jnp.asarray([2, 0], jnp.int32),
        node_path=jnp.asarray([[0, 1, 2], [0, 0, 0]], jnp.int32),
        features=Features(hidden=jnp.zeros((2, 3, 0)), aux_hidden=jnp.zeros((2, 3, 0))),
    )
    emitted = emitted_by(verified, rows, is_chain=True)
    assert emitted.is_chain
    tokens = last_two(emitted)
    assert tokens.queries_per_row == 2
    assert tokens.token_ids.tolist() == [A2, Y, T7, Z]
    assert tokens.rows.q_positions.tolist() == [9, 10, 7, 8]
    assert tokens.rows.prefix_lens.tolist() == [9, 7]
    assert tokens.rows.cu_q_lens.tolist() == [0, 2, 4]
    assert tokens.last.tolist() == [1, 3]


def test_how_rows_lie_is_part_of_the_program() -> None:
    """queries_per_row is no array: jax compares it when it looks for a compiled program."""
    emitted = chunks([3], [0, 1], [4])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(emitted))
    other = dataclasses.replace(emitted, queries_per_row=1)
    structures: list[Any] = [jax.tree.structure(emitted), jax.tree.structure(other)]
    assert structures[0] != structures[1]


def drafters() -> dict[Algorithm, Drafter]:
    """Return one of each algorithm; none is run here."""
    head, three = FeatureHead(DRAFT, Ops()), tiny_target_config(num_layers=3)
    eagle1 = eagle1_spec(layer=DRAFT.layer, draft_vocab_size=DRAFT.layer.vocab_size)
    of_last_hidden = FeatureHead(eagle1, Ops())
    return {
        Algorithm.NONE: NoDrafter(),
        Algorithm.EAGLE: EagleDrafter(of_last_hidden, spec_of(3, 2, 7, Algorithm.EAGLE)),
        Algorithm.EAGLE3: EagleDrafter(head, spec_of(3, 2, 7)),
        Algorithm.NGRAM: NgramDrafter(spec_of(3, 2, 7, Algorithm.NGRAM)),
        Algorithm.STANDALONE: StandaloneDrafter(
            Decoder(TARGET, Ops()), spec_of(3, 2, 7, Algorithm.STANDALONE)
        ),
        Algorithm.NEXTN: EagleDrafter(of_last_hidden, spec_of(3, 2, 7, Algorithm.NEXTN)),
        Algorithm.MULTI_LAYER_EAGLE: MultiLayerDrafter(
            FeatureHead(mtp_spec(layer=three, target_num_layers=3), Ops()),
            spec_of(3, 2, 7, Algorithm.MULTI_LAYER_EAGLE),
        ),
        Algorithm.DFLASH: BlockDrafter(
            BlockHead(own_blocks.SPECS["dflash"], Ops()), spec_of(3, 2, 7, Algorithm.DFLASH)
        ),
        Algorithm.FROZEN_KV_MTP: FrozenKVDrafter(
            Assistant(own_assistants.SPEC, Ops()), spec_of(3, 2, 7, Algorithm.FROZEN_KV_MTP)
        ),
    }


def test_every_algorithm_has_a_drafter_and_the_host_knows_what_it_declares() -> None:
    made = drafters()
    assert set(made) == set(ALGORITHMS.values())
    assert set(ALGORITHMS) == set(DRAFTERS)
    for algorithm, drafter in made.items():
        assert drafter.algorithm == algorithm
        has_keys = bool(drafter.cache_groups) or drafter.needs.caches
        assert drafter.algorithm.has_model == has_keys
        hash((drafter.cache_groups, drafter.needs))
    assert {a: d.algorithm.lookahead for a, d in made.items() if d.algorithm.lookahead} == {
        Algorithm.EAGLE: 1,
        Algorithm.EAGLE3: 1,
        Algorithm.NEXTN: 1,
        Algorithm.MULTI_LAYER_EAGLE: 1,
    }
    assert made[Algorithm.EAGLE].needs == Needs(hidden=True)
    assert made[Algorithm.FROZEN_KV_MTP].needs == Needs(hidden=True, caches=True)
    ahead = {a: d.algorithm.tokens_ahead(3, 2) for a, d in made.items()}
    assert ahead[Algorithm.EAGLE3] == ahead[Algorithm.NEXTN] == 1
    assert ahead[Algorithm.MULTI_LAYER_EAGLE] == 3  # row i of layer 2 has token i + 3
    own_pools = made[Algorithm.MULTI_LAYER_EAGLE].cache_groups
    assert [(group.name, group.num_layers) for group in own_pools] == [
        ("draft 0", 1),
        ("draft 1", 1),
        ("draft 2", 1),
    ]
    assert made[Algorithm.EAGLE3].needs.aux_layer_ids == DRAFT.aux_layer_ids


def test_a_drafter_whose_writes_are_not_reserved_is_refused() -> None:
    target: Any = None
    eagle = drafters()[Algorithm.EAGLE3]
    other = SpeculativeConfig(algorithm=Algorithm.NGRAM, num_steps=3, topk=1, num_draft_tokens=4)
    with pytest.raises(ConfigError, match="EagleDrafter drafts for NGRAM; expected the drafter"):
        StepProgram(target=target, drafter=eagle, draft_shape=other)


def test_pools_follow_the_declared_groups() -> None:
    groups = (
        CacheGroup("wide", 2, KV(num_heads=4, qk_dim=8, v_dim=8)),
        CacheGroup("narrow", 1, KV(num_heads=1, qk_dim=16, v_dim=16), window=32),
    )
    pools = empty_pools(groups, num_pages=5, page_size=3, shards=2, dtype=jnp.bfloat16, ops=Ops())
    # One kv head on two shards is on both.
    assert [pool.shape for pool in pools] == [(5, 3, 8, 8)] * 2 + [(5, 3, 4, 16)]
    assert {pool.dtype for pool in pools} == {np.dtype(jnp.bfloat16)}
    assert empty_pools((), num_pages=5, page_size=3, shards=1, dtype=jnp.float32, ops=Ops()) == ()
    narrow = (CacheGroup("narrow values", 1, KV(1, 24, 16)),)
    (pool,) = empty_pools(narrow, num_pages=5, page_size=3, shards=1, dtype=jnp.float32, ops=Ops())
    assert pool.shape == (5, 3, 2, 24)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KV(0, 8, 8), "num_heads is 0; expected at least 1"),
        (lambda: KV(1, 128, 192), "head dims are K 128 and V 192; expected V to be no wider"),
        (lambda: CacheGroup("a", 0, KV(1, 8, 8)), "group a has 0 layers; expected at least 1"),
        (lambda: CacheGroup("a", 1, KV(1, 8, 8), 0), "group a has a window of 0; expected"),
    ],
)
def test_impossible_groups_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
