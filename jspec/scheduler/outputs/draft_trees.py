"""The draft trees of a sequence, for requests with return_draft_trees.

Such a row runs the programs of rows with a grammar, which show the host every tree (decision 23). A
watcher in the grammar's place allows the same tokens (or all) and records the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.messages.grammar import Constraint
from jspec.messages.request import Request
from jspec.messages.verified_tree import VerifiedTree

ALL_ALLOWED = 0xFFFFFFFF


class TreeWatcher:
    """A `messages.grammar.Constraint` around the row's own grammar, if it has one."""

    def __init__(self, inner: Constraint | None = None) -> None:
        self._inner = inner
        self._shown: tuple[list[int], list[int]] | None = None

    @property
    def num_free(self) -> int:
        """0, since the host must see every tree."""
        return 0

    @property
    def failed(self) -> str:
        return "" if self._inner is None else self._inner.failed

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        self._shown = tokens.tolist(), parents.tolist()
        if self._inner is None:
            allowed[:] = ALL_ALLOWED
        else:
            self._inner.fill(tokens, parents, allowed)

    def accept(self, token_ids: tuple[int, ...]) -> None:
        if self._inner is not None:
            self._inner.accept(token_ids)

    def take(self, accepted_ids: Sequence[int]) -> VerifiedTree | None:
        shown, self._shown = self._shown, None
        return None if shown is None else VerifiedTree.of(*shown, accepted_ids=accepted_ids)


def constraint_of(request: Request) -> Constraint | None:
    grammar = None if request.grammar is None else request.grammar.begin()
    return TreeWatcher(grammar) if request.sampling.return_draft_trees else grammar


def tree_after(constraint: Constraint | None, ids: tuple[int, ...]) -> VerifiedTree | None:
    """Return the tree of the round that emitted `ids`, if watched. Call it once per round."""
    return constraint.take(ids[:-1]) if isinstance(constraint, TreeWatcher) and ids else None
