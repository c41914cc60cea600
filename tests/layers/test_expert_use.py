"""Counts of the tokens that experts are given."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jspec.layers.expert_use import ExpertCounter, ExpertUse, MoETokens, copies_of, expert_counts
from jspec.layers.linear import Shard
from jspec.layers.moe import moe, route
from jspec.pallas_kernels.ops import Ops
from jspec.spec.layers.feed_forward import MoESpec
from tests.layers.test_moe import INNER, TOP, X, drawn, tokens

IS_REAL = jnp.array([True, False, True, True])
KEYS = jnp.array([7, 8, 9, 10])


def test_padding_is_not_counted() -> None:
    ids = jnp.array([[2, 0], [0, 1], [0, 1]])
    assert expert_counts(ids, jnp.array([True, True, False]), 3).tolist() == [2, 1, 1]


def test_a_layer_counts_what_its_router_chose() -> None:
    spec = MoESpec(num_experts=X, top_k=TOP, inner=INNER)
    params, x = drawn(bias=False), jnp.asarray(tokens(4), jnp.float32)
    use = ExpertUse(MoETokens(is_real=IS_REAL, keys=KEYS))
    plain = moe(params, x, spec=spec, shard=Shard(), ops=Ops())
    found = moe({**params, "use": use}, x, spec=spec, shard=Shard(), ops=Ops())
    np.testing.assert_array_equal(found, plain)
    ids, _ = route(params["router"], x, spec=spec)
    assert use.counts is not None
    expected = np.bincount(np.asarray(ids)[np.asarray(IS_REAL)].ravel(), minlength=X)
    assert use.counts.tolist() == expected.tolist()


def test_padding_that_repeats_a_kept_token_is_not_counted() -> None:
    kept = MoETokens(is_real=IS_REAL, keys=KEYS).kept(jnp.array([0, 1, 3, 3]))
    assert kept.is_real is not None
    assert kept.is_real.tolist() == [True, False, True, False]
    assert kept.keys.tolist() == [7, 8, 10, 10]


def test_layers_without_experts_have_zeros() -> None:
    counter = ExpertCounter(2)
    counter.add(None)
    counter.add(jnp.array([3, 4], jnp.uint32))
    assert counter.counts().tolist() == [[0, 0], [3, 4]]


def test_copies_take_turns_by_the_key_of_a_token() -> None:
    """Whatever the batch is; an expert with one copy has no choice."""
    copies = copies_of((0, 2, 1, 2, 2), 3)
    assert copies.tolist() == [[1, 0, 0, 0], [1, 2, 0, 0], [3, 1, 3, 4]]
    ids = jnp.array([[0, 2], [2, 1], [2, 0], [2, 0]])

    def physical(order: list[int]) -> list[list[int]]:
        at = jnp.array(order)
        use = ExpertUse(MoETokens(is_real=None, keys=KEYS[at], copies=jnp.array(copies)))
        found: list[list[int]] = use.physical(ids[at], 3).tolist()
        assert use.counts is None
        return found

    found = physical([0, 1, 2, 3])
    assert found == [[0, 3], [4, 2], [1, 0], [3, 0]]
    assert physical([2, 0]) == [found[2], found[0]]
