"""The draft trees of one sequence, for who asked to see them.

A row whose trees are wanted goes through the programs of rows with a grammar, which show the host
every tree before it is judged (decision 23): a watcher stands in the grammar's place, allows what
the grammar does, or all, and keeps what it was shown. So no program has another output, and nobody
else pays. It knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.messages.grammar import Constraint
from jspec.messages.request import Request
from jspec.messages.verified_tree import VerifiedTree

ALL_ALLOWED = 0xFFFFFFFF


class TreeWatcher:
    """Implements `messages.grammar.Constraint`. inner: the row's own grammar, if it has one."""

    def __init__(self, inner: Constraint | None = None) -> None:
        self._inner = inner
        self._shown: tuple[list[int], list[int]] | None = None

    @property
    def failed(self) -> str:
        return "" if self._inner is None else self._inner.failed

    def fill(self, tokens: np.ndarray, parents: np.ndarray, allowed: np.ndarray) -> None:
        """As `Constraint.fill`; the tree is kept until it is taken."""
        self._shown = tokens.tolist(), parents.tolist()
        if self._inner is None:
            allowed[:] = ALL_ALLOWED
        else:
            self._inner.fill(tokens, parents, allowed)

    def accept(self, token_ids: tuple[int, ...]) -> None:
        if self._inner is not None:
            self._inner.accept(token_ids)

    def take(self, accepted_ids: Sequence[int]) -> VerifiedTree | None:
        """The tree that was shown last, once: None for a root alone (a prompt's, a plain step's).

        accepted_ids: the drafts that its verification accepted, in order.
        """
        shown, self._shown = self._shown, None
        return None if shown is None else VerifiedTree.of(*shown, accepted_ids=accepted_ids)


def constraint_of(request: Request) -> Constraint | None:
    """What is to see a new sequence's trees: its grammar, a watcher, both, or nobody."""
    grammar = None if request.grammar is None else request.grammar.begin()
    return TreeWatcher(grammar) if request.sampling.return_draft_trees else grammar


def tree_after(constraint: Constraint | None, ids: tuple[int, ...]) -> VerifiedTree | None:
    """The tree of the round that emitted `ids`, if its row has a watcher; once for each round."""
    return constraint.take(ids[:-1]) if isinstance(constraint, TreeWatcher) and ids else None
