"""Building the draft tree: SGLang's golden numbers, the law of ancestors, masks by brute force."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.device.batch import DraftTree
from jspec.spec import indexing
from jspec.speculative.beams import grow_block
from jspec.speculative.tree import (
    Level,
    ancestors,
    beam_scores,
    build_tree,
    pack_bits,
    root_only,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "tree_build.json"

_build = jax.jit(build_tree, static_argnames="num_draft_tokens")
_ancestors = jax.jit(ancestors, static_argnames="num_levels")


def children_order(parents: list[int]) -> tuple[list[int], list[int]]:
    """Return (first child, next sibling) of each node, -1 for none, as SGLang writes the tree."""
    nodes = range(len(parents))
    first = [next((j for j in nodes if parents[j] == i), -1) for i in nodes]
    after = [[j for j in nodes if j > i > 0 and parents[j] == parents[i]] for i in nodes]
    return first, [later[0] if later else -1 for later in after]


def golden_levels(golden: dict[str, Any]) -> tuple[Level, ...]:
    """Convert SGLang's per-level lists to candidate levels.

    Its parents_per_level has one list more than is used: list d names, by index in the pool, the
    beams that level d + 2 expands, K candidates each; level 1's parent is the root.
    """
    topk = golden["topk"]
    levels = []
    for depth, (scores, ids) in enumerate(
        zip(golden["scores_per_level"], golden["token_ids_per_level"], strict=True)
    ):
        tokens = np.array(ids, np.int32)
        beams = np.array(golden["parents_per_level"][max(depth - 1, 0)], np.int32)[:, -topk:]
        parents = np.full_like(tokens, -1) if depth == 0 else np.repeat(beams, topk, axis=1)
        flat = np.array(scores, np.float32).reshape(tokens.shape)
        levels.append(
            Level(ids=jnp.asarray(tokens), scores=jnp.log(flat), parents=jnp.asarray(parents))
        )
    return tuple(levels)


def test_golden_tree_of_sglang() -> None:
    golden = json.loads(GOLDEN.read_text())
    expected = golden["expected"]
    seq_lens = jnp.asarray(golden["seq_lens"], jnp.int32)
    tree = _build(
        jnp.asarray(golden["bonus_ids"], jnp.int32),
        golden_levels(golden),
        num_draft_tokens=golden["num_draft_tokens"],
    )
    assert tree.tokens.tolist() == expected["draft_token_ids"]
    positions = indexing.target_position(seq_lens[:, None], tree.depths)
    assert positions.tolist() == expected["positions"]
    orders = [children_order(parents) for parents in tree.parents.tolist()]
    assert [first for first, _ in orders] == expected["first_child"]
    assert [sibling for _, sibling in orders] == expected["next_sibling"]


def test_a_tree_of_one_node() -> None:
    tree = root_only(jnp.asarray([7, 9], jnp.int32))
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()) == (
        [[7], [9]],
        [[-1], [-1]],
        [[0], [0]],
    )


SHAPES = [(1, 3, 3), (3, 1, 4), (3, 3, 8), (4, 2, 15)]
TERMS = (0.0, 0.0, -0.0, -0.5, -1.0, -7.0, 0.25, -np.inf)  # ties, and a term above 0


def levels_of(rng: np.random.Generator, *, num_steps: int, topk: int) -> list[dict[str, Any]]:
    """Return candidates with many ties: each level expands the K best of the one before."""
    batch = 2
    scores = np.sort(rng.choice([0.0, -1.0, -2.0], (batch, topk)), axis=1)[:, ::-1]
    pool_idx = np.broadcast_to(np.arange(topk), (batch, topk))
    levels = [{"scores": scores, "parents": np.full((batch, topk), -1)}]
    first = 0
    for _ in range(num_steps - 1):
        terms = rng.choice(TERMS, (batch, topk, topk))
        expanded = np.asarray(
            beam_scores(jnp.asarray(scores, jnp.float32), jnp.asarray(terms, jnp.float32))
        ).reshape(batch, -1)
        first += levels[-1]["scores"].shape[1]
        levels.append({"scores": expanded, "parents": np.repeat(pool_idx, topk, axis=1)})
        best = np.argsort(-expanded, axis=1, kind="stable")[:, :topk]
        scores, pool_idx = np.take_along_axis(expanded, best, axis=1), first + best
    for level in levels:
        level["ids"] = rng.integers(0, 100, level["scores"].shape)
    return levels


@pytest.mark.parametrize(("num_steps", "topk", "num_draft_tokens"), SHAPES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_best_nodes_closed_under_ancestors(
    seed: int, num_steps: int, topk: int, num_draft_tokens: int
) -> None:
    levels = levels_of(np.random.default_rng(seed), num_steps=num_steps, topk=topk)
    roots = np.array([500, 501])
    tree = _build(
        jnp.asarray(roots, jnp.int32),
        tuple(
            Level(
                ids=jnp.asarray(level["ids"], jnp.int32),
                scores=jnp.asarray(level["scores"], jnp.float32),
                parents=jnp.asarray(level["parents"], jnp.int32),
            )
            for level in levels
        ),
        num_draft_tokens=num_draft_tokens,
    )
    for b, root in enumerate(roots):
        ids, scores, parents = (
            np.concatenate([level[name][b] for level in levels])
            for name in ("ids", "scores", "parents")
        )
        ranked = sorted(range(len(ids)), key=lambda i: (-scores[i], i))
        chosen = sorted(ranked[: num_draft_tokens - 1])
        node_of = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(chosen)}
        expected_parents = [-1] + [node_of[parents[c]] for c in chosen]  # a KeyError: not closed
        depths = [0]
        for i, parent in enumerate(expected_parents[1:], start=1):
            assert parent < i
            depths.append(depths[parent] + 1)
        assert tree.tokens[b].tolist() == [root, *ids[chosen]]
        assert tree.parents[b].tolist() == expected_parents
        assert tree.depths[b].tolist() == depths


def test_ties_prefer_the_lower_index() -> None:
    levels = (
        Level(
            ids=jnp.asarray([[10, 11]], jnp.int32),
            scores=jnp.asarray([[-1.0, -1.0]]),
            parents=jnp.asarray([[-1, -1]], jnp.int32),
        ),
        Level(
            ids=jnp.asarray([[20, 21, 22, 23]], jnp.int32),
            scores=jnp.asarray([[-1.0, -1.0, -1.0, -1.0]]),
            parents=jnp.asarray([[1, 1, 0, 0]], jnp.int32),
        ),
    )
    tree = _build(jnp.asarray([5], jnp.int32), levels, num_draft_tokens=5)
    assert tree.tokens.tolist() == [[5, 10, 11, 20, 21]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2, 2]]


def random_parents(rng: np.random.Generator, *, num_nodes: int, num_levels: int) -> list[int]:
    parents, depths = [-1], [0]
    for i in range(1, num_nodes):
        parent = int(rng.choice([j for j in range(i) if depths[j] < num_levels]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def forest(parents: list[list[int]]) -> DraftTree:
    array = jnp.asarray(parents, jnp.int32)
    return DraftTree(tokens=array, parents=array, depths=array)  # only parents are looked at


@pytest.mark.parametrize(("num_nodes", "num_levels"), [(1, 0), (16, 15), (33, 4)])
def test_masks_are_the_ancestors(num_nodes: int, num_levels: int) -> None:
    rng = np.random.default_rng(num_nodes)
    trees = [random_parents(rng, num_nodes=num_nodes, num_levels=num_levels) for _ in range(20)]
    if num_levels == num_nodes - 1:
        trees[0] = list(range(-1, num_nodes - 1))  # a chain: as deep as can be
    expected = np.zeros((len(trees), num_nodes, num_nodes), bool)
    for b, parents in enumerate(trees):
        for i in range(num_nodes):
            node = i
            while node >= 0:
                expected[b, i, node] = True
                node = parents[node]
    mask = _ancestors(forest(trees), num_levels=num_levels)
    np.testing.assert_array_equal(mask, expected)
    words = np.asarray(jax.jit(pack_bits)(mask))
    assert words.shape == (len(trees), num_nodes, -(-num_nodes // 32))
    for b in range(len(trees)):
        for i in range(num_nodes):
            bits = sum(int(word) << (32 * w) for w, word in enumerate(words[b, i]))
            assert bits == sum(1 << j for j in range(num_nodes) if expected[b, i, j])


def test_a_child_never_scores_above_its_parent() -> None:
    """Rounding may make a log-probability positive; the tree would not be closed then."""
    scores = jax.jit(partial(beam_scores))(jnp.asarray([[-1.0, -2.0]]), jnp.full((1, 2, 2), 1e-7))
    np.testing.assert_array_equal(scores, [[[-1.0, -1.0], [-2.0, -2.0]]])


def lattice_tree(terms: Any, *, num_draft_tokens: int) -> list[list[int]]:
    """Return tokens, parents and depths.

    terms: [S, P, K], of candidate k, token 10 * (s + 1) + k, under candidate p of the level before;
    under the root p is 0.
    """
    num_steps, topk = terms.shape[0], terms.shape[2]

    def rank(depth: int, parents: Any, carried: Any) -> Any:
        ids = jnp.broadcast_to(10 * (depth + 1) + jnp.arange(topk), (*parents.shape, topk))
        of_parent = jnp.asarray(terms[depth], jnp.float32)[parents % 10 if depth else parents * 0]
        return carried, ids.astype(jnp.int32), of_parent

    root_ids = jnp.asarray([7], jnp.int32)
    levels = grow_block(
        root_ids,
        rank,
        draft_shape=SpeculativeConfig(
            algorithm=Algorithm.EAGLE,
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
        ),
    )
    tree = build_tree(root_ids, levels, num_draft_tokens=num_draft_tokens)
    return [np.asarray(x)[0].tolist() for x in (tree.tokens, tree.parents, tree.depths)]


def test_the_best_paths_of_a_lattice_are_its_tree() -> None:
    """The example of `grow_block`; and equal terms prefer the lower index."""
    terms = np.array([[[-1.0, -2.0]] * 2, [[-0.5, -3.0]] * 2])
    assert lattice_tree(terms, num_draft_tokens=4) == [[7, 10, 11, 20], [-1, 0, 0, 1], [0, 1, 1, 2]]
    tree = lattice_tree(np.full((2, 2, 2), -1.0), num_draft_tokens=5)
    assert tree == [[7, 10, 11, 20, 21], [-1, 0, 0, 1, 1], [0, 1, 1, 2, 2]]


@pytest.mark.parametrize(("topk", "num_draft_tokens"), [(1, 4), (3, 9)])
def test_edges_of_a_lattice_follow_the_candidate_before(topk: int, num_draft_tokens: int) -> None:
    """Every node is reached by its own path's edges, and no candidate outside beats one inside:
    checked by hand, over the expansions of the K best of each level.
    """
    rng = np.random.default_rng(topk)
    edges = -rng.exponential(size=(3, topk, topk))
    pool: list[tuple[float, tuple[int, ...]]] = []
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for level in edges:
        grown = [
            (score + float(level[path[-1] if path else 0, k]), (*path, k))
            for score, path in beams
            for k in range(topk)
        ]
        pool += grown
        beams = sorted(grown, key=lambda found: -found[0])[:topk]
    best = {path for _, path in sorted(pool, key=lambda found: -found[0])[: num_draft_tokens - 1]}
    tokens, parents, _ = lattice_tree(edges, num_draft_tokens=num_draft_tokens)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token % 10))
    assert set(paths[1:]) == best
