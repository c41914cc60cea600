"""Laws of every drafter by itself: its guesses and its caches; moved indices must fail them.

guesses      every candidate of the tree, its score and its parent are those of float64, which
             recomputes each path from the row's start: after chunks of a prompt, after four
             forwards in a chain, in a tree along each path, and after a verification
caches       rows filled by verifications equal those of a fresh prompt
no live row  a step without one changes nothing
interpreted  operation by operation it equals its compiled form
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec.speculative
from jspec.config.drafting import ALGORITHMS
from jspec.config.limits import Algorithm
from jspec.models.heads.block_head import BlockHead
from jspec.models.heads.feature_head import FeatureHead
from jspec.spec import indexing
from jspec.speculative import beams, tree
from jspec.speculative.drafter import Drafter, NoDrafter
from jspec.speculative.drafters import frozen_kv, multi_layer, ngram, ranked
from jspec.speculative.drafters.registry import DRAFTERS
from tests.speculative.drafter_rows import (
    NUM_ROWS,
    Programs,
    Shape,
    Texts,
    interpreted,
    random_history,
    refilled,
)
from tests.speculative.every_drafter import EVERY, KINDS, Kind, of_layers
from tests.speculative.published_layers import FAMILIES

pytestmark = pytest.mark.law

CHAIN, TREE = (5, 1), (3, 2)
SHAPES: tuple[Shape, ...] = (CHAIN, TREE, (5, 2), (2, 3), (1, 4), (1, 1))
# Separate layers in two families as well, with windows, sinks, gated heads and narrow values.
LAWFUL = {kind.name: kind for kind in (*EVERY, *(of_layers(name) for name in FAMILIES))}
# CI's cases of each kind; the whole cross product runs by hand.
FAST: dict[str, Shape] = {
    "dflash": TREE,
    "eagle3": (5, 2),
    "multi_layer_not_chained": TREE,
    "ngram": (5, 2),
}
SLOW: dict[str, Shape] = {
    "eagle1_ngram": TREE,
    "dflash2": TREE,
    "dspark": TREE,
    "p_eagle": TREE,
    "eagle1": TREE,
    "multi_layer_chained": (3, 1),
    "multi_layer_hidden_first": (2, 3),
    "multi_layer_mimo_v2": TREE,
    "multi_layer_step3p5": (3, 1),
    "recurrent": TREE,
    "standalone": TREE,
    "frozen_kv": TREE,
}


def cases() -> list[Any]:
    return [
        pytest.param(
            kind, shape, id=f"{kind.name}-{shape[0]}-{shape[1]}", marks=marks_of(kind, shape)
        )
        for kind in LAWFUL.values()
        for shape in dict.fromkeys((min(s, kind.num_steps), k) for s, k in SHAPES)
    ]


def marks_of(kind: Kind, shape: Shape) -> Any:
    if FAST.get(kind.name) == shape:
        return ()
    is_slow = SLOW.get(kind.name) == shape
    return pytest.mark.slow if is_slow else [pytest.mark.slow, pytest.mark.exhaustive]


def drafter_classes() -> set[type]:
    """Return the package's classes with propose and advance."""
    found = set()
    for module in pkgutil.walk_packages(jspec.speculative.__path__, "jspec.speculative."):
        for _, each in inspect.getmembers(import_module(module.name), inspect.isclass):
            is_drafter = hasattr(each, "propose") and hasattr(each, "advance")
            if is_drafter and not inspect.isabstract(each) and each is not Drafter:
                found.add(each)
    return found


def test_every_drafter_is_here() -> None:
    """The list of kinds names each algorithm of the registry and each class of drafter."""
    named = {kind.algorithm for kind in EVERY} | {Algorithm.NONE}
    assert {algorithm.name for algorithm in named} == set(DRAFTERS) == set(ALGORITHMS)
    assert {*FAST, *SLOW} == {*LAWFUL}
    made = {type(kind.drafter((1, 1, 2))) for kind in EVERY}
    assert made | {NoDrafter} == drafter_classes()


def check_guesses(kind: Kind, shape: Shape, programs: Programs | None = None) -> None:
    """Check after prompts, of which two are shorter than a last layer's lag, and after
    verifications that accept all, nothing and something.
    """
    texts = Texts(kind, shape, seed=1, programs=programs)
    num_steps = shape[0]
    texts.chunk([1, 2, 5])
    checked = texts.check_guesses()
    texts.chunk([4, 0, 6])
    checked += texts.check_guesses()
    texts.verify([num_steps, 0, min(1, num_steps)])
    checked += texts.check_guesses()
    texts.verify([0, min(2, num_steps), num_steps])
    checked += texts.check_guesses()
    assert checked > NUM_ROWS


@pytest.mark.law("every case")
@pytest.mark.slow_cases("multi_layer", "eagle3-5-2")
@pytest.mark.parametrize(("kind", "shape"), cases())
def test_every_guess_is_that_of_float64(kind: Kind, shape: Shape) -> None:
    check_guesses(kind, shape)


