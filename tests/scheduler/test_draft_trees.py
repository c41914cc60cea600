"""Watched trees: their nodes, the path that was walked, and a grammar that is still used."""

from __future__ import annotations

import numpy as np

from jspec.messages.verified_tree import VerifiedTree
from jspec.scheduler.outputs.draft_trees import ALL_ALLOWED, TreeWatcher, tree_after
from tests.support.fake_grammar import FakeConstraint, FakeGrammar

TOKENS = np.array([7, 5, 6, 9], np.int32)
PARENTS = np.array([-1, 0, 0, 2], np.int32)


def test_the_path_of_the_accepted_drafts_is_found() -> None:
    tree = VerifiedTree.of(TOKENS.tolist(), PARENTS.tolist(), accepted_ids=(6, 9))
    assert tree == VerifiedTree(ids=(7, 5, 6, 9), parents=(-1, 0, 0, 2), accepted=(2, 3))


def test_the_same_token_at_two_places_is_found_under_its_own_parent() -> None:
    tree = VerifiedTree.of((1, 2, 3, 4, 4), (-1, 0, 0, 1, 2), accepted_ids=(3, 4))
    assert tree is not None
    assert tree.accepted == (2, 4)


def test_a_root_alone_is_no_tree_and_what_was_not_drafted_ends_the_path() -> None:
    assert VerifiedTree.of((7,), (-1,), accepted_ids=()) is None
    tree = VerifiedTree.of((7, 5), (-1, 0), accepted_ids=(8,))  # a simulated acceptance
    assert tree is not None
    assert tree.accepted == ()


def test_a_watcher_allows_everything_and_tells_each_tree_once() -> None:
    watcher = TreeWatcher()
    allowed = np.zeros((4, 3), np.uint32)
    watcher.fill(TOKENS, PARENTS, allowed)
    assert (allowed == ALL_ALLOWED).all()
    found = tree_after(watcher, (6, 9, 1))
    assert found is not None
    assert found.accepted == (2, 3)
    assert tree_after(watcher, (6, 9, 1)) is None


def test_a_grammar_says_the_same_with_and_without_a_watcher() -> None:
    grammar = FakeGrammar(vocab_size=40, end_id=5, least=2, most=9)
    alone, watched = FakeConstraint(grammar), TreeWatcher(FakeConstraint(grammar))
    masks = np.zeros((2, 4, 2), np.uint32)
    for _ in range(2):
        alone.fill(TOKENS, PARENTS, masks[0])
        watched.fill(TOKENS, PARENTS, masks[1])
        assert (masks[0] == masks[1]).all()
        for constraint in (alone, watched):
            constraint.accept((6,))
    alone.accept((7, 7))
    watched.accept((7, 7))
    assert watched.failed == alone.failed != ""
