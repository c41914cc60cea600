"""A draft model and a lookup in one tree: the merged candidates, their scores, what they gain."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config.engine_args import EngineArgs
from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.config.shape_sets import shapes_for
from jspec.device.batch import DraftTree
from jspec.device.state import empty_sampling
from jspec.errors import ConfigError
from jspec.models.heads.feature_head import FeatureHead
from jspec.speculative.drafter import StepBatch
from jspec.speculative.drafters.composite import path_scores
from jspec.speculative.drafters.ngram import Branches
from jspec.speculative.tree import Level, build_tree, merge_paths
from tests.speculative.drafter_rows import NUM_ROWS, Programs, Texts
from tests.speculative.engines import TARGET, tiny_params
from tests.speculative.every_drafter import EAGLE3, KINDS, Kind, with_lookup
from tests.support.dial_drafter import DialDrafter, dial_head, dial_params

Paths = dict[tuple[int, ...], float]  # path scores


def level(ids: list[int], scores: list[float], parents: list[int]) -> Level:
    return Level(
        ids=jnp.asarray([ids], jnp.int32),
        scores=jnp.asarray([scores], jnp.float32),
        parents=jnp.asarray([parents], jnp.int32),
    )


def test_the_example_of_merged_paths() -> None:
    a, b, c, d = range(10, 14)
    levels = level([a, b], [-1.0, -2.0], [-1, -1]), level([c], [-3.0], [0])
    paths = jnp.asarray([[[a, d], [b, c]]], jnp.int32)
    scores = jnp.asarray([[[-0.5, -0.7], [-4.0, -5.0]]], jnp.float32)
    first, second = jax.jit(merge_paths)(levels, paths, scores)
    assert first.ids.tolist() == [[a, b, a, b]]
    np.testing.assert_allclose(first.scores[0, :2], [-0.5, -2.0])
    assert (first.scores[0, 2:] < -1e5).all()
    assert second.ids.tolist() == [[c, d, c]]
    assert second.parents.tolist() == [[0, 0, 1]]
    np.testing.assert_allclose(second.scores, [[-3.0, -0.7, -5.0]])


def random_levels(rng: np.random.Generator, *, topk: int, depth: int, vocab: int) -> Any:
    """Return the levels of one row, as `beams` makes them, and its paths with their scores."""
    known: Paths = {}
    levels, pool, expanded = [], [], [()]
    for _ in range(depth):
        ids, scores, parents, grown = [], [], [], []
        for above in expanded:
            for token in rng.permutation(vocab)[:topk].tolist():
                path = (*above, token)
                known[path] = known.get(above, 0.0) - rng.exponential()
                grown.append(path)
                ids.append(token)
                scores.append(known[path])
                parents.append(pool.index(above) if above else -1)
        pool += grown
        levels.append(level(ids, scores, parents))
        expanded = sorted(grown, key=lambda path: -known[path])[:topk]
    return tuple(levels), known


def test_the_tree_has_the_best_paths_of_both() -> None:
    """Checked by hand: closed, each path once, and no better path is left out."""
    nodes = 8

    @jax.jit
    def tree_of(*given: Any) -> DraftTree:
        return build_tree(jnp.zeros(1, jnp.int32), merge_paths(*given), num_draft_tokens=nodes)

    for seed in range(20):
        rng = np.random.default_rng(seed)
        levels, known = random_levels(rng, topk=2, depth=3, vocab=3)
        tokens = rng.integers(0, 3, (1, 3, 5 if seed % 4 else 1))
        scores = -np.cumsum(rng.exponential(0.3, tokens.shape), axis=2)
        for path, own in zip(tokens[0].tolist(), scores[0].tolist(), strict=True):
            for d, score in enumerate(own):
                found = tuple(path[: d + 1])
                known[found] = max(known.get(found, -np.inf), score)
        given = jnp.asarray(tokens, jnp.int32), jnp.asarray(scores, jnp.float32)
        tree = jax.tree.map(np.asarray, tree_of(levels, *given))
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, nodes):
            parent = int(tree.parents[0, node])
            assert 0 <= parent < node
            paths.append((*paths[parent], int(tree.tokens[0, node])))
            assert tree.depths[0, node] == len(paths[node])
        best = sorted(known, key=lambda path: -known[path])[: nodes - 1]
        assert sorted(paths[1:]) == sorted(best)


def rows_at(temperature: float, *, count: int) -> StepBatch:
    seeds = jnp.stack((jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)), axis=1)
    return StepBatch(
        root_ids=jnp.zeros(count, jnp.int32),
        seq_lens=jnp.full(count, 5, jnp.int32),
        page_table=jnp.zeros((count, 1), jnp.int32),
        sampling=dataclasses.replace(
            empty_sampling(count, vocab_size=9),
            temperature=jnp.full(count, temperature, jnp.float32),
            seed=seeds,
        ),
    )


def test_a_longer_match_is_surer_and_the_noise_only_moves_it() -> None:
    """A path's mean probability over the noise is that of Laplace's rule, m / (m + d)."""
    count = 4000
    tokens = jnp.broadcast_to(
        jnp.asarray([[1, 2, 3], [4, 5, 6], [0, 0, 0]], jnp.int32), (count, 3, 3)
    )
    branches = Branches(tokens=tokens, lengths=jnp.broadcast_to(jnp.asarray([4, 1, 0]), (count, 3)))
    scored = jax.jit(path_scores)
    cold, warm = (np.asarray(scored(branches, rows_at(t, count=count))) for t in (0.0, 1.0))
    by_rule = [[4 / 5, 4 / 6, 4 / 7], [1 / 10, 1 / 15, 1 / 20]]
    np.testing.assert_allclose(np.exp(cold[0, :2]), by_rule, rtol=1e-5)
    np.testing.assert_allclose(np.exp(warm[:, :2]).mean(axis=0), by_rule, rtol=0.05)
    assert (np.diff(cold, axis=2) <= 0).all()
    assert (np.diff(warm, axis=2) <= 0).all()
    assert (warm[:, 2] < -1e3).all()


ACCEPTANCE = 0.6
QUOTED, BETWEEN, LEFT = 14, 4, 12
NODES, NUM_VERIFICATIONS = 6, 4


def quoting_ids() -> np.ndarray:
    """Return rows whose answer first says something else, then quotes the prompt, then neither."""
    rng = np.random.default_rng(4)
    first = rng.integers(0, TARGET.vocab_size, (NUM_ROWS, QUOTED))
    between, left = (rng.integers(0, TARGET.vocab_size, (NUM_ROWS, n)) for n in (2 * BETWEEN, LEFT))
    return np.hstack([first, between, first, left])


def dialled(draft_shape: SpeculativeConfig, ops: Any, shard: Any) -> DialDrafter:
    head = dial_head(FeatureHead(EAGLE3, ops, shard))
    return DialDrafter(head, draft_shape, acceptance=ACCEPTANCE)


def dialled_params() -> Any:
    truths = {11 + row: tuple(ids) for row, ids in enumerate(quoting_ids().tolist())}
    dial = dial_params(truths, rows=NUM_ROWS, width=quoting_ids().shape[1])
    return {"head": tiny_params()[1], "dial": dial}


DIALLED = dataclasses.replace(KINDS["eagle3"], name="dialled", make=dialled, params=dialled_params)


def emitted_tokens(kind: Kind, shape: tuple[int, int]) -> int:
    """Return what NUM_VERIFICATIONS of N = NODES emit of the answers in `quoting_ids`."""
    programs = Programs(kind, shape, nodes=NODES)
    texts = Texts(kind, shape, seed=0, programs=programs)
    texts.ids = quoting_ids()
    prompt = QUOTED + BETWEEN
    texts.shape = programs.drafter.draft_shape.depth, shape[1]
    for start in range(0, prompt, 4):
        texts.chunk([min(4, prompt - start)] * NUM_ROWS)
    for _ in range(NUM_VERIFICATIONS):
        tree, _ = texts.propose()
        texts._emit([accepted_drafts(tree, texts, r) for r in range(NUM_ROWS)], is_chain=False)
    return sum(texts.told) - NUM_ROWS * prompt


def accepted_drafts(tree: Any, texts: Texts, row: int) -> int:
    tokens, parents = np.asarray(tree.tokens)[row], np.asarray(tree.parents)[row]
    node, count = 0, 0
    while True:
        wanted = texts.ids[row, texts.told[row] + 1 + count]
        held = np.flatnonzero((parents == node) & (tokens == wanted))
        if not held.size:
            return count
        node, count = int(held[0]), count + 1


@pytest.mark.slow
def test_both_together_accept_more_than_each_alone() -> None:
    """An answer quotes its prompt; all have the same number of nodes."""
    alone = emitted_tokens(DIALLED, (3, 2)), emitted_tokens(KINDS["ngram"], (NODES - 1, 1))
    together = emitted_tokens(with_lookup(DIALLED), (3, 2))
    assert together > max(alone)


def test_its_shape_covers_the_deeper_paths() -> None:
    args = EngineArgs(
        model_path="target",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="draft",
        speculative_lookup="ngram",
    )
    shape = args.speculative
    assert (str(shape), shape.lookup_steps, shape.depth, shape.max_emitted) == ("3/1/8", 7, 7, 8)
    assert not shape.is_chain
    assert shape.keeps_ids
    assert shape.num_scratch_slots == 8  # the emitted ones
    wide = dataclasses.replace(shape, topk=4, num_draft_tokens=64)
    assert (wide.lookup_steps, wide.max_emitted) == (15, 16)
    assert wide.pool_size == 4 + 2 * 16 + 4 * 15
    for smaller in shapes_for(wide):
        assert smaller.fits_within(wide)
        assert smaller.is_plain or smaller.lookup
    assert not SpeculativeConfig(
        algorithm=Algorithm.EAGLE3, num_steps=3, num_draft_tokens=4
    ).fits_within(wide)


@pytest.mark.parametrize("algorithm", ["NGRAM", "NONE"])
def test_it_needs_a_draft_model(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_lookup is 'ngram', but .* is {algorithm}"):
        EngineArgs(model_path="target", speculative_algorithm=algorithm, speculative_lookup="ngram")