def check_caches(kind: Kind, shape: Shape, programs: Programs | None = None) -> None:
    """Check equal rows in every pool and equal state, after verifications or a prompt."""
    for seed in range(3):
        texts = Texts(kind, shape, seed=seed, programs=programs)
        random_history(texts, np.random.default_rng(100 + seed))
        assert_refilled(texts)


def assert_refilled(texts: Texts) -> None:
    fresh = refilled(texts)
    for row in range(NUM_ROWS):
        for own, other in zip(texts.cached(row), fresh.cached(row), strict=True):
            assert np.isfinite(other).all(), "a row that nobody wrote"
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)
    for own, other in zip(jax.tree.leaves(texts.state), jax.tree.leaves(fresh.state), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def check_chain(kind: Kind, shape: Shape, programs: Programs | None = None) -> None:
    """Let a chain's own drafts become the text: the drafter's caches equal those after a prompt,
    and its next guesses are float64's.
    """
    texts = Texts(kind, shape, seed=7, programs=programs)
    texts.chunk([3, 1, 5])
    for accepted in ([shape[0], 0, 1], [0, shape[0], shape[0]], [1, 2, 0]):
        texts.accept(accepted)
        assert_refilled(texts)
    assert texts.check_guesses()


@pytest.mark.slow
def test_of_a_chain_a_drafter_of_tokens_runs_the_last_two_alone() -> None:
    check_chain(KINDS["standalone"], (3, 1))


@pytest.mark.law("every case")
@pytest.mark.slow_cases("multi_layer")
@pytest.mark.parametrize(("kind", "shape"), cases())
def test_verifications_leave_what_a_prompt_leaves(kind: Kind, shape: Shape) -> None:
    check_caches(kind, shape)


@pytest.mark.law("every case")
@pytest.mark.parametrize(("kind", "shape"), cases())
def test_no_live_row_touches_no_row(kind: Kind, shape: Shape) -> None:
    """It changes neither caches outside the dummy page, nor a guess."""
    texts = Texts(kind, shape, seed=3)
    texts.chunk([5, 1, 2])
    texts.verify([1, 0, 1])
    tree, _ = texts.propose()
    before = [np.asarray(pool)[1:] for pool in texts.caches]
    texts.chunk([0] * NUM_ROWS)
    for pool, expected in zip(texts.caches, before, strict=True):
        np.testing.assert_array_equal(np.asarray(pool)[1:], expected)
    again, _ = texts.propose()
    jax.tree.map(np.testing.assert_array_equal, again, tree)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
def test_interpreted_it_is_what_it_is_compiled(kind: Kind) -> None:
    shape = (2, 2)
    compiled, by_itself = Texts(kind, shape, seed=5), Texts(kind, shape, seed=5)
    for texts in (compiled, by_itself):
        with interpreted() if texts is by_itself else contextlib.nullcontext():
            texts.chunk([3, 1, 6])
            texts.verify([1, 0, shape[0]])
    trees = []
    for texts in (compiled, by_itself):
        with interpreted() if texts is by_itself else contextlib.nullcontext():
            trees.append(texts.propose()[0])
    for own, other in zip(jax.tree.leaves(trees[0]), jax.tree.leaves(trees[1]), strict=True):
        if np.issubdtype(own.dtype, np.floating):  # scores, whose last bits a fusion may change
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(own, other)
    for row in range(NUM_ROWS):
        for own, other in zip(compiled.cached(row), by_itself.cached(row), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Mutation:
    """Replaces `owner.name` by mutate(original): `check` of `kind` must fail."""

    title: str
    owner: Any
    name: str
    mutate: Callable[[Any], Any]
    kind: str
    check: Callable[[Kind, Shape, Programs], None] = check_guesses
    shape: Shape = TREE
    is_fast: bool = False


def rolled_parents(best_beams: Any) -> Any:
    """Give a beam what the next one's parent carries."""

    def mutate(level: Any, ancestors: Any, carried: Any, **named: Any) -> Any:
        rolled = jax.tree.map(lambda x: jnp.roll(x, 1, axis=1), carried)
        return best_beams(level, ancestors, rolled, **named)

    return mutate


def shared_pool(forward: Any) -> Any:
    """Let layer 0 write into layer 1's pool and read it."""

    def run(self: Any, params: Any, ids: Any, hidden: Any, kv: Any, rows: Any, **named: Any) -> Any:
        if named["level"]:
            return forward(self, params, ids, hidden, kv, rows, **named)
        out, found = forward(self, params, ids, hidden, (kv[1], *kv[1:]), rows, **named)
        return out, (kv[0], found[0], *kv[2:])

    return run


MUTATIONS = (
    Mutation(
        "emitted position",
        indexing,
        "emitted_position",
        lambda f: lambda seq_len, row: f(seq_len, row) + 1,
        "eagle3",
        is_fast=True,
    ),
    Mutation(
        "draft RoPE position",
        indexing,
        "draft_position",
        lambda f: lambda seq_len, depth: f(seq_len, depth) + 1,
        "recurrent",
    ),
    Mutation(
        "RoPE position of a token's row",
        indexing,
        "target_position",
        lambda f: lambda seq_len, depth: f(seq_len, depth) + 1,
        "standalone",
    ),
    Mutation(
        "row of a beam",
        indexing,
        "beam_slot",
        lambda f: lambda depth, **named: f(depth, **named) + 1,
        "eagle1",
    ),
    Mutation(
        "token of a pair",
        ranked,
        "following_ids",
        lambda f: lambda emitted: jnp.roll(f(emitted), 1),
        "multi_layer_chained",
    ),
    Mutation(
        "lag",
        multi_layer,
        "lag_behind",
        lambda f: (
            lambda emitted, *, lag, num_known: f(emitted, lag=max(lag - 1, 0), num_known=num_known)
        ),
        "multi_layer_not_chained",
        is_fast=True,
    ),
    Mutation(
        "slot of a lagging row",
        indexing,
        "lagged_start",
        lambda f: lambda seq_len, lag: f(seq_len, lag) + 1,
        "multi_layer_hidden_first",
        check_caches,
    ),
    Mutation(
        "position of a row of a block",
        indexing,
        "target_position",
        lambda f: lambda seq_len, depth: f(seq_len, depth) + 1,
        "dflash",
    ),
    Mutation(
        "RoPE position of a mask's pair",
        indexing,
        "draft_position",
        lambda f: lambda seq_len, depth: f(seq_len, depth) + 1,
        "p_eagle",
    ),
    Mutation(
        "a selector's candidates",
        BlockHead,
        "transitions",
        lambda f: lambda self, params, ids, *rest: jnp.roll(f(self, params, ids, *rest), 1, -1),
        "dflash2",
    ),
    Mutation(
        "the token before a Markov head's",
        BlockHead,
        "markov",
        lambda f: lambda self, params, ids, *rest: f(self, params, jnp.roll(ids, 1), *rest),
        "dspark",
    ),
    Mutation(
        "last row",
        ranked,
        "with_next_ids",
        lambda f: (
            lambda emitted: dataclasses.replace(
                f(emitted), last=jnp.maximum(f(emitted).last - 1, 0)
            )
        ),
        "standalone",
    ),
    Mutation(
        "a chain's last two",
        ranked,
        "last_two",
        lambda f: lambda emitted: dataclasses.replace(f(emitted), last=f(emitted).last - 1),
        "standalone",
        check_chain,
        (3, 1),
    ),
    Mutation(
        "the last of a chain",  # its row is unwritten if the whole chain is accepted
        ranked,
        "last_two",
        lambda f: (
            lambda emitted: dataclasses.replace(
                f(emitted), token_ids=f(emitted).token_ids.at[::2].set(0)
            )
        ),
        "standalone",
        check_chain,
        (3, 1),
    ),
    Mutation(
        "looked-up position",
        ngram,
        "next_positions",
        lambda f: lambda emitted: f(emitted) + 1,
        "ngram",
    ),
    Mutation(
        "a path's token under another parent",
        tree,
        "_with_tokens",
        lambda f: (
            lambda level, tokens, scores, *, parents: f(
                level, tokens, scores, parents=jnp.roll(parents, 1, axis=1)
            )
        ),
        "eagle1_ngram",
    ),
    Mutation(
        "ancestors",
        beams,
        "_with_itself",
        lambda f: lambda ancestors: jnp.ones_like(f(ancestors)),
        "eagle3",
    ),
    Mutation(
        "parent's output",
        beams,
        "_best_beams",
        rolled_parents,
        "recurrent",
        check_guesses,
        (3, 3),
    ),
    Mutation("another layer's pool", FeatureHead, "forward", shared_pool, "multi_layer_chained"),
    Mutation(
        "last of the target's keys",
        frozen_kv,
        "_one_query_each",
        lambda f: lambda rows, num: f(dataclasses.replace(rows, seq_lens=rows.seq_lens - 1), num),
        "frozen_kv",
    ),
    Mutation(
        "features that travel",
        multi_layer,
        "delayed",
        lambda f: (
            lambda hidden, first, *, before, own: f(hidden, 0 * first, before=before, own=own)
        ),
        "multi_layer_not_chained",
    ),
)


@pytest.mark.slow_cases("lag")
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(each, id=each.title, marks=() if each.is_fast else pytest.mark.slow)
        for each in MUTATIONS
    ],
)
def test_a_moved_index_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    original, kind = getattr(mutation.owner, mutation.name), KINDS[mutation.kind]
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.mutate(original))
    with pytest.raises(AssertionError):
        mutation.check(kind, mutation.shape, Programs(kind, mutation.shape))


def test_every_kind_notices_some_mutation() -> None:
    assert {mutation.kind for mutation in MUTATIONS} == set(KINDS)
