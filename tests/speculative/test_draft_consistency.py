"""Drafting and advancing are the same function of (tokens, features, positions).

A draft step at depth d must give what an advance gives over the same tokens and features, at the
slots right behind the committed rows. In a tree, each beam must equal the chain along its own
path, also after beams were re-ranked. Rejected and re-ranked rows are never attended to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.batch import Features, Verified
from jspec.core.config import SpeculativeConfig
from jspec.core.state import empty_sampling
from jspec.engine.runner import empty_pools
from jspec.models.eagle3 import Eagle3Head
from jspec.pallas_kernels.ops import Ops
from jspec.speculative.drafter import RowsInStep, emitted_by
from jspec.speculative.eagle import EagleDrafter, EagleState
from jspec.testing.dial_drafter import DialHead
from tests.speculative.engines import DRAFT, TARGET, spec_of, tiny_params

BATCH, PAGE, PAGES_PER_ROW = 2, 4, 12
LENS = (7, 13)  # committed rows of the two sequences
SIZE = DRAFT.layer.hidden_size


@dataclasses.dataclass(frozen=True, slots=True)
class UnfusedHead(DialHead):
    """A head whose features are given as they are, so that a test may hand in its own hidden."""

    def features(self, params: Any, aux_hidden: jax.Array) -> jax.Array:
        del params
        return aux_hidden


class Given(NamedTuple):
    """What one draft forward was given."""

    ids: Any
    hidden: Any


@dataclasses.dataclass(frozen=True, slots=True)
class RecordingDrafter(EagleDrafter):
    """Keeps what each draft forward was given and gave: (beams, hidden) by depth."""

    record: list[Any] = dataclasses.field(default_factory=list, hash=False, compare=False)

    def expand(self, caches: Any, ids: Any, carried: Any, beams: Any, **named: Any) -> Any:
        out = EagleDrafter.expand(self, caches, ids, carried, beams, **named)
        self.record.append((Given(ids, carried), out[1], beams.ancestors))
        return out


def setup() -> tuple[Any, Any, RowsInStep, EagleState, Eagle3Head]:
    """A pool with LENS committed rows (random KV) and NaN everywhere else."""
    rng = np.random.default_rng(0)
    head = Eagle3Head(DRAFT, Ops())
    table = 1 + np.arange(BATCH * PAGES_PER_ROW).reshape(BATCH, PAGES_PER_ROW)
    pool = empty_pools(
        EagleDrafter(head, spec_of(1, 1, 2)).cache_groups,
        num_pages=1 + BATCH * PAGES_PER_ROW,
        page_size=PAGE,
        shards=1,
        dtype=jnp.float32,
        ops=Ops(),
    )[0]
    pages = np.full(pool.shape, np.nan, np.float32)
    for b, length in enumerate(LENS):
        for slot in range(length):
            pages[table[b, slot // PAGE], slot % PAGE] = rng.normal(size=pool.shape[2:])
    rows = RowsInStep(
        root_ids=jnp.array([3, 5], jnp.int32),
        seq_lens=jnp.array(LENS, jnp.int32),
        page_table=jnp.asarray(table, jnp.int32),
        sampling=dataclasses.replace(
            empty_sampling(BATCH, vocab_size=TARGET.vocab_size),
            seed=jnp.array([[0, 1], [0, 2]], jnp.uint32),
            temperature=jnp.array([0.0, 1.0], jnp.float32),
        ),
    )
    state = EagleState(
        hidden=jnp.asarray(rng.normal(size=(BATCH, SIZE)), jnp.float32),
        level1_ids=jnp.zeros((BATCH, 1), jnp.int32),
        level1_scores=jnp.zeros((BATCH, 1), jnp.float32),
    )
    return (jnp.asarray(pages),), {"head": tiny_params()[1]}, rows, state, head


def draft_and_record(spec: SpeculativeConfig) -> tuple[Any, list[Any], Any, Any, Any, Any, Any]:
    """One propose, with level 1 from the head's own candidates at the given hidden."""
    kv, params, rows, state, head = setup()
    drafter = RecordingDrafter(UnfusedHead(head), spec)

    def run(kv: Any, state: EagleState) -> Any:
        ids, scores = drafter.candidates(
            {**params, "draft_ids": params["head"]["draft_ids"]},
            state.hidden[:, None],
            positions=rows.seq_lens[:, None] + 1,
            sampling=rows.sampling,
        )
        state = dataclasses.replace(state, level1_ids=ids[:, 0], level1_scores=scores[:, 0])
        drafter.record.clear()
        kv_after, tree = drafter.propose(
            {**params, "draft_ids": params["head"]["draft_ids"]}, kv, state, rows
        )
        return kv_after, tree, list(drafter.record)

    kv_after, tree, record = jax.jit(run)(kv, state)
    return kv_after, record, tree, kv, params, rows, (state, head, drafter)


