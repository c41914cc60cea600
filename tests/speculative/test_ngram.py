"""Drafting by lookup: the matches, their tree, and texts that do not depend on it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec.config.limits import Algorithm, SpeculativeConfig
from jspec.device.batch import DraftTree, Features, Verified
from jspec.device.state import empty_sampling
from jspec.speculative.drafter import StepBatch, emitted_by
from jspec.speculative.drafters.ngram import (
    BEFORE_START,
    UNKNOWN,
    Branches,
    NgramDrafter,
    NgramState,
    find_in_corpus,
    find_in_history,
    last_ids,
    match_lengths,
    path_scores,
    sort_corpus,
)
from jspec.speculative.tree import build_tree, merge_paths
from tests.speculative.engines import spec_of
from tests.speculative.test_drafter import chunks

WIDTH = 24  # of the histories in the unit tests
CHAIN, TREE = (3, 1, 4), (3, 3, 8)


def ngram(num_steps: int, topk: int, nodes: int) -> SpeculativeConfig:
    return spec_of(num_steps, topk, nodes, Algorithm.NGRAM)


def history_of(*rows: list[int]) -> tuple[jax.Array, jax.Array]:
    """Return (history, L): each row's ids, its last one the root, UNKNOWN after it."""
    history = np.full((len(rows), WIDTH), UNKNOWN, np.int32)
    for r, ids in enumerate(rows):
        history[r, : len(ids)] = ids
    return jnp.asarray(history), jnp.asarray([len(ids) - 1 for ids in rows], jnp.int32)


def found(ids: list[int], *, topk: int = 1, min_match: int = 1, steps: int = 3) -> Branches:
    """Return the continuation of a row with these ids; matches of up to 4 ids."""
    return _found(*history_of(ids), topk=topk, min_match=min_match, steps=steps)


@functools.partial(jax.jit, static_argnames=("topk", "min_match", "steps"))
def _found(
    history: jax.Array, seq_lens: jax.Array, *, topk: int, min_match: int, steps: int
) -> Branches:
    spec = ngram(steps, topk, steps + 1 if topk == 1 else 1 + steps * topk)
    suffix = last_ids(history, seq_lens, count=4)
    return find_in_history(history, suffix, seq_lens, draft_shape=spec, min_match=min_match)


@functools.partial(jax.jit, static_argnames="num_draft_tokens")
def jitted_tree(root_ids: jax.Array, branches: Branches, *, num_draft_tokens: int) -> DraftTree:
    levels = merge_paths((), branches.tokens, path_scores(branches))
    return build_tree(root_ids, levels, num_draft_tokens=num_draft_tokens)


jitted_corpus = jax.jit(
    functools.partial(find_in_corpus, draft_shape=ngram(2, 2, 5), min_match=1),
)


def test_the_examples_of_the_functions() -> None:
    history, seq_lens = history_of([5, 6, 7])
    assert last_ids(history, seq_lens, count=4).tolist() == [[7, 6, 5, BEFORE_START]]
    history, _ = history_of([1, 2, 3, 9, 1, 2])
    lengths = match_lengths(history, jnp.asarray([[2, 1, 9]], jnp.int32))
    assert lengths[0, :6].tolist() == [0, 2, 0, 0, 0, 3]
    assert found([1, 2, 3, 9, 1, 2]).tokens.tolist() == [[[3, 9, 1]]]


def test_the_longest_match_is_taken_and_the_latest_of_equals() -> None:
    assert found([1, 2, 5, 8, 2, 6, 7, 1, 2]).tokens[0, 0, 0] == 5  # 1 2, though 2 alone is later
    assert found([1, 2, 5, 8, 1, 2, 6, 7, 1, 2]).tokens[0, 0, 0] == 6
    assert found([1, 2, 5, 8, 2], min_match=2).is_match.tolist() == [[False]]


def test_a_row_that_repeats_itself_is_continued_as_it_repeats() -> None:
    assert found([9, 4, 4]).tokens.tolist() == [[[4, 4, 4]]]
    assert found([9, 1, 2, 1, 2], steps=5).tokens.tolist() == [[[1, 2, 1, 2, 1]]]


