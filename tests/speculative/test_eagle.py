"""The K best candidates of a level: the TPU's rounds choose what lax.top_k chooses."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jspec.device.batch import DraftTree
from jspec.layers.linear import Shard
from jspec.pallas_kernels.sample.reference import largest_in_rounds
from jspec.speculative.candidates import top_candidates
from jspec.speculative.tree import Level, beam_scores, build_tree


@settings(deadline=None, max_examples=40)
@given(
    topk=st.integers(2, 6),
    seed=st.integers(0, 1 << 16),
    ties=st.sampled_from([1, 2, 5, 1 << 20]),
)
def test_rounds_are_top_k_ties_included(topk: int, seed: int, ties: int) -> None:
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-ties, ties, (2, 3, 17)) * 0.25, jnp.float32)
    values, idx = jax.jit(largest_in_rounds, static_argnames="topk")(x, topk=topk)
    expected_values, expected_idx = jax.lax.top_k(x, topk)
    assert idx.dtype == expected_idx.dtype
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(idx, expected_idx)


def test_rounds_take_all_columns_of_a_row_once() -> None:
    x = jnp.asarray([[0.0, -np.finfo(np.float32).max, 7.0, 7.0, 0.0]])
    values, idx = largest_in_rounds(x, topk=5)
    np.testing.assert_array_equal(idx, [[2, 3, 0, 4, 1]])
    np.testing.assert_array_equal(values, jnp.take_along_axis(x, idx, axis=1))


@pytest.mark.parametrize(("platform", "has_top_k"), [("tpu", False), ("cpu", True), ("cuda", True)])
def test_only_a_tpu_goes_by_rounds(platform: str, *, has_top_k: bool) -> None:
    best = partial(top_candidates, topk=4, shard=Shard(1))
    scaled = jax.ShapeDtypeStruct((2, 4, 500), jnp.float32)
    ids = jax.ShapeDtypeStruct((500,), jnp.int32)
    text = jax.jit(best).trace(scaled, ids).lower(lowering_platforms=(platform,)).as_text()
    assert ("top_k" in text) == has_top_k


@pytest.mark.parametrize("topk", [1, 3])
def test_shards_find_what_one_device_finds_with_two_collectives(topk: int) -> None:
    """Few values, so that most places are ties; one shard has fewer columns than candidates."""
    logits = jnp.asarray(np.random.default_rng(0).integers(0, 4, (3, 2, 8)), jnp.float32)
    ids = jnp.arange(20, 28)
    best = jax.jit(
        jax.shard_map(
            partial(top_candidates, topk=topk, shard=Shard(4, "tensor")),
            mesh=Mesh(np.array(jax.devices("cpu")[:4]), ("tensor",)),
            in_specs=(PartitionSpec(None, None, "tensor"), PartitionSpec("tensor")),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    assert str(jax.make_jaxpr(best)(logits, ids)).count("all_gather[") == 2
    found, terms = best(logits, ids)
    expected, expected_terms = top_candidates(logits, ids, topk=topk, shard=Shard())
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(terms, expected_terms, rtol=1e-5)


BAD = st.sampled_from([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0])


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1 << 16), bad=st.lists(BAD, min_size=1, max_size=4), share=st.floats(0, 1)
)
def test_logits_that_are_not_finite_give_candidates_and_a_tree(
    seed: int, bad: list[float], share: float
) -> None:
    """Any number of them, up to all: distinct valid ids, scores that fall from parent to child."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 3, 11)).astype(np.float32)
    odd = rng.random(logits.shape) < share
    logits[odd] = rng.choice(np.asarray(bad, np.float32), int(odd.sum()))
    ids, terms, tree = candidates_and_tree(jnp.asarray(logits))
    for row in np.asarray(ids).reshape(-1, 3):
        assert len(set(row.tolist())) == 3
        assert set(row.tolist()) <= set(range(20, 31))
    assert np.isfinite(terms).all()
    best = np.where(np.isnan(logits), -np.inf, logits).max(axis=2)
    chosen = np.take_along_axis(logits, np.asarray(ids)[:, :, :1] - 20, axis=2)[..., 0]
    is_low = np.isnan(chosen)
    np.testing.assert_array_equal(np.isneginf(best[is_low]), True)  # NaN only where nothing else is
    node = np.arange(1, tree.parents.shape[1])
    assert (np.asarray(tree.parents)[:, 0] == -1).all()
    assert (np.asarray(tree.parents)[:, 1:] < node).all()
    assert (np.asarray(tree.parents)[:, 1:] >= 0).all()
    depths = np.take_along_axis(tree.depths, np.asarray(tree.parents)[:, 1:], axis=1)
    np.testing.assert_array_equal(
        np.asarray(tree.depths)[:, 1:], depths + 1
    )  # no parent is missing
    assert set(np.asarray(tree.tokens)[:, 1:].ravel().tolist()) <= set(range(20, 31))


@jax.jit
def candidates_and_tree(logits: jax.Array) -> tuple[jax.Array, jax.Array, DraftTree]:
    """Rank level 1 from logits[:, 0], level 2 from all three, one per beam."""
    ids, terms = top_candidates(logits, jnp.arange(20, 31), topk=3, shard=Shard(1))
    first = Level(
        ids=ids[:, 0],
        scores=beam_scores(jnp.zeros((2, 1)), terms[:, :1])[:, 0],
        parents=jnp.full((2, 3), -1, jnp.int32),
    )
    parents = jnp.broadcast_to(jnp.repeat(jnp.arange(3, dtype=jnp.int32), 3), (2, 9))
    scores = beam_scores(first.scores, terms).reshape(2, 9)
    second = Level(ids=ids.reshape(2, 9), scores=scores, parents=parents)
    tree = build_tree(jnp.zeros(2, jnp.int32), (first, second), num_draft_tokens=7)
    return ids, terms, tree


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_become_terms_of_a_path(bad: float) -> None:
    scores = beam_scores(jnp.asarray([[0.0, -1.0]]), jnp.asarray([[[bad, -2.0], [bad, 0.5]]]))
    assert np.isfinite(scores).all()
    assert (np.asarray(scores) <= [[[0.0], [-1.0]]]).all()
    assert scores[0, :, 1].tolist() == [-2.0, -1.0]