def advance_along(
    kv: Any, params: Any, rows: RowsInStep, head: Any, *, most: int
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Of tokens [B, M] and hidden [B, M, E], M = most: the output of the head's last row when they
    are what followed the root, each with the feature of the token before it."""
    spec = spec_of(most - 1, 1, most) if most > 1 else spec_of(1, 1, 2)
    drafter = EagleDrafter(UnfusedHead(head), spec)
    shared = {**params, "draft_ids": params["head"]["draft_ids"]}
    advance = jax.jit(
        lambda kv, verified: drafter.advance(shared, kv, None, emitted_by(verified, rows))
    )

    def along(tokens: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        verified = Verified(
            emitted_ids=jnp.asarray(tokens, jnp.int32),
            bonus_ids=jnp.asarray(tokens[:, -1], jnp.int32),
            num_accepted=jnp.full((BATCH,), most - 1, jnp.int32),
            node_path=jnp.zeros((BATCH, most), jnp.int32),
            features=Features(hidden=jnp.zeros((BATCH, most, 0)), aux_hidden=jnp.asarray(hidden)),
        )
        return np.asarray(advance(kv, verified)[1].hidden)

    return along


def check_paths(spec: SpeculativeConfig) -> int:
    """Every recorded beam equals the advance along its own path; returns how many were checked."""
    _, record, _, kv, params, rows, (_, head, _) = draft_and_record(spec)
    checked = 0
    for depth, (_, hidden, _) in enumerate(record, start=1):
        along = advance_along(kv, params, rows, head, most=depth)
        for k in range(spec.topk):
            path = path_of(record, depth, k)
            tokens = np.stack([step[0] for step in path], axis=1)
            features = np.stack([step[1] for step in path], axis=1)
            got = np.asarray(hidden)[:, k]
            want = along(tokens, features)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
            checked += 1
    return checked


def path_of(record: list[Any], depth: int, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(token, parent's output) of each row on the way to beam k at `depth`, from the mask."""
    topk = record[0][0].ids.shape[1]
    ancestors = np.asarray(record[depth - 1][2])[:, k]  # [B, depth * K]
    path = []
    for level in range(depth):
        beams = record[level][0]
        own = ancestors[:, level * topk : (level + 1) * topk]
        assert (own.sum(axis=1) == 1).all(), "a beam has one ancestor at each level"
        at = own.argmax(axis=1)
        rows = np.arange(BATCH)
        path.append((np.asarray(beams.ids)[rows, at], np.asarray(beams.hidden)[rows, at]))
    return path


@pytest.mark.parametrize("shape", [(4, 1, 5), (4, 3, 12)], ids=str)
def test_each_draft_row_equals_the_advance_along_its_path(shape: tuple[int, int, int]) -> None:
    spec = spec_of(*shape)
    assert check_paths(spec) == (spec.num_steps - 1) * spec.topk


def test_beams_are_reranked_in_the_tree_that_is_checked() -> None:
    """The tree case above proves something only if some beam left its column."""
    _, record, *_ = draft_and_record(spec_of(4, 3, 12))
    ancestors = np.asarray(record[-1][2])
    topk = 3
    moved = [
        ancestors[b, k, level * topk + k] == 0
        for b in range(BATCH)
        for k in range(topk)
        for level in range(ancestors.shape[2] // topk - 1)
    ]
    assert any(moved)


def test_the_tree_holds_the_drafted_tokens_of_its_paths() -> None:
    """Parents, depths and tokens of the tree agree with the beams that were forwarded."""
    _, record, tree, *_ = draft_and_record(spec_of(3, 2, 7))
    tokens, parents = np.asarray(tree.tokens), np.asarray(tree.parents)
    level1 = np.asarray(record[0][0].ids)
    for b in range(BATCH):
        children = tokens[b][parents[b] == 0]
        assert set(children) <= set(level1[b])