def test_branches_differ_and_those_without_a_match_come_last_as_token_0() -> None:
    branches = found([2, 5, 2, 6, 7, 2, 5, 2], topk=3, steps=2)
    assert branches.tokens[0].tolist() == [[6, 7], [5, 2], [0, 0]]
    assert branches.is_match.tolist() == [[True, True, False]]
    nothing = found([1, 2, 3], topk=2, steps=2)
    assert not nothing.is_match.any()
    assert not nothing.tokens.any()


def expected_branch(ids: list[int], *, min_match: int, steps: int) -> list[int]:
    """Return the first branch, by one comparison at a time."""
    root = len(ids) - 1

    def length(end: int) -> int:
        agree = 0
        while agree < 4 and end - agree >= 0 and ids[end - agree] == ids[root - agree]:
            agree += 1
        return agree

    ends = [(length(end), end) for end in range(root) if length(end) >= min_match]
    if not ends:
        return [0] * steps
    end, said = max(ends)[1], list(ids)
    for d in range(steps):
        said.append(said[end + 1 + d])
    return said[root + 1 :]


@settings(deadline=None, max_examples=40)
@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH),
    min_match=st.sampled_from([1, 3]),
)
def test_the_first_branch_is_what_a_search_by_hand_finds(ids: list[int], min_match: int) -> None:
    tokens = found(ids, min_match=min_match).tokens[0, 0].tolist()
    assert tokens == expected_branch(ids, min_match=min_match, steps=3)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=4, max_size=4),
    num_matches=st.integers(0, 4),
    nodes=st.sampled_from([2, 6, 13]),
)
def test_a_tree_is_valid_and_holds_the_best_branches(
    tokens: list[list[int]], num_matches: int, nodes: int
) -> None:
    branches = Branches(
        tokens=jnp.asarray([tokens], jnp.int32),
        lengths=(jnp.arange(4)[None] < num_matches).astype(jnp.int32),
    )
    tree = jax.tree.map(np.asarray, jitted_tree(jnp.asarray([7]), branches, num_draft_tokens=nodes))
    parents, depths, ids = tree.parents[0], tree.depths[0], tree.tokens[0]
    assert (parents[0], depths[0], ids[0]) == (-1, 0, 7)
    for node in range(1, nodes):
        assert 0 <= parents[node] < node
        assert depths[node] == depths[parents[node]] + 1

    def path(node: int) -> tuple[int, ...]:
        return () if node == 0 else (*path(parents[node]), int(ids[node]))

    paths = [path(node) for node in range(1, nodes)]
    possible = {tuple(branch[: d + 1]) for branch in tokens for d in range(3)}
    assert set(paths) <= possible
    assert len(set(paths)) == min(nodes - 1, len(possible))  # copies only if no other node is left
    if num_matches and nodes > 4:
        assert (tokens[0][0],) in paths


def test_branches_that_begin_alike_are_merged() -> None:
    branches = Branches(tokens=jnp.asarray([[[1, 2], [1, 3]]]), lengths=jnp.ones((1, 2), jnp.int32))
    tree = jitted_tree(jnp.asarray([7]), branches, num_draft_tokens=4)
    assert tree.tokens.tolist() == [[7, 1, 2, 3]]
    assert tree.parents.tolist() == [[-1, 0, 1, 1]]


@settings(deadline=None, max_examples=40)
@given(
    corpus=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_a_corpus_gives_what_followed_the_longest_agreement(
    corpus: list[int], ids: list[int]
) -> None:
    corpus += [3] * (40 - len(corpus))  # one shape
    params = {k: jnp.asarray(v) for k, v in sort_corpus(np.array(corpus), max_match=4).items()}
    history, seq_lens = history_of(ids)
    suffix = last_ids(history, seq_lens, count=4)
    got = jitted_corpus(params["corpus"], params["contexts"], suffix)

    def length(end: int) -> int:
        agree = 0
        while agree < min(4, len(ids), end + 1) and corpus[end - agree] == ids[-1 - agree]:
            agree += 1
        return agree

    best = max(length(end) for end in range(39))
    assert got.is_match[0, 0] == (best > 0)
    if best:
        followed = [[*corpus, 0, 0][e + 1 : e + 3] for e in range(39) if length(e) == best]
        assert got.tokens[0, 0].tolist() in followed


def test_a_corpus_in_which_nothing_follows_anything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1,\); expected at least two ids"):
        sort_corpus(np.array([4]), max_match=3)


def test_the_history_is_what_the_row_said() -> None:
    """A prompt in two chunks, then a verification: the history has the row's ids, in their places.

    The second row is a new tenant, without any id of the former one.
    """
    drafter = NgramDrafter(ngram(2, 1, 3))
    state = NgramState(history=jnp.full((2, WIDTH), 99, jnp.int32))
    first = chunks([3, 4, 5, 8, 9, 0], [0, 3, 5], [6, 7])
    first = dataclasses.replace(
        first,
        rows=dataclasses.replace(
            first.rows,
            prefix_lens=jnp.asarray([0, 2], jnp.int32),
            q_positions=jnp.asarray([0, 1, 2, 2, 3, 0], jnp.int32),
        ),
        is_first=jnp.asarray([True, False]),
    )
    advance = jax.jit(lambda state, emitted: drafter.advance({}, (), state, emitted)[1])
    state = advance(state, first)
    assert state.history[0].tolist() == [3, 4, 5, 6] + [UNKNOWN] * (WIDTH - 4)
    assert state.history[1].tolist() == [99, 99, 8, 9, 7] + [99] * (WIDTH - 5)
    rows = StepBatch(
        root_ids=jnp.asarray([6, 7], jnp.int32),
        seq_lens=jnp.asarray([3, WIDTH - 1], jnp.int32),  # row 1 ends at the table's edge
        page_table=jnp.zeros((2, 1), jnp.int32),
        sampling=empty_sampling(2, vocab_size=100),
    )
    nothing = jnp.zeros((2, 3, 0))
    verified = Verified(
        emitted_ids=jnp.asarray([[11, 12, 0], [13, 14, 15]], jnp.int32),
        bonus_ids=jnp.asarray([12, 15], jnp.int32),
        num_accepted=jnp.asarray([1, 2], jnp.int32),
        node_path=jnp.zeros((2, 3), jnp.int32),
        features=Features(hidden=nothing, aux_hidden=nothing),
    )
    state = advance(state, emitted_by(verified, rows))
    assert state.history[0].tolist() == [3, 4, 5, 6, 11, 12] + [UNKNOWN] * (WIDTH - 6)
    assert state.history[1].tolist() == [99, 99, 8, 9, 7] + [99] * (WIDTH - 6) + [7]


def test_a_row_without_anything_to_look_up_gets_a_valid_tree() -> None:
    drafter = NgramDrafter(ngram(*TREE))
    rows = StepBatch(
        root_ids=jnp.asarray([5], jnp.int32),
        seq_lens=jnp.asarray([0], jnp.int32),
        page_table=jnp.zeros((1, 1), jnp.int32),
        sampling=empty_sampling(1, vocab_size=100),
    )
    state = drafter.init_state(1, context_length=WIDTH, dtype=jnp.float32)
    tree = jax.jit(lambda state: drafter.propose({}, (), state, rows)[1])(state)
    assert isinstance(tree, DraftTree)
    parents = np.asarray(tree.parents)[0]
    assert (parents[1:] >= 0).all()
    assert (parents < np.arange(8)).all()
    assert tree.tokens.tolist() == [[5] + [0] * 7]


@pytest.mark.slow
def test_the_bundled_target_repeats_itself_and_is_believed() -> None:
    prompt = "    self.first = first\n    self.second = second\n" * 4
    with jspec.Engine(
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        max_running_requests=1,
        context_length=256,
        chunked_prefill_size=32,
        compilation_cache_dir="",
    ) as engine:
        result = engine.generate(prompt, {"temperature": 0.0, "max_new_tokens": 48})
    assert result["meta_info"]["spec_accept_length"] > 1.5
